"""What a server keeps for others: their parities, and how far each source has got.

A flush is applied whole, in order, and acknowledged. A new holder is streamed to until its source says that this was
all. When a source is replaced, every living holder tells the successor where its group stands (`Have`); with several
holders they first bring each other to the same flush (tails), so that what they hold fits together. Decoding
itself is `decode.py`. The rule to keep: same flush number, same parity contribution, at every holder.

Where more is lost than can be decoded, lost servers are **recalled**: they come back with older rows (`recall.py`).
What is left of a parity with rows of theirs then stands for nothing, also as far as it is of servers that live: nobody
can take the old rows out of it. Its holder makes it void, and asks every living source for a stream from the beginning
(`StreamAsk`); the recalled ones stream by themselves. Links keep their order, so what a source sent before it heard
that comes before its `StreamBegin`: it is about the parity that is void, and is dropped without a word. When all
sources of a parity have ended their streams it is whole; when all that have rows of a recalled server are, that server
is told (`Mended`), and not before it may count as back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from regrow.core.checks import RowChecks, check_marks
from regrow.core.decode import Decoder
from regrow.core.effects import Refuse, Send
from regrow.core.flush_group import Part
from regrow.core.groups import Groups
from regrow.core.identity import Identity
from regrow.core.messages import (
    Flush,
    FlushAck,
    FlushCommit,
    Have,
    Int32Array,
    Mended,
    Message,
    Stream,
    StreamAck,
    StreamAsk,
    StreamBegin,
    StreamEnd,
    SyndromeAsk,
    Tail,
    TailEnd,
    UInt32Array,
    Undo,
)
from regrow.store.interface import HeldParities

# Flushes whose rows count as hot. Too few: pulls wait for rows that were left to the end. Too many: nothing is hot.
HOT_FLUSHES = 4
EARLY_MAX = 1 << 16  # Messages about replacements that this server does not know of yet.
TAIL_FLUSHES_MAX = 1 << 16  # A source that leaves so many unstable is not being acknowledged at all.


class Held:
    """The parity of one group of one source, as far as it has come."""

    def __init__(self, marks: int) -> None:
        self.number = 0
        self.marks: tuple[int, ...] = (0,) * marks
        self.updates = 0  # that rows of the source had had at these marks, if this is the group that is copied,
        self.updates_lost = 0  # and how many of them are lost
        self.ended = True  # False: a new holder, or one whose parity was made void, that is still being streamed to
        self.asked = 0  # the StreamAsk that is not answered: what comes before its StreamBegin is void; 0: none
        self.tail: deque[Flush] = deque()  # flushes that some other holder may lack (r >= 2): those behind `stable`
        self.stable = 0  # the newest flush that every holder has, as far as this one was told
        self.last: Part | None = None  # what the last flush changed (sync)
        # Rows of the last flushes, (counts, slots): if the source dies, workers will want them first.
        self.recent: deque[tuple[Int32Array, UInt32Array]] = deque(maxlen=HOT_FLUSHES)
        self.staged: deque[Flush] = deque()  # not committed yet (two-phase commit)
        self.awaited: set[int] = set()  # holders whose tails are still to come
        self.agreed = True  # every holder is at the same flush of a source that was replaced
        self.is_streamed = False  # a source that was replaced has brought all of it here since: it lacks nothing of it


class Holder:
    """The holder side of one server. Every method returns what to send."""

    def __init__(
        self, *, server: int, groups: Groups, store: HeldParities, marks: int, ended: bool, keeps_last: bool
    ) -> None:
        self.server = server
        self.held: dict[tuple[int, int], Held] = {}
        self.rows_applied = 0
        self.decoder = Decoder(server=server, groups=groups, store=store, held=self.held)
        self._groups = groups
        self._store = store
        self._marks = marks
        self._checks = RowChecks(groups.job, store)
        self._keeps_last = keeps_last
        self._peers: dict[int, Identity] = {}
        self._recovering: frozenset[int] = frozenset()
        self._early: list[tuple[Identity, Message]] = []  # of holders that know a newer view
        self._parities = _find_parities(groups, server)
        self._asks = 0  # StreamAsks so far
        self._unmended: dict[int, Identity] = {}  # recalled servers with rows in parities that are not whole
        self._has_streamed = False  # something came for them since they were last told
        for g in range(len(groups)):
            for source in groups.sources(server, g):
                state = Held(marks)
                state.ended = ended
                self.held[source, g] = state

    @property
    def whole(self) -> bool:
        """Every parity of this server is complete."""
        return all(state.ended for state in self.held.values())

    def find_owing(self) -> Iterator[int]:
        """Servers that have not answered all that was sent to them; holders whose tails are to come."""
        yield from self.decoder.find_owing()
        for state in self.held.values():
            if state.awaited:
                yield from sorted(state.awaited)

    # --- Flushes ---

    def on_flush(self, source: Identity, flush: Flush) -> list[Send]:
        state = self._state(source.id, flush.group)
        if state.asked:
            return []
        if not state.ended:
            raise ValueError(f"flush {flush.number} of group {flush.group} before the end of its stream")
        expected = state.number + len(state.staged) + 1
        if flush.number != expected:
            raise ValueError(f"flush {flush.number} of group {flush.group} came, {expected} is next")
        if flush.stable >= flush.number:
            raise ValueError(f"flush {flush.number} of group {flush.group} says that {flush.stable} is stable")
        check_marks(flush.marks, self._marks)
        self._check_tail(state, flush)
        if flush.staged:
            self._check_part(flush)  # it is applied later, and must be applicable then
            state.staged.append(flush)
        else:
            self._apply(source.id, state, flush)
        ack = FlushAck(group=flush.group, number=flush.number, staged=flush.staged)
        return [Send(target=source, message=ack), *self.decoder.resume()]

    def on_commit(self, source: Identity, commit: FlushCommit) -> list[Send]:
        state = self._state(source.id, commit.group)
        if not state.ended or state.number + len(state.staged) < commit.number:
            raise ValueError(f"commit of flush {commit.number} of group {commit.group}, which is not here")
        while state.staged and state.staged[0].number <= commit.number:
            self._apply(source.id, state, state.staged.popleft())
        ack = FlushAck(group=commit.group, number=commit.number, staged=False)
        return [Send(target=source, message=ack), *self.decoder.resume()]

    def _apply(self, source: int, state: Held, flush: Flush) -> None:
        """All or nothing: the store checks everything before it changes anything."""
        self._store.parity_apply(source, flush.counts, flush.slots, flush.deltas)
        self.rows_applied += flush.slots.size
        self.decoder.adjust(source, flush)
        if self._keeps_last and state.marks != flush.marks:
            state.last = (flush.counts, flush.slots, flush.deltas)
        state.number = flush.number
        state.marks = flush.marks
        state.updates = flush.updates
        state.updates_lost = flush.updates_lost
        if flush.slots.size:
            state.recent.append((flush.counts, flush.slots))
        if self._groups.list[flush.group][1] > 1:
            state.tail.append(flush)
            state.stable = max(state.stable, flush.stable)
            while state.tail and state.tail[0].number <= state.stable:
                state.tail.popleft()

    # --- Being streamed to ---

    def on_stream(self, source: Identity, stream: Stream) -> list[Send]:
        state = self._state(source.id, stream.group)
        if state.asked:
            return []
        if state.ended:
            raise ValueError(f"group {stream.group} is streamed, but its parity is here")
        self._store.parity_apply(source.id, stream.counts, stream.slots, stream.deltas)
        self._has_streamed = True
        return [Send(target=source, message=StreamAck(group=stream.group))]

    def on_stream_begin(self, source: Identity, begin: StreamBegin) -> list[Send]:
        """The source has heard that its parity is void here. If that was asked again since, it will hear that too."""
        state = self._state(source.id, begin.group)
        if begin.number > self._asks:
            raise ValueError(f"stream {begin.number} of group {begin.group} begins, and nobody asked for it")
        if begin.number == state.asked:
            state.asked = 0
        return []

    def on_stream_end(self, source: Identity, end: StreamEnd) -> list[Send]:
        state = self._state(source.id, end.group)
        if state.asked:
            return []
        if state.ended:
            raise ValueError(f"the stream of group {end.group} ended before")
        check_marks(end.marks, self._marks)
        self._check_part(end)
        state.ended = state.is_streamed = True
        state.number = end.number
        state.marks = end.marks
        state.updates = end.updates
        state.updates_lost = end.updates_lost
        state.last = (end.counts, end.slots, end.deltas) if self._keeps_last else None
        self._has_streamed = True
        if not end.number:
            return self.tell_mended()  # nothing was ever flushed, and nothing is to be acknowledged
        ack = FlushAck(group=end.group, number=end.number, staged=False)
        return [Send(target=source, message=ack), *self.tell_mended()]

    # --- Parities that are void ---

    def _make_void(self, recalled: set[int]) -> list[Send]:
        """All parities with rows of these servers stand for nothing from here on."""
        sends: list[Send] = []
        for q, members in enumerate(self._parities):
            if recalled.isdisjoint([source for source, _ in members]):
                continue
            for table in np.flatnonzero(self._groups.is_recallable).tolist():
                self._store.parity_void(table, q)
            for source, g in members:
                state = self.held[source, g] = Held(self._marks)
                state.ended = False
                if source in recalled:
                    self._unmended[source] = self._peers[source]
                else:
                    self._asks += 1
                    state.asked = self._asks
                    ask = StreamAsk(group=g, number=self._asks)
                    sends.append(Send(target=self._peers[source], message=ask))
        return sends

    def tell_mended(self) -> list[Send]:
        """Recalled servers hear how many streams their parities still need, if that got any further."""
        if not self._unmended or not self._has_streamed:
            return []
        self._has_streamed = False
        sends: list[Send] = []
        for source, identity in list(self._unmended.items()):
            parities = [members for members in self._parities if source in [other for other, _ in members]]
            left = sum(not self.held[place].ended for members in parities for place in members)
            sends.append(Send(target=identity, message=Mended(left=left)))
            if not left:
                del self._unmended[source]
        return sends

    # --- A source was replaced ---

    def know(
        self,
        *,
        peers: dict[int, Identity],
        recovering: Iterable[int],
        replaced: Iterable[int],
        recalled: Iterable[int] = (),
        is_new: bool = False,
    ) -> list[Send | Refuse]:
        """A view. Decoding starts anew where the set of the lost changed. `is_new`: it is the first one, and all that
        is here is empty."""
        self._peers = peers
        self._recovering = frozenset(recovering)
        sends: list[Send | Refuse] = []
        changed = set(replaced) & self._recovering
        void = changed.intersection(recalled)
        if void and not is_new:
            sends += self._make_void(void)
        for (source, g), state in self.held.items():
            if source in changed and not (source in void and g in self._groups.recallable):
                state.staged.clear()
                state.is_streamed = False
                if state.ended:
                    sends += self._agree(source, g, state)
                else:
                    state.agreed = False
        self.decoder.know(peers=peers, recovering=self._recovering, recalled=frozenset(recalled), changed=changed)
        return [*sends, *self._hear_early()]

    def _agree(self, source: int, g: int, state: Held) -> list[Send]:
        """Tells the other living holders what they may lack. With one holder there is nothing to agree on."""
        others = [h for h in self._groups.holders(source, g) if h != self.server and h not in self._recovering]
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
                    stable=state.stable,  # or tails would grow with every death of their source
                    marks=flush.marks,
                    updates=flush.updates,
                    updates_lost=flush.updates_lost,
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
        have = Have(
            group=g,
            number=state.number,
            marks=state.marks,
            updates=state.updates,
            updates_lost=state.updates_lost,
            touched=np.concatenate(words),
        )
        return [*sends, Send(target=target, message=have)]

    def on_holder_message(self, peer: Identity, message: Message) -> list[Send | Refuse]:
        """Tails and syndromes, of holders that may know a newer view than this one."""
        if isinstance(message, Tail | TailEnd):
            self._state(message.source, message.group)
            if peer.id not in self._groups.holders(message.source, message.group):
                raise ValueError(f"S{peer.id} holds no parity of group {message.group} of S{message.source}")
            known = self._peers[message.source]
            if message.incarnation > known.incarnation:
                self._keep_early(peer, message)
                return []
            return [*self._on_tail(peer, message)] if message.incarnation == known.incarnation else []
        assert isinstance(message, SyndromeAsk)
        sends = self.decoder.on_syndrome_ask(peer, message)
        if sends is None:
            self._keep_early(peer, message)
        return [*(sends or [])]

    def _keep_early(self, peer: Identity, message: Message) -> None:
        if len(self._early) >= EARLY_MAX:
            raise ValueError("too much before the view that it is about")
        self._early.append((peer, message))

    def _hear_early(self) -> list[Send | Refuse]:
        """What came before its time is looked at again. What is wrong with it is its sender's fault alone."""
        early, self._early = self._early, []
        effects: list[Send | Refuse] = []
        for peer, message in early:
            if self._peers.get(peer.id) != peer:
                continue
            try:
                effects += self.on_holder_message(peer, message)
            except (ValueError, IndexError) as error:
                effects.append(Refuse(target=peer, reason=f"{type(message).__name__}: {error}"))
        return effects

    def _on_tail(self, peer: Identity, message: Tail | TailEnd) -> list[Send | Refuse]:
        state = self._state(message.source, message.group)
        if not state.ended or state.agreed:
            return []
        if isinstance(message, Tail):
            check_marks(message.marks, self._marks)
            if message.stable >= message.number:
                raise ValueError(f"flush {message.number} of a tail says that {message.stable} is stable")
            if message.number == state.number + 1:
                flush = Flush(
                    group=message.group,
                    number=message.number,
                    stable=message.stable,
                    marks=message.marks,
                    staged=False,
                    updates=message.updates,
                    updates_lost=message.updates_lost,
                    counts=message.counts,
                    slots=message.slots,
                    deltas=message.deltas,
                )
                self._check_tail(state, flush)
                self._apply(message.source, state, flush)
            return []
        if message.number > state.number:
            raise ValueError(f"a tail ended at flush {message.number} before all of it was here")
        state.awaited.discard(peer.id)
        announced = self._announce(message.source, message.group, state)
        return [*announced, *(self._hear_early() if not state.awaited else [])]

    # --- Small things ---

    def _check_tail(self, state: Held, flush: Flush) -> None:
        """Before anything is changed for it, staged or not: a commit cannot be refused in the middle."""
        if self._groups.list[flush.group][1] == 1 or len(state.tail) + len(state.staged) < TAIL_FLUSHES_MAX:
            return
        stable = max(state.stable, flush.stable)
        unstable = 1 + sum(each.number > stable for each in (*state.tail, *state.staged))
        if unstable > TAIL_FLUSHES_MAX:
            raise ValueError(f"{unstable} flushes of group {flush.group} are unstable")

    def _check_part(self, message: Flush | StreamEnd) -> None:
        """What is kept of a message, to be used when nobody can be refused for it any more."""
        self._checks.check_records(message.counts, message.slots, message.deltas)
        if (self._groups.of_slots(message.counts, message.slots) != message.group).any():
            raise ValueError(f"it has rows that are not in group {message.group}")

    def _state(self, source: int, group: int) -> Held:
        state = self.held.get((source, group))
        if state is None:
            raise ValueError(f"S{self.server} holds no parity of group {group} of S{source}")
        return state


def _find_parities(groups: Groups, server: int) -> list[list[tuple[int, int]]]:
    """Of each parity that this server holds of rows that may be recalled: whose rows are in it, as (source, group).
    Tables of such rows all have the same code, so a parity has one group of each of its sources."""
    coded = [g for g in groups.recallable if g != groups.bare]
    if not coded:
        return []
    _, r = groups.list[coded[0]]
    return [[(groups.step(server, -(groups.list[g][0] + q)), g) for g in coded] for q in range(r)]
