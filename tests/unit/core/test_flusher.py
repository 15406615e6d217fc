"""Goal: what a server reports durable is at its holders; changes leave when they should; new holders get all.

Method: one flusher over a real store, told of pushes, acknowledgements, time and views by hand. Where the content of
messages matters they are applied to the real parities of real holders and compared, byte for byte, with those of
holders that were never replaced. Durability is compared with a model that remembers every flush.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from flushers import UNLIMITED, Replica, Source, brief, of_type
from helpers import server

from regrow.core import flusher
from regrow.core.effects import Send
from regrow.core.flush_pace import IDLE_GAPS, IDLE_SECONDS
from regrow.core.flusher import FLUSHES_UNACKED_MAX, STREAMS_UNDERWAY_MAX, Budget
from regrow.core.groups import Groups
from regrow.core.messages import Flush, FlushAck, Have, Message, Stream, StreamEnd
from regrow.core.protection import FlushSpec

# --- When changes leave ---
# With k = 2 and r = 1 server 0 has two groups: 0, held by S1 (odd slots, and the small table), and 1, held by S2.


def test_a_flush_leaves_after_so_many_pushes() -> None:
    source = Source(spec=FlushSpec(pushes=3))
    assert source.push(1, [0, 1, 2]) == []
    assert source.push(2, [1, 3]) == []
    sends = source.push(3, [5], slots_small=[0])
    assert brief(sends) == [("Flush", 1, 0, 4), ("Flush", 2, 1, 2)]
    first, second = of_type(sends, Flush)
    assert (first.counts.tolist(), sorted(first.slots[:3].tolist())) == ([3, 1], [1, 3, 5])
    assert first.slots[3:].tolist() == [0]
    assert (second.counts.tolist(), sorted(second.slots.tolist())) == ([2, 0], [0, 2])
    assert [(m.number, m.stable, m.marks, m.staged) for m in (first, second)] == [(1, 0, (3,), False)] * 2
    # A row that changed in two pushes travels once, as the difference of what was and what is.
    assert source.push(4, [0]) == source.push(5, []) == []
    assert brief(source.push(6, [])) == [("Flush", 1, 0, 0), ("Flush", 2, 1, 1)]


def test_a_flush_leaves_when_so_many_bytes_wait() -> None:
    record_bytes = 4 * Source().store.record_floats(0)
    source = Source(spec=FlushSpec(pushes=1000, bytes=3 * record_bytes))
    assert source.push(1, [0, 1]) == []
    assert source.push(2, [0, 1]) == [], "the same rows take no more room"
    assert brief(source.push(3, [2])) == [("Flush", 1, 0, 1), ("Flush", 2, 1, 2)]


def test_a_flush_leaves_when_nothing_more_comes() -> None:
    source = Source(spec=FlushSpec(pushes=1000, seconds=100.0))
    assert source.flusher.tick(5.0) == []
    source.push(1, [0])
    assert source.flusher.tick(10.0) == []
    assert source.flusher.tick(10.0 + IDLE_SECONDS - 0.01) == []
    source.push(2, [0])
    assert source.flusher.tick(10.0 + IDLE_SECONDS) == [], "another push came"
    until = 10.0 + IDLE_SECONDS + IDLE_GAPS * IDLE_SECONDS
    assert source.flusher.tick(until - 0.01) == []
    assert len(source.flusher.tick(until + 0.01)) == 2
    assert source.flusher.tick(1000.0) == []


def test_a_flush_leaves_before_a_worker_keeps_too_much_to_go_on() -> None:
    """Three servers have about as much of each push: of 600 bytes that a worker may keep half has come."""
    source = Source(workers=2, spec=FlushSpec(pushes=1000, redo_bytes=600))
    assert source.push(1, [0], push_bytes=60) == []
    assert source.push(1, [0], worker=1, push_bytes=60) == [], "each worker has its own"
    assert source.push(2, [2], push_bytes=39) == []
    assert brief(source.push(3, [4], push_bytes=1)) == [("Flush", 1, 0, 0), ("Flush", 2, 1, 3)]
    assert source.push(2, [0], worker=1, push_bytes=60) == [], "the flush took both"


def test_pushes_that_are_slow_go_along_with_each_other_and_pauses_teach_nothing() -> None:
    """A push every 0.4 s, which is longer than idle was: they wait for each other, as far as `seconds` lets them."""
    source = Source(spec=FlushSpec(pushes=1000, seconds=5.0))
    flushed_at = []
    for push in range(1, 30):
        source.push(push, [push % 20])
        for quarter in range(4):
            now = 0.4 * push + 0.1 * quarter
            if source.flusher.tick(now):
                flushed_at.append(round(now, 1))
    assert flushed_at == [0.7, 5.8, 11.0], "of the first one nobody knows yet how soon another comes"
    for push in range(30, 40):
        source.flusher.flush_all()
        source.push(push, [0])
        assert source.flusher.tick(100.0 * push) == [], "after a pause"
    assert len(source.flusher.tick(3900.01 + IDLE_SECONDS)) == 2


def test_gaps_of_workers_that_push_together_are_the_long_ones() -> None:
    """Two pushes at once, then none for 0.8 s."""
    source = Source(workers=2, spec=FlushSpec(pushes=12, seconds=60.0))
    left = []
    for pair in range(1, 25):
        for worker in range(2):
            left += [pair] * bool(source.push(pair, [pair % 20], worker=worker))
            left += [-pair] * bool(source.flusher.tick(0.9 * pair + 0.1 * worker))
        left += [-pair] * bool(source.flusher.tick(0.9 * pair + 0.6))
    assert left == [-1, 7, 13, 19], "by number, but for the first one"


def test_a_flush_leaves_when_it_has_waited_long_enough() -> None:
    source = Source(spec=FlushSpec(pushes=1000, seconds=2.0))
    flushed_at = []
    for tenth in range(1, 60):  # a push between any two ticks: never idle
        source.push(tenth, [tenth % 20])
        if source.flusher.tick(tenth / 10):
            flushed_at.append(tenth)
    assert flushed_at == [21, 42]


def test_a_group_without_rows_sends_its_marks_and_one_without_news_nothing() -> None:
    source = Source()
    source.push(1, [1])
    first = source.flusher.flush_all()
    assert brief(first) == [("Flush", 1, 0, 1), ("Flush", 2, 1, 0)]
    assert [message.marks for message in of_type(first, Flush)] == [(1,), (1,)]
    source.ack(1, 0, 1)
    assert source.durable == 0, "the other holder has not said that it knows"
    source.ack(2, 1, 1)
    assert source.durable == 1
    assert source.flusher.flush_all() == []
    source.touch([0])  # as when records are loaded: rows without a push
    assert brief(source.flusher.flush_all()) == [("Flush", 2, 1, 1)]


# --- What is durable ---


def test_durable_follows_the_least_acknowledged_holder_in_every_order() -> None:
    """Two groups with two holders each, three flushes: all orders in which the last acknowledgements come."""
    flushes = 3
    pairs = [(g, h) for g in range(2) for h in Groups(Source(r=2, servers=4).job).holders(0, g)]
    for order in itertools.product(range(flushes + 1), repeat=4):
        source = Source(r=2, servers=4)
        for seq in range(1, flushes + 1):
            source.push(seq, [seq, seq + 1])
            source.flusher.flush_all()
        for (g, holder), number in zip(pairs, order, strict=True):
            if number:
                source.ack(holder, g, number)
        assert source.durable == min(order)


def test_an_acknowledgement_of_what_was_never_sent_is_refused() -> None:
    source = Source()
    source.push(1, [0, 1])
    source.flusher.flush_all()
    for holder, group, number in [(1, 0, 2), (1, 0, 0), (2, 0, 1), (1, 1, 1), (0, 0, 1), (1, 2, 1)]:
        with pytest.raises(ValueError, match=r"was never sent to|there is no group"):
            source.ack(holder, group, number)
    source.replace(1)
    with pytest.raises(ValueError, match="was never sent to S1"):
        source.ack(1, 0, 1)  # one that is being streamed to


class Model:
    """Remembers all flushes: a push is durable when every holder that counts has one with it."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.marks: dict[int, list[tuple[int, ...]]] = {g: [(0, 0)] for g in range(len(source.groups))}
        self.has = {(g, h): 0 for g in range(len(source.groups)) for h in source.groups.holders(0, g)}
        self.streaming: set[tuple[int, int]] = set()
        self.durable = [0, 0]

    def sent(self, sends: list[Send]) -> list[tuple[int, int, int]]:
        """Notes flushes; returns what will be acknowledged: (holder, group, number)."""
        acks = []
        for send in sends:
            message, holder = send.message, send.target.id
            if isinstance(message, Flush):
                self._note(message.group, message.number, message.marks)
                assert (message.group, holder) not in self.streaming
                acks.append((holder, message.group, message.number))
            elif isinstance(message, StreamEnd):
                assert all(map(int.__ge__, message.marks, self.durable)), "what was reported is in it"
                self._note(message.group, message.number, message.marks)
                self.streaming.discard((message.group, holder))
                if message.number:
                    acks.append((holder, message.group, message.number))
        return acks

    def _note(self, g: int, number: int, marks: tuple[int, ...]) -> None:
        known = self.marks[g]
        while len(known) <= number:  # flushes that reached nobody because all holders were new have a number too
            known.append(marks)
        assert known[number] == marks

    def check(self, *, settled: bool) -> None:
        """What is reported is at most what is so, and no less where the flusher had a reason to look."""
        for w in range(2):
            least = []
            for g, marks in self.marks.items():
                counting = [n for (h_g, h), n in self.has.items() if h_g == g and (g, h) not in self.streaming]
                least.append(marks[min(counting)][w] if counting else self.source.flusher.applied[g][w])
            reported = self.source.flusher.durable(w)
            assert self.durable[w] <= reported <= max(self.durable[w], min(least))
            assert not settled or reported == max(self.durable[w], min(least))
            self.durable[w] = reported


