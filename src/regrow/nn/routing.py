"""The worker's side of the layout: which server holds which row of a batch."""

from __future__ import annotations

from regrow import _kernels
from regrow.core.job import JobSpec


def make_router(
    job: JobSpec,
    *,
    feature_tables: list[int],
    static_tables: list[int],
    mean_pooling: list[bool] | None = None,
    expanded: list[bool] | None = None,
) -> _kernels.Router:
    """The worker's side of the layout that the servers of `job` use."""
    tables = job.tables
    return _kernels.Router(
        rows=[table.rows for table in tables],
        dims=[table.dim for table in tables],
        k=[table.k for table in tables],
        r=[table.r for table in tables],
        table_index=list(range(len(tables))),
        mean_pooling=mean_pooling or [False] * len(tables),
        expanded=expanded,
        feature_tables=feature_tables,
        static_tables=static_tables,
        servers=job.servers,
        rings=job.rings,
    )
