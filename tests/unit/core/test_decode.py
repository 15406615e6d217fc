"""Goal: a parity holder's bytes change by whole flushes in order and by nothing else, and what it decodes is the lost
row, bit for bit, whatever arrives in between.

Method: real stores for every server of a small ring. What members changed and flushed is delivered to a real holder in
every order that links allow: for two and three members all of them are enumerated. After everything that must be
refused the parities are compared with those before.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import COORDINATOR, arrays, counts_of, job, server, table
from holders import UNLIMITED, Bench, parities, records, ring_job, sent, update

from regrow.core import decode
from regrow.core.decode import SWEEPS_UNDERWAY_MAX
from regrow.core.door import ServerDoor
from regrow.core.effects import Delivered, Refuse, Send, Tick
from regrow.core.groups import Groups
from regrow.core.holder import HOT_FLUSHES
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.messages import (
    Fault,
    Have,
    Member,
    Message,
    Restored,
    RestoredAck,
    Snap,
    SnapAsk,
    SyndromeAsk,
    Tail,
    View,
)
from regrow.core.protection import FlushSpec
from regrow.store.memory import MemoryStore

# --- One member is lost ---

LOST = 0  # S0, member 0 of the stripes
ROWS = [0, 1, 2]  # blocks of it that are decoded; the others stay untouched


def orders(living: int) -> Iterator[tuple[str, ...]]:
    """All merges of the members' messages: each sends two flushes and one answer, in any order of its own."""
    own = ["FFS", "FSF", "SFF"]
    for choice in itertools.product(own, repeat=living):
        for order in set(itertools.permutations([m for m in range(living) for _ in range(3)])):
            queues = [deque(each) for each in choice]
            yield tuple(f"{queues[m].popleft()}{m}" for m in order)


def lost_member(k: int, *, touched: bool) -> tuple[Bench, bytes]:
    """A holder whose member 0 is lost, and the bytes of what it should decode. Other members may be untouched yet."""
    bench = Bench(ring_job(k, 1))
    update(bench.stores[LOST], [block * k for block in ROWS], 3.0)
    bench.hear(bench.flush(LOST), LOST)
    for member in range(1, k) if touched else ():
        update(bench.stores[member], [block * k + member for block in (0, 2)], member)
        bench.hear(bench.flush(member), member)
    expected = bench.published(LOST, [block * k for block in ROWS]).tobytes()
    update(bench.stores[LOST], [0], 9.0)  # never flushed: lost with it
    return bench, expected


@pytest.mark.parametrize("touched", [False, True])
@pytest.mark.parametrize("k", [2, 3])
def test_a_lost_row_is_decoded_whatever_arrives_in_between(k: int, touched: bool) -> None:
    """A flush is of rows that are asked for and of others; between flush and answer a member has changes of its own."""
    count = 0
    for order in orders(k - 1):
        bench, expected = lost_member(k, touched=touched)
        (have,) = sent(bench.lose(LOST), Have)
        assert (have.number, have.marks, have.touched.tolist()) == (1, (1,), [0b111])
        sends = bench.holder.decoder.sweep(UNLIMITED)
        asks = {send.target.id: send.message for send in sends if isinstance(send.message, SnapAsk)}
        assert sorted(asks) == (list(range(1, k)) if touched else [])
        for event in order:
            kind, member = event[0], int(event[1]) + 1
            update(bench.stores[member], [block * k + member for block in (1, 2, 3)], 5.0 * count)
            if kind == "F":
                sends += bench.hear(bench.flush(member), member)
            elif member in asks:
                sends += bench.holder.decoder.on_snap(server(member), bench.snap(member, asks[member]))
        restored = sent(sends, Restored)
        assert [(m.counts.tolist(), m.slots.tolist()) for m in restored] == [([3], [block * k for block in ROWS])]
        assert restored[0].relatives.tobytes() == expected, order
        count += 1
    assert count == {2: 3, 3: 9 * 20}[k]


