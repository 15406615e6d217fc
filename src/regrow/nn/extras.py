"""What a script wants to be kept with its checkpoints, as text: numbers, words, lists, dictionaries and small tensors.

It goes through pipes and into every manifest, so it is small. Nothing here is pickled: whoever loads a checkpoint of
somebody else runs none of their code.
"""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regrow.errors import UserError

if TYPE_CHECKING:
    from regrow.nn.seat import Seat

# As text. A pipe holds 64 KiB, and the launcher must never wait for one.
EXTRA_BYTES_MAX = 32 << 10
TENSOR = "tensor of"  # a dictionary with this key is one


def encode_extra(extra: Any) -> str:
    """UserError for what cannot be kept, and where in it that is."""
    text = json.dumps(_encode(extra, "extra"))
    if len(text) > EXTRA_BYTES_MAX:
        raise UserError(
            f"extra takes {len(text)} bytes as text, {EXTRA_BYTES_MAX} at most are kept",
            hint="what is large belongs into tables and job.dense, whose rows are in every checkpoint",
        )
    return text


def decode_extra(text: str | None) -> Any:
    return None if text is None else json.loads(text, object_hook=_decode_tensor)


def _encode(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = base64.b64encode(flat.view(torch.uint8).numpy().tobytes()).decode()
        return {TENSOR: str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "data": data}
    if isinstance(value, list | tuple):
        return [_encode(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key == TENSOR:
                raise UserError(f"{where}: the key {key!r} cannot be kept", hint=f"text, but not {TENSOR!r}")
        return {key: _encode(each, f"{where}[{key!r}]") for key, each in value.items()}
    raise UserError(
        f"{where} is a {type(value).__name__}, which cannot be kept",
        hint="numbers, text, lists, dictionaries and tensors can; of a module, its state_dict()",
    )


def _decode_tensor(found: dict[str, Any]) -> Any:
    if TENSOR not in found:
        return found
    data = bytearray(base64.b64decode(found["data"]))
    dtype = getattr(torch, found[TENSOR])
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.zeros(0, dtype=dtype)
    return flat.reshape(found["shape"])


class WithExtras:
    """What a job lets its script say of checkpoints."""

    _seat: Seat
    _step: int
    _is_stepped: bool

    def _begin(self) -> Any:
        raise NotImplementedError

    @property
    def saves(self) -> bool:
        """Whether this run makes checkpoints."""
        return self._seat.saves

    @property
    def extra(self) -> Any:
        """What the last `save` was given, in this run or before the checkpoint that it goes on from; None: nothing."""
        return decode_extra(self._seat.extra)

    def save(self, extra: Any = None) -> None:
        """Asks for a checkpoint soon, and does not wait for it. `extra`: numbers, text, lists, dictionaries and small
        tensors, which this and later checkpoints have; that of worker 0 counts."""
        if not self.saves:
            raise UserError(
                "job.save: this run makes no checkpoints",
                hint="regrow run --protect delta --ckpt DIRECTORY; `if job.saves:` for a script that runs without too",
            )
        text = None if extra is None else encode_extra(extra)
        self._begin()
        pushed = self._step if self._is_stepped else self._step - 1
        self._seat.extra = text or self._seat.extra
        self._seat.save(pushed, text)