@pytest.mark.parametrize("r", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_durable_is_what_the_model_says_and_never_falls(r: int, seed: int) -> None:
    """Pushes of two workers, flushes, acknowledgements (in order per holder) and replaced holders, at random."""
    rng = np.random.default_rng(seed)
    source = Source(r=r, servers=2 + r, workers=2)
    model = Model(source)
    acks: list[tuple[int, int, int]] = []
    seqs = [0, 0]
    for _ in range(250):
        action = rng.choice(["push", "flush", "ack", "stream", "replace"], p=[0.3, 0.2, 0.33, 0.12, 0.05])
        match action:
            case "push":
                worker = int(rng.integers(2))
                seqs[worker] += 1
                slots = rng.permutation(16)[: rng.integers(4)].tolist()
                assert source.push(seqs[worker], slots, worker=worker) == []
            case "flush":
                acks += model.sent(source.flusher.flush_all())
            case "ack" if acks:
                first = {(holder, g): n for n, (holder, g, _) in reversed(list(enumerate(acks)))}
                holder, g, number = acks.pop(first[sorted(first)[rng.integers(len(first))]])
                model.has[g, holder] = number
                acks += model.sent(source.ack(holder, g, number))
            case "stream":
                acks += model.sent(source.flusher.stream(UNLIMITED))
                for g, holder in sorted(model.streaming):
                    source.flusher.on_stream_ack(holder, g)
            case "replace":
                gone = int(rng.integers(1, 2 + r))
                source.replace(gone)
                acks = [ack for ack in acks if ack[0] != gone]
                for key in [key for key in model.has if key[1] == gone]:
                    model.has[key] = 0
                    model.streaming.add(key)
        model.check(settled=action in ("flush", "replace"))


def test_with_all_holders_new_what_is_applied_is_durable() -> None:
    """Training goes on while a parity is rebuilt: the end of the stream will carry at least this."""
    source = Source()
    source.push(1, [0, 1])
    assert source.durable == 0
    source.replace(1, 2)
    assert source.durable == 1
    source.push(2, [4])
    source.flusher.flush_all()
    assert source.durable == 2
    ends = of_type(source.flusher.stream(UNLIMITED), StreamEnd)
    assert [end.marks for end in ends] == [(2,), (2,)]
    source.replace(1, 2)
    assert source.durable == 2


# --- How much may be under way ---


def test_a_holder_that_does_not_answer_gets_fewer_and_larger_flushes() -> None:
    source = Source(spec=FlushSpec(pushes=1))
    for seq in range(1, FLUSHES_UNACKED_MAX + 1):
        assert len(source.push(seq, [1])) == 2
        source.ack(2, 1, seq)
    for seq in range(FLUSHES_UNACKED_MAX + 1, FLUSHES_UNACKED_MAX + 4):
        sends = source.push(seq, [1, 3, 2 * seq % 20 | 1])
        assert brief(sends) == [("Flush", 2, 1, 0)], "only the one that answers"
        source.ack(2, 1, seq)
    assert source.durable == 0
    source.ack(1, 0, 1)
    assert source.durable == 1
    (flush,) = of_type(source.flusher.flush_all(), Flush)
    assert (flush.group, flush.number, flush.marks) == (0, FLUSHES_UNACKED_MAX + 1, (FLUSHES_UNACKED_MAX + 3,))
    assert set(flush.slots.tolist()) >= {1, 3}


def test_streams_stop_when_the_budget_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher, "STREAM_BYTES", 16)  # one row of table 0
    source = Source(k=1, servers=2)
    source.push(1, range(20))
    source.flusher.flush_all()
    source.replace(1)
    budget = Budget(16.0)
    rows = 0
    for second in range(5):
        budget.refill(float(second))
        while streams := of_type(source.flusher.stream(budget), Stream):
            rows += sum(stream.slots.size for stream in streams)
            for _ in streams:
                source.flusher.on_stream_ack(1, 0)
        assert rows == second + 1


