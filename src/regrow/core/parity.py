"""What a server keeps for others: their parities, how far each source has got, and the decoding of lost rows.

A flush is applied whole, in order, and acknowledged. When a source is replaced, every holder tells the successor where
its group stands (`Have`), and the first living holder of each stripe, its **decoder**, brings the rows back: it asks the
living members for their published values, takes them out of its parity, and what remains is the lost row. A member's
answer comes behind its flushes on the same link; flushes of members that have answered change the accumulator as well as
the parity, so the difference between the two stays the lost row, without a lock.

With several members lost, other holders do the same and send their remainder (a **syndrome**); the decoder solves the
equations. Holders of a lost source first bring each other to the same flush (tails), or the equations would not fit.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
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
    Flush,
    FlushAck,
    FlushCommit,
    Have,
    Int32Array,
    Message,
    Restored,
    Snap,
    SnapAsk,
    Stream,
    StreamAck,
    StreamEnd,
    Syndrome,
    SyndromeAsk,
    Tail,
    TailEnd,
    UInt32Array,
    UInt64Array,
    Undo,
)
from regrow.core.publish import Budget, Part

SWEEP_BYTES = 512 << 10  # decoded at a time in the background; too large: whoever faults waits behind it
SWEEPS_UNDERWAY_MAX = 2
TAIL_FLUSHES_MAX = 1 << 16  # A source that leaves so many unstable is not being acknowledged at all.


class HolderStore(Protocol):
    """What a holder needs of the store."""

    def parity_apply(
        self, source: int, counts: Int32Array, slots: UInt32Array, deltas: Float32Array
    ) -> None: ...
    def parity_touched(self, source: int, group: int, table: int) -> UInt64Array: ...
    def parity_members(self, table: int, q: int, member: int) -> UInt64Array: ...
    def parity_read(self, table: int, q: int, blocks: UInt32Array, out: Float32Array) -> None: ...
    def blocks(self, table: int) -> int: ...
    def record_floats(self, table: int) -> int: ...


class Held:
    """The parity of one group of one source, as far as it has come."""

    def __init__(self, marks: int) -> None:
        self.number = 0
        self.marks: tuple[int, ...] = (0,) * marks
        self.ended = True  # False: a new holder that is still being streamed to
        self.tail: deque[Flush] = deque()  # flushes that some other holder may lack (r >= 2)
        self.last: Part | None = None  # what the last flush changed (sync)
        self.staged: deque[Flush] = deque()  # not committed yet (two-phase commit)
        self.awaited: set[int] = set()  # holders whose tails are still to come
        self.agreed = True  # every holder is at the same flush of a source that was replaced


@dataclasses.dataclass(slots=True)
class Sweep:
    """Stripes of a table whose parity `q` is here and that lost members: what to decode, and how far it is."""

    table: int
    q: int
    unknown: tuple[int, ...]  # lost data members
    partners: tuple[int, ...]  # other parities whose syndromes are needed
    # By block: touched in a lost member, and not begun. Known when the holders have agreed.
    todo: np.ndarray[Any, np.dtype[np.bool_]] | None = None
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


class ParityHolder:
    """The holder side of one server. Every method returns what to send."""

    def __init__(
        self, *, server: int, groups: Groups, store: HolderStore, marks: int, ended: bool, keeps_last: bool
    ) -> None:
        self.server = server
        self.held: dict[tuple[int, int], Held] = {}
        self.rows_applied = 0
        self.rows_decoded = 0
        self.faults = 0
        self._groups = groups
        self._store = store
        self._keeps_last = keeps_last
        self._peers: dict[int, Identity] = {}
        self._recovering: frozenset[int] = frozenset()
        self._sweeps: dict[tuple[int, int], Sweep] = {}
        self._sent: dict[tuple[Identity, int, int], np.ndarray[Any, np.dtype[np.bool_]]] = {}
        self._batches: dict[int, Batch] = {}
        self._request = 0
        self._early: list[tuple[Identity, Message]] = []  # of holders that know a newer view
        self._faults: list[tuple[int, int, Any]] = []  # (table, q, blocks) of sweeps that cannot begin yet
        for g in range(len(groups)):
            for source in groups.sources(server, g):
                state = Held(marks)
                state.ended = ended
                self.held[source, g] = state

    @property
    def whole(self) -> bool:
        """Every parity of this server is complete."""
        return all(state.ended for state in self.held.values())

    # --- Flushes ---

    def on_flush(self, source: Identity, flush: Flush) -> list[Send]:
        state = self._state(source.id, flush.group)
        if not state.ended:
            raise ValueError(f"flush {flush.number} of group {flush.group} before the end of its stream")
        expected = state.number + len(state.staged) + 1
        if flush.number != expected:
            raise ValueError(f"flush {flush.number} of group {flush.group} came, {expected} is next")
        if flush.staged:
            state.staged.append(flush)
        else:
            self._apply(source.id, state, flush)
        ack = FlushAck(group=flush.group, number=flush.number, staged=flush.staged)
        return [Send(target=source, message=ack)]

    def on_commit(self, source: Identity, commit: FlushCommit) -> list[Send]:
        state = self._state(source.id, commit.group)
        while state.staged and state.staged[0].number <= commit.number:
            self._apply(source.id, state, state.staged.popleft())
        if not state.ended or state.number < commit.number:
            raise ValueError(f"commit of flush {commit.number} of group {commit.group}, which is not here")
        return [
            Send(target=source, message=FlushAck(group=commit.group, number=commit.number, staged=False))
        ]

    def _apply(self, source: int, state: Held, flush: Flush) -> None:
        """All or nothing: the store checks everything before it changes anything."""
        self._store.parity_apply(source, flush.counts, flush.slots, flush.deltas)
        self.rows_applied += flush.slots.size
        self._adjust(source, flush.group, flush.counts, flush.slots, flush.deltas)
        if self._keeps_last and state.marks != flush.marks:
            state.last = (flush.counts, flush.slots, flush.deltas)
        state.number = flush.number
        state.marks = flush.marks
        if self._groups.list[flush.group][1] > 1:
            state.tail.append(flush)
            while state.tail and state.tail[0].number <= flush.stable:
                state.tail.popleft()
            if len(state.tail) > TAIL_FLUSHES_MAX:
                raise ValueError(f"{len(state.tail)} flushes of group {flush.group} are unstable")

    def _adjust(self, source: int, g: int, counts: Any, slots: Any, deltas: Any) -> None:
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

    # --- Being streamed to ---

    def on_stream(self, source: Identity, stream: Stream) -> list[Send]:
        state = self._state(source.id, stream.group)
        if state.ended:
            raise ValueError(f"group {stream.group} is streamed, but its parity is here")
        self._store.parity_apply(source.id, stream.counts, stream.slots, stream.deltas)
        return [Send(target=source, message=StreamAck(group=stream.group))]

    def on_stream_end(self, source: Identity, end: StreamEnd) -> list[Send]:
        state = self._state(source.id, end.group)
        if state.ended:
            raise ValueError(f"the stream of group {end.group} ended before")
        state.ended = True
        state.number = end.number
        state.marks = end.marks
        state.last = (end.counts, end.slots, end.deltas) if self._keeps_last else None
        if not end.number:
            return []  # nothing was ever flushed, and nothing is to be acknowledged
        return [Send(target=source, message=FlushAck(group=end.group, number=end.number, staged=False))]

    # --- A source was replaced ---

    def know(
        self, *, peers: dict[int, Identity], recovering: Iterable[int], replaced: Iterable[int]
    ) -> list[Send]:
        """A view. Decoding starts anew where the set of the lost changed."""
        self._peers = peers
        self._recovering = frozenset(recovering)
        sends: list[Send] = []
        changed = set(replaced) & self._recovering
        for (source, g), state in self.held.items():
            if source in changed:
                state.staged.clear()
                if state.ended:
                    sends += self._agree(source, g, state)
                else:
                    state.agreed = False
        self._sent = {key: value for key, value in self._sent.items() if key[0] in peers.values()}
        self._plan_sweeps(changed)
        early, self._early = self._early, []
        for peer, message in early:
            if peers.get(peer.id) == peer:
                sends += self.on_holder_message(peer, message)
        return sends

    def _agree(self, source: int, g: int, state: Held) -> list[Send]:
        """Tells the other living holders what they may lack. With one holder there is nothing to agree on."""
        others = [
            h
            for h in self._groups.holders(source, g)
            if h != self.server and h not in self._recovering
        ]
        state.awaited = set(others)
        state.agreed = False
        incarnation = self._peers[source].incarnation
        sends: list[Send] = []
        for other in others:
            for flush in state.tail:
                tail = Tail(
                    source=source,
                    incarnation=incarnation,
                    group=g,
                    number=flush.number,
                    marks=flush.marks,
                    counts=flush.counts,
                    slots=flush.slots,
                    deltas=flush.deltas,
                )
                sends.append(Send(target=self._peers[other], message=tail))
            end = TailEnd(source=source, incarnation=incarnation, group=g, number=state.number)
            sends.append(Send(target=self._peers[other], message=end))
        return sends + self._announce(source, g, state)

    def _announce(self, source: int, g: int, state: Held) -> list[Send]:
        """Tells the replacement where its group stands, once all holders stand there."""
        if state.agreed or state.awaited:
            return []
        state.agreed = True
        target = self._peers[source]
        words = [
            self._store.parity_touched(source, g, table)
            for table in range(len(self._groups.job.tables))
            if self._groups.member(table, g) is not None
        ]
        sends = []
        if state.last is not None:
            counts, slots, deltas = state.last
            undo = Undo(group=g, counts=counts, slots=slots, deltas=deltas)
            sends.append(Send(target=target, message=undo))
        have = Have(group=g, number=state.number, marks=state.marks, touched=np.concatenate(words))
        return [*sends, Send(target=target, message=have)]

    def on_holder_message(self, peer: Identity, message: Message) -> list[Send]:
        """Tails and syndromes, of holders that may know a newer view than this one."""
        if isinstance(message, Tail | TailEnd):
            self._state(message.source, message.group)
            known = self._peers[message.source]
            if message.incarnation > known.incarnation:
                self._early.append((peer, message))
                return []
            return self._on_tail(peer, message) if message.incarnation == known.incarnation else []
        assert isinstance(message, SyndromeAsk)
        if reason := self._ask_invalid_reason(message):
            raise ValueError(reason)
        lost = [self._server_of(message.table, message.q, j) for j in message.unknown]
        here = [self._peers[server].incarnation for server in lost]
        if any(mine > theirs for mine, theirs in zip(here, message.incarnations, strict=True)):
            return []  # of a recovery that has started anew
        newer = any(mine < theirs for mine, theirs in zip(here, message.incarnations, strict=True))
        if not newer and not self._recovering.issuperset(lost):
            return []  # somebody has recovered meanwhile, and whoever asked will know
        if newer or not self._agreed(message.table, message.q, message.unknown):
            self._early.append((peer, message))
            return []
        return self._on_syndrome_ask(peer, message)

    def _on_tail(self, peer: Identity, message: Tail | TailEnd) -> list[Send]:
        state = self._state(message.source, message.group)
        if not state.ended or state.agreed:
            return []
        if isinstance(message, Tail):
            if message.number == state.number + 1:
                flush = Flush(
                    group=message.group,
                    number=message.number,
                    stable=0,
                    marks=message.marks,
                    staged=False,
                    counts=message.counts,
                    slots=message.slots,
                    deltas=message.deltas,
                )
                self._apply(message.source, state, flush)
            return []
        assert message.number <= state.number, "a tail ended before all of it was applied"
        state.awaited.discard(peer.id)
        sends = self._announce(message.source, message.group, state)
        if not state.awaited:
            early, self._early = self._early, []
            for other, parked in early:
                sends += self.on_holder_message(other, parked)
        return sends

    # --- Decoding ---

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

    def _todo(self, sweep: Sweep) -> np.ndarray[Any, np.dtype[np.bool_]]:
        if sweep.todo is None:
            sweep.todo = np.zeros(self._store.blocks(sweep.table), bool)
            for j in sweep.unknown:
                sweep.todo |= self._unsent(sweep.table, sweep.q, j)
        return sweep.todo

    def _unsent(self, table: int, q: int, member: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
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
                incarnations=tuple(
                    self._peers[self._member_server(sweep, j)].incarnation for j in sweep.unknown
                ),
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
            if j < self._groups.job.tables[batch.sweep.table].k
            and self._member_server(batch.sweep, j) == source.id
        ]
        if len(members) != 1 or snap.relatives.size != batch.parity_without.size:
            raise ValueError(f"an answer of {snap.relatives.size} values nobody asked for")
        factor = self._coefficient(batch.sweep, batch.sweep.q, members[0])
        _core.gf_xor(batch.parity_without, snap.relatives, factor)
        batch.waiting.discard(members[0])
        return self._finish(snap.request)

    def _on_syndrome_ask(self, peer: Identity, ask: SyndromeAsk) -> list[Send]:
        blocks = ask.blocks
        sweep = Sweep(table=ask.table, q=ask.q, unknown=ask.unknown, partners=())
        return self._begin(sweep, blocks, background=False, asked_by=peer, asked_request=ask.request)

    def on_syndrome(self, source: Identity, syndrome: Syndrome) -> list[Send]:
        batch = self._batches.get(syndrome.request)
        if batch is None:
            return []
        sweep = batch.sweep
        k = self._groups.job.tables[sweep.table].k
        partners = [
            q
            for q in sweep.partners
            if k + q in batch.waiting
            and self._groups.parity_server(sweep.table, self.server, sweep.q, q) == source.id
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

    # --- Small things ---

    def _state(self, source: int, group: int) -> Held:
        state = self.held.get((source, group))
        if state is None:
            raise ValueError(f"S{self.server} holds no parity of group {group} of S{source}")
        return state

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
            state = self.held[source, int(self._groups.of_member[table][j])]
            if source not in self._recovering or not state.ended or not state.agreed:
                return False
        return True

    def _numbers(self, sweep: Sweep) -> tuple[int, ...]:
        groups = self._groups.of_member[sweep.table]
        return tuple(self.held[self._member_server(sweep, j), int(groups[j])].number for j in sweep.unknown)

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


def _bits(words: UInt64Array, count: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """One bool per bit, the least significant first."""
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:count].view(np.bool_)


def _bits_at(words: UInt64Array, blocks: UInt32Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The bits of these blocks only."""
    bits: np.ndarray[Any, np.dtype[np.uint64]] = words[blocks >> 6] >> (blocks & 63).astype(np.uint64)
    return (bits & np.uint64(1)).astype(np.bool_)
