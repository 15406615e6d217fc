"""One recording of a model's updates, for all who make cuts of it: hooks are in place once, and an update is written
down once.

Who comes first has the hooks attached, who comes later is one more tenant of the same tracker, who leaves last has them
removed. A recording belongs to the model, so nobody has to hand it around.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from regrow.checkpoint.torch.adapters import all_optimizers
from regrow.checkpoint.torch.adapters_torchrec import unwrap
from regrow.checkpoint.torch.model_state import ModelState
from regrow.checkpoint.torch.tracker import Tracker
from regrow.errors import CheckpointError

_RECORDINGS: weakref.WeakKeyDictionary[nn.Module, _Recording] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(slots=True, eq=False)
class _Recording:
    state: ModelState
    tracker: Tracker
    row_local: tuple[type[torch.optim.Optimizer], ...]
    tenants: set[int]


@dataclasses.dataclass(slots=True, eq=False)
class Seat:
    """A tenant's place at a recording."""

    state: ModelState
    tracker: Tracker
    tenant: int
    _model: nn.Module

    def leave(self) -> None:
        """Once: nothing is kept for this tenant any more."""
        recording = _RECORDINGS[self._model]
        recording.tenants.remove(self.tenant)
        if recording.tenants:
            recording.tracker.remove_tenant(self.tenant)
        else:
            recording.state.detach()
            del _RECORDINGS[self._model]


def take_seat(
    model: nn.Module,
    optimizers: Sequence[Any] | None,
    *,
    first_rank: bool,
    row_local: Sequence[type[torch.optim.Optimizer]],
) -> Seat:
    """`optimizers` None: those of who was here before; if nobody was, none. Others must be the same."""
    inner = unwrap(model)
    recording = _RECORDINGS.get(inner)
    if recording is None:
        state = ModelState(model, optimizers or (), first_rank=first_rank, row_local=row_local)
        recording = _Recording(state, Tracker(), tuple(row_local), {0})
        state.attach(recording.tracker)
        _RECORDINGS[inner] = recording
        return Seat(state, recording.tracker, 0, inner)
    if optimizers is not None:
        _check_same(recording, all_optimizers(inner, optimizers), row_local)
    tenant = recording.tracker.add_tenant()
    recording.tenants.add(tenant)
    return Seat(recording.state, recording.tracker, tenant, inner)


def note_restored(model: nn.Module) -> None:
    """All rows of a model were written: whoever records it must know, for a kernel's tables tell nobody."""
    recording = _RECORDINGS.get(unwrap(model))
    if recording is not None:
        recording.state.note_all(recording.tracker)


def _check_same(
    recording: _Recording,
    found: Sequence[torch.optim.Optimizer],
    row_local: Sequence[type[torch.optim.Optimizer]],
) -> None:
    before = recording.state.dense.optimizers
    if [id(each) for each in before] != [id(each) for each in found] or set(row_local) != set(recording.row_local):
        names = [[type(each).__name__ for each in some] for some in (before, found)]
        raise CheckpointError(
            f"updates of this model are recorded already, with the optimizers {names[0]}; these are {names[1]}",
            hint="give the same optimizers= and row_local= to all checkpointers and publishers of a model, or close"
            " the one before",
        )