# --- Holders that were replaced ---


def touched_slots(source: Source, g: int) -> set[tuple[int, int]]:
    found = set()
    for index in range(len(source.job.tables)):
        bits = np.unpackbits(source.store.touched(index).view(np.uint8), bitorder="little")
        found |= {(index, slot) for slot in np.flatnonzero(bits).tolist() if source.group_of(index, slot) == g}
    return found


def rows_in(stream: Stream) -> list[tuple[int, int]]:
    return list(zip(np.repeat([0, 1], stream.counts).tolist(), stream.slots.tolist(), strict=True))


def test_a_new_holder_is_streamed_exactly_the_touched_rows_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher, "STREAM_BYTES", 32)
    source = Source()
    source.push(1, [0, 1, 3, 7, 8, 19], slots_small=[0, 4])
    source.flusher.flush_all()
    source.replace(1)
    streamed: list[tuple[int, int]] = []
    while not (ends := of_type(sends := source.flusher.stream(UNLIMITED), StreamEnd)):
        streams = of_type(sends, Stream)
        assert 0 < len(streams) <= STREAMS_UNDERWAY_MAX
        assert all(stream.group == 0 and stream.deltas.nbytes <= 32 for stream in streams)
        assert source.flusher.stream(UNLIMITED) == [], "until one is acknowledged"
        streamed += [row for stream in streams for row in rows_in(stream)]
        for _ in streams:
            source.flusher.on_stream_ack(1, 0)
    assert all(send.target == server(1, 1) for send in sends)
    streamed += [row for stream in of_type(sends, Stream) for row in rows_in(stream)]
    assert sorted(streamed) == sorted(touched_slots(source, 0)) == [(0, 1), (0, 3), (0, 7), (0, 19), (1, 0), (1, 4)]
    assert [(end.number, end.marks) for end in ends] == [(1, (1,))]


