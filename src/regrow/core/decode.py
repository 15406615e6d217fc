"""Bringing lost rows back: done by the first living holder of a stripe, its **decoder**.

Theory of operation. A parity is the sum of what the members of its stripe have published. The decoder asks the living
members for their published values (`SnapAsk`), sums the answers up, and what is left of its parity is the lost row. The
members go on training meanwhile, and nothing is locked. That works because of where things are in the order of a link:

- *A member's answer comes behind the flushes that it contains*, on the same link. So when it is here, the parity
  contains exactly the value that was answered, no more and no less.
- *From then on, a flush of that member changes the parity and the sum of answers alike* (`adjust`), so their difference
  stays the lost row. Flushes of members that have not answered change the parity only: their answer will contain them.
- *A member answers with what it has published, and does not flush first*: rows would leave without their marks.

Rows that somebody waits for (`on_fault`) are decoded at once; the rest is swept in the background, a batch at a time,
as fast as its budget allows and with few batches under way, or a fault would queue behind gigabytes. `todo` says which
stripes are still to be begun, `_sent` which rows have left for which incarnation of their owner. Both together make
that each row is sent, and that a late fault, of a row that is not lost any more, is ignored.

With several members of a stripe lost, there are as many equations as holders: others do the same and send what remains
of their parity (a **syndrome**), and the decoder solves for all. Equations fit together only if they were made at the
same flush of every lost member, and a replacement flushes again as soon as it serves. So each syndrome says at which
flush it was made; the decoder waits for flushes that it lacks, and decodes again the stripes that changed in between.

What breaks without the rules:
- Deltas of members that have not answered, taken into the sum: a wrong row, with nothing to show it.
- Stripes that are decoded again, counted as sent: the next view may drop their batch, and a row never comes back.
- An answer to a recovery that has begun anew, taken for one of this one: requests are numbered for that.
- A batch dropped with a view, its rows left to the sweep: whoever waits for one has asked, and does not ask again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from regrow import _kernels
from regrow.core.bitmaps import Bools, bits, bits_at
from regrow.core.checks import check_marks
from regrow.core.coding import coefficient, inverse
from regrow.core.decode_batch import Batch, Places, Standing, Stripes, Sweep
from regrow.core.effects import Send
from regrow.core.flusher import Budget
from regrow.core.groups import Groups, by_table
from regrow.core.identity import Identity
from regrow.core.messages import (
    Fault,
    Float32Array,
    Flush,
    Restored,
    Snap,
    SnapAsk,
    Syndrome,
    SyndromeAsk,
)
from regrow.store.interface import HeldParities

SWEEP_BYTES = 1 << 20  # decoded at a time in the background; too large: whoever faults waits behind it
SWEEPS_UNDERWAY_MAX = 2


class Decoder:
    """The stripes of one server that lost members. Every method returns what to send."""

    def __init__(
        self, *, server: int, groups: Groups, store: HeldParities, held: Mapping[tuple[int, int], Standing]
    ) -> None:
        self.server = server
        self.rows_decoded = 0
        self.faults = 0
        self.bytes_begun = 0  # in the background, so far
        self.bytes_total = 0  # that were to be decoded here when sweeps began
        self.places_begun_again = 0  # because a view changed what they are decoded from
        self._groups = groups
        self._store = store
        self._held = held
        self._peers: dict[int, Identity] = {}
        self._recovering: frozenset[int] = frozenset()
        self._recalled: frozenset[int] = frozenset()
        self._sweeps: dict[tuple[int, int, int], Sweep] = {}
        self._sent: dict[tuple[Identity, tuple[int, int, int]], Bools] = {}  # by replacement and shape: places
        self._batches: dict[int, Batch] = {}
        self._request = 0
        self._unacked: dict[tuple[Identity, int], None] = {}  # rows of the background on their way, by target
        self._faults: list[tuple[tuple[int, int, int], Places]] = []  # of sweeps that cannot begin yet
        tables = range(len(groups.job.tables))
        self._first = np.concatenate([[0], np.cumsum([store.blocks(table) for table in tables])]).astype(np.int64)
        self._end = int(self._first[-1])  # of all places
        self._floats = np.array([store.record_floats(table) for table in tables], np.int64)
        self._ks = np.array([table.k for table in groups.job.tables], np.int64)
        self._rs = np.array([table.r for table in groups.job.tables], np.int64)

    def know(
        self,
        *,
        peers: dict[int, Identity],
        recovering: frozenset[int],
        changed: set[int],
        recalled: frozenset[int] = frozenset(),
    ) -> None:
        """A view: what is decoded for somebody who was replaced starts anew. For `recalled` servers only copies are."""
        self._peers = peers
        self._recovering = recovering
        self._recalled = recalled
        self.bytes_total = self.bytes_total if recovering else 0
        self._sent = {key: value for key, value in self._sent.items() if key[0] in peers.values()}
        self._unacked = {key: None for key in self._unacked if key[0] in peers.values()}
        self._plan_sweeps(changed)

    def adjust(self, source: int, flush: Flush) -> None:
        """A member that has answered changes a row: what is taken out of the parity changes with it. A lost one that is
        at work again: what its flushes change is noted."""
        distance, r = self._groups.list[flush.group]
        for batch in self._batches.values():
            sweep = batch.sweep
            member = sweep.k - distance
            if r != sweep.r or member < 0 or self._member_server(sweep, member) != source:
                continue
            if member in batch.waiting:
                continue
            if member in sweep.unknown:
                tables = np.repeat(np.arange(flush.counts.size), flush.counts)
                places = self._first[tables] + flush.slots // self._ks[tables]
                mine = (self._ks[tables] == sweep.k) & (self._rs[tables] == sweep.r)
                batch.changes.append((sweep.unknown.index(member), flush.number, places[mine]))
                continue
            factor = coefficient(sweep.q, member, sweep.r)
            floats = self._floats.tolist()
            changes = by_table((flush.counts, flush.slots, flush.deltas), floats)
            stripes = batch.stripes
            parts = by_table((stripes.counts, stripes.blocks, batch.sum_up()), floats)
            for table in parts.keys() & changes.keys():
                (mine_blocks, accumulator), (changed, deltas) = parts[table], changes[table]
                blocks = (changed // np.uint32(sweep.k)).astype(np.uint32)
                _kernels.xor_matching(mine_blocks, accumulator, floats[table], blocks, deltas, factor)

    # --- What there is to do ---

    def _plan_sweeps(self, changed: set[int]) -> None:
        """Which stripes this server decodes now: those whose first living parity is here."""
        shapes: dict[tuple[int, int], list[int]] = {}
        for table, spec in enumerate(self._groups.job.tables):
            shapes.setdefault((spec.k, spec.r), []).append(table)
        sweeps: dict[tuple[int, int, int], Sweep] = {}
        for (k, r), tables in sorted(shapes.items()):  # copies first: they are the dense parameters, which all wait for
            for q in range(r):
                sweep = self._plan_sweep(k, r, q, tuple(tables))
                if sweep is None:
                    continue
                old = self._sweeps.get(sweep.key)
                if old is not None and self._goes_on(old, changed) and old.partners == sweep.partners:
                    sweep = old
                sweeps[sweep.key] = sweep
        self._sweeps = sweeps
        for request, batch in list(self._batches.items()):
            mine = batch.asked_by is None and sweeps.get(batch.sweep.key) is batch.sweep
            other = batch.asked_by in self._peers.values() and self._goes_on(batch.sweep, changed)
            if not mine and not other:
                self._drop(request)
        self._faults = [(key, wanted) for key, wanted in self._faults if key in sweeps]  # the rest is not lost any more

    def _drop(self, request: int) -> None:
        """A batch that cannot go on. Somebody may wait for its rows and does not ask twice: they are begun again before
        all others, as soon as they can be."""
        batch = self._batches.pop(request)
        if batch.asked_by is None:
            self.places_begun_again += batch.stripes.blocks.size
            self._faults.append((batch.sweep.key, self._places(batch.stripes)))

    def _plan_sweep(self, k: int, r: int, q: int, tables: tuple[int, ...]) -> Sweep | None:
        sweep = Sweep(k=k, r=r, q=q, tables=tables, unknown=(), partners=())
        unknown = tuple(j for j in range(k) if self._member_server(sweep, j) in self._recovering)
        living = [p for p in range(r) if self._parity_server(sweep, p) not in self._recovering]
        if not unknown or len(living) < len(unknown) or living[0] != q:
            return None  # nothing to decode, or too few equations, or another decodes
        if self._groups.is_recallable[tables[0]] and any(
            self._member_server(sweep, j) in self._recalled for j in unknown
        ):
            return None  # their parities are void
        return dataclasses.replace(sweep, unknown=unknown, partners=tuple(living[1 : len(unknown)]))

    def _goes_on(self, sweep: Sweep, changed: set[int]) -> bool:
        """The same replacements still wait for the same members."""
        lost = {self._member_server(sweep, j) for j in range(sweep.k)} & self._recovering
        return lost == {self._member_server(sweep, j) for j in sweep.unknown} and not lost & changed

    def _todo(self, sweep: Sweep) -> Bools:
        if sweep.todo is None:
            sweep.todo = np.zeros(self._end, bool)
            for j in sweep.unknown:
                touched = np.zeros_like(sweep.todo)
                for table in sweep.tables:
                    first, end = self._first[table], self._first[table + 1]
                    touched[first:end] = bits(self._store.parity_members(table, sweep.q, j), int(end - first))
                sent = self._sent.get((self._peers[self._member_server(sweep, j)], sweep.key))
                sweep.todo |= touched if sent is None else touched & ~sent
            sweep.hot = self._find_hot(sweep, sweep.todo)
            left = [np.count_nonzero(sweep.todo[a:b]) for a, b in itertools.pairwise(self._first.tolist())]
            self.bytes_total += 4 * int(left @ self._floats)
        return sweep.todo

    def _find_hot(self, sweep: Sweep, todo: Bools) -> Bools | None:
        """Of what is to be done, what lost members changed in their last flushes: workers will want it first."""
        hot = np.zeros_like(todo)
        for j in sweep.unknown:
            for counts, slots in self._held[self._member_server(sweep, j), self._group(sweep, j)].recent:
                tables = np.repeat(np.arange(counts.size), counts)
                mine = (self._ks[tables] == sweep.k) & (self._rs[tables] == sweep.r)
                hot[(self._first[tables] + slots // self._ks[tables])[mine]] = True
        hot &= todo
        return hot if hot.any() else None

    def sweep(self, budget: Budget) -> list[Send]:
        """Decodes the next rows in the background, as far as the budget goes."""
        sends: list[Send] = []
        for sweep in self._sweeps.values():
            if sweep.cursor == self._end or not self._have_agreed(sweep):
                continue
            while self._underway() < SWEEPS_UNDERWAY_MAX:
                if not budget.has_some():
                    return sends
                stripes = self._take_next(sweep)
                if not stripes.blocks.size:
                    break
                count = 4 * self._count_floats(stripes)
                budget.take(count)
                self.bytes_begun += count
                sends += self._begin(sweep, stripes, background=True)
        return sends

    def _underway(self) -> int:
        """Background work that is not done: being decoded, or not yet in place at the replacement."""
        return sum(batch.background for batch in self._batches.values()) + len(self._unacked)

    def find_owing(self) -> Iterator[int]:
        """Servers that were sent rows, or asked for some, and have not answered."""
        for target, _ in self._unacked:
            yield target.id
        for batch in self._batches.values():
            sweep = batch.sweep
            for place in sorted(batch.waiting):
                is_member = place < sweep.k
                yield self._member_server(sweep, place) if is_member else self._parity_server(sweep, place - sweep.k)

    def on_restored_ack(self, source: Identity, request: int) -> None:
        self._unacked.pop((source, request), None)

    def _take_next(self, sweep: Sweep) -> Stripes:
        """The next stripes, hot ones first, about SWEEP_BYTES of them; none are left when there are none."""
        todo = self._todo(sweep)
        while sweep.hot is not None:
            counts, blocks, sweep.hot_cursor = _kernels.take_places(
                sweep.hot.view(np.uint8), self._first, self._floats, sweep.hot_cursor, SWEEP_BYTES
            )
            places = self._places(Stripes(counts=counts, blocks=blocks))
            places = places[todo[places]]  # somebody who waited for one may have been quicker
            todo[places] = False
            if sweep.hot_cursor == self._end:
                sweep.hot = None
            if places.size:
                return self._stripes(places)
        counts, blocks, sweep.cursor = _kernels.take_places(
            todo.view(np.uint8), self._first, self._floats, sweep.cursor, SWEEP_BYTES
        )
        return Stripes(counts=counts, blocks=blocks)

    @property
    def sweeping(self) -> bool:
        """Something is being decoded, or is left to be."""
        if self._batches:
            return True
        return bool(self._sweeps) and any(sweep.cursor < self._end for sweep in self._sweeps.values())

    # --- What somebody waits for ---

    def on_fault(self, source: Identity, fault: Fault) -> list[Send]:
        """Somebody waits for these rows. What was sent, is under way, or is not lost needs nothing."""
        if source.id not in self._recovering:
            return []
        tables = np.repeat(np.arange(fault.counts.size), fault.counts)
        blocks, members = np.divmod(fault.slots.astype(np.int64), self._ks[tables])
        places = self._first[tables] + blocks
        sends: list[Send] = []
        for k, r, q in list(self._sweeps):
            # Of all members, the one that is this source's in stripes with parity q here.
            member = (source.id - self.server + k + q) % self._groups.ring
            mine = (self._ks[tables] == k) & (self._rs[tables] == r) & (members == member)
            if mine.any():
                sends += self._fault((k, r, q), np.unique(places[mine]))
        return sends

    def _fault(self, key: tuple[int, int, int], wanted: Places) -> list[Send]:
        sweep = self._sweeps.get(key)
        if sweep is None:
            return []
        if not self._have_agreed(sweep):
            self._faults.append((key, wanted))
            return []
        todo = self._todo(sweep)
        places = wanted[todo[wanted]]
        if not places.size:
            return []
        todo[places] = False
        self.faults += places.size
        # In batches of about SWEEP_BYTES: the first rows need not wait for the last.
        batch_of = np.cumsum(4 * self._floats[self._tables(places)]) // SWEEP_BYTES
        sends: list[Send] = []
        for piece in np.split(places, np.flatnonzero(np.diff(batch_of)) + 1):
            sends += self._begin(sweep, self._stripes(piece), background=False)
        return sends

    def release_faults(self) -> list[Send]:
        """Faults that came before their sweep could begin."""
        faults, self._faults = self._faults, []
        sends: list[Send] = []
        for key, wanted in faults:
            sends += self._fault(key, wanted)
        return sends

    # --- Decoding ---

    def _begin(
        self,
        sweep: Sweep,
        stripes: Stripes,
        *,
        background: bool,
        asked_by: Identity | None = None,
        asked_request: int = 0,
    ) -> list[Send]:
        """Asks the living members, and other holders where several members are lost."""
        self._request += 1
        batch = Batch(
            sweep=sweep,
            stripes=stripes,
            floats=self._count_floats(stripes),
            parity_without=None,
            waiting=set(),
            syndromes={},
            background=background,
            numbers=self._numbers(sweep),
            changes=[],
            asked_by=asked_by,
            asked_request=asked_request,
        )
        self._batches[self._request] = batch
        sends: list[Send] = []
        for j in range(sweep.k):
            # In the background it pays to look: a member of which no row was ever touched has answered, nothing is in
            # the parity of it. For a few rows of many tables, asking is cheaper than looking.
            if j in sweep.unknown or (background and not self._has_touched(sweep, j, stripes)):
                continue
            batch.waiting.add(j)
            slots = stripes.blocks * np.uint32(sweep.k) + np.uint32(j)
            ask = SnapAsk(request=self._request, counts=stripes.counts, slots=slots)
            sends.append(Send(target=self._peers[self._member_server(sweep, j)], message=ask))
        lost = [self._peers[self._member_server(sweep, j)].incarnation for j in sweep.unknown]
        for q in sweep.partners:
            batch.waiting.add(sweep.k + q)
            syndrome = SyndromeAsk(
                request=self._request,
                k=sweep.k,
                q=q,
                unknown=sweep.unknown,
                incarnations=tuple(lost),
                counts=stripes.counts,
                blocks=stripes.blocks,
            )
            sends.append(Send(target=self._peers[self._parity_server(sweep, q)], message=syndrome))
        return sends + self._finish(self._request)

    def _find_touched(self, sweep: Sweep, member: int, stripes: Stripes) -> Bools:
        """Of these stripes, those in which this member was ever touched."""
        found = np.zeros(stripes.blocks.size, bool)
        start = 0
        for table in np.flatnonzero(stripes.counts).tolist():
            end = start + int(stripes.counts[table])
            words = self._store.parity_members(table, sweep.q, member)
            found[start:end] = bits_at(words, stripes.blocks[start:end])
            start = end
        return found

    def _has_touched(self, sweep: Sweep, member: int, stripes: Stripes) -> bool:
        """Whether this member was ever touched in any of these stripes."""
        start = 0
        for table in np.flatnonzero(stripes.counts).tolist():
            end = start + int(stripes.counts[table])
            words = self._store.parity_members(table, sweep.q, member)
            if _kernels.has_any_bit(words, stripes.blocks[start:end]):
                return True
            start = end
        return False

    def on_snap(self, source: Identity, snap: Snap) -> list[Send]:
        batch = self._batches.get(snap.request)
        if batch is None:
            return []  # of a recovery that has started anew
        sweep = batch.sweep
        members = [j for j in batch.waiting if j < sweep.k and self._member_server(sweep, j) == source.id]
        if len(members) != 1 or snap.relatives.size != batch.floats:
            raise ValueError(f"an answer of {snap.relatives.size} values nobody asked for")
        factor = coefficient(sweep.q, members[0], sweep.r)
        if batch.parity_without is None and factor == 1 and snap.relatives.flags.writeable:
            batch.parity_without = snap.relatives  # nobody else has it: it becomes the sum
        else:
            _kernels.gf_xor(batch.sum_up(), snap.relatives, factor)
        batch.waiting.discard(members[0])
        return self._finish(snap.request)

    def on_syndrome(self, source: Identity, syndrome: Syndrome) -> list[Send]:
        batch = self._batches.get(syndrome.request)
        if batch is None:
            return []
        sweep = batch.sweep
        waiting = [q for q in sweep.partners if sweep.k + q in batch.waiting]
        partners = [q for q in waiting if self._parity_server(sweep, q) == source.id]
        if len(partners) != 1 or syndrome.relatives.size != batch.floats:
            raise ValueError(f"a syndrome of {syndrome.relatives.size} values nobody asked for")
        check_marks(syndrome.numbers, len(sweep.unknown))
        batch.syndromes[partners[0]] = (syndrome.numbers, syndrome.relatives)
        batch.waiting.discard(sweep.k + partners[0])
        return self._finish(syndrome.request)

    def _finish(self, request: int) -> list[Send]:
        """Everybody has answered: what is left of the parity is the lost rows, or an equation of them."""
        batch = self._batches[request]
        if batch.waiting or self._is_behind(batch):
            return []
        del self._batches[request]
        sweep = batch.sweep
        own = batch.sum_up()
        self._store.parity_add(sweep.q, batch.stripes.counts, batch.stripes.blocks, own)
        numbers = self._numbers(sweep)
        if batch.asked_by is not None:
            answer = Syndrome(request=batch.asked_request, numbers=numbers, relatives=own)
            return [Send(target=batch.asked_by, message=answer)]
        equations = {sweep.q: own} | {q: values for q, (_, values) in batch.syndromes.items()}
        again = self._changed_between(batch)
        sends = self._begin(sweep, self._stripes(again), background=batch.background) if again.size else []
        return sends + self._restore(batch, equations, request, without=again)

    def _is_behind(self, batch: Batch) -> bool:
        """A lost member is at work again, and another holder has a flush of it that is still on its way here."""
        here = self._numbers(batch.sweep)
        return any(
            theirs > mine for numbers, _ in batch.syndromes.values() for theirs, mine in zip(numbers, here, strict=True)
        )

    def _changed_between(self, batch: Batch) -> Places:
        """The stripes whose equations do not fit together, because a lost member that is at work again has changed
        them between a syndrome and now."""
        changed = [np.zeros(0, np.int64)]
        if not batch.syndromes:  # one equation fits itself
            return changed[0]
        for numbers, _ in batch.syndromes.values():
            if any(theirs < begun for theirs, begun in zip(numbers, batch.numbers, strict=True)):
                return self._places(batch.stripes)  # what it lacks was not noted here
            changed += [places for index, number, places in batch.changes if number > numbers[index]]
        return np.intersect1d(self._places(batch.stripes), np.concatenate(changed))

    def resume(self) -> list[Send]:
        """A flush has arrived: batches that waited for it go on."""
        sends: list[Send] = []
        for request, batch in list(self._batches.items()):
            if not batch.waiting:
                sends += self._finish(request)
        return sends

    def _restore(
        self, batch: Batch, equations: dict[int, Float32Array], request: int, *, without: Places
    ) -> list[Send]:
        """Solves for the lost members and sends each its rows, but for stripes that must be decoded again."""
        sweep = batch.sweep
        rows = list(equations)[: len(sweep.unknown)]
        matrix = [[coefficient(q, j, sweep.r) for j in sweep.unknown] for q in rows]
        sends: list[Send] = []
        for j, factors in zip(sweep.unknown, inverse(matrix), strict=True):
            if factors == (1,):
                relatives = equations[rows[0]]
            else:
                relatives = np.zeros(batch.floats, np.float32)
                for factor, q in zip(factors, rows, strict=True):
                    if factor:
                        _kernels.gf_xor(relatives, equations[q], factor)
            sends += self._send_rows(batch, j, relatives, request if batch.background else 0, without)
        return sends

    def _send_rows(
        self, batch: Batch, member: int, relatives: Float32Array, request: int, without: Places
    ) -> list[Send]:
        sweep, stripes = batch.sweep, batch.stripes
        target = self._peers[self._member_server(sweep, member)]
        sent = self._sent.get((target, sweep.key))
        if sent is None:
            sent = self._sent[target, sweep.key] = np.zeros(self._end, bool)
        if len(sweep.unknown) == 1:
            assert not without.size  # there is one equation, and it fits itself
            _kernels.mark_places(sent.view(np.uint8), self._first, stripes.counts, stripes.blocks)
        else:  # a stripe may be decoded for the sake of another member
            places = self._places(stripes)
            # Not those that were begun again: their batch may be dropped with the next view, and then only this says
            # that they are still to be sent.
            again = np.isin(places, without)
            sent[places[~again]] = True
            wanted = self._find_touched(sweep, member, stripes) & ~again
            relatives = relatives[np.repeat(wanted, self._floats[self._tables(places)])]
            stripes = self._stripes(places[wanted])
        if not stripes.blocks.size:
            return []
        self.rows_decoded += stripes.blocks.size
        if request:
            self._unacked[target, request] = None
        slots = stripes.blocks * np.uint32(sweep.k) + np.uint32(member)
        restored = Restored(request=request, counts=stripes.counts, slots=slots, relatives=relatives)
        return [Send(target=target, message=restored)]

    # --- What is asked of this holder by another ---

    def on_syndrome_ask(self, peer: Identity, ask: SyndromeAsk) -> list[Send] | None:
        """What remains of this parity without the living members; None: ask again when more is known here."""
        self._check_asked(ask)
        tables = tuple(np.flatnonzero(ask.counts).tolist())
        r = self._groups.job.tables[tables[0]].r
        sweep = Sweep(k=ask.k, r=r, q=ask.q, tables=tables, unknown=ask.unknown, partners=())
        lost = [self._member_server(sweep, j) for j in ask.unknown]
        here = [self._peers[server].incarnation for server in lost]
        if any(mine > theirs for mine, theirs in zip(here, ask.incarnations, strict=True)):
            return []  # of a recovery that has started anew
        newer = any(mine < theirs for mine, theirs in zip(here, ask.incarnations, strict=True))
        if not newer and not self._recovering.issuperset(lost):
            return []  # somebody has recovered meanwhile, and whoever asked will know
        if newer or not self._can_answer(sweep):
            return None
        stripes = Stripes(counts=ask.counts, blocks=ask.blocks)
        return self._begin(sweep, stripes, background=False, asked_by=peer, asked_request=ask.request)

    def _check_asked(self, ask: SyndromeAsk) -> None:
        """ValueError unless all of it makes sense."""
        tables = self._groups.job.tables
        if ask.counts.size != len(tables) or (ask.counts < 0).any() or int(ask.counts.sum()) != ask.blocks.size:
            raise ValueError(f"counts do not describe {ask.blocks.size} blocks in {len(tables)} tables")
        if len(ask.unknown) != len(ask.incarnations) or not all(0 <= j < ask.k for j in ask.unknown):
            raise ValueError(f"members {ask.unknown} of {ask.k} with {len(ask.incarnations)} incarnations")
        asked = np.flatnonzero(ask.counts).tolist()
        for table in asked:
            if tables[table].k != ask.k or ask.q >= tables[table].r:
                raise ValueError(f"table {table} has no stripes of {ask.k} members with a parity {ask.q}")
        if len({tables[table].r for table in asked}) != 1:
            raise ValueError("a syndrome is of tables of one shape")
        table_of = np.repeat(np.arange(len(tables)), ask.counts)
        places = self._first[table_of] + ask.blocks
        if (places >= self._first[table_of + 1]).any() or (np.diff(places) <= 0).any():
            raise ValueError("blocks of a syndrome must exist, and ascend")

    # --- Small things ---

    def _have_agreed(self, sweep: Sweep) -> bool:
        """Everybody who holds something of the lost members is at the same flush of theirs."""
        for j in sweep.unknown:
            source = self._member_server(sweep, j)
            state = self._held[source, self._group(sweep, j)]
            if source not in self._recovering or not state.ended or not state.agreed:
                return False
        return True

    def _can_answer(self, sweep: Sweep) -> bool:
        """As `_have_agreed`; but a holder that was replaced together with the lost members agrees on nothing, and has
        what they streamed to it. Whoever takes it for a partner would wait until they are all back."""
        states = [self._held[self._member_server(sweep, j), self._group(sweep, j)] for j in sweep.unknown]
        return all([state.ended and (state.agreed or state.is_streamed) for state in states])

    def _numbers(self, sweep: Sweep) -> tuple[int, ...]:
        return tuple(self._held[self._member_server(sweep, j), self._group(sweep, j)].number for j in sweep.unknown)

    def _group(self, sweep: Sweep, member: int) -> int:
        return self._groups.list.index((sweep.k - member, sweep.r))

    def _member_server(self, sweep: Sweep, member: int) -> int:
        return self._groups.step(self.server, member - sweep.k - sweep.q)

    def _parity_server(self, sweep: Sweep, q: int) -> int:
        return self._groups.step(self.server, q - sweep.q)

    def _tables(self, places: Places) -> Any:
        """The table of each place."""
        return np.searchsorted(self._first, places, side="right") - 1

    def _count_floats(self, stripes: Stripes) -> int:
        return int(stripes.counts @ self._floats)

    def _places(self, stripes: Stripes) -> Places:
        return np.repeat(self._first[:-1], stripes.counts) + stripes.blocks

    def _stripes(self, places: Places) -> Stripes:
        tables = self._tables(places)
        counts = np.bincount(tables, minlength=self._floats.size).astype(np.int32)
        return Stripes(counts=counts, blocks=(places - self._first[tables]).astype(np.uint32))
