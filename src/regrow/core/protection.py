"""What protects the rows of a job, and what follows from that when servers die.

A protection is a value: one of the structs below, part of the job and so of every view. Whoever has to decide something
(the coordinator, a session, a server, the launcher) asks the value; nobody else knows which kinds there are, nor looks
at a table's parities to find out (a test counts the places that do). All of them answer the same questions:

    has_parities        do rows have parities at other servers? Then changes are flushed, and servers know each other.
    replaces_servers    is a server that dies followed by a successor while the others go on?
    lost_together_max   how many servers may die together, at the most: so many spares are worth having
    begins_together     must recoveries that are under way begin again, together, when another server dies?
    saves_own           does each server save its own rows, for its successor to go back to?
    recalls(table)      may rows of this table come back from there, without what was learned since?
    find_recalled(down) which of these servers must go back to their saves, for too many are lost to decode their rows?
    keeps_epochs        are checkpoints kept in the files of each server's own store (which must have such)?
    flush_seconds       ... and within which time are their rows to be on disk?
    verdict(down)       can this set of servers be lost together? With the reason, which names what is lost.

To add one: a struct here with these answers and a new tag, its name in `Protection`, and whatever brings its rows back
(`core/wayback.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import msgspec

from regrow.core.layout import Layout

if TYPE_CHECKING:
    from regrow.core.job import TableSpec

Commit = Literal["exactly-once", "2pc", "none"]

TABLES_NAMED_MAX = 8  # in a reason; the rest is counted
REASON_LENGTH_MAX = 4000  # a reason travels in a view


class Verdict(NamedTuple):
    """Whether a loss can be survived, and why (not)."""

    survivable: bool
    reason: str


class FlushSpec(msgspec.Struct, frozen=True, kw_only=True):
    """When changes leave a server for its parity holders, and what counts as safe."""

    # A flush leaves after so many pushes, or when so many bytes wait, or after so long. Too small: hot rows travel
    # again and again. Too large: workers keep more for a redo, and resend it.
    pushes: int = 16
    bytes: int = 32 << 20
    seconds: float = 5.0
    # What a worker keeps for a redo at most (`--redo-bytes`). Too small: more flushes. Too large: it waits for them.
    redo_bytes: int = 64 << 20
    commit: Commit = "exactly-once"
    # So many bytes of rows per second come back in the background to a server that was lost, from all others
    # together. Too small: unprotected for longer. Too large: pulls wait longer while it lasts. 0: no limit.
    sweep_bytes_per_s: int = 0
    # The share of training that a recovery may cost as long as it lasts. 0: as fast as loses least in all.
    recovery_cost: float = 0.0
    # ... but all is back within so long. Too small: training counts for nothing. Too large: the next loss comes first.
    recovery_seconds_max: int = 60

    def invalid_reason(self) -> str | None:
        """Says what is wrong, or None."""
        if not 1 <= self.pushes <= 1 << 20:
            return f"a flush after {self.pushes} pushes makes no sense"
        if self.redo_bytes < 1:
            return f"workers that keep {self.redo_bytes} bytes of pushes keep none"
        if self.bytes < 1 or self.sweep_bytes_per_s < 0:
            return "flush bytes must be positive, and the sweep's limit not negative"
        if not 0.0 < self.seconds <= 3600.0:
            return f"a flush after {self.seconds} seconds makes no sense"
        if not 0.0 <= self.recovery_cost <= 1.0 or self.recovery_seconds_max < 1:
            return "a recovery costs a share of training, and takes a second or more"
        return None


class Unprotected(msgspec.Struct, frozen=True, kw_only=True, tag="unprotected"):
    """Nothing: whoever loses a server has lost its rows."""

    rings: ClassVar[int] = 1
    flush: ClassVar[FlushSpec] = FlushSpec()
    has_parities: ClassVar[bool] = False
    replaces_servers: ClassVar[bool] = False
    lost_together_max: ClassVar[int] = 0
    begins_together: ClassVar[bool] = False
    saves_own: ClassVar[bool] = False
    keeps_epochs: ClassVar[bool] = False
    flush_seconds: ClassVar[float] = 0.0

    def recalls(self, table: TableSpec) -> bool:
        return False

    def find_recalled(self, down: Collection[int], *, begun: Collection[int], servers: int) -> frozenset[int]:
        return frozenset()

    def verdict(self, down: Collection[int], *, tables: Sequence[TableSpec], servers: int) -> Verdict:
        if not down:
            return Verdict(True, "no server is down")
        return Verdict(False, f"{name_servers(down)}: nothing protects the rows of these servers")

    def invalid_reason(self, *, tables: Sequence[TableSpec], servers: int, mode: str) -> str | None:
        for table in tables:
            if table.r > 0:
                return f"table {table.name!r} has parities (r = {table.r}), but the job is not coded"
        return None


class Batched(Unprotected, frozen=True, kw_only=True, tag="batch"):
    """Checkpoints inside the files of tiered stores: whoever loses a server loses what came since the newest, and all
    begin again from that."""

    # Rows of a checkpoint are on disk after so long. Too short: their writing gets in the way of reads. Too long: less
    # often than that is a checkpoint made.
    flush_seconds: float = 10.0  # type: ignore[misc]  # the answer of one protection is a value of it

    keeps_epochs: ClassVar[bool] = True

    def invalid_reason(self, *, tables: Sequence[TableSpec], servers: int, mode: str) -> str | None:
        if not 0.0 <= self.flush_seconds <= 86400.0:
            return f"rows of a checkpoint cannot be written within {self.flush_seconds} s"
        return super().invalid_reason(tables=tables, servers=servers, mode=mode)


class Coded(msgspec.Struct, frozen=True, kw_only=True, tag="coded"):
    """Erasure coding: r parities for every k rows, in rings of servers that protect each other.

    `k` and `r` are those of embedding tables. Each table has its own: dense parameters are kept whole (k = 1), and a
    table may have fewer parities, or none (r = 0): then losing a server loses its rows.
    """

    k: int
    r: int
    rings: int = 1
    flush: FlushSpec = FlushSpec()

    has_parities: ClassVar[bool] = True
    replaces_servers: ClassVar[bool] = True
    saves_own: ClassVar[bool] = False
    keeps_epochs: ClassVar[bool] = False
    flush_seconds: ClassVar[float] = 0.0

    @property
    def lost_together_max(self) -> int:
        return self.r

    def recalls(self, table: TableSpec) -> bool:
        return False

    def find_recalled(self, down: Collection[int], *, begun: Collection[int], servers: int) -> frozenset[int]:
        return frozenset()

    @property
    def begins_together(self) -> bool:
        """With several parities, holders must agree about every lost source again after any new loss."""
        return self.r > 1

    def verdict(self, down: Collection[int], *, tables: Sequence[TableSpec], servers: int) -> Verdict:
        """No stripe may have more members on the servers `down` than it has parities."""
        return judge_loss(down, _count_lost_rows(frozenset(down), tuple(tables), servers, self.rings))

    def invalid_reason(self, *, tables: Sequence[TableSpec], servers: int, mode: str) -> str | None:
        if self.rings < 1 or servers % self.rings:
            return f"rings must divide servers: {servers} servers, {self.rings} rings"
        if self.k < 1 or self.r < 1:
            return f"a code has at least one row and one parity, not k={self.k}, r={self.r}"
        if reason := self.flush.invalid_reason():
            return reason
        if mode == "sync" and self.flush.commit != "exactly-once":
            return f"commit = {self.flush.commit!r} is for asynchronous jobs"
        most = max(tables, key=lambda table: table.r)
        if most.r > self.r:
            return f"table {most.name!r} has {most.r} parities, the code of the job {self.r}"
        return None if most.r else "no table has a parity (r >= 1), but the job is coded"


class Partial(msgspec.Struct, frozen=True, kw_only=True, tag="partial"):
    """Partial recovery: a lost server goes back to what it last saved by itself, and nobody else goes back at all.

    Tables without parities (r = 0) lose what came since their server's last save. The others, dense parameters above
    all, are copied r times (k = 1) and lose nothing; and what their holders know of them says how far the lost server
    was, so that the loss is counted to the push.
    """

    r: int = 1
    flush: FlushSpec = FlushSpec()

    rings: ClassVar[int] = 1
    has_parities: ClassVar[bool] = True
    replaces_servers: ClassVar[bool] = True
    saves_own: ClassVar[bool] = True
    keeps_epochs: ClassVar[bool] = False
    flush_seconds: ClassVar[float] = 0.0

    @property
    def lost_together_max(self) -> int:
        return self.r

    def recalls(self, table: TableSpec) -> bool:
        return not table.r

    def find_recalled(self, down: Collection[int], *, begun: Collection[int], servers: int) -> frozenset[int]:
        """No decision is needed: rows without parities have no other way back."""
        return frozenset()

    @property
    def begins_together(self) -> bool:
        return self.r > 1

    def verdict(self, down: Collection[int], *, tables: Sequence[TableSpec], servers: int) -> Verdict:
        """Only copies can be lost: of all other rows their servers have saves."""
        lost = count_lost_rows(down, tables=tables, servers=servers, rings=1)
        copied = {table.name for table in tables if table.r}
        return judge_loss(down, [(name, count) for name, count in lost if name in copied])

    def invalid_reason(self, *, tables: Sequence[TableSpec], servers: int, mode: str) -> str | None:
        if reason := self.flush.invalid_reason():
            return reason
        if self.flush.commit != "exactly-once":
            return f"commit = {self.flush.commit!r} does not go with partial recovery"
        if self.r < 1:
            return f"partial recovery keeps at least one copy of dense parameters, not {self.r}"
        for table in tables:
            if table.k != 1 or table.r not in (0, self.r):
                return f"table {table.name!r} has k={table.k}, r={table.r}; here it is k=1 and r=0 or r={self.r}"
        if not any(table.r for table in tables):
            return "no table has copies, so nobody would know how far a lost server was"
        return None


class CodedPartial(msgspec.Struct, frozen=True, kw_only=True, tag="coded-partial"):
    """Parities first, saves beyond: where a stripe has lost more than r, the lost servers of its ring go back to saves.

    Embedding tables have this k and r. Dense parameters are copied r + 1 times: they are never older than they must be,
    and what their holders know of them says how far a server was that is recalled, so that its loss is counted.
    """

    k: int
    r: int
    rings: int = 1
    flush: FlushSpec = FlushSpec()

    has_parities: ClassVar[bool] = True
    replaces_servers: ClassVar[bool] = True
    saves_own: ClassVar[bool] = True
    begins_together: ClassVar[bool] = True  # copies are at least two
    keeps_epochs: ClassVar[bool] = False
    flush_seconds: ClassVar[float] = 0.0

    @property
    def lost_together_max(self) -> int:
        return self.r + 1

    def recalls(self, table: TableSpec) -> bool:
        return table.r == self.r

    def find_recalled(self, down: Collection[int], *, begun: Collection[int], servers: int) -> frozenset[int]:
        """Of each ring all or none. None if every stripe can be decoded: it has lost no more than r, and nobody of the
        ring was recalled before and is not back (`begun`). Else parities of its stripes stand for nothing yet."""
        layout = Layout(servers=servers, k=self.k, r=self.r, rings=self.rings)
        ring = servers // self.rings
        recalled: set[int] = set()
        for first in range(0, servers, ring):
            mine = [server for server in down if first <= server < first + ring]
            is_hopeless = any(_is_hopeless(server, j, layout, down) for server in mine for j in range(self.k))
            if is_hopeless or any(server in begun for server in mine):
                recalled.update(mine)
        return frozenset(recalled)

    def verdict(self, down: Collection[int], *, tables: Sequence[TableSpec], servers: int) -> Verdict:
        """Only copies can be lost: of all other rows their servers have saves."""
        lost = _count_lost_rows(frozenset(down), tuple(tables), servers, self.rings)
        copied = {table.name for table in tables if not self.recalls(table)}
        verdict = judge_loss(down, [(name, count) for name, count in lost if name in copied])
        if not verdict.survivable or not (recalled := self.find_recalled(down, begun=(), servers=servers)):
            return verdict
        return Verdict(True, f"too many of a stripe are lost: {name_servers(recalled)} go back to their saves")

    def invalid_reason(self, *, tables: Sequence[TableSpec], servers: int, mode: str) -> str | None:
        for table in tables:
            if (table.k, table.r) not in ((self.k, self.r), (1, self.r + 1)):
                codes = f"k={self.k} and r={self.r}, or k=1 and r={self.r + 1}"
                return f"table {table.name!r} has k={table.k}, r={table.r}; here it is {codes}"
        coded = [table for table in tables if self.recalls(table)]
        if len(coded) == len(tables):
            return "no table has copies, so nobody would know how far a lost server was"
        if not coded:
            return "every table is copied, and none would be recalled"
        if self.flush.commit != "exactly-once":
            return f"commit = {self.flush.commit!r} does not go with partial recovery"
        code = Coded(k=self.k, r=self.r, rings=self.rings, flush=self.flush)
        return code.invalid_reason(tables=coded, servers=servers, mode=mode)


Protection = Unprotected | Batched | Coded | Partial | CodedPartial


def judge_loss(down: Collection[int], lost: Sequence[tuple[str, int]]) -> Verdict:
    """What to say of servers that are down together, and with them these (table, rows)."""
    if not lost:
        return Verdict(True, f"no stripe has lost more members than it has parities, without {name_servers(down)}")
    rows = sum(count for _, count in lost)
    named = ", ".join(f"{name} ({count})" for name, count in lost[:TABLES_NAMED_MAX])
    more = f" and {len(lost) - TABLES_NAMED_MAX} more tables" if len(lost) > TABLES_NAMED_MAX else ""
    reason = f"{name_servers(down)} are down together: up to {rows} rows are lost, in {named}{more}"
    return Verdict(False, reason[:REASON_LENGTH_MAX])


def count_lost_rows(
    down: Collection[int], *, tables: Sequence[TableSpec], servers: int, rings: int
) -> list[tuple[str, int]]:
    """(table, rows) that cannot come back from parities when all of `down` are lost together.

    A stripe lies on k + r consecutive servers of its ring. Rows that nobody ever updated are counted too: only the lost
    servers could have said which they were.
    """
    lost = []
    for index, table in enumerate(tables):
        layout = Layout(servers=servers, k=table.k, r=table.r, rings=rings)
        rows = hopeless_total = 0
        for server in down:
            held = layout.rows_on(server, rows=table.rows, table=index)
            hopeless = sum(_is_hopeless(server, j, layout, down) for j in range(table.k))
            hopeless_total += hopeless
            rows += -(-held * hopeless // table.k)
        # A table so small that these stripes are empty counts too: nobody is left to say where its groups stood.
        if hopeless_total:
            lost.append((table.name, rows))
    return lost


@functools.lru_cache(maxsize=256)
def _count_lost_rows(
    down: frozenset[int], tables: tuple[TableSpec, ...], servers: int, rings: int
) -> list[tuple[str, int]]:
    """Remembered: while somebody is doubted, its coordinator asks at every tick."""
    return count_lost_rows(down, tables=tables, servers=servers, rings=rings)


def _is_hopeless(server: int, member: int, layout: Layout, down: Collection[int]) -> bool:
    """Whether stripes in which `server` has this member have lost more members than they have parities."""
    stripe = [layout.step(server, m - member) for m in range(layout.k + layout.r)]
    return sum(s in down for s in stripe) > layout.r


def name_servers(servers: Collection[int]) -> str:
    return ", ".join(f"S{server}" for server in sorted(servers)) or "nobody"