@pytest.mark.parametrize("r", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_new_holder_ends_with_the_parity_of_one_that_was_never_replaced(
    r: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows change before, during and after the stream; messages arrive in order, acknowledgements when they like."""
    monkeypatch.setattr(flusher, "STREAM_BYTES", 32)
    rng = np.random.default_rng(seed)
    source = Source(r=r, servers=2 + r)
    never = {h: Replica(source, h, ended=True) for h in range(1, 2 + r)}  # hear every flush from the beginning
    holders = {h: Replica(source, h, ended=True) for h in range(1, 2 + r)}
    channels: dict[int, list[Message]] = {h: [] for h in holders}
    numbers = {(h, g): 0 for h in holders for g in range(len(source.groups))}
    lost = 1

    def post(sends: list[Send]) -> None:
        for send in sends:
            channels[send.target.id].append(send.message)

    def flush() -> None:
        """What the never replaced hear is taken from the store, so that it does not depend on the flusher."""
        for g in range(len(source.groups)):
            part = source.store.take_flush(g, keep=True)
            before = source.flusher.groups[g].number
            post(source.flusher.flush(g))
            if source.flusher.groups[g].number > before:
                hear_directly(g, part)
        source.flusher._settle()

    def hear_directly(g: int, part: Any) -> None:
        for h in source.groups.holders(0, g):
            numbers[h, g] += 1
            counts, slots, deltas = part
            message = Flush(
                group=g, number=numbers[h, g], stable=0, marks=(0,), counts=counts, slots=slots, deltas=deltas
            )
            never[h].hear(message)

    def deliver(h: int) -> None:
        for answer in holders[h].hear(channels[h].pop(0)):
            if isinstance(answer, FlushAck):
                g = answer.group
                part = source.store.take_flush(g, keep=True)
                before = source.flusher.groups[g].number
                post(source.flusher.on_ack(h, answer))
                if source.flusher.groups[g].number > before:
                    hear_directly(g, part)
            else:
                source.flusher.on_stream_ack(h, answer.group)

    def stream() -> None:
        parts = {g: source.store.take_flush(g, keep=True) for g in range(len(source.groups))}
        before = [group.number for group in source.flusher.groups]
        post(source.flusher.stream(UNLIMITED))
        for g, group in enumerate(source.flusher.groups):
            if group.number > before[g]:
                hear_directly(g, parts[g])

    for seq in range(1, 121):
        if seq == 40:
            channels[lost].clear()
            holders[lost] = Replica(source, lost, ended=False)
            source.replace(lost)
        source.push(seq, rng.permutation(16)[: rng.integers(4)].tolist(), slots_small=[int(rng.integers(4))])
        if rng.random() < 0.4:
            flush()
        if seq > 40 and rng.random() < 0.3:
            stream()
        for h in rng.permutation(list(holders)).tolist():
            while channels[h] and rng.random() < 0.6:
                deliver(h)
    assert source.flusher.durable(0) > 0
    for _ in range(200):
        flush()
        stream()
        for h in holders:
            while channels[h]:
                deliver(h)
    assert holders[lost].machine.held[0, 0].ended
    assert source.flusher.durable(0) == 120
    for h, holder in holders.items():
        assert holder.parities() == never[h].parities()


def test_changes_of_rows_that_were_streamed_follow_and_of_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flusher, "STREAM_BYTES", 16)
    source = Source()
    source.push(1, [1, 3, 5, 7], slots_small=[2])
    source.flusher.flush_all()
    source.replace(1)
    assert [rows_in(m) for m in of_type(source.flusher.stream(UNLIMITED), Stream)] == [[(0, 1)], [(0, 3)]]
    source.push(2, [1, 7, 2], slots_small=[2])
    sends = source.flusher.flush_all()
    assert brief(sends) == [("Stream", 1, 0, 1), ("Flush", 2, 1, 1)]
    assert rows_in(of_type(sends, Stream)[0]) == [(0, 1)]
    # An untouched row that lies before what was streamed counts as streamed too: there was nothing to send.
    source.push(3, [9])
    assert brief(source.flusher.flush_all()) == [("Flush", 2, 1, 0)]


@pytest.mark.parametrize("r", [1, 2])
def test_a_row_that_was_never_flushed_is_not_streamed_as_touched(r: int) -> None:
    """Assigned, not flushed, and its server dies: who brings it back must find it untouched, as all others do."""
    source = Source(r=r, servers=4)
    source.push(1, [1])
    source.flusher.flush_all()
    for replica in range(1, 4):
        for ack in [FlushAck(group=g, number=1, staged=False) for g in range(len(source.flusher.coded))]:
            if replica in source.flusher.groups[ack.group].acked:
                source.flusher.on_ack(replica, ack)
    source.touch([3, 5])  # as by an assignment: no push says so
    source.replace(2)
    streamed = [row for m in of_type(source.flusher.stream(UNLIMITED), Stream) for row in rows_in(m)]
    assert streamed == ([(0, 1)] if r == 2 else [])
    told = {row for send in source.flusher.flush_all() if send.target == server(2, 1) for row in rows_in(send.message)}
    assert told >= ({(0, 3), (0, 5)} if r == 2 else set()), "they follow with the flush"


def test_a_stream_of_nothing_ends_at_once() -> None:
    source = Source()
    source.replace(1)
    sends = source.flusher.stream(UNLIMITED)
    assert brief(sends) == [("StreamEnd", 1, 0, 0)]
    assert of_type(sends, StreamEnd)[0].number == 0
    assert Replica(source, 1, ended=False).hear(of_type(sends, StreamEnd)[0]) == []


def test_with_two_holders_flushes_are_held_back_until_the_stream_has_ended() -> None:
    """Else the new holder would never be at the same flush as the other one."""
    source = Source(k=1, r=2, servers=3)
    source.push(1, [0])
    source.flusher.flush_all()
    source.ack(1, 0, 1)
    source.replace(1)
    # Everything is streamed, but S2 has not acknowledged flush 1.
    assert brief(source.flusher.stream(UNLIMITED)) == [("Stream", 1, 0, 1)]
    assert source.flusher.stream(UNLIMITED) == []
    source.push(2, [0, 1])
    assert source.flusher.flush_all() == []
    assert source.flusher.numbers() == [2], "what waits will be in the next one"
    assert not source.flusher.has_acked(source.flusher.numbers())
    ended = source.ack(2, 0, 1)
    assert brief(ended) == [("StreamEnd", 1, 0, 0)]
    assert [(end.number, end.marks) for end in of_type(ended, StreamEnd)] == [(1, (1,))]
    assert source.durable == 0, "S1 counts again, and has not said that it is there"
    source.ack(1, 0, 1)
    assert source.durable == 1
    assert brief(source.flusher.flush_all()) == [("Flush", 1, 0, 2), ("Flush", 2, 0, 2)]


def test_a_replacement_knows_nothing_until_its_holders_have_told_it() -> None:
    source = Source(spec=FlushSpec(pushes=1))
    for group in source.flusher.groups:
        group.active = False
    assert source.flusher.flush_all() == source.flusher.tick(100.0) == []
    source.flusher.activate(Have(group=0, number=7, marks=(4,), touched=np.zeros(1, np.uint64)), undo=None)
    assert source.durable == 0
    source.flusher.activate(Have(group=1, number=9, marks=(3,), touched=np.zeros(1, np.uint64)), undo=None)
    assert source.durable == 3
    assert [marks[0] for marks in source.flusher.applied] == [4, 3]
    flushes = of_type(source.push(5, [0]), Flush)
    assert [(flush.group, flush.number) for flush in flushes] == [(0, 8), (1, 10)]
