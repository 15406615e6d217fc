"""Bringing lost rows back: done by the first living holder of a stripe, its **decoder**.

It asks the living members of a stripe for their published values, takes them out of its parity, and what remains is the
lost row. A member's answer comes behind its flushes on the same link; flushes of members that have answered change the
accumulator as well as the parity, so the difference between the two stays the lost row, without a lock.

With several members lost, other holders do the same and send what remains of theirs (a **syndrome**), made at the same
flush of every lost member; the decoder solves the equations. What somebody waits for comes first, the rest in the
background, as fast as its budget allows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from regrow import _core
from regrow.core.coding import coefficient, inverse
from regrow.core.effects import Send
from regrow.core.groups import Groups
from regrow.core.link import Identity
from regrow.core.messages import (
    Fault,
    Float32Array,
    Restored,
    Snap,
    SnapAsk,
    Syndrome,
    SyndromeAsk,
    UInt32Array,
    UInt64Array,
)
from regrow.core.publish import Budget

SWEEP_BYTES = 512 << 10  # decoded at a time in the background; too large: whoever faults waits behind it
SWEEPS_UNDERWAY_MAX = 2

Bools = np.ndarray[Any, np.dtype[np.bool_]]


class DecoderStore(Protocol):
    """What a decoder needs of the parities."""

    def parity_members(self, table: int, q: int, member: int) -> UInt64Array: ...
    def parity_read(self, table: int, q: int, blocks: UInt32Array, out: Float32Array) -> None: ...
    def blocks(self, table: int) -> int: ...
    def record_floats(self, table: int) -> int: ...


class Standing(Protocol):
    """How far a holder is with one group of one source."""

    number: int
    ended: bool
    agreed: bool


@dataclasses.dataclass(slots=True)
class Sweep:
    """Stripes of a table whose parity `q` is here and that lost members: what to decode, and how far it is."""

    table: int
    q: int
    unknown: tuple[int, ...]  # lost data members
    partners: tuple[int, ...]  # other parities whose syndromes are needed
    # By block: touched in a lost member, and not begun. Known when the holders have agreed.
    todo: Bools | None = None
    cursor: int = 0


@dataclasses.dataclass(slots=True)
class Batch:
    """Some stripes being decoded together."""

    sweep: Sweep
    blocks: UInt32Array  # ascending
    parity_without: Float32Array  # the accumulator: answers, and later flushes of those who have answered
    waiting: set[int]  # members and partners that have not answered, as ("members, then k + q")
    syndromes: dict[int, tuple[tuple[int, ...], Float32Array]]
    background: bool
    asked_by: Identity | None = None  # another holder wants the syndrome
    asked_request: int = 0


class Decoder:
    """The stripes of one server that lost members. Every method returns what to send."""

    def __init__(
        self, *, server: int, groups: Groups, store: DecoderStore, held: Mapping[tuple[int, int], Standing]
    ) -> None:
        self.server = server
        self.rows_decoded = 0
        self.faults = 0
        self._groups = groups
        self._store = store
        self._held = held
        self._peers: dict[int, Identity] = {}
        self._recovering: frozenset[int] = frozenset()
        self._sweeps: dict[tuple[int, int], Sweep] = {}
        self._sent: dict[tuple[Identity, int, int], Bools] = {}
        self._batches: dict[int, Batch] = {}
        self._request = 0
        self._faults: list[tuple[int, int, Any]] = []  # (table, q, blocks) of sweeps that cannot begin yet

    def know(self, *, peers: dict[int, Identity], recovering: frozenset[int], changed: set[int]) -> None:
        """A view: what is decoded for somebody who was replaced starts anew."""
        self._peers = peers
        self._recovering = recovering
        self._sent = {key: value for key, value in self._sent.items() if key[0] in peers.values()}
        self._plan_sweeps(changed)

    def adjust(self, source: int, g: int, counts: Any, slots: Any, deltas: Any) -> None:
        """A member that has answered changes a row: what is taken out of the parity changes with it."""
        for batch in self._batches.values():
            table = batch.sweep.table
            member = self._groups.member(table, g)
            if member is None or not counts[table] or self._member_server(batch.sweep, member) != source:
                continue
            if member in batch.waiting or member in batch.sweep.unknown:
                continue
            changed, values = self._table_part(counts, slots, deltas, table)
            k = self._groups.job.tables[table].k
            floats = self._store.record_floats(table)
            factor = self._coefficient(batch.sweep, batch.sweep.q, member)
            blocks = (changed // np.uint32(k)).astype(np.uint32)
            _core.xor_matching(batch.blocks, batch.parity_without, floats, blocks, values, factor)

    def _plan_sweeps(self, changed: set[int]) -> None:
        """Which stripes this server decodes now: those whose first living parity is here."""
        sweeps: dict[tuple[int, int], Sweep] = {}
        for table, spec in enumerate(self._groups.job.tables):
            for q in range(spec.r):
                unknown = tuple(j for j in range(spec.k) if self._server_of(table, q, j) in self._recovering)
                living = [
                    p
                    for p in range(spec.r)
                    if self._groups.parity_server(table, self.server, q, p) not in self._recovering
                ]
                if not unknown or not living or living[0] != q:
                    continue
                sweep = Sweep(table=table, q=q, unknown=unknown, partners=tuple(living[1 : len(unknown)]))
                old = self._sweeps.get((table, q))
                if old is not None and self._goes_on(old, changed) and old.partners == sweep.partners:
                    sweep = old
                sweeps[table, q] = sweep
        self._sweeps = sweeps
        for request, batch in list(self._batches.items()):
            mine = batch.asked_by is None and sweeps.get((batch.sweep.table, batch.sweep.q)) is batch.sweep
            other = batch.asked_by in self._peers.values() and self._goes_on(batch.sweep, changed)
            if not mine and not other:
                del self._batches[request]

    def _goes_on(self, sweep: Sweep, changed: set[int]) -> bool:
        """The same replacements still wait for the same members."""
        k = self._groups.job.tables[sweep.table].k
        lost = {self._member_server(sweep, j) for j in range(k)} & self._recovering
        return lost == {self._member_server(sweep, j) for j in sweep.unknown} and not lost & changed

    def _todo(self, sweep: Sweep) -> Bools:
        if sweep.todo is None:
            sweep.todo = np.zeros(self._store.blocks(sweep.table), bool)
            for j in sweep.unknown:
                sweep.todo |= self._unsent(sweep.table, sweep.q, j)
        return sweep.todo

    def _unsent(self, table: int, q: int, member: int) -> Bools:
        count = self._store.blocks(table)
        touched = _bits(self._store.parity_members(table, q, member), count)
        sent = self._sent.get((self._peers[self._server_of(table, q, member)], table, q))
        return touched if sent is None else touched & ~sent

    def sweep(self, budget: Budget) -> list[Send]:
        """Decodes the next rows in the background, as far as the budget goes."""
        sends: list[Send] = []
        for sweep in self._sweeps.values():
            if not self._agreed(sweep.table, sweep.q, sweep.unknown):
                continue
            while sum(batch.background for batch in self._batches.values()) < SWEEPS_UNDERWAY_MAX:
                record_bytes = 4 * self._store.record_floats(sweep.table)
                rows = max(1, SWEEP_BYTES // record_bytes)
                blocks = self._next_blocks(sweep, rows)
                if blocks.size == 0 or not budget.take(blocks.size * record_bytes):
                    break
                sends += self._decode(sweep, blocks, background=True)
        return sends

    def _next_blocks(self, sweep: Sweep, rows: int) -> Any:
        todo = self._todo(sweep)
        while sweep.cursor < todo.size:
            window = todo[sweep.cursor : sweep.cursor + 64 * rows]
            found = np.flatnonzero(window)
            if found.size:
                return (found[:rows] + sweep.cursor).astype(np.uint32)
            sweep.cursor += window.size
        return np.zeros(0, np.uint32)

    @property
    def sweeping(self) -> bool:
        """Something is being decoded, or is left to be."""
        return bool(self._batches) or any(
            sweep.todo is None or sweep.cursor < sweep.todo.size for sweep in self._sweeps.values()
        )

    def on_fault(self, source: Identity, fault: Fault) -> list[Send]:
        """Somebody waits for these rows. What was sent, is under way, or is not lost needs nothing."""
        if source.id not in self._recovering:
            return []
        sends: list[Send] = []
        start = 0
        for table, count in enumerate(fault.counts.tolist()):
            slots = fault.slots[start : start + count]
            start += count
            if not count:
                continue
            spec = self._groups.job.tables[table]
            for j in np.unique(slots % spec.k).tolist():
                for q in range(spec.r):
                    if self._server_of(table, q, j) == source.id:
                        blocks = np.unique(slots[slots % spec.k == j] // spec.k)
                        sends += self._fault(table, q, blocks)
        return sends

    def _fault(self, table: int, q: int, blocks: Any) -> list[Send]:
        sweep = self._sweeps.get((table, q))
        if sweep is None or int(blocks[-1]) >= self._store.blocks(table):
            return []
        if not self._agreed(table, q, sweep.unknown):
            self._faults.append((table, q, blocks))
            return []
        wanted = blocks[self._todo(sweep)[blocks]].astype(np.uint32)
        if not wanted.size:
            return []
        self.faults += wanted.size
        return self._decode(sweep, wanted, background=False)

    def _decode(self, sweep: Sweep, blocks: UInt32Array, *, background: bool) -> list[Send]:
        self._todo(sweep)[blocks] = False
        return self._begin(sweep, blocks, background=background)

    def _begin(
        self,
        sweep: Sweep,
        blocks: UInt32Array,
        *,
        background: bool,
        asked_by: Identity | None = None,
        asked_request: int = 0,
    ) -> list[Send]:
        """Asks the living members, and other holders where several members are lost."""
        self._request += 1
        spec = self._groups.job.tables[sweep.table]
        floats = self._store.record_floats(sweep.table)
        batch = Batch(
            sweep=sweep,
            blocks=blocks,
            parity_without=np.zeros(blocks.size * floats, np.float32),
            waiting=set(),
            syndromes={},
            background=background,
            asked_by=asked_by,
            asked_request=asked_request,
        )
        self._batches[self._request] = batch
        sends: list[Send] = []
        for j in range(spec.k):
            # A member of which no row was ever touched has answered: nothing is in the parity of it.
            if j in sweep.unknown or not self._any_touched(sweep, j, blocks):
                continue
            batch.waiting.add(j)
            ask = SnapAsk(
                request=self._request,
                table=sweep.table,
                slots=(blocks * np.uint32(spec.k) + np.uint32(j)).astype(np.uint32),
            )
            sends.append(Send(target=self._peers[self._member_server(sweep, j)], message=ask))
        for q in sweep.partners:
            batch.waiting.add(spec.k + q)
            holder = self._groups.parity_server(sweep.table, self.server, sweep.q, q)
            syndrome = SyndromeAsk(
                request=self._request,
                table=sweep.table,
                q=q,
                unknown=sweep.unknown,
                incarnations=tuple(self._peers[self._member_server(sweep, j)].incarnation for j in sweep.unknown),
                blocks=blocks,
            )
            sends.append(Send(target=self._peers[holder], message=syndrome))
        return sends + self._finish(self._request)

    def _any_touched(self, sweep: Sweep, member: int, blocks: UInt32Array) -> bool:
        return bool(_bits_at(self._store.parity_members(sweep.table, sweep.q, member), blocks).any())

    def on_snap(self, source: Identity, snap: Snap) -> list[Send]:
        batch = self._batches.get(snap.request)
        if batch is None:
            return []  # of a recovery that has started anew
        members = [
            j
            for j in batch.waiting
            if j < self._groups.job.tables[batch.sweep.table].k and self._member_server(batch.sweep, j) == source.id
        ]
        if len(members) != 1 or snap.relatives.size != batch.parity_without.size:
            raise ValueError(f"an answer of {snap.relatives.size} values nobody asked for")
        factor = self._coefficient(batch.sweep, batch.sweep.q, members[0])
        _core.gf_xor(batch.parity_without, snap.relatives, factor)
        batch.waiting.discard(members[0])
        return self._finish(snap.request)

    def on_syndrome(self, source: Identity, syndrome: Syndrome) -> list[Send]:
        batch = self._batches.get(syndrome.request)
        if batch is None:
            return []
        sweep = batch.sweep
        k = self._groups.job.tables[sweep.table].k
        partners = [
            q
            for q in sweep.partners
            if k + q in batch.waiting and self._groups.parity_server(sweep.table, self.server, sweep.q, q) == source.id
        ]
        if len(partners) != 1 or syndrome.relatives.size != batch.parity_without.size:
            raise ValueError(f"a syndrome of {syndrome.relatives.size} values nobody asked for")
        batch.syndromes[partners[0]] = (syndrome.numbers, syndrome.relatives)
        batch.waiting.discard(k + partners[0])
        return self._finish(syndrome.request)

    def _finish(self, request: int) -> list[Send]:
        """Everybody has answered: what is left of the parity is the lost rows, or an equation of them."""
        batch = self._batches[request]
        if batch.waiting:
            return []
        del self._batches[request]
        sweep = batch.sweep
        own = np.empty_like(batch.parity_without)
        self._store.parity_read(sweep.table, sweep.q, batch.blocks, own)
        _core.gf_xor(own, batch.parity_without, 1)
        numbers = self._numbers(sweep)
        if batch.asked_by is not None:
            answer = Syndrome(request=batch.asked_request, numbers=numbers, relatives=own)
            return [Send(target=batch.asked_by, message=answer)]
        if any(theirs != numbers for theirs, _ in batch.syndromes.values()):
            # A lost member is at work again and has flushed in between, to one of us only so far.
            return self._begin(sweep, batch.blocks, background=batch.background)
        equations = {sweep.q: own} | {q: values for q, (_, values) in batch.syndromes.items()}
        return self._restore(sweep, batch.blocks, equations)

    def _restore(self, sweep: Sweep, blocks: UInt32Array, equations: dict[int, Float32Array]) -> list[Send]:
        rows = list(equations)[: len(sweep.unknown)]
        matrix = [[self._coefficient(sweep, q, j) for j in sweep.unknown] for q in rows]
        solution = inverse(matrix)
        spec = self._groups.job.tables[sweep.table]
        floats = self._store.record_floats(sweep.table)
        count = self._store.blocks(sweep.table)
        sends: list[Send] = []
        for index, j in enumerate(sweep.unknown):
            relatives = np.zeros(blocks.size * floats, np.float32)
            for factor, q in zip(solution[index], rows, strict=True):
                if factor:
                    _core.gf_xor(relatives, equations[q], factor)
            target = self._peers[self._member_server(sweep, j)]
            touched = _bits_at(self._store.parity_members(sweep.table, sweep.q, j), blocks)
            sent = self._sent.setdefault((target, sweep.table, sweep.q), np.zeros(count, bool))
            sent[blocks] = True
            if not touched.any():
                continue
            counts = np.zeros(len(self._groups.job.tables), np.int32)
            counts[sweep.table] = np.count_nonzero(touched)
            slots = (blocks[touched] * np.uint32(spec.k) + np.uint32(j)).astype(np.uint32)
            if not touched.all():
                relatives = relatives.reshape(-1, floats)[touched].reshape(-1)
            self.rows_decoded += slots.size
            restored = Restored(counts=counts, slots=slots, relatives=relatives)
            sends.append(Send(target=target, message=restored))
        return sends

    def release_faults(self) -> list[Send]:
        """Faults that came before their sweep could begin."""
        faults, self._faults = self._faults, []
        sends: list[Send] = []
        for table, q, blocks in faults:
            sends += self._fault(table, q, blocks)
        return sends

    # --- What is asked of this holder by another ---

    def on_syndrome_ask(self, peer: Identity, ask: SyndromeAsk) -> list[Send] | None:
        """What remains of this parity without the living members; None: ask again when more is known here."""
        if reason := self._ask_invalid_reason(ask):
            raise ValueError(reason)
        lost = [self._server_of(ask.table, ask.q, j) for j in ask.unknown]
        here = [self._peers[server].incarnation for server in lost]
        if any(mine > theirs for mine, theirs in zip(here, ask.incarnations, strict=True)):
            return []  # of a recovery that has started anew
        newer = any(mine < theirs for mine, theirs in zip(here, ask.incarnations, strict=True))
        if not newer and not self._recovering.issuperset(lost):
            return []  # somebody has recovered meanwhile, and whoever asked will know
        if newer or not self._agreed(ask.table, ask.q, ask.unknown):
            return None
        sweep = Sweep(table=ask.table, q=ask.q, unknown=ask.unknown, partners=())
        return self._begin(sweep, ask.blocks, background=False, asked_by=peer, asked_request=ask.request)

    # --- Small things ---

    def _ask_invalid_reason(self, ask: SyndromeAsk) -> str | None:
        if ask.table >= len(self._groups.job.tables):
            return f"there is no table {ask.table}"
        spec = self._groups.job.tables[ask.table]
        blocks = ask.blocks
        if ask.q >= spec.r or not all(0 <= j < spec.k for j in ask.unknown):
            return f"table {ask.table} has no parity {ask.q} or no members {ask.unknown}"
        if len(ask.unknown) != len(ask.incarnations):
            return "as many incarnations as members are needed"
        if blocks.size == 0 or int(blocks.max()) >= self._store.blocks(ask.table) or (np.diff(blocks) <= 0).any():
            return "blocks of a syndrome must exist, and ascend"
        return None

    def _agreed(self, table: int, q: int, unknown: tuple[int, ...]) -> bool:
        for j in unknown:
            source = self._server_of(table, q, j)
            state = self._held[source, int(self._groups.of_member[table][j])]
            if source not in self._recovering or not state.ended or not state.agreed:
                return False
        return True

    def _numbers(self, sweep: Sweep) -> tuple[int, ...]:
        groups = self._groups.of_member[sweep.table]
        return tuple(self._held[self._member_server(sweep, j), int(groups[j])].number for j in sweep.unknown)

    def _member_server(self, sweep: Sweep, member: int) -> int:
        return self._server_of(sweep.table, sweep.q, member)

    def _server_of(self, table: int, q: int, member: int) -> int:
        return self._groups.member_server(table, self.server, q, member)

    def _coefficient(self, sweep: Sweep, q: int, member: int) -> int:
        return coefficient(q, member, self._groups.job.tables[sweep.table].r)

    def _table_part(self, counts: Any, slots: Any, deltas: Any, table: int) -> tuple[Any, Any]:
        rows = int(counts[:table].sum())
        start = sum(int(counts[t]) * self._store.record_floats(t) for t in range(table))
        count = int(counts[table])
        floats = self._store.record_floats(table)
        return slots[rows : rows + count], deltas[start : start + count * floats]


def _bits(words: UInt64Array, count: int) -> Bools:
    """One bool per bit, the least significant first."""
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:count].view(np.bool_)


def _bits_at(words: UInt64Array, blocks: UInt32Array) -> Bools:
    """The bits of these blocks only."""
    bits: np.ndarray[Any, np.dtype[np.uint64]] = words[blocks >> 6] >> (blocks & 63).astype(np.uint64)
    return (bits & np.uint64(1)).astype(np.bool_)