def test_flushes_before_the_loss_and_answers_of_a_recovery_before_do_not_disturb() -> None:
    bench, expected = lost_member(3, touched=True)
    bench.lose(LOST)
    old = {send.target.id: send.message for send in bench.holder.decoder.sweep(UNLIMITED)}
    stale = {member: bench.snap(member, ask) for member, ask in old.items()}
    assert bench.holder.decoder.on_snap(server(1), stale[1]) == []
    bench.lose(LOST)  # its successor died too
    assert bench.holder.decoder.on_snap(server(2), stale[2]) == []
    for member in (1, 2):
        update(bench.stores[member], [member, 6 + member], 7.0)
        bench.hear(bench.flush(member), member)
    new = {send.target.id: send.message for send in bench.holder.decoder.sweep(UNLIMITED)}
    sends = [s for m, ask in new.items() for s in bench.holder.decoder.on_snap(server(m), bench.snap(m, ask))]
    (send,) = [s for s in sends if isinstance(s.message, Restored)]
    assert send.target == server(LOST, 2)
    assert send.message.relatives.tobytes() == expected


def test_an_answer_that_nobody_asked_for_is_refused() -> None:
    bench, expected = lost_member(3, touched=True)
    bench.lose(LOST)
    asks = {send.target.id: send.message for send in bench.holder.decoder.sweep(UNLIMITED)}
    decoder = bench.holder.decoder
    good = bench.snap(1, asks[1])
    for source, wrong in [
        (server(3), good),
        (server(LOST, 1), good),
        (server(1), Snap(request=good.request, relatives=good.relatives[:-1])),
        (server(1), Snap(request=good.request, relatives=good.relatives[:0])),
    ]:
        with pytest.raises(ValueError, match="nobody asked for"):
            decoder.on_snap(source, wrong)
    assert decoder.on_snap(server(1), Snap(request=999, relatives=good.relatives)) == []
    assert decoder.on_snap(server(1), good) == []
    with pytest.raises(ValueError, match="nobody asked for"):
        decoder.on_snap(server(1), good)
    (restored,) = sent(decoder.on_snap(server(2), bench.snap(2, asks[2])), Restored)
    assert restored.relatives.tobytes() == expected


# --- Order and pace ---


def fault(*slots: int) -> Fault:
    return Fault(**arrays(counts=[len(slots)], slots=list(slots)))


def decoded(bench: Bench, sends: list[Send]) -> list[Restored]:
    """Answers all asks at once; returns what was restored."""
    found = sent(sends, Restored)
    for send in sends:
        if isinstance(send.message, SnapAsk):
            member = send.target.id
            found += decoded(bench, bench.holder.decoder.on_snap(send.target, bench.snap(member, send.message)))
    return found


def test_a_fault_comes_before_the_sweep_and_is_served_once() -> None:
    bench, expected = lost_member(2, touched=True)
    bench.lose(LOST)
    decoder, owner = bench.holder.decoder, server(LOST, 1)
    (first,) = decoded(bench, decoder.on_fault(owner, fault(2)))
    assert (first.request, first.slots.tolist()) == (0, [2])
    floats = bench.stores[0].record_floats(0) * 4
    assert first.relatives.tobytes() == expected[floats : 2 * floats]
    for again in (fault(2), fault(2, 2), fault(6), fault(1), fault()):  # sent; untouched; not of this holder; nothing
        assert decoder.on_fault(owner, again) == []
    under_way = decoder.on_fault(owner, fault(4, 4))
    assert len(under_way) == 1
    assert decoder.on_fault(owner, fault(4)) == []
    (rest,) = decoded(bench, decoder.sweep(UNLIMITED))
    assert rest.slots.tolist() == [0], "one was sent, one is under way, the others were never touched"
    assert rest.request > 0
    assert [m.slots.tolist() for m in decoded(bench, under_way)] == [[4]]
    assert decoder.faults == 2
    assert decoder.sweep(UNLIMITED) == []


@pytest.mark.parametrize("asked", ["before the view", "while it was swept"])
def test_a_row_that_somebody_waits_for_is_begun_again_when_a_view_drops_it(asked: str) -> None:
    """Two members are lost; one is back first. What was being decoded from syndromes is decoded from its rows then, at
    once and not when the sweep comes there: whoever waits does not ask twice."""
    bench = Bench(ring_job(2, 2))  # S3 has parity 0 of the stripes of S1 and S2
    groups = {1: bench.groups.list.index((2, 2)), 2: bench.groups.list.index((1, 2))}
    for source, group in groups.items():
        update(bench.stores[source], [2 * block + source - 1 for block in ROWS], source)
        bench.hear(bench.flush(source, group=group), source)
    decoder = bench.holder.decoder
    peers = {**bench.peers, 1: server(1, 1), 2: server(2, 1)}
    decoder.know(peers=peers, recovering=frozenset({1, 2}), changed={1, 2})
    if asked == "while it was swept":
        assert len(sent(decoder.sweep(UNLIMITED), SyndromeAsk)) == 1
    fault = Fault(**arrays(counts=[1], slots=[2]))
    asks = sent(decoder.on_fault(server(1, 1), fault), SyndromeAsk)
    assert len(asks) == (asked == "before the view")
    decoder.know(peers=peers, recovering=frozenset({1}), changed=set())
    (again,) = sent(decoder.release_faults(), SnapAsk)
    assert 3 in again.slots.tolist(), "the row of S2 in the same stripe"
    assert decoder.places_begun_again == again.slots.size
    decoder.know(peers=peers, recovering=frozenset(), changed=set())
    assert decoder.release_faults() == [] and not decoder.sweeping, "nothing is lost any more"


