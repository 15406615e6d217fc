"""Checkpoints for people who train with torch: `DeltaCheckpointer`.

    checkpointer = DeltaCheckpointer(model, "file:///data/ckpt", optimizers=[adagrad, adam], every=500)
    for batch in data:
        ...; adagrad.step(); adam.step(); checkpointer.step(extra={"position": n})
    checkpointer.close()

Here is what a checkpoint is of, and how a model is restored; how cuts are taken and written is in `cuts.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from regrow.checkpoint import load
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.manifest import Encoding, TableInfo
from regrow.checkpoint.storage import Storage
from regrow.checkpoint.torch import dense
from regrow.checkpoint.torch.adapters import Table
from regrow.checkpoint.torch.cuts import COPY_BYTES_MAX, CutWriter
from regrow.checkpoint.torch.model_state import ModelState, Writer
from regrow.checkpoint.torch.ranks import Ranks
from regrow.checkpoint.torch.recording import note_restored
from regrow.errors import CheckpointError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestoredModel:
    """What a model was restored to. Give it to the next `DeltaCheckpointer` as `resume`."""

    cut: str
    step: int
    extra: dict[str, Any]
    url: str
    report: load.LoadReport
    tables: tuple[TableInfo, ...] = dataclasses.field(repr=False)
    versions: dict[str, int] = dataclasses.field(repr=False)  # of the tables right after


class DeltaCheckpointer(CutWriter):
    """Writes cuts of a torch model: a full now and then, deltas in between. Use from one thread.

    every -- a cut after so many steps, or so much time: "60s", "5m", "1h"; None: only by `save`. Too small: storage is
        busy with rows that change again at once. Too large: more to train again after a crash.
    full_every -- every so many cuts is a full. Too small: bytes. Too large: a restore reads many pieces.
    copy_bytes_max -- larger cuts are written while training waits. Too small: it waits often. Too large: memory.
    row_local -- types of optimizers of your own that leave a row without gradient alone.

    Several may watch one model, a `Publisher` among them: its updates are recorded once. They must say the same
    optimizers.
    """

    made_by = "regrow.DeltaCheckpointer"

    def __init__(
        self,
        model: nn.Module,
        url: str,
        *,
        optimizers: Sequence[Any] = (),
        every: int | str | None = 500,
        full_every: int = 20,
        resume: RestoredModel | None = None,
        encoding: Encoding = "raw",
        copy_bytes_max: int = COPY_BYTES_MAX,
        staging_directory: str | None = None,
        row_local: Sequence[type[torch.optim.Optimizer]] = (),
    ) -> None:
        super().__init__(
            model,
            url,
            optimizers=optimizers,
            every=every,
            full_every=full_every,
            encoding=encoding,
            bits=32,
            copy_bytes_max=copy_bytes_max,
            staging_directory=staging_directory,
            row_local=row_local,
        )
        if resume is not None:
            try:
                self._resume(resume)
            except BaseException:
                self.close()
                raise

    @staticmethod
    def restore(model: nn.Module, url: str, *, at: str | None = None, optimizers: Sequence[Any] = ()) -> RestoredModel:
        """Writes a cut into a model and its optimizers. `at` is a cut's id or a step; None: the newest.

        Without optimizers, only the model is restored. A cut that does not fit changes nothing. To go on from it with
        deltas, make the next checkpointer with `resume=` before the next step.
        """
        ranks = Ranks()
        storage = Storage.open(url)
        found, _ = storage.manifests()
        plan, _ = Graph(found).restore_plan(ranks.first_says(at or Graph(found).choose(None).id))
        state = ModelState(model, optimizers)
        writer = Writer(state, plan.pieces[-1], with_optimizers=bool(state.dense.optimizers))
        report = load.restore(storage, plan, writer.apply)
        writer.finish()
        note_restored(model)
        return RestoredModel(
            cut=plan.target.id,
            step=plan.target.step,
            extra=plan.target.extra,
            url=url,
            report=report,
            tables=plan.pieces[-1].tables,
            versions=state.versions(),
        )

    # --- what a checkpoint is of

    def _describe(self, table: Table) -> tuple[TableInfo, dict[str, Any]]:
        return table.info(0), table.scalars()

    def _pack_dense(self) -> bytes:
        return dense.pack(*self._state.dense.collect())

    def _describe_dense(self, data_bytes: int, *, index: int) -> TableInfo:
        rows_before = next((table.rows for table in self._tables if table.name == dense.DENSE), 0)
        return dense.table_info(data_bytes, index=index, rows_before=rows_before)

    def _resume(self, resume: RestoredModel) -> None:
        now = self._state.versions()
        if changed := [name for name, version in now.items() if resume.versions.get(name) != version]:
            raise CheckpointError(
                f"{changed[0]!r} was changed since {resume.cut} was restored, and nobody took note of its rows",
                hint="make the checkpointer right after the restore, or without resume=, to begin with a full",
            )
        self._step = self._last_step = resume.step
        if resume.url == self._storage.url:  # elsewhere, a delta would lead from a cut that is not there
            self._source, self._tables = resume.cut, resume.tables
        self._tracker.compact(tenant=self._seat.tenant).durable()  # what waited was read from there
