"""Rows on disk: who waits for which of them, and goes on when they are in memory.

Theory of operation. A store may keep most of its rows on disk and only some in memory (`store.interface.PagedRows`).
Whoever needs a row that is not in memory has a fault, as at a server that comes back (`wayback.py`), but nobody else is
asked: the store reads it, in the background, while the server's loop does other things. The store gives a *ticket* for
all rows of one request. When the driver sees that something has come, it says `Fetched`; the rows of a ticket that is
done are *pinned*, whoever waited for that very ticket is served, and then the ticket is given back.

What breaks without the rules:
- A ticket that is not given back keeps its rows in memory for ever, until nothing else fits. Whoever is served, or will
  never be (a worker that was replaced), gives it back: `drop`, `forget`.
- A ticket held while its owner waits for something else (a cut, another worker) could keep out the rows that this
  depends on. So nobody waits with rows in his hand: held back, he drops them, and asks again. A store gives frames to
  tickets in the order of asking, to each all at once, so the oldest always gets further.
- Rows that are read before anybody asks for them (`Expect`) are a wish: pinned until they are here and no longer, a few
  for each worker, and only if they and all that is used meanwhile fit the cache; else they would have left it again
  before their pull came. A wish is passed over rather than that anything fails for it.
- A push that overtakes one of its own worker that waits for the disk: serving keeps them in a queue (serving_async.py).
- Tidying up (evicting, writing) before an answer would be on the way of whoever waits. It is asked for behind all
  answers (`Upkeep`), and the driver does it when nothing else is there to be done.

A disk that does not answer is noticed at a tick (`DISK_SECONDS_MAX`), and ends the server: its rows cannot be served,
and there is nobody else who has them.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, cast

from regrow.core.identity import Identity
from regrow.core.messages import Int32Array, Message, UInt32Array
from regrow.errors import StoreFull, StoreSilent
from regrow.store.interface import PagedRows, Sizes

# A ticket that is not done after so long is waited for no more. Too small: a disk that is busy with something else (a
# scrub, another process that syncs) ends a run. Too large: everybody waits for one that has failed without a word.
DISK_SECONDS_MAX = 120.0
# Batches of a worker that are read ahead at once. Too few: a disk that is late once is late for the next batch too. Too
# many: rows that are needed now are read behind rows that are not.
WISHES_MAX = 2
EXPECT = "expect"  # of a waiter: nobody waits for it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """Event at a server: its store has read something, or written something for good."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """Effect of a server: say `UpkeepDue` when nothing else is to be done."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepDue:
    """Event at a server: nobody waits just now."""


class Waiter(NamedTuple):
    """Somebody who needs rows, by what for: a worker's pull or push by its number, its rows to come (EXPECT: 0,
    those of a pull that waits for others, or the number of a wish), or a step of all of them."""

    kind: str
    worker: int
    number: int


NOBODY = -1  # the worker of what concerns all of them