def test_faults_of_whoever_is_not_recovering_are_ignored() -> None:
    bench, _ = lost_member(2, touched=True)
    assert bench.holder.decoder.on_fault(server(LOST), fault(0)) == []
    bench.lose(LOST)
    assert bench.holder.decoder.on_fault(server(1), fault(1)) == []
    bench.holder.know(peers=bench.peers, recovering=[], replaced=[])
    assert bench.holder.decoder.on_fault(server(LOST, 1), fault(0)) == []
    assert bench.holder.decoder.sweep(UNLIMITED) == []


def test_what_is_under_way_is_bounded_by_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "SWEEP_BYTES", 32)  # two rows
    bench = Bench(ring_job(2, 1, rows=2 * 3 * 20))
    touched = [0, 4, 6, 10, 12, 20, 22, 38]
    update(bench.stores[LOST], touched)
    bench.hear(bench.flush(LOST), LOST)
    bench.lose(LOST)
    decoder = bench.holder.decoder
    found: list[int] = []
    waiting: deque[int] = deque()
    while True:
        for restored in decoded(bench, decoder.sweep(UNLIMITED)):
            assert 0 < restored.slots.size <= 2
            found += restored.slots.tolist()
            waiting.append(restored.request)
        assert len(waiting) <= SWEEPS_UNDERWAY_MAX
        assert decoder.sweep(UNLIMITED) == []
        if not waiting:
            break
        decoder.on_restored_ack(server(LOST), waiting[0])  # of another incarnation: does not count
        assert decoder.sweep(UNLIMITED) == []
        decoder.on_restored_ack(server(LOST, 1), waiting.popleft())
    assert found == touched, "in order, each once, and no row that was never touched"
    assert decoder.rows_decoded == len(touched)


# --- Several are lost: whole servers, messages in any order that links allow ---


class Ring:
    """Servers of one view, and a link between any two."""

    def __init__(self, of: JobSpec, seed: int) -> None:
        self.job = of
        self.rng = np.random.default_rng(seed)
        self.members = [Member(id=s, incarnation=0, address="") for s in range(of.servers)]
        self.links: dict[tuple[Identity, Identity], deque[Message]] = {}
        self.machines = [self.made(s) for s in range(of.servers)]
        self.now = 0.0
        self.epoch = 0
        self.refused: list[Refuse] = []
        self.view()

    def made(self, index: int) -> ServerDoor:
        identity = server(index, self.members[index].incarnation)
        return ServerDoor(identity=identity, build_store=MemoryStore, reply_bytes_max=1 << 20)

    def view(self) -> None:
        self.epoch += 1
        view = View(epoch=self.epoch, servers=tuple(self.members), job=self.job)
        for machine in self.machines:
            self.links.setdefault((COORDINATOR, machine.identity), deque()).append(view)

    def lose(self, *servers: int) -> None:
        for index in servers:
            old = self.members[index]
            self.members[index] = Member(id=index, incarnation=old.incarnation + 1, address="", recovering=True)
            over = self.machines[index].identity
            self.links = {pair: queue for pair, queue in self.links.items() if over not in pair}
            self.machines[index] = self.made(index)
        self.view()

    def run(self, events: int | None = None) -> None:
        """Delivers so many messages in a random order; None: until time and messages bring no news."""
        quiet = 0
        while (events is None and quiet < 4) or (events is not None and events > 0):
            ready = sorted((pair for pair, queue in self.links.items() if queue), key=str)
            if not ready or self.rng.random() < 0.02:
                self.now += 1.0
                quiet += not ready
                for machine in self.machines:
                    self.take(machine, machine.receive(Tick(now=self.now)))
            else:
                quiet = 0
                source, target = ready[self.rng.integers(len(ready))]
                message = self.links[source, target].popleft()
                machine = self.machines[target.id]
                self.take(machine, machine.receive(Delivered(source=source, message=message)))
            events = None if events is None else events - 1

    def take(self, machine: ServerDoor, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Refuse):
                self.refused.append(effect)
            elif isinstance(effect, Send) and effect.target.role == "server" and not self.is_over(effect.target):
                self.links.setdefault((machine.identity, effect.target), deque()).append(effect.message)

    def is_over(self, peer: Identity) -> bool:
        return self.members[peer.id].incarnation > peer.incarnation

    def store(self, index: int) -> MemoryStore:
        store = self.machines[index].server.store
        assert isinstance(store, MemoryStore)
        return store

    def change(self) -> None:
        """Some rows of every server that was never lost, and a flush of some."""
        for index, machine in enumerate(self.machines):
            if machine.server is None or machine.identity.incarnation:
                continue
            slots = self.rng.permutation(self.store(index).slots(0))[:3].tolist()
            update(self.store(index), slots, float(self.rng.standard_normal()))
            if self.rng.random() < 0.5:
                self.take(machine, machine.server.flusher.flush_all())

    def check_parities(self) -> None:
        """Every parity is that of the rows as they are."""
        for index in range(self.job.servers):
            fresh = MemoryStore(self.job, index)
            groups = Groups(self.job)
            for g in range(len(groups)):
                for source in groups.sources(index, g):
                    j = groups.member(0, g)
                    assert j is not None
                    slots = np.arange(j, fresh.slots(0), self.job.tables[0].k, dtype=np.uint32)
                    bits = np.unpackbits(self.store(source).touched(0).view(np.uint8), bitorder="little")
                    slots = slots[bits[slots].astype(bool)]
                    values = np.empty(slots.size * fresh.record_floats(0), np.float32)
                    self.store(source).published(counts_of(1, 0, slots.size), slots, values)
                    fresh.parity_apply(source, np.array([slots.size], np.int32), slots, values)
            assert parities(self.store(index), self.job) == parities(fresh, self.job), index


