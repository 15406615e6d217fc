"""The tables of a job, as servers are told of them: those of its collections, then dense parameters and averages.

All workers must come to the same list: where a row lives follows from the number of its table.
"""

from __future__ import annotations

from collections.abc import Sequence

from regrow.core.job import JobSpec, TableSpec
from regrow.errors import UserError
from regrow.nn.coded import make_marks_table, make_protection, protect
from regrow.nn.dense import BufferTable, DenseTable, FlatTable
from regrow.nn.job_embedding import JobCollection
from regrow.nn.seat import Seat

Static = list[tuple[int, DenseTable | BufferTable]]  # with the number of its table


def declare(
    collections: Sequence[JobCollection],
    flat: Sequence[DenseTable | BufferTable | None],
    seat: Seat,
    *,
    kept: Sequence[FlatTable] = (),
) -> tuple[JobSpec, Static]:
    """The job, and where in it the dense tables are. `kept`: tables that no step pulls or pushes."""
    wish = seat.protection
    tables = [protect(spec, wish) for collection in collections for spec in collection.specs]
    static: Static = []
    for table in flat:
        if table is not None:
            static.append((len(tables), table))
            tables.append(protect(table.spec, wish, dense=True))
    tables += [protect(table.spec, wish, dense=True) for table in kept]
    if not tables:
        raise UserError("the job has nothing to train", hint="job.embedding_bag_collection(...), job.dense(model)")
    protection = make_protection(wish, flush_seconds=seat.flush_seconds, redo_bytes=seat.redo_bytes)
    if protection.saves_own and not static:
        tables.append(protect(make_marks_table(seat.servers), wish, dense=True))
    spec = JobSpec(
        tables=tuple(tables),
        servers=seat.servers,
        workers=seat.workers,
        mode=seat.mode,
        seed=seat.seed,
        protection=protection,
    )
    if reason := spec.invalid_reason():
        raise UserError(reason)
    return spec, static


def check_names(wanted: Sequence[str], tables: Sequence[TableSpec], *, option: str) -> None:
    """Tables that an option names are tables of the job."""
    known = [table.name for table in tables]
    for name in wanted:
        if name not in known:
            raise UserError(f"{option}: the script has no table {name!r}", hint=f"it has {', '.join(known)}")
