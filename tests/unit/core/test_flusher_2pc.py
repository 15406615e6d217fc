"""Goal: in two phases, what is staged counts only when it is committed, and staging waits for no commit.

Method: as for flushes that are applied at once (test_flusher.py): by hand, and against real parities.
"""

from __future__ import annotations

import numpy as np
import pytest
from flushers import UNLIMITED, Replica, Source, brief, of_type
from helpers import arrays, counts_of

from regrow.core import flusher
from regrow.core.effects import Send
from regrow.core.flusher import FLUSHES_UNACKED_MAX
from regrow.core.messages import Flush, FlushAck, FlushCommit, StreamEnd
from regrow.core.protection import FlushSpec


def test_a_staged_flush_counts_only_when_it_was_committed() -> None:
    source = Source(spec=FlushSpec(pushes=1, commit="2pc"))
    sends = source.push(1, [0, 1])
    assert [(flush.number, flush.staged) for flush in of_type(sends, Flush)] == [(1, True), (1, True)]
    source.ack(1, 0, 1, staged=True)
    assert source.flusher.find_prepared(0) == 0
    source.ack(2, 1, 1, staged=True)
    assert (source.flusher.find_prepared(0), source.durable) == (1, 0)
    # Holders do not have it in their parity, so it is not in what they are told of a row.
    part = arrays(counts=[1, 0], slots=[1])
    assert not source.flusher.snapshot(1, part["counts"], part["slots"]).any()
    commits = source.flusher.commit(0, 1)
    assert brief(commits) == [("FlushCommit", 1, 0, 0), ("FlushCommit", 2, 1, 0)]
    assert source.flusher.snapshot(1, part["counts"], part["slots"]).any()
    source.ack(1, 0, 1)
    assert source.durable == 0
    source.ack(2, 1, 1)
    assert source.durable == 1
    assert source.flusher.commit(0, 1) == []


def test_a_flush_with_pushes_of_two_workers_waits_for_both() -> None:
    source = Source(workers=2, spec=FlushSpec(pushes=2, commit="2pc"))
    source.push(1, [0], worker=0)
    source.push(1, [1], worker=1)
    assert source.flusher.commit(1, 1) == []
    assert [commit.number for commit in of_type(source.flusher.commit(0, 1), FlushCommit)] == [1, 1]


def test_what_is_staged_and_not_committed_keeps_no_flush_back() -> None:
    """Else two servers with the pushes of two workers in opposite order wait for each other for ever."""
    source = Source(workers=2, spec=FlushSpec(pushes=1, commit="2pc"))
    for seq in range(1, FLUSHES_UNACKED_MAX + 2):
        assert len(source.push(seq, [0, 1], worker=0)) == 2
        source.ack(1, 0, seq, staged=True)
        source.ack(2, 1, seq, staged=True)
    assert source.flusher.find_prepared(0) == FLUSHES_UNACKED_MAX + 1
    assert source.durable == 0
    # What a holder has not even staged is bounded as ever.
    for seq in range(1, FLUSHES_UNACKED_MAX + 1):
        assert len(source.push(seq, [0, 1], worker=1)) == 2
    assert source.push(FLUSHES_UNACKED_MAX + 1, [0, 1], worker=1) == []


def test_two_workers_whose_pushes_come_in_opposite_order_both_get_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """Server 0 has the pushes of W0 and lacks those of W1, server 1 the other way round; then the rest comes."""
    monkeypatch.setattr(flusher, "FLUSHES_UNACKED_MAX", 1)
    sources = [Source(workers=2, spec=FlushSpec(pushes=1, commit="2pc")) for _ in range(2)]

    def answer(source: Source, sends: list[Send]) -> None:
        for send in sends:
            if isinstance(send.message, Flush | FlushCommit):
                staged = isinstance(send.message, Flush)
                source.ack(send.target.id, send.message.group, send.message.number, staged=staged)

    for first in (True, False):
        for s, source in enumerate(sources):
            answer(source, source.push(1, [0, 1], worker=s if first else 1 - s))
    for worker in range(2):
        assert all(source.flusher.find_prepared(worker) == 1 for source in sources), "the worker may commit"
        for source in sources:
            answer(source, source.flusher.commit(worker, 1))
    assert [source.flusher.durable(worker) for source in sources for worker in range(2)] == [1] * 4


