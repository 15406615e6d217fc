"""The worker's side of the layout: which server holds which row of a batch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from regrow import _kernels
from regrow.core.job import JobSpec
from regrow.errors import UserError

NUMBERED = re.compile(r"feature (\d+), (.*)")  # how routers speak of features


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


def explain_id(error: IndexError, features: Sequence[str], tables: Sequence[str]) -> UserError:
    """An id that its table has not, by the names that whoever gave it knows. `tables`: of each feature."""
    found = NUMBERED.fullmatch(str(error))
    assert found is not None, error
    number, rest = found.groups()
    return UserError(
        f"feature {features[int(number)]!r}, table {tables[int(number)]!r}, {rest}",
        hint="hash ids into the rows, leave such samples out, or make num_embeddings larger",
    )