CODES = [(2, 1, 3), (3, 1, 5), (1, 2, 3), (2, 2, 4), (3, 2, 6)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("k", "r", "servers"), CODES)
def test_r_lost_servers_come_back_bit_for_bit_while_the_others_change(k: int, r: int, servers: int, seed: int) -> None:
    of = ring_job(k, r, servers=servers, rows=6 * k * servers, flush=FlushSpec(pushes=1 << 20))
    ring = Ring(of, seed)
    ring.run()
    for _ in range(6):
        ring.change()
        ring.run(events=10)
    ring.run()
    ring.check_parities()
    lost = sorted(ring.rng.permutation(servers)[:r].tolist())
    expected = {index: records(ring.store(index)) for index in lost}
    ring.lose(*lost)
    for _ in range(12):
        ring.change()
        ring.run(events=8)
    ring.run()
    assert ring.refused == []
    assert all(machine.recovered for machine in ring.machines)
    for index in lost:
        ring.store(index).fill(1 << 20)
        assert records(ring.store(index)).tobytes() == expected[index].tobytes()
    ring.check_parities()


@pytest.mark.parametrize("seed", range(6))
def test_holders_agree_before_they_decode(seed: int) -> None:
    """A flush that reached only one of two holders before its source died is in both afterwards, or in the row of
    neither: they end at the same number, and what comes back is what that flush says."""
    of = ring_job(2, 2, flush=FlushSpec(pushes=1 << 20))
    ring = Ring(of, seed)
    ring.run()
    history = {0: records(ring.store(0)).tobytes()}
    for number in range(1, 5):
        update(ring.store(0), [0, 1, 2, 3, int(ring.rng.integers(4, 8))], number)
        ring.take(ring.machines[0], ring.machines[0].server.flusher.flush_all())
        history[number] = records(ring.store(0)).tobytes()
    ring.run(events=int(ring.rng.integers(2, 9)))
    ring.lose(0)
    ring.run()
    assert ring.refused == []
    for g in range(len(Groups(of))):
        holders = Groups(of).holders(0, g)
        numbers = {ring.machines[h].server.holder.held[0, g].number for h in holders}
        assert len(numbers) == 1
        (number,) = numbers
        ring.store(0).fill(1 << 20)
        j = Groups(of).member(0, g)
        then = np.frombuffer(history[number], np.float32).reshape(ring.store(0).slots(0), -1)
        assert records(ring.store(0))[j::2].tobytes() == then[j::2].tobytes()
    ring.check_parities()


