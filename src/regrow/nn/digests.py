"""Digests of what a worker computes in each step, to find the first in which two runs part.

A line of JSON for each step, in the order in which things follow from each other: the batch, the rows and the dense
parameters that were pulled, the loss, the gradients. The first that differs says where to look. A step that is done
again after a failure has another line, and the last one counts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regrow.errors import RegrowError
from regrow.nn.declaring import Static
from regrow.nn.lookup import POOLED, Lookup
from regrow.nn.routes import Column

DIGEST_BYTES = 8  # of each; what differs by accident differs in these


class StepDigests:
    """Of one worker, in one file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._write("\n")  # whoever was here before may have died within a line

    def add(self, lookup: Lookup, columns: Sequence[Column], static: Static, loss: float | None) -> None:
        """A step, when its gradients were taken."""
        features = [s for part in lookup.parts for s in part.sources]
        rows, grads = digest_tables(lookup, columns)
        line = {
            "step": lookup.step,
            "batch": digest(array for each in features for array in (each.values(), each.lengths())),
            "rows": rows,
            "dense": digest(table.values for _, table in static),
            "loss": loss,
            "grads": grads | {table.spec.name: digest([table.grads]) for _, table in static},
        }
        self._write(json.dumps(line) + "\n")

    def _write(self, text: str) -> None:
        """At once: a worker that is killed has said what it did."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(text)
        except OSError as error:
            raise RegrowError(f"cannot write digests of steps to {self._path}: {error.strerror}") from None


def digest_tables(lookup: Lookup, columns: Sequence[Column]) -> tuple[dict[str, str], dict[str, str]]:
    """Rows as the model saw them, and their gradients, by table."""
    rows: dict[str, list[Any]] = {}
    grads: dict[str, list[Any]] = {}
    start = 0
    for number, (table, is_expanded, width) in enumerate(columns):
        leaves = lookup.list_leaves(number if is_expanded else POOLED)
        of = slice(None) if is_expanded else slice(start, start + width)
        start += 0 if is_expanded else width
        rows.setdefault(table, []).extend(leaf[:, of] for leaf in leaves)
        grads.setdefault(table, []).extend(leaf.grad[:, of] for leaf in leaves if leaf.grad is not None)
    return {name: digest(each) for name, each in rows.items()}, {name: digest(each) for name, each in grads.items()}


def digest(arrays: Iterable[Any]) -> str:
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for array in arrays:
        plain = array.detach().cpu().numpy() if hasattr(array, "detach") else array
        found.update(repr(plain.shape).encode())
        found.update(np.ascontiguousarray(plain).tobytes())
    return found.hexdigest()
