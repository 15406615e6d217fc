"""Publications of torch models: the weights that changed, for those who answer look-ups (`regrow.serving.Replica`).

    with Publisher(model, "s3://bucket/live", optimizers=[adagrad, adam], every="30s") as publisher:
        for batch in data:
            ...; adagrad.step(); adam.step(); publisher.step()

A publication is a cut without the state of optimizers, and what `publications.py` says of it. Beside a
`DeltaCheckpointer` this is the second tenant of the same tracker: each has its own cuts, and neither notices the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from regrow.checkpoint.manifest import Manifest, TableInfo
from regrow.checkpoint.manifests import answer_wanted_full
from regrow.checkpoint.publications import write_latest
from regrow.checkpoint.torch import dense
from regrow.checkpoint.torch.adapters import Table
from regrow.checkpoint.torch.cuts import COPY_BYTES_MAX, CutWriter
from regrow.checkpoint.torch.tracker import Handover
from regrow.errors import ConfigError


class Publisher(CutWriter):
    """Publishes a torch model while it trains: a full now and then, deltas in between. Use from one thread.

    optimizers -- as a `DeltaCheckpointer` has them; None: those that one has named for this model before.
    every -- a publication after so much time ("30s"), or so many steps; None: only by `publish`. Too small: storage is
        busy with rows that change again at once. Too large: look-ups are older.
    full_every -- every so many publications is a full. Too small: bytes. Too large: a replica that starts reads many
        pieces, unless a merger makes fulls of them.
    bits -- 8 or 4 store rows in fewer bits; with 32 a replica's rows are the model's to the bit.
    copy_bytes_max -- larger ones are written while training waits. Too small: it waits often. Too large: memory.
    row_local -- types of optimizers of your own that leave a row without gradient alone.
    """

    kind = "publication"
    made_by = "regrow.Publisher"

    def __init__(
        self,
        model: nn.Module,
        url: str,
        *,
        optimizers: Sequence[Any] | None = None,
        every: int | str | None = "30s",
        full_every: int = 100,
        bits: Literal[32, 8, 4] = 32,
        copy_bytes_max: int = COPY_BYTES_MAX,
        staging_directory: str | None = None,
        row_local: Sequence[type[torch.optim.Optimizer]] = (),
    ) -> None:
        if bits not in (32, 8, 4):
            raise ConfigError("bits", bits, "must be 32, 8 or 4")
        super().__init__(
            model,
            url,
            optimizers=optimizers,
            every=every,
            full_every=full_every,
            encoding="raw",
            bits=bits,
            copy_bytes_max=copy_bytes_max,
            staging_directory=staging_directory,
            row_local=row_local,
        )

    def publish(self, *, full: bool = False, extra: Mapping[str, Any] | None = None) -> str:
        """Publishes now, waits until it is on storage, and returns the cut's id. Errors are raised, and the next
        publication has these rows too."""
        return self.save(full=full, extra=extra)

    def _describe(self, table: Table) -> tuple[TableInfo, dict[str, Any]]:
        return msgspec.structs.replace(table.info(0), states=()), {"dtype": table.scalars()["dtype"]}

    def _pack_dense(self) -> bytes:
        return dense.pack(*self._state.dense.collect_model())

    def _describe_dense(self, data_bytes: int, *, index: int) -> TableInfo:
        # Its size changes only with the model. A table without rows to spare is stored whole, as replicas ask.
        rows = dense.count_rows(data_bytes)
        return msgspec.structs.replace(dense.table_info(data_bytes, index=index), rows=rows)

    def _take_rows(self, *, full: bool) -> Handover:
        handover = super()._take_rows(full=full)
        handover.leave_state()
        return handover

    def _after_manifest(self, manifest: Manifest) -> None:
        """`latest.json`, the last of all; and whether somebody, who misses a piece, asked for a full."""
        write_latest(self._storage, manifest)
        self._full_wanted = answer_wanted_full(self._storage, full=manifest.source is None)