def test_stale_and_senseless_messages_between_holders() -> None:
    ring = Ring(ring_job(2, 2, flush=FlushSpec(pushes=1 << 20)), seed=0)
    ring.run()
    ring.change()
    ring.run()
    machine = ring.machines[2]
    before = parities(ring.store(2), ring.job)
    part = arrays(counts=[1], slots=[0], deltas=[1.0] * 4)
    ask: dict[str, Any] = dict(request=1, k=2, q=0, unknown=(0,), incarnations=(0,), **arrays(counts=[1], blocks=[0]))
    tail: dict[str, Any] = dict(source=0, incarnation=0, group=1, number=1, stable=0, marks=(1,), **part)
    silent = [
        Tail(**tail),  # nobody was replaced: it has agreed with itself
        SyndromeAsk(**ask),  # nobody is recovering
        Snap(request=5, **arrays(relatives=[1.0] * 4)),
        RestoredAck(request=3),
        fault(0),
    ]
    for message in silent:
        assert machine.receive(Delivered(source=server(3), message=message)) == [], message
    refused = [
        Tail(**tail | {"group": 9}),
        Tail(**tail | {"source": 2}),
        SyndromeAsk(**ask | arrays(blocks=[99])),
        SyndromeAsk(**ask | arrays(counts=[2], blocks=[1, 1])),
        SyndromeAsk(**ask | arrays(counts=[1, 0])),
        SyndromeAsk(**ask | arrays(counts=[0], blocks=[])),
        SyndromeAsk(**ask | {"k": 3}),
        SyndromeAsk(**ask | {"q": 2}),
        SyndromeAsk(**ask | {"unknown": (2,)}),
        SyndromeAsk(**ask | {"incarnations": ()}),
        fault(99),
        SnapAsk(request=1, **arrays(counts=[1], slots=[99])),
        SnapAsk(request=1, **arrays(counts=[-1], slots=[0])),
    ]
    for message in refused:
        effects = machine.receive(Delivered(source=server(3), message=message))
        assert [type(effect) for effect in effects] == [Refuse], (message, effects)
        assert effects[0].reason.startswith(type(message).__name__)
    assert parities(ring.store(2), ring.job) == before


# --- In which order ---


def test_rows_of_the_last_flushes_are_swept_first_and_the_rest_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: what workers want soon comes soon, and nothing is left out or sent twice. Method: every row is changed,
    then some in each of the flushes that count as late; batches of a few rows; one hot row is asked for before."""
    of = ring_job(2, 1, rows=150)
    bench = Bench(of)
    slots = np.arange(0, bench.stores[0].slots(0), 2, dtype=np.uint32)  # member 0 of every block
    hot = [slots[[20, 3]], slots[[7]], slots[[3, 21]], slots[[11]]]
    assert len(hot) == HOT_FLUSHES
    for changed in [slots, slots[[1]], *hot]:
        update(bench.stores[0], changed.tolist())
        bench.hear(bench.flush(0), 0)
    monkeypatch.setattr(decode, "SWEEP_BYTES", 4 * 4 * bench.stores[0].record_floats(0))
    bench.lose(0)
    decoder = bench.holder.decoder
    asked = Fault(counts=counts_of(1, 0, 1), slots=slots[[11]])
    ask = sent(decoder.on_fault(bench.peers[0], asked), SnapAsk)[0]
    order = [rows.slots for rows in sent(decoder.on_snap(bench.peers[1], bench.snap(1, ask)), Restored)]
    while sends := decoder.sweep(UNLIMITED):
        order += [rows.slots for rows in sent(sends, Restored)]
        for rows in sent(sends, Restored):
            decoder.on_restored_ack(bench.peers[0], rows.request)
    blocks = (np.concatenate(order) // 2).tolist()
    assert blocks[:5] == [11, 3, 7, 20, 21]
    assert blocks[5:] == [block for block in range(slots.size) if block not in blocks[:5]]


def test_copies_are_swept_before_all_other_rows() -> None:
    of = job(table("rows", rows=60, k=2, r=1), table("dense", rows=9, k=1, r=1), servers=3)
    groups = Groups(of)
    decoder = Bench(of).holder.decoder
    peers = {s: server(s, int(s == 0)) for s in range(3)}
    decoder.know(peers=peers, recovering=frozenset({0, 1}), changed={0, 1})
    assert len(groups) > 1
    assert [key[0] for key in decoder._sweeps] == sorted(key[0] for key in decoder._sweeps)
