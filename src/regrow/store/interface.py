"""What a server asks of whatever holds its rows: the one interface between the protocol and a store.

Here are promises and no code. A store holds one server's part of every table of a job, and the parities of other
servers' rows; it knows nothing of views, messages or time. `core`, `runtime` and `sim` know a store by these protocols
only, each part of them by the one that names what it needs; `Store` is all of them together. The rule to keep: this
module imports nothing of the project when it runs, so that whoever reads it loads no kernels.

**Words.** A *slot* is the place of a row on this server: slot b * k + j is member j of block b, and
`regrow.core.layout` says which row that is. Slots of the last block that no row has are *holes*: they can be read and
written like rows, begin as zeros and are left out of captures. A *record* is [weights | optimizer state | zeros up to
a multiple of four floats], and its bits are what is stored, coded and compared. A row is *touched* once it was changed;
until then its value is its initial value, which follows from the seed. A *relative* value is value ^ initial value, bit
by bit, so that a row never touched is zero. A *coding group* is a number: rows whose parities are at the same servers,
seen from their own; the list of groups is that of `regrow.core.groups`, the same on every server. Rows of tables
without parities are in none; where rows come back (`ReturningRows`), they are all in one more group, the *bare* one,
whose number is the next.

**Rows of a call** are named by (counts, slots): counts[t] of the slots belong to table t, tables follow each other, and
so do the floats of the rows: `dim` of each where it says weights or gradients, `record_floats` where it says records.

**Arrays** are C-contiguous, aligned, and of exactly the dtype named. What is passed in is read (or, where it is called
`out`, written) during the call only: the caller keeps it, changes it in no other thread meanwhile, and may use it again
when the call returns. What is given out is the caller's for ever, unless the method says otherwise. Arguments are given
by position, but for `keep`, `aside_first`, `clean_to` and the `group` of `missing_rows`, which may be named.

**Errors.** Everything is checked before anything is changed: after an exception the store, and `out`, are as they were.
ValueError: an array, a number of entries or a value that cannot be, or a call whose time has not come. IndexError: a
table, slot, block, row, group, server, parity, member or tenant that does not exist. MemoryError: the system has no
room. Every method may raise these three; its text says what is particular to it.

**Threads.** The loop of the server calls every method, one call at a time; a store need not lock anything. The
exceptions are the methods that say "any thread": they may be called at any time, also while the loop is inside another.
A method may use threads of its own, and give the interpreter away meanwhile, but has none left when it returns.

**Order.** A store is built with all its tables (`StoreBuilder`). Built to come back, it has no rows at first: a row may
be read or changed only after `prepare` did not name it as missing. Parities can be applied and read from the beginning
in either case. Captures are begun, taken and ended in this order, one at a time.

**A new store** touches three places: a file of its own in `regrow/store/`; the line that chooses what servers are built
of (`build_store` in `regrow/runtime/serve.py`); and `SUBJECTS` in tests/unit/store/subjects.py, by which it has to pass
the same tests as all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from regrow.core.job import JobSpec

Int32Array = npt.NDArray[np.int32]
UInt32Array = npt.NDArray[np.uint32]
UInt64Array = npt.NDArray[np.uint64]
Float32Array = npt.NDArray[np.float32]

# counts, slots, and floats of the rows: gradients or records.
Part = tuple[Int32Array, UInt32Array, Float32Array]
# Rows of a table, as a chunk of a checkpoint has them: the table, the numbers of the rows, and [rows, width] weights
# and parts of the optimizer's state, in the order of `OptimizerSpec.state_parts`. No padding.
TableRows = tuple[int, UInt32Array, list[Float32Array]]

TENANTS_MAX = 4  # Whoever needs more must ask whether the store can keep them apart.


class Sizes(Protocol):
    """How large things are. None of it changes after the store was built; any thread may ask."""

    @property
    def is_paged(self) -> bool:
        """Whether rows may be on disk: then, and only then, all of `PagedRows` is there. Any thread."""

    @property
    def memory_bytes(self) -> int:
        """Bytes that rows, parities and their bits took when the store was built. Any thread.

        What changes, tenants and captures take later comes on top, and is not counted here.
        """

    @property
    def redundancy_bytes(self) -> int:
        """The part of `memory_bytes` that parities and their bits take; 0 without parities. Any thread."""

    def slots(self, table: int) -> int:
        """Slots of a table on this server, holes included: the same on every server. Any thread."""

    def blocks(self, table: int) -> int:
        """Blocks of k slots: slots / k, for tables without parities too. Any thread."""

    def record_floats(self, table: int) -> int:
        """Floats of a record, padding included: a multiple of four. Any thread."""


class WorkerRows(Sizes, Protocol):
    """Rows as workers see them: weights go out, gradients come in, and the store runs the optimizers.

    Server loop only. At a store that comes back, all rows of a call must be there: ValueError names one that is not.
    """

    def gather(self, counts: Int32Array, slots: UInt32Array, out: Float32Array) -> None:
        """Copies the weights of rows to `out`. A row may be named more than once; nothing changes."""

    def update(
        self, counts: Int32Array, slots: UInt32Array, grads: Float32Array, step: int, rates: Sequence[float] = ()
    ) -> None:
        """Runs each table's optimizer on its rows, bit for bit as `regrow.core.twins.update_record` does.

        The slots of a table must be distinct: the store does not check it (servers refuse such a push), and which
        gradient of a row counts is then not known. The rows become touched, pending in their groups, and dirty to every
        tenant; what was published or captured of them is kept first. `step` counts from 1: ValueError below that if any
        table of the job has an optimizer that counts steps (both Adams), whether or not it has rows in this call.
        `rates` has the learning rate of each table for this call alone; none: those of the job.
        """

    def assign_untouched(self, counts: Int32Array, slots: UInt32Array, weights: Float32Array) -> None:
        """Sets the weights of those rows that were never touched, as a change like any other; skips the others.

        So a worker that says twice what rows begin with changes nothing the second time. Of a row named twice in one
        call the first counts.
        """

    def sum_pushes(self, parts: list[Part]) -> Part:
        """Makes one push out of several: gradients of rows in common are summed in the order of the list.

        Rows are in the order of their first occurrence within their table. Touches no row of the store; what it gives
        out is the caller's and shares no memory with the parts. ValueError if a part does not fit the tables.
        """


class WholeRecords(Sizes, Protocol):
    """Rows as whole records, for dumps and checkpoints. Server loop only."""

    def read_records(self, table: int, slot_first: int, slot_count: int, out: Float32Array) -> None:
        """Copies the records of slots that follow each other to `out`. ValueError if one of them is not there yet."""

    def write_records(self, table: int, slot_first: int, slot_count: int, source: Float32Array) -> None:
        """Overwrites records of slots that follow each other, padding included, as a change like any other.

        The rows become touched, pending and dirty, as by `update`. ValueError if one of them is not there yet.
        """

    def load_rows(
        self, table: int, ids: UInt32Array, parts: Sequence[Float32Array], clean_to: int | None = None
    ) -> int:
        """Gives those of the rows that live on this server these values, and returns how many they are.

        `ids` are numbers of rows of the table, each at most once, in any order; `parts` are their weights, [rows, dim],
        and each part of the optimizer's state, as `capture_chunk` gave them; the padding of a record stays as it is. It
        is a change like any other, and `clean_to` means nothing. ValueError if the parts are not those of the table;
        IndexError if the table has no such row, on whatever server, or there is no tenant `clean_to`.

        Where rows of the table come back (`ReturningRows`): ValueError if `know_touched` was not said of all of them.
        Then only rows that are missing and known to have been touched are set and counted. All others are passed over,
        so whoever reads the newest values first is right. That stays so for good once any row was said to come (with
        parities: once any was loaded): what is late is old. Rows set are touched, and dirty to all tenants but
        `clean_to`, who has them already; they are not pending, so whoever holds a parity of one must be told of it.
        """

    def find_slots(self, table: int, ids: UInt32Array) -> UInt64Array:
        """The slots of those of these rows that live on this server, as a bitmap like `touched`.

        Any thread. IndexError if the table has no such row, on whatever server.
        """

    def touched(self, table: int) -> UInt64Array:
        """Gives a copy of the bitmap of touched slots: bit s % 64 of word s // 64; bits beyond the last slot are zero.

        At a store that comes back, rows that are known to have been touched count, though they are missing yet.
        """


class FlushedRows(Sizes, Protocol):
    """This server as the source of rows that others hold parities of. Server loop only, but for `pending_bytes`.

    A value is *published* once parities are to stand for it: what the row was when its group was last flushed. Of a row
    that changed since, which is *pending*, the store keeps the published record beside the present one until it is
    flushed. Rows of tables without parities are never pending.
    """

    def pending_rows(self, group: int) -> int:
        """Counts the pending rows of a group."""

    def pending_bytes(self) -> int:
        """Bytes of the records kept for pending rows of all groups: 4 * record_floats for each. Any thread.

        Asked while the loop changes rows, it may or may not count those of the call under way.
        """

    def take_flush(self, group: int, keep: bool = False) -> Part:
        """Gives (counts, slots, deltas) of the pending rows of a group, and makes their present values published.

        A delta is the record published ^ the present one; within a table, rows are in any order, each once. The caller
        owns the arrays, which may travel for as long as they like: later changes do not show in them. The store forgets
        the flush at once; who may need it again keeps it. With `keep` it is only looked at: nothing becomes published,
        and the next call gives the same rows again.
        """

    def published(self, counts: Int32Array, slots: UInt32Array, out: Float32Array) -> None:
        """Copies relative published records to `out`: what parities stand for after the flushes taken so far.

        Of rows never touched they are zeros. Of a table without parities, nothing is ever pending: relative present
        records. At a store that comes back, blank rows are zeros; ValueError if a row is missing or nothing is known
        of it.
        """

    def next_touched(self, table: int, group: int, block_first: int, rows_max: int) -> tuple[UInt32Array, int]:
        """Finds up to `rows_max` touched slots of a group from a block on, rising, and the block to go on from.

        That is `blocks(table)` once there are no more. So a new holder gets all there is, a message at a time, while
        rows change: a row touched behind the block is in a later flush. Missing rows that are known to have been
        touched count. ValueError if the table has no rows in the group or rows_max < 1; IndexError unless
        0 <= block_first <= blocks(table).
        """


class HeldParities(Sizes, Protocol):
    """This server as a holder of parities of other servers' rows, and of who was ever touched. Server loop only.

    Parity q of a block is the sum over its members j of coefficient(q, j, r) * relative published record, in GF(2^8) on
    bytes, see `regrow.core.coding`. All begin as zeros. The rows of one block lie on consecutive servers of a ring, so
    the members of a parity are rows of different servers.
    """

    def parity_apply(self, source: int, counts: Int32Array, slots: UInt32Array, deltas: Float32Array) -> None:
        """Adds deltas of a server's records to the parities of them that are here, and marks the rows touched.

        `slots` are those of the source. A row named twice is added twice: who sends a flush again must know that the
        first was not applied. ValueError if the source is in another ring or this server holds no parity of one of the
        rows; IndexError if there is no such server.
        """

    def parity_read(self, q: int, counts: Int32Array, blocks: UInt32Array, out: Float32Array) -> None:
        """Copies parities q of blocks to `out`: here `counts` and `blocks` name blocks, not rows.

        ValueError if one of the tables named has no parities, IndexError if it has no parity q or no such block.
        """

    def parity_add(self, q: int, counts: Int32Array, blocks: UInt32Array, records: Float32Array) -> None:
        """Adds parities q of blocks to `records`, which is XOR: what is left of them without what is in it.

        Named and refused as in `parity_read`.
        """

    def parity_members(self, table: int, q: int, member: int) -> UInt64Array:
        """Shows for each block whose parity q is here whether this data member was ever touched: a bit per block.

        It may be the store's own memory: the caller does not write to it, and copies what must stay as it is when the
        next `parity_apply` comes. It stays readable as long as the array lives. ValueError if the table has no
        parities.
        """

    def parity_touched(self, source: int, group: int, table: int) -> UInt64Array:
        """Gives a copy of the same bits for the rows of a group of a server: what `know_touched` takes there.

        ValueError if the source is in another ring, the table has no rows in the group, or no parity of them is here.
        """

    def parity_void(self, table: int, q: int) -> None:
        """Makes parities q of all blocks of a table zeros again, of members that were never touched.

        So they stand for nothing, and whatever is added from now on is all there is. ValueError if the table has no
        parities, IndexError if it has no parity q.
        """


class ReturningRows(Sizes, Protocol):
    """This server as the replacement of one that died: rows that are not there, until they are. Server loop only.

    A store built to come back has no row, and takes no time for it: all are *absent*. What is known of an absent row
    decides how it comes back. Known not to have been touched, it is *blank*: its value is its initial value, and the
    store fills it in by itself, at the latest when `prepare` asks. Else it is *missing*: of those known to have been
    touched somebody `put`s the value, or loads it if nobody can decode it (`WholeRecords.load_rows`); of the others
    `know_touched` may still come. Once none is absent, the store is like any other, but for what `load_rows` says of
    values that are late; at a store that was not built to come back, all of this may be called and finds nothing to do.
    """

    def know_touched(self, group: int, table: int, words: UInt64Array) -> None:
        """Says of the absent rows of a group which were touched, a bit per block, and which are blank.

        In the bare group it is a bit per slot. Said again, the last word counts, for rows that are absent still. Rows
        that are there stay as they are. To tenants, a touched row is dirty when it is put, not before. ValueError if
        the table has no rows in the group, if the words are not as many as blocks need, or if there are bits beyond the
        last block.
        """

    def prepare(self, counts: Int32Array, slots: UInt32Array) -> tuple[Int32Array, UInt32Array]:
        """Fills in those of the rows that are blank; gives (counts, slots) of those that are missing, in order.

        All others may be read and changed from now on, for good. A row named twice is given twice.
        """

    def put(self, counts: Int32Array, slots: UInt32Array, relatives: Float32Array) -> int:
        """Sets rows that are missing and known to have been touched to their relative published records.

        Skips all others, so values may come twice and in any order; returns how many it set. Those are touched, and
        dirty to tenants, but not pending: the parities stand for them already.
        """

    def fill(self, rows_max: int) -> int:
        """Fills in up to so many blank rows, and returns how many; 0 when none are left. ValueError if rows_max < 1."""

    def missing_rows(self, group: int | None = None) -> int:
        """Counts the missing rows, of one group or of all, those of which nothing is known included. Takes no time."""

    def blank_rows(self) -> int:
        """Counts the blank rows. The store has come back when neither missing nor blank rows are left."""


class CapturedRows(Protocol):
    """This server as the source of checkpoints: rows as they were at one instant, while training goes on.

    A *tenant* is somebody who captures rows: to each a row is *dirty* if it changed since the tenant's last capture (or
    was touched before there was the tenant). A capture is begun at an instant, for one tenant; then its rows are taken,
    a chunk at a time, in whatever time it takes; then it is ended. There is one at a time. A row that changes before it
    was taken is kept *aside* as it was: that memory grows with the changes, and whoever takes rows sees to it that it
    does not grow too far (`capture_side_bytes`, `aside_first`). Flushes and captures do not disturb each other. Server
    loop only, all of it: these calls change what `update` changes.
    """

    def add_tenant(self) -> int:
        """Begins to keep track of changed rows for one more tenant, and returns its number, from 0.

        All touched rows that are there are dirty to it. May be called at any time, also during a capture. At least
        TENANTS_MAX are possible; ValueError beyond what the store can keep apart.
        """

    def dirty_rows(self, tenant: int) -> int:
        """Counts the rows, holes included, that are dirty to a tenant. Not for every step: it may look at all rows."""

    def begin_capture(self, tenant: int, full: bool) -> None:
        """Captures the tenant's dirty rows, or all touched ones if `full`, as they are now; they are then clean to it.

        Short: no row is copied, and none is looked at. Of tables with a priority (`PrioritizedRows`) not all dirty rows
        may be captured; the others stay dirty. To other tenants nothing changes. ValueError while a capture is under
        way or a row of the store is missing; blank rows do not matter, as they were never touched.
        """

    def choose_captured(self, rows: int) -> bool:
        """Goes on finding out which rows the capture has, for about so many rows. False: it is known.

        Which they are is decided by the instant that the capture began at, whatever changes meanwhile, and does not
        depend on these calls. They spare others the time: whoever asks for rows, or how many there are, before it is
        known, waits until it is. ValueError without a capture or if rows < 1.
        """

    def capture_chunk(self, bytes_max: int, aside_first: bool = False) -> list[TableRows]:
        """Takes captured rows that were not taken yet, with their values of the instant, as `load_rows` takes them.

        At most `bytes_max` bytes of numbers, weights and state, but at least one row. By table and slot, and so from
        call to call; with `aside_first`, rows that are kept aside go first, in any order among the calls. In the list,
        tables rise, each is there at most once, and so do the numbers of its rows. Holes are taken and left out: the
        list may be empty before the end, which only `capture_left` tells. The arrays may be views of one block of
        memory, which is the caller's and lives as long as one of them. ValueError without a capture or if
        bytes_max < 1.
        """

    def prepare_chunk(self, bytes_max: int, aside_first: bool, slice_bytes: int) -> bool:
        """Begins the chunk that the next `capture_chunk` gives, or goes on with it, for about `slice_bytes`.

        False: it is ready, and to give it takes no time. The rows of a chunk are decided when it is begun: what is said
        of them later does not count. Its rows are not taken before it is given. ValueError as of `capture_chunk`, or if
        slice_bytes < 1.
        """

    def capture_left(self) -> int:
        """Counts the captured rows, holes included, that were not taken yet; 0 without a capture."""

    def capture_side_bytes(self) -> int:
        """Bytes of the records kept aside: at least those not taken yet, and 0 once none of them is left.

        Between the two the store may give memory back when it likes.
        """

    def end_capture(self, durable: bool) -> None:
        """Ends the capture; what is kept aside is forgotten.

        Durable: what was captured is safe elsewhere; ValueError unless every row was taken. Not durable: all that was
        captured, taken or not, is dirty to the tenant again. ValueError without a capture.
        """


class PrioritizedRows(Protocol):
    """Which rows a tenant captures if it may not take all, and how many updates no capture of it has. Server loop only.

    An *update* here is one worker's push that changes one row; whoever serves pushes tells of them beside
    `WorkerRows.update`. To each tenant an update is *captured* once a capture began that has the row; it is uncaptured
    again if that capture ends and is not durable. The numbers are exact, whatever happens meanwhile.
    """

    def set_priority(self, tenant: int, kind: str, tables: Sequence[int], share: float, seed: int, period: int) -> None:
        """From now on a capture of the tenant takes at most a share of the rows of each of these tables.

        That is floor(share * rows that live here), at least one; of other tables, and if `full`, all are taken as ever.
        If the dirty rows of a table are no more, it takes them all; else the `kind` decides, and those not taken stay
        dirty:

            mfu   those with the most updates that are uncaptured
            ssu   those of a list of rows that some pushes named, each once, and then others. Each `period`-th call of
                  `note_updates` adds its rows; the list has room for the share, and in a full one a new row takes the
                  place of one that `seed`, the table and the number of such changes so far decide. A capture empties
                  it; one that was not durable brings back what there is room for
            scar  those whose weights are farthest, by the L2 norm, from what was last captured of them, or else from
                  their initial values. Of a capture that was not durable they were the farthest already: they go first
            none  all rows are taken, whatever the share

        Of equals, those go first whose slots follow the last one taken so; so each dirty row is captured in the end.
        The same calls choose the same rows. A tenant without a word about it has `none`. Takes the memory for it at
        once. ValueError for a kind that does not exist, a share outside (0, 1], period < 1, during a capture, or if
        updates are uncaptured: of them, nobody knows the rows.
        """

    def note_updates(self, counts: Int32Array, slots: UInt32Array) -> None:
        """Takes note that one worker's push updates these rows, each of them once.

        The slots of a table must be distinct, and it is not checked. Whether the rows are there is not asked: `update`
        does. For each push, and as cheap as that asks for: nothing is allocated but when a row was noted 256 times more
        than it was captured.
        """

    def updates_noted(self) -> int:
        """All updates noted so far: rows of all calls, and what `set_updates_noted` said."""

    def set_updates_noted(self, total: int) -> None:
        """Goes on from another number: a replacement knows what its predecessor counted. Changes nothing else."""

    def updates_uncaptured(self, tenant: int) -> int:
        """Counts the updates noted, since there is the tenant, that are uncaptured to it."""

    def capture_skipped(self) -> int:
        """Counts the dirty rows that the last capture that began, of whichever tenant, left out; 0 before the first."""

    def updates_skipped(self) -> int:
        """Counts the updates of these rows that were uncaptured when that capture began, and stayed so."""

    def priority_bytes(self) -> int:
        """Bytes that all of this takes now, of all tenants: what a capture needs until it ends is not counted."""

    def count_bytes(self) -> int:
        """Of these bytes, those that are there to count updates exactly, whatever goes first."""


class PagedRows(Sizes, Protocol):
    """Rows that may be on disk, with a part of them in memory: the *cache*. Server loop only, but for `fetch_fd`.

    Only some stores have this part: those that say `is_paged`, and whoever uses a store looks once, when it is built.
    There `gather` and `update` take rows that are in memory only: ValueError names one that is not. All other methods
    take any row: what is not in memory is read or written around the cache, and the call waits for the disk. Such a
    store has no parities and does not come back (`FlushedRows`, `HeldParities` and `ReturningRows` find nothing to do,
    and refuse what would be one): it is built anew, or from one of its own checkpoints.

    **Rows come** by `fetch`. No call of this part waits for the disk; what it asks for goes on in the background, and
    `fetch_fd` can be read when something is done. All changes of what is in memory happen inside `fetch`,
    `poll_fetched`, `release` and `upkeep`.

    **Epochs.** Checkpoints are numbered from 1 by the store: the *epoch* of a change is the number of the first
    checkpoint that has it. `begin_epoch` is the instant of a checkpoint; it is *complete* once all its rows are on the
    device and synced, which comes by itself while `upkeep` is called, and *committed* once `commit_epoch` says that all
    servers have it. A store always keeps the one committed last and all that began after it, and can be built again as
    it was at one that was complete. Nothing else survives the end of the process.

    **Errors**, of `regrow.errors`: `StoreDamaged` names the table and rows whose bytes are not what was written;
    `StoreFull` says that there is no room on the device for rows that have to leave the memory.
    """

    @property
    def fetch_fd(self) -> int:
        """A descriptor that is readable when `poll_fetched` or `poll_complete` may have something new.

        `poll_fetched` makes it unreadable again. The store owns and closes it. Any thread.
        """

    @property
    def rows_ahead_max(self) -> int:
        """So many rows in all may usefully be fetched before they are needed: 0 where that brings nothing, because a
        read takes no time, because all rows fit, or because rows do not stay for so long. Never changes."""

    def fetch(self, counts: Int32Array, slots: UInt32Array) -> int:
        """Asks for rows: 0 if all are in memory; they stay until the next `fetch`, `poll_fetched` or `upkeep`.

        Else a ticket, above all given before: `poll_fetched` names it when all its rows are in memory. Tickets get room
        for all their rows at once, in the order in which they were asked for, so nobody holds rows while waiting for
        more; from then on the rows are *pinned*, they stay until `release`. A row may be named more than once.
        ValueError if the rows do not fit the cache at all. `StoreFull` if rows that changed would have to leave the
        memory and cannot be written; nothing is asked for then.
        """

    def poll_fetched(self) -> list[int]:
        """Takes what was read, and gives the tickets, rising, whose rows are all in memory since the last call.

        `StoreDamaged` if a row that was read is not what was written: its ticket is given up, and all others are still
        there at the next call. `StoreFull` as in `fetch`.
        """

    def release(self, ticket: int) -> None:
        """The rows of a ticket are no longer pinned by it. Also of one that is not done yet: it is given up.

        ValueError if there is no such ticket (any more).
        """

    def upkeep(self) -> bool:
        """Does a bounded part of the work that makes room, writes and cleans; True if there is more to be done now.

        For when nobody waits: after replies, and at each tick.
        """

    def begin_epoch(self) -> int:
        """Begins a checkpoint of all rows as they are now, and gives its number. Takes no time; copies nothing."""

    def poll_complete(self) -> int:
        """The newest complete epoch; 0 if there is none."""

    def hasten(self, epoch: int, seconds_left: float) -> None:
        """How long the rows of an epoch may still take to be written, from now on; without a word, as they come.

        Too short: `upkeep` writes more at a time than it would. ValueError if the epoch did not begin.
        """

    def commit_epoch(self, epoch: int) -> None:
        """All servers have this epoch: it is what the store keeps, and what only older ones needed may be overwritten.

        It is durable some time after the call; a store that ended before can still be built at this epoch, because it
        was complete. ValueError unless it is complete, or if a later one was committed.
        """

    def tier_report(self) -> dict[str, int | float]:
        """Counters since the store was built, and sizes now; see docs/tiered.md for the names. Short."""


class Store(
    WorkerRows, WholeRecords, FlushedRows, HeldParities, ReturningRows, CapturedRows, PrioritizedRows, Protocol
):
    """All rows of a server, and the parities it holds for others."""


class StoreBuilder(Protocol):
    """Makes the store of a server: a class, or a function that also adds tenants."""

    def __call__(self, job: JobSpec, server: int, recovering: bool, /) -> Store:
        """Builds a store with all tables of the job, for server number `server` of it.

        Rows have their initial values; if `recovering`, all of them are absent, and that takes no time. A job says all
        there is to know: two stores of the same job and server hold the same bits. Called on the loop of the server
        that owns the store from then on. MemoryError if there is no room, ValueError if the job cannot be.
        """