class Paging:
    """The tickets of one server, and who waits for them."""

    def __init__(self, store: PagedRows, *, workers: int) -> None:
        self.faults = 0  # requests that had to wait for the disk
        self.rows_named = 0  # before anybody asked for them
        self._store = store
        self._rows_ahead_max = store.rows_ahead_max // workers  # of a wish
        self._tickets: dict[Waiter, int] = {}
        self._waiters: dict[int, Waiter] = {}  # the same the other way round
        self._since: dict[int, float] = {}  # when a ticket was asked for; of those that are not done
        self._parked: dict[Waiter, tuple[Identity, Message]] = {}
        self._now = 0.0
        self._upkeep_asked = False

    def __repr__(self) -> str:
        return f"<{len(self._tickets)} wait for the disk>"

    @property
    def waits(self) -> int:
        """How many tickets wait for the disk."""
        return len(self._since)

    @property
    def requests_waiting(self) -> int:
        """How many of them somebody waits for."""
        return sum(self._waiters[ticket].kind != EXPECT for ticket in self._since)

    @property
    def reads_ahead(self) -> bool:
        """Whether it is of use to name rows before they are pulled."""
        return self._rows_ahead_max > 0

    # --- Who needs rows ---

    def ask(self, waiter: Waiter, counts: Int32Array, slots: UInt32Array) -> bool:
        """Whether all these rows are in memory: then they can be used at once, and before anything else is asked for.
        Else they are on their way, and `poll` names the waiter when they are here."""
        ticket = self._tickets.get(waiter)
        if ticket is not None:
            return ticket not in self._since
        try:
            ticket = self._store.fetch(counts, slots)
        except StoreFull:
            if waiter.kind == EXPECT or not self._drop_wishes():
                raise
            ticket = self._store.fetch(counts, slots)
        if not ticket:
            return True
        self.faults += waiter.kind != EXPECT
        self._tickets[waiter] = ticket
        self._waiters[ticket] = waiter
        self._since[ticket] = self._now
        return False

    def is_waiting(self, waiter: Waiter) -> bool:
        """Whether its rows were asked for and are not here."""
        return self._tickets.get(waiter, 0) in self._since

    def park(self, source: Identity, message: Message, waiter: Waiter, part: tuple[Int32Array, UInt32Array]) -> bool:
        """`ask` for a message that comes again, by `take_parked`, when its rows are here."""
        if self.ask(waiter, *part):
            return True
        self._parked[waiter] = (source, message)
        return False

    def take_parked(self, waiter: Waiter) -> tuple[Identity, Message] | None:
        return self._parked.pop(waiter, None)

    def expect(self, worker: int, counts: Int32Array, slots: UInt32Array) -> None:
        """The rows of a pull that has to wait for others: they are read meanwhile."""
        self._wish(Waiter(EXPECT, worker, 0), counts, slots)

    def read_ahead(self, worker: int, counts: Int32Array, slots: UInt32Array) -> None:
        """A worker names rows that it will pull soon. Passed over if too many are on their way already."""
        if slots.size > self._rows_ahead_max:
            return
        wishes = (Waiter(EXPECT, worker, number) for number in range(1, 1 + WISHES_MAX))
        if (free := next((wish for wish in wishes if wish not in self._tickets), None)) is not None:
            self._wish(free, counts, slots)

    def _wish(self, wish: Waiter, counts: Int32Array, slots: UInt32Array) -> None:
        if wish in self._tickets:
            return
        try:
            self.ask(wish, counts, slots)
        except ValueError:  # more than the cache has room for
            return
        except StoreFull:
            self._drop_wishes()
            return
        self.rows_named += slots.size

    def _drop_wishes(self) -> bool:
        """There is no room on the disk: what is in memory is for whoever needs it now, from here on. False: there were
        none."""
        self._rows_ahead_max = 0
        wishes = [waiter for waiter in self._tickets if waiter.kind == EXPECT]
        for wish in wishes:
            self.drop(wish)
        return bool(wishes)

    def drop(self, waiter: Waiter) -> None:
        """Served, or not to be served: its rows may leave the memory."""
        self._parked.pop(waiter, None)
        ticket = self._tickets.pop(waiter, None)
        if ticket is None:
            return
        del self._waiters[ticket]
        self._since.pop(ticket, None)
        self._store.release(ticket)

    def forget(self, worker: int) -> None:
        """Another incarnation of this worker is here: what the one before waited for is void."""
        for waiter in [waiter for waiter in self._tickets if waiter.worker == worker]:
            self.drop(waiter)

    # --- What has come ---

    def poll(self) -> list[Waiter]:
        """Whose rows are here now, in the order in which they came. Each is to be dropped when it was served."""
        try:
            found = self._store.poll_fetched()
        except StoreFull:
            if not self._drop_wishes():
                raise
            found = self._store.poll_fetched()
        done = [ticket for ticket in found if ticket in self._waiters]
        for ticket in done:
            self._since.pop(ticket, None)
        return [self._waiters[ticket] for ticket in done]

    def check_time(self, now: float) -> None:
        """Raises StoreSilent if somebody has waited for too long."""
        self._now = now
        if not self._since:
            return
        ticket, since = next(iter(self._since.items()))
        if not since:
            self._since[ticket] = now  # asked for before the first tick
        elif now - since > DISK_SECONDS_MAX:
            waiter = self._waiters[ticket]
            raise StoreSilent(
                f"the disk has not answered for {now - since:.0f} s: a {waiter.kind} waits for rows",
                hint="look at the disk under --store-dir; the rows that were in memory only are lost with this server",
            )

    def correct_report(self, report: dict[str, int | float]) -> dict[str, int | float]:
        """A store's `tier_report`, as those see it who wait. A row that was read ahead is a miss, and not a hit besides
        when it is pulled; a wish that waits keeps nobody waiting."""
        hits = max(0, report.get("hits", 0) - self.rows_named)
        return {**report, "hits": hits, "waits": self.faults, "rows_named": self.rows_named}

    # --- When nobody waits ---

    def ask_upkeep(self) -> list[Upkeep]:
        """Behind all answers of an event. Asked for once, until it was done."""
        if self._upkeep_asked:
            return []
        self._upkeep_asked = True
        return [Upkeep()]

    def do_upkeep(self) -> list[Upkeep]:
        """A bounded piece of it; if there is more, it is asked for again."""
        self._upkeep_asked = False
        return self.ask_upkeep() if self._store.upkeep() else []


def look_for_paging(store: Sizes, *, workers: int) -> Paging | None:
    """None: all rows are always in memory. Asked once, when a server is built."""
    return Paging(cast(PagedRows, store), workers=workers) if store.is_paged else None
