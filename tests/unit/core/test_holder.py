"""Goal: a holder applies flushes whole and in order, streams until they end, and what is staged when it is committed.

Method: one holder, fed by hand (holders.py), compared with the parities that follow from the rows themselves.
"""

from __future__ import annotations

import pytest
from helpers import arrays, server
from holders import Bench, acks, ring_job, sent, update

from regrow.core import holder
from regrow.core.messages import (
    Flush,
    FlushCommit,
    Have,
    Stream,
    StreamEnd,
)

# --- Flushes ---


def test_flushes_are_applied_in_order_and_no_other_way() -> None:
    bench = Bench(ring_job(2, 1))
    flushes = []
    for value in (1.0, 2.0, 3.0):
        update(bench.stores[0], [0, 2], value)
        flushes.append(bench.flush(0))
    states = [bench.bytes]
    for at, flush in enumerate(flushes):
        for wrong in flushes[:at] + flushes[at + 1 :]:
            with pytest.raises(ValueError, match=f"flush {wrong.number} of group 1 came, {at + 1} is next"):
                bench.hear(wrong, 0)
            assert bench.bytes == states[-1]
        assert acks(bench.hear(flush, 0)) == [(1, at + 1, False)]
        states.append(bench.bytes)
        held = bench.holder.held[0, 1]
        assert (held.number, held.marks) == (at + 1, (at + 1,))


PART = arrays(counts=[2], slots=[0, 2], deltas=[1.0] * 8)
BAD_FLUSHES = {
    "no such group": dict(group=7),
    "a group of another source": dict(group=0),
    "rows of another group": arrays(slots=[0, 1]),
    "a slot beyond the end": arrays(slots=[0, 2**32 - 2]),
    "too few values": arrays(deltas=[1.0] * 7),
    "too many values": arrays(deltas=[1.0] * 9),
    "too few slots": arrays(slots=[0]),
    "counts of another job": arrays(counts=[2, 0]),
    "no counts": arrays(counts=[]),
    "a negative count": arrays(counts=[-2]),
    "more counted than there are": arrays(counts=[3]),
}


@pytest.mark.parametrize("name", BAD_FLUSHES)
def test_a_malformed_flush_changes_nothing(name: str) -> None:
    bench = Bench(ring_job(2, 1))
    update(bench.stores[0], [0, 2, 4])
    bench.hear(bench.flush(0), 0)
    before = bench.bytes
    fields = {"group": 1, "number": 2, "stable": 0, "marks": (2,), **PART, **BAD_FLUSHES[name]}
    with pytest.raises((ValueError, IndexError)):
        bench.hear(Flush(**fields), 0)
    assert bench.bytes == before
    held = bench.holder.held[0, 1]
    assert (held.number, held.marks) == (1, (1,))
    with pytest.raises((ValueError, IndexError)):
        Bench(ring_job(2, 1), ended=False).holder.on_stream(
            server(0), Stream(**{key: fields[key] for key in ("group", *PART)})
        )
    bench.hear(Flush(group=1, number=2, stable=0, marks=(2,), **PART), 0)
    assert bench.bytes != before


@pytest.mark.parametrize("staged", [False, True])
def test_a_source_that_leaves_too_much_unstable_is_refused_before_anything_changes(
    monkeypatch: pytest.MonkeyPatch, staged: bool
) -> None:
    """Found by fuzz: the flush that was one too many was applied, and then refused."""
    monkeypatch.setattr(holder, "TAIL_FLUSHES_MAX", 2)
    bench = Bench(ring_job(3, 2))
    group = next(group for source, group in bench.holder.held if source == 0)
    none = arrays(counts=[0], slots=[], deltas=[])

    def flush(number: int, stable: int) -> Flush:
        return Flush(group=group, number=number, stable=stable, marks=(number,), staged=staged, **none)

    for number in (1, 2):
        bench.hear(flush(number, 0), 0)
    held = bench.holder.held[0, group]
    with pytest.raises(ValueError, match=f"3 flushes of group {group} are unstable"):
        bench.hear(flush(3, 0), 0)
    assert (held.number, len(held.tail), len(held.staged)) == ((0, 0, 2) if staged else (2, 2, 0))
    bench.hear(flush(3, 1), 0)
    if staged:
        bench.holder.on_commit(bench.peers[0], FlushCommit(group=group, number=3))
    assert (held.number, [each.number for each in held.tail], list(held.staged)) == (3, [2, 3], [])


def test_streams_and_flushes_do_not_mix() -> None:
    new, old = Bench(ring_job(2, 1), ended=False), Bench(ring_job(2, 1))
    stream = Stream(group=1, **PART)
    end = StreamEnd(group=1, number=5, marks=(9,), **arrays(counts=[0], slots=[], deltas=[]))
    with pytest.raises(ValueError, match="before the end of its stream"):
        new.hear(Flush(group=1, number=1, stable=0, marks=(1,), **PART), 0)
    with pytest.raises(ValueError, match="is streamed, but its parity is here"):
        old.holder.on_stream(server(0), stream)
    with pytest.raises(ValueError, match="ended before"):
        old.holder.on_stream_end(server(0), end)
    assert new.bytes == old.bytes
    new.holder.on_stream(server(0), stream)
    assert not new.holder.whole
    assert acks(new.holder.on_stream_end(server(0), end)) == [(1, 5, False)]
    with pytest.raises(ValueError, match="came, 6 is next"):
        new.hear(Flush(group=1, number=5, stable=0, marks=(9,), **PART), 0)
    new.hear(Flush(group=1, number=6, stable=0, marks=(10,), **PART), 0)


def test_a_staged_flush_is_in_the_parity_once_it_is_committed() -> None:
    bench = Bench(ring_job(2, 1))
    before = bench.bytes
    for number in (1, 2, 3):
        flush = Flush(group=1, number=number, stable=0, marks=(number,), staged=True, **PART)
        assert acks(bench.hear(flush, 0)) == [(1, number, True)]
    assert bench.bytes == before
    with pytest.raises(ValueError, match="commit of flush 4 of group 1, which is not here"):
        Bench(ring_job(2, 1)).holder.on_commit(server(0), FlushCommit(group=1, number=4))
    assert acks(bench.holder.on_commit(server(0), FlushCommit(group=1, number=1))) == [(1, 1, False)]
    assert bench.bytes != before
    bench.holder.on_commit(server(0), FlushCommit(group=1, number=3))
    assert bench.holder.held[0, 1].marks == (3,)
    # What its source never committed is gone with it.
    bench.hear(Flush(group=1, number=4, stable=0, marks=(4,), staged=True, **PART), 0)
    (have,) = sent(bench.lose(0), Have)
    assert (have.number, have.marks) == (3, (3,))
