"""Loading and dumping whole records, as `load_state_dict`, `--prefill`, digests and exports do it.

The first worker writes the records of the last table before anybody trains, a few rows at a time; should it die, its
successor begins again. At its end every worker reads all records; asynchronously it begins with that as soon as some
server is on its way back. What it reads must contain its own pushes, all that were durable when it asked and each
once, and what was loaded; synchronously it is the state of the end, to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from regrow.core.session import ReadAnswered, ReadWanted, WriteAnswered, WriteWanted
from regrow.sim.reference import F32, Key, Reference

ROWS_WRITTEN = 2  # by one request
SLOTS_READ = 3
FLOATS_PER_UNIT = 4  # records are padded to 16 bytes
FIRST_REQUEST = 1_000_000  # pulls are numbered by step


@dataclasses.dataclass(slots=True)
class Loading:
    """What all workers of a world know: whether they may begin. `on_done` is called when they may."""

    on_done: Callable[[], None]
    done: bool = False
    loader: Dumps | None = None  # the newest: one that hung and was replaced does not say when the load is over


class Dumps:
    """The records that one incarnation of a worker writes and reads."""

    def __init__(self, worker: int, reference: Reference, loading: Loading) -> None:
        self._worker = worker
        self._reference = reference
        self._loading = loading
        self._request = FIRST_REQUEST
        self._writes = self._plan_writes() if worker == 0 and not loading.done else []
        if self._writes:
            loading.loader = self
        self._reads = self._plan_reads()
        self._asked: dict[int, tuple[ReadWanted | WriteWanted, int]] = {}  # and what was durable then

    @property
    def may_train(self) -> bool:
        return self._loading.done

    @property
    def may_write(self) -> bool:
        return bool(self._writes) and not self._loading.done

    @property
    def may_read(self) -> bool:
        return bool(self._reads)

    @property
    def done(self) -> bool:
        return not self._reads and not self._asked

    def write(self) -> WriteWanted:
        wanted = self._writes.pop(0)
        self._asked[wanted.request] = wanted, 0
        return wanted

    def read(self, *, durable: int) -> ReadWanted:
        wanted = self._reads.pop(0)
        self._asked[wanted.request] = wanted, durable
        return wanted

    def hear(self, effect: ReadAnswered | WriteAnswered) -> str | None:
        """What is wrong with an answer, if anything."""
        if effect.request not in self._asked:
            return f"W{self._worker} is answered twice"
        wanted, durable = self._asked.pop(effect.request)
        if isinstance(effect, WriteAnswered):
            if not self._writes and not self._asked and self._loading.loader is self:
                self._loading.done = True
                self._loading.on_done()
            return None
        assert isinstance(wanted, ReadWanted)
        return self._find_problem(wanted, effect.records, durable)

    def _next_request(self) -> int:
        self._request += 1
        return self._request

    def _plan_writes(self) -> list[WriteWanted]:
        reference = self._reference
        assert reference.assigned is not None
        by_server: dict[int, list[Key]] = {}
        for key in reference.assigned[0].where:
            by_server.setdefault(reference.places.of_row[key][0], []).append(key)
        wanted = []
        for server, keys in by_server.items():
            for first in range(0, len(keys), ROWS_WRITTEN):
                some = keys[first : first + ROWS_WRITTEN]
                wanted.append(
                    WriteWanted(
                        request=self._next_request(),
                        server=server,
                        table=some[0][0],
                        slots=np.array([reference.places.of_row[key][1] for key in some], np.uint32),
                        records=np.concatenate([_pad(reference.base[key]) for key in some]),
                    )
                )
        return wanted

    def _plan_reads(self) -> list[ReadWanted]:
        slots: dict[tuple[int, int], int] = {}
        for server, table, slot in self._reference.places.row_at:
            slots[server, table] = max(slot + 1, slots.get((server, table), 0))
        return [
            ReadWanted(
                request=self._next_request(),
                server=server,
                table=table,
                slot_first=first,
                slot_count=min(SLOTS_READ, count - first),
            )
            for (server, table), count in slots.items()
            for first in range(0, count, SLOTS_READ)
        ]

    def _find_problem(self, wanted: ReadWanted, records: F32, durable: int) -> str | None:
        by_slot = records.reshape(wanted.slot_count, -1)
        for index in range(wanted.slot_count):
            row = self._reference.places.row_at.get((wanted.server, wanted.table, wanted.slot_first + index))
            if row is None:
                continue
            key = wanted.table, row
            problem = self._reference.dump_problem(key, by_slot[index], worker=self._worker, durable=durable)
            if problem is not None:
                return f"W{self._worker} read row {row} of table {wanted.table} after step {durable}: it {problem}"
        return None


def _pad(record: F32) -> F32:
    return np.pad(record, (0, -record.size % FLOATS_PER_UNIT))
