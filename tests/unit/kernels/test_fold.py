"""Goal: the two kernels that merge checkpoints say what their twins say, and refuse what cannot be.

Method: lists with few and with many numbers in common, near each other and far apart, empty ones, numbers that fall;
rows of every usual width, as numbers and as floats with odd bits.
"""

from __future__ import annotations

import numpy as np
import pytest

from regrow import _kernels
from regrow.core import twins


@pytest.mark.parametrize("below", [1, 7, 300, 1 << 11, 1 << 20, 1 << 32])
@pytest.mark.parametrize("most", [0, 1, 5, 400])
def test_the_newest_of_each_number(below: int, most: int) -> None:
    rng = np.random.default_rng([below % 1000, most])
    for count in (0, 1, 2, 3, 40):
        sizes = rng.integers(0, most + 1, count)
        lists = [np.unique(rng.integers(0, below, size).astype(np.uint32)) for size in sizes]
        if count == 2:
            lists[1] = lists[0]
        if count == 3:
            lists[1] = np.append(lists[1], np.array([below - 1, 0], np.uint32))
        found = _kernels.newest_rows(lists)
        assert found.dtype == np.uint64
        assert found.tolist() == twins.newest_rows(lists).tolist()


def test_numbers_that_do_not_rise_are_sorted_too() -> None:
    lists = [np.random.default_rng(index).integers(0, 50, 200).astype(np.uint32) for index in range(3)]
    assert _kernels.newest_rows(lists).tolist() == twins.newest_rows(lists).tolist()


@pytest.mark.parametrize("width", [None, 1, 2, 3, 16, 17, 32, 128])
def test_rows_are_copied_bit_by_bit(width: int | None) -> None:
    rng = np.random.default_rng(width or 0)
    numbers = [np.unique(rng.integers(0, 90, 50).astype(np.uint32)) for _ in range(4)]
    places = _kernels.newest_rows(numbers)
    for dtype in (np.uint32, np.float32):
        shapes = [(len(each),) if width is None else (len(each), width) for each in numbers]
        lists = [rng.integers(0, 1 << 32, shape, np.uint32).view(dtype) for shape in shapes]
        out, expected = (np.zeros((len(places), *lists[0].shape[1:]), dtype) for _ in range(2))
        _kernels.gather_rows(lists, places, out)
        twins.gather_rows(lists, places, expected)
        assert out.tobytes() == expected.tobytes()


def test_what_cannot_be() -> None:
    rows = np.zeros((3, 4), np.float32)
    out = np.ones((1, 4), np.float32)
    for place in (3, 1 << 32):
        with pytest.raises(IndexError, match="there is no row"):
            _kernels.gather_rows([rows], np.array([place], np.uint64), out)
    with pytest.raises(ValueError, match="out has 4"):
        _kernels.gather_rows([rows], np.array([0, 1], np.uint64), out)
    for other in (rows[:, :3].copy(), rows.view(np.uint32), rows.ravel()):
        with pytest.raises(ValueError, match="rows like those of out"):
            _kernels.gather_rows([rows, other], np.array([0], np.uint64), out)
    with pytest.raises(ValueError, match="contiguous"):
        _kernels.gather_rows([rows[:, ::2]], np.array([0], np.uint64), np.ones((1, 2), np.float32))
    with pytest.raises(ValueError, match="uint32"):
        _kernels.newest_rows([np.zeros(3, np.int64)])
    assert (out == 1).all()