def test_what_is_loaded_is_committed_without_a_worker() -> None:
    source = Source(spec=FlushSpec(commit="2pc"))
    source.touch([0])
    assert brief(source.flusher.flush_all()) == [("Flush", 2, 1, 1), ("FlushCommit", 2, 1, 0)]


def test_what_is_durable_needs_no_commit() -> None:
    """Its worker may have forgotten it: what all new holders lack counts as durable, and no commit ever follows."""
    source = Source(k=1, servers=2, workers=2, spec=FlushSpec(pushes=1, commit="2pc"))
    source.replace(1)
    assert source.push(1, [0], worker=0) == []
    assert source.durable == 1
    finish_stream(source, holder=1, group=0)
    (flush,) = of_type(source.push(1, [0], worker=1), Flush)
    assert flush.marks == (1, 1)
    source.ack(1, 0, flush.number, staged=True)
    assert brief(source.flusher.commit(1, 1)) == [("FlushCommit", 1, 0, 0)]


def test_what_waits_for_a_push_of_another_worker_goes_when_that_is_durable() -> None:
    """The commit of W1 is here; the push of W0 is durable in group 0, and in group 1 once its holder is replaced."""
    source = Source(workers=2, spec=FlushSpec(pushes=1, commit="2pc"))
    source.replace(1)
    source.push(1, [0, 1], worker=0)
    source.ack(2, 1, 1, staged=True)
    finish_stream(source, holder=1, group=0)
    source.push(1, [0, 1], worker=1)
    source.ack(1, 0, 2, staged=True)
    source.ack(2, 1, 2, staged=True)
    assert source.flusher.commit(1, 1) == [] and source.durable == 0
    source.replace(2)
    assert source.durable == 1
    assert ("FlushCommit", 1, 0, 0) in brief(finish_stream(source, holder=2, group=1))


def finish_stream(source: Source, *, holder: int, group: int) -> list[Send]:
    """Streams to the end, whose acknowledgement brings what is returned."""
    sends = source.flusher.stream(UNLIMITED)
    while not (ends := of_type(sends, StreamEnd)):
        source.flusher.on_stream_ack(holder, group)
        sends = source.flusher.stream(UNLIMITED)
    return source.ack(holder, group, ends[0].number)


def test_a_stream_takes_what_is_staged_along_and_commits_it_elsewhere() -> None:
    source = Source(k=1, r=2, servers=3, spec=FlushSpec(pushes=1, commit="2pc"))
    replica = {h: Replica(source, h, ended=h == 2) for h in (1, 2)}
    flushes = [send for send in source.push(1, [0, 5]) if send.target.id == 2]
    source.replace(1)
    for send in flushes:
        for answer in replica[2].hear(send.message):
            source.flusher.on_ack(2, answer)
    sends = source.flusher.stream(UNLIMITED)
    sends += source.flusher.stream(UNLIMITED)
    assert [name for name, *_ in brief(sends)] == ["Stream", "FlushCommit"]
    ends: list[Send] = []
    for send in sends:
        for answer in replica[send.target.id].hear(send.message):
            if isinstance(answer, FlushAck):
                ends += source.flusher.on_ack(send.target.id, answer)
    (answer,) = replica[1].hear(*of_type(ends, StreamEnd))
    source.flusher.on_ack(1, answer)
    assert source.durable == 1
    blocks = np.arange(source.store.blocks(0), dtype=np.uint32)
    expected = np.empty(blocks.size * source.store.record_floats(0), np.float32)
    counts = counts_of(2, 0, blocks.size)
    source.store.published(counts, blocks, expected)  # k = 1, first coefficients 1: the parity is the row
    for q, each in enumerate((replica[1], replica[2])):
        out = np.empty_like(expected)
        each.store.parity_read(q, counts, blocks, out)
        assert out.tobytes() == expected.tobytes()
