"""A torch model as checkpoints see it: tables with rows, and the dense part. Taken apart here, put together here.

What a model is made of is found once, by name. Before anything is written into a model, everything that can be known to
differ is looked at, and the first difference is an error with a name in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from regrow.checkpoint.chunks import Chunk
from regrow.checkpoint.columns import Whole, fit_states, join_tables
from regrow.checkpoint.manifest import Manifest
from regrow.checkpoint.torch import dense
from regrow.checkpoint.torch.adapters import Table, TorchAdapter, all_optimizers, embedding_weights
from regrow.checkpoint.torch.adapters_torchrec import TorchRecAdapter, unwrap
from regrow.checkpoint.torch.placing import Mean, Place, find_sources, place
from regrow.checkpoint.torch.tracker import Tracker
from regrow.errors import CheckpointError

FRAMEWORK = "torch"  # in `Cut.job`: names of tables are names of parameters, and every row is stored


def refuse_served(model: nn.Module) -> None:
    """Rows that are on Regrow's servers are in no tensor of the model: a checkpoint of it would be without them."""
    for name, module in model.named_modules():
        if getattr(module, "rows_are_on_servers", False):
            what = f"{name!r} is" if name else "the model is"
            raise CheckpointError(
                f"{what} a {type(module).__name__}: its rows are on servers, and would be missing from the checkpoint",
                hint="give it the rest of the model; the collection's state_dict() and optimizer_state() read its rows",
            )


class ModelState:
    """The tables and the dense part of a model. Ranks other than the first save only the rows they alone have."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        *,
        first_rank: bool = True,
        row_local: Sequence[type[torch.optim.Optimizer]] = (),
    ) -> None:
        model = unwrap(model)
        refuse_served(model)
        self.fused = TorchRecAdapter(model)
        found = all_optimizers(model, optimizers)
        weights = embedding_weights(model, skipped=self.fused.names)
        self.plain = TorchAdapter(weights, found, row_local=row_local)
        self.dense = dense.DenseState(model, found, tables=weights, elsewhere=self.fused.names)
        self._first_rank = first_rank

    @property
    def saved(self) -> list[Table]:
        """The tables whose rows are saved by this rank."""
        return [*(self.plain.tables if self._first_rank else ()), *self.fused.tables]

    def attach(self, tracker: Tracker) -> None:
        if self._first_rank:
            self.plain.attach(tracker)
        self.fused.attach(tracker)

    def detach(self) -> None:
        self.plain.detach()
        self.fused.detach()

    def before_cut(self) -> None:
        if self._first_rank:
            self.plain.before_cut()
        self.fused.before_cut()

    def job(self) -> dict[str, Any]:
        return {"framework": FRAMEWORK, "dense": self.dense.describe()}

    def versions(self) -> dict[str, int]:
        """Tells whether a table was changed since."""
        return self.plain.versions()

    def note_all(self, tracker: Tracker) -> None:
        """Every row was just written, by somebody who says so."""
        self.plain.note_versions()
        for table in self.saved:
            tracker.track(table.name, None, table.states())

    # --- back into a model

    def check(self, piece: Manifest, *, with_optimizers: bool) -> None:
        """CheckpointError naming the first thing in which the model differs from the cut that `piece` ends at."""
        job, infos = piece.target.job, {table.name: table for table in piece.tables}
        if piece.target.kind == "publication":
            raise CheckpointError(
                f"cut {piece.target.id} was published for look-ups, without the state of optimizers",
                hint="training goes on from a checkpoint; `regrow ckpt export` writes the weights",
            )
        if job.get("framework") != FRAMEWORK or dense.DENSE not in infos:
            raise CheckpointError(
                f"cut {piece.target.id} was not made of a torch model",
                hint="rows that Regrow's servers trained: `regrow train --resume`, or export them",
            )
        reason = _tables_differ(self.plain.tables + self.fused.tables, self.fused.names, join_tables(piece.tables))
        reason = reason or self.dense.invalid_reason(job["dense"], with_optimizers=with_optimizers)
        if reason is not None:
            raise CheckpointError(
                f"cut {piece.target.id} does not fit this model: {reason}",
                hint="build the model and its optimizers as they were, or choose another cut with at=",
            )


class Writer:
    """Writes the chunks of a restore into a model's tensors. Plain overwriting, as `load.restore` asks for."""

    def __init__(self, state: ModelState, piece: Manifest, *, with_optimizers: bool) -> None:
        state.check(piece, with_optimizers=with_optimizers)
        self._state, self._cut, self._with_optimizers = state, piece.target, with_optimizers
        infos = {table.name: table for table in piece.tables}
        self._dense = dense.Gathered(infos[dense.DENSE])
        self._wholes = join_tables(piece.tables)
        self._places: dict[str, list[Place]] = {}  # by the table's name on storage
        self._means: list[Mean] = []
        tables = state.plain.tables + state.fused.tables
        sources = {table.name: find_sources(table, self._wholes[table.whole]) for table in tables}
        widths = {table.name: fit_states(sources[table.name], table.dim) for table in tables}
        for table in tables:
            found = sources[table.name]
            with_states = with_optimizers or table in state.fused.tables
            if with_states:
                table.prepare(widths[table.name])
            places, means = place(table, found, with_states=with_states)
            self._means += means
            for each in places:
                self._places.setdefault(each.source.name, []).append(each)

    def apply(self, _: Manifest, chunk: Chunk) -> None:
        for name, rows in chunk.items():
            if name == dense.DENSE:
                self._dense.write(rows)
            for each in self._places.get(name, ()):
                each.write(rows)

    def finish(self) -> None:
        for mean in self._means:
            mean.finish()
        self._state.dense.load(*dense.unpack(self._dense.file()), with_optimizers=self._with_optimizers)
        said = self._cut.job.get("tables", {})
        for table in self._state.fused.tables:
            source = find_sources(table, self._wholes[table.whole])[0]
            if source.name in said:
                table.load_scalars(said[source.name])


def _tables_differ(own: list[Table], elsewhere: set[str], saved: Mapping[str, Whole]) -> str | None:
    for table in own:
        whole = saved.get(table.whole)
        if whole is None:
            return f"table {table.whole!r} is not in the checkpoint"
        own_dim = table.dim if table.columns is None else table.columns.dim
        own_shape, saved_shape = [table.rows, own_dim], [whole.rows, whole.dim]
        if own_shape != saved_shape:
            return f"table {table.whole!r} is {own_shape} here and {saved_shape} in the checkpoint"
    names = {table.whole for table in own} | elsewhere | {dense.DENSE}
    if missing := sorted(set(saved) - names):
        return f"table {missing[0]!r} is in the checkpoint and not in the model"
    return None
