"""The kernels of a sweep agree with obvious loops over places, on odd sizes, and refuse what makes no sense."""

from __future__ import annotations

import numpy as np
import pytest

from regrow import _kernels

FIRST = np.array([0, 5, 5, 70, 200, 201], np.int64)
FLOATS = np.array([4, 8, 20, 4, 512], np.int64)


def take_slowly(todo: np.ndarray, place: int, bytes_max: int) -> tuple[list[int], list[int], int]:
    counts, blocks = [0] * FLOATS.size, []
    while place < todo.size and bytes_max > 0:
        if todo[place]:
            todo[place] = 0
            table = int(np.searchsorted(FIRST, place, side="right")) - 1
            counts[table] += 1
            blocks.append(place - int(FIRST[table]))
            bytes_max -= 4 * int(FLOATS[table])
        place += 1
    return counts, blocks, place


@pytest.mark.parametrize("bytes_max", [1, 16, 17, 100, 1000, 1 << 20])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 1.0])
def test_places_are_taken_in_order_until_there_are_enough(share: float, bytes_max: int) -> None:
    rng = np.random.default_rng(int(share * 100) + bytes_max)
    todo = (rng.random(FIRST[-1]) < share).astype(np.uint8)
    slow, place, slow_place = todo.copy(), 0, 0
    for _ in range(500):
        counts, blocks, place = _kernels.take_places(todo, FIRST, FLOATS, place, bytes_max)
        slow_counts, slow_blocks, slow_place = take_slowly(slow, slow_place, bytes_max)
        assert counts.tolist() == slow_counts
        assert blocks.tolist() == slow_blocks
        assert todo.tolist() == slow.tolist()
        if not blocks.size:
            break
    assert place == FIRST[-1]
    assert not todo.any()


def test_marks_are_set_where_they_belong() -> None:
    flags = np.zeros(FIRST[-1], np.uint8)
    _kernels.mark_places(flags, FIRST, np.array([1, 0, 2, 0, 1], np.int32), np.array([4, 0, 64, 0], np.uint32))
    assert np.flatnonzero(flags).tolist() == [4, 5, 69, 200]


def test_bits_and_records() -> None:
    words = np.array([0, 1 << 63], np.uint64)
    assert _kernels.has_any_bit(words, np.array([3, 127], np.uint32))
    assert not _kernels.has_any_bit(words, np.array([3, 126], np.uint32))
    records = np.zeros((7, 5), np.float32)
    records[2, 4], records[6, 0] = -0.0, 1e-45  # a zero with a sign has a bit
    assert _kernels.find_nonzero(records.reshape(-1), 5).tolist() == [0, 0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda todo: _kernels.take_places(todo, FIRST, FLOATS, -1, 1), IndexError),
        (lambda todo: _kernels.take_places(todo, FIRST, FLOATS, 202, 1), IndexError),
        (lambda todo: _kernels.take_places(todo, FIRST, FLOATS, 0, 0), ValueError),
        (lambda todo: _kernels.take_places(todo[:-1], FIRST, FLOATS, 0, 1), ValueError),
        (lambda todo: _kernels.take_places(todo, FIRST, FLOATS[1:], 0, 1), ValueError),
        (lambda todo: _kernels.take_places(todo, FIRST, 0 * FLOATS, 0, 1), ValueError),
        (lambda todo: _kernels.mark_places(todo, FIRST, np.array([6, 0, 0, 0, 0], np.int32), np.arange(6)), ValueError),
        (lambda todo: mark(todo, [1, 0, 0, 0, 0], [5]), IndexError),
        (lambda todo: mark(todo, [2, 0, 0, 0, 0], [1]), ValueError),
        (lambda todo: mark(todo, [2, 0, 0, 0, -1], [1]), ValueError),
        (lambda todo: _kernels.has_any_bit(np.zeros(1, np.uint64), np.array([64], np.uint32)), IndexError),
        (lambda todo: _kernels.find_nonzero(np.zeros(7, np.float32), 5), ValueError),
    ],
)
def test_nonsense_is_refused_and_changes_nothing(call: object, error: type[Exception]) -> None:
    todo = np.ones(FIRST[-1], np.uint8)
    with pytest.raises(error):
        call(todo)  # type: ignore[operator]
    assert todo.all()


def mark(todo: np.ndarray, counts: list[int], blocks: list[int]) -> None:
    todo[:] = 1
    _kernels.mark_places(todo, FIRST, np.array(counts, np.int32), np.array(blocks, np.uint32))
