"""Goal: who is recalled is decided once and not forgotten, and a void parity is made of nothing but what came after.

Method: a coordinator, a source and a holder alone, each told by hand what the others would say.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from helpers import arrays, job, server, table

from regrow.core.coordinator import Coordinator
from regrow.core.effects import Delivered, Died, Joined, Send
from regrow.core.flusher import Budget, Flusher
from regrow.core.groups import Groups
from regrow.core.holder import Holder
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.messages import (
    Declare,
    Flush,
    FlushAck,
    KnownView,
    Mended,
    Message,
    Ready,
    Recovered,
    Register,
    Stream,
    StreamAsk,
    StreamBegin,
    StreamEnd,
    View,
)
from regrow.core.protection import CodedPartial
from regrow.store.memory import MemoryStore

WORKER = Identity(role="worker", id=0, incarnation=0)


def make_job(servers: int, *, k: int = 2, rings: int = 1) -> JobSpec:
    tables = (table("rows", rows=4 * servers * k, kind="sgd", k=k, r=1), table("dense", rows=servers, k=1, r=2))
    of = job(*tables, servers=servers, rings=rings)
    return msgspec.structs.replace(of, protection=CodedPartial(k=k, r=1, rings=rings))


# --- The coordinator ---


class Office:
    """A coordinator whose servers come when they are told to."""

    def __init__(self, of: JobSpec, *, term: int = 0) -> None:
        self.machine = Coordinator(servers=of.servers, term=term)
        self.job = of

    def hear(self, source: Identity, message: Message) -> None:
        self.machine.receive(Delivered(source=source, message=message))

    def come(self, peer: Identity, known: KnownView | None = None) -> None:
        self.machine.receive(Joined(peer=peer))
        self.hear(peer, Register(address="", known=known))
        if known is None:
            self.hear(peer, Ready(rows=1, memory_bytes=1))

    def begin(self) -> None:
        self.hear(WORKER, Declare(job=self.job))
        for index in range(self.job.servers):
            self.come(server(index))

    def die(self, *peers: Identity) -> None:
        for peer in peers:
            self.machine.receive(Died(peer=peer))

    @property
    def view(self) -> View:
        assert self.machine.view is not None
        return self.machine.view

    @property
    def recalled(self) -> list[int]:
        return [member.id for member in self.view.servers if member.recalled]

    @property
    def recovering(self) -> list[int]:
        return [member.id for member in self.view.servers if member.recovering]


def test_one_loss_recalls_nobody_and_two_of_a_stripe_both() -> None:
    office = Office(make_job(3))
    office.begin()
    office.die(server(1))
    office.come(server(1, 1))
    assert (office.recovering, office.recalled) == ([1], [])
    office.die(server(2))  # the recovery of S1 begins again
    office.come(server(1, 2))
    office.come(server(2, 1))
    assert (office.recovering, office.recalled) == ([1, 2], [1, 2])
    office.hear(server(1, 2), Recovered())
    assert (office.recovering, office.recalled) == ([2], [2])
    office.hear(server(2, 1), Recovered())
    assert (office.recovering, office.recalled) == ([], [])


def test_who_is_not_back_stays_recalled_and_so_is_who_dies_meanwhile() -> None:
    """S1 and S5 have no stripe in common: but for what is under way, parities would bring both back."""
    office = Office(make_job(8))
    office.begin()
    office.die(server(1), server(2))
    office.come(server(1, 1))
    office.come(server(2, 1))
    assert office.recalled == [1, 2]
    office.hear(server(2, 1), Recovered())
    office.die(server(5))
    office.come(server(1, 2))
    office.come(server(5, 1))
    assert office.recalled == [1, 5]


def test_another_coordinator_learns_who_is_recalled() -> None:
    office = Office(make_job(8))
    office.begin()
    office.die(server(1), server(2))
    office.come(server(1, 1))
    office.come(server(2, 1))
    known = KnownView(epoch=office.view.epoch, servers=office.view.servers, job=office.job)
    after = Office(office.job, term=1)
    living = [member.identity for member in known.servers if member.id != 1]
    for peer in living:
        after.come(peer, known)
    after.die(server(1, 1))
    after.come(server(1, 2))
    after.come(server(2, 2))  # the other one begins again with it
    assert after.recalled == [1, 2]


# --- A holder ---


class Ring:
    """Three servers: S2 holds the parity of S0 and S1, which is made void because S1 was recalled."""

    def __init__(self) -> None:
        self.job = make_job(3)
        self.groups = Groups(self.job)
        self.store = MemoryStore(self.job, 2)
        self.holder = Holder(server=2, groups=self.groups, store=self.store, marks=1, ended=True, keeps_last=False)
        self.peers = {index: server(index) for index in range(3)}
        self.holder.know(peers=self.peers, recovering=[], replaced=[])
        self.g = [self.groups.list.index((2, 1)), self.groups.list.index((1, 1))]  # of S0 and S1 at S2

    def recall(self, incarnation: int) -> list[Any]:
        self.peers = self.peers | {1: server(1, incarnation)}
        effects = self.holder.know(peers=self.peers, recovering=[1], replaced=[1], recalled=[1])
        return [(effect.target.id, effect.message) for effect in effects if isinstance(effect, Send)]

    def make_part(self, source: int, value: float) -> dict[str, Any]:
        """One row of the source, that S2 has in the parity of its first block."""
        floats = self.store.record_floats(0)
        deltas = np.full(floats, value, np.float32)
        return {**arrays(counts=[1, 0], slots=[source]), "deltas": deltas}

    def read(self) -> list[float]:
        out = np.empty(self.store.record_floats(0), np.float32)
        self.store.parity_read(0, np.array([1, 0], np.int32), np.zeros(1, np.uint32), out)
        return out.tolist()

    def flush(self, number: int, value: float) -> list[Any]:
        flush = Flush(group=self.g[0], number=number, stable=0, marks=(number,), **self.make_part(0, value))
        return [send.message for send in self.holder.on_flush(self.peers[0], flush)]


def test_a_void_parity_has_only_what_was_streamed_after_it_was_asked_for() -> None:
    ring = Ring()
    assert [type(message) for message in ring.flush(1, 4.0)] == [FlushAck]
    assert any(ring.read())
    asked = [(who, message) for who, message in ring.recall(1) if isinstance(message, StreamAsk)]
    assert [(who, ask.group, ask.number) for who, ask in asked] == [(0, ring.g[0], 1)]
    assert not any(ring.read()) and not ring.holder.whole
    assert ring.flush(2, 5.0) == [], "it was sent before S0 heard of it"
    assert not any(ring.read())
    ring.recall(2)  # once more, before anybody has answered
    source = ring.peers[0]
    ring.holder.on_stream_begin(source, StreamBegin(group=ring.g[0], number=1))
    assert ring.holder.on_stream(source, Stream(group=ring.g[0], **ring.make_part(0, 6.0))) == []
    assert not any(ring.read()), "the first question is over"
    ring.holder.on_stream_begin(source, StreamBegin(group=ring.g[0], number=2))
    ring.holder.on_stream(source, Stream(group=ring.g[0], **ring.make_part(0, 8.0)))
    assert any(ring.read())
    with pytest.raises(ValueError, match="nobody asked for it"):
        ring.holder.on_stream_begin(source, StreamBegin(group=ring.g[0], number=3))


def test_a_recalled_server_hears_when_its_parities_are_whole() -> None:
    ring = Ring()
    ring.recall(1)
    nothing = {**arrays(counts=[0, 0], slots=[]), "deltas": np.zeros(0, np.float32)}
    ring.holder.on_stream_begin(ring.peers[0], StreamBegin(group=ring.g[0], number=1))
    told = []
    for source in (1, 0):
        end = StreamEnd(group=ring.g[source], number=1, marks=(3,), **nothing)
        sends = ring.holder.on_stream_end(ring.peers[source], end)
        told += [(send.target, send.message.left) for send in sends if isinstance(send.message, Mended)]
    assert told == [(server(1, 1), 1), (server(1, 1), 0)]
    assert ring.holder.whole and ring.holder.tell_mended() == []


# --- A source ---


def test_a_source_streams_from_the_beginning_to_a_holder_that_asks() -> None:
    of = make_job(3)
    groups, store = Groups(of), MemoryStore(of, 0)
    spec = of.protection.flush
    source = Flusher(server=0, groups=groups, store=store, marks=1, spec=spec, keeps_undo=False)
    source.know({index: server(index) for index in range(3)}, replaced=[])
    g = groups.list.index((2, 1))
    store.update(np.array([1, 0], np.int32), np.zeros(1, np.uint32), np.ones(2, np.float32), 1)
    source.applied = [[1] for _ in source.applied]
    source.flush_all()
    source.on_ack(2, FlushAck(group=g, number=1, staged=False))
    assert not source.is_streaming
    (begin,) = source.on_stream_ask(server(2), StreamAsk(group=g, number=7))
    assert (begin.target, begin.message.group, begin.message.number) == (server(2), g, 7)
    messages = [send.message for send in source.stream(Budget(0))]
    assert [type(message) for message in messages] == [Stream, StreamEnd]
    assert (messages[0].slots.tolist(), messages[1].number, messages[1].marks) == ([0], 1, (1,))
    with pytest.raises(ValueError, match="holds nothing"):
        source.on_stream_ask(server(1), StreamAsk(group=g, number=8))


def test_a_row_is_streamed_only_once_something_of_it_was_published() -> None:
    """If a new holder knew it as touched, and nothing else, a successor would not take its first weights again."""
    of = make_job(3)
    groups, store = Groups(of), MemoryStore(of, 0)
    source = Flusher(server=0, groups=groups, store=store, marks=1, spec=of.protection.flush, keeps_undo=False)
    g = groups.list.index((1, 2))
    source.know({index: server(index) for index in range(3)}, replaced=[1])
    store.assign_untouched(np.array([0, 1], np.int32), np.zeros(1, np.uint32), np.ones(2, np.float32))
    assert store.pending_rows(g) == 1
    sent = [send.message for send in source.stream(Budget(0)) if send.message.group == g]
    assert [type(message) for message in sent] == [StreamEnd], "S2 lives, so nothing was flushed for its sake"
    source.applied = [[1] for _ in source.applied]
    flushes = [send for send in source.flush(g) if isinstance(send.message, Flush)]
    assert [(send.target.id, send.message.slots.tolist()) for send in flushes] == [(1, [0]), (2, [0])]
