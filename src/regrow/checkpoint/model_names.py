"""What the parameters of a script's model are called, for whoever gets them without the script.

Servers know tables by name, and dense parameters as rows of one table. Which parameter is where in that follows from
their order and shapes, so these go into every manifest, beside the names that tables have within the model. They are
small: names and shapes. Cuts from before have none, and are read by order alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from regrow.checkpoint.chunks import BUFFERS, DENSE, Floats
from regrow.checkpoint.manifest import Cut
from regrow.errors import UserError

KEY = "model"  # in the extra of a cut
ALIGNMENT_FLOATS = 16  # as in regrow.nn.dense: where each parameter begins
# As text. A pipe holds 64 KiB, and the launcher must never wait for one. Too small: models of many layers are exported
# without names.
BYTES_MAX = 32 << 10

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class ModelNames(msgspec.Struct, frozen=True, kw_only=True):
    """`tables`: of each table, what its weight is called in the model. The others in the order of their table."""

    tables: dict[str, str] = {}
    dense: Shapes = ()
    buffers: Shapes = ()

    def find_shapes(self, table: str) -> Shapes:
        """What is in this table besides rows; nothing, if it is one of rows."""
        return {DENSE: self.dense, BUFFERS: self.buffers}.get(table, ())


def encode(names: ModelNames) -> str | None:
    """None: there is too much of it."""
    text = msgspec.json.encode(names).decode()
    return text if len(text) <= BYTES_MAX else None


def find(cut: Cut) -> ModelNames:
    """Those of a cut that servers have made; empty where nobody said any."""
    text = None if cut.job.get("framework") == "torch" else cut.extra.get(KEY)
    return ModelNames() if text is None else decode(text)


def note(text: str | None) -> dict[str, str]:
    """As part of the `extra` of a cut."""
    return {} if text is None else {KEY: text}


def decode(text: str) -> ModelNames:
    return msgspec.json.decode(text, type=ModelNames)


def find_places(shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Name, shape and first float of each."""
    start = 0
    for name, shape in shapes:
        yield name, shape, start
        start += -(-math.prod(shape) // ALIGNMENT_FLOATS) * ALIGNMENT_FLOATS


def cut_tensors(names: ModelNames, tables: Mapping[str, Floats]) -> dict[str, Any]:
    """The tensors in tables that are none of rows, by name: views of these."""
    import torch

    found: dict[str, Any] = {}
    for table, rows in tables.items():
        flat = rows.reshape(-1)
        for name, shape, start in find_places(names.find_shapes(table)):
            count = math.prod(shape)
            if start + count > flat.size:
                raise UserError(f"{name!r} {list(shape)} does not fit; {flat.size} floats are stored in all")
            found[name] = torch.from_numpy(flat[start : start + count]).reshape(shape)
    return found


def find_difference(before: Shapes, now: Shapes) -> str | None:
    """What is at another place in the table now, in words; names alone may change."""
    for (old, was), (name, shape) in zip(before, now, strict=False):
        if was != shape:
            return f"{name!r} is {list(shape)}, where the checkpoint has {old!r} {list(was)}"
    if len(before) == len(now):
        return None
    name, shape = (*before, *now)[-1] if len(now) > len(before) else before[len(now)]
    return f"{name!r} {list(shape)} is only {'in the model' if len(now) > len(before) else 'in the checkpoint'}"
