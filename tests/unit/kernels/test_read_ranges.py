"""Goal: parts of a file come back one after the other, whatever was read together; less if the file ends before.

Method: random ranges of a small file, with all gaps; slices as the slow twin.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from regrow import _kernels

DATA = np.random.default_rng(0).bytes(5000)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(DATA)
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("gap", [0, 1, 50, 10**6])
@pytest.mark.parametrize("seed", range(5))
def test_ranges_are_those_of_the_file(fd: int, seed: int, gap: int) -> None:
    random = np.random.default_rng(seed)
    starts = random.integers(0, 4900, int(random.integers(0, 40)))
    if seed % 2:
        starts.sort()
    ends = starts + random.integers(0, 100, len(starts))
    expected = b"".join(DATA[start:end] for start, end in zip(starts, ends, strict=True))
    assert _kernels.read_ranges(fd, starts, ends, gap).tobytes() == expected


@pytest.mark.parametrize("gap", [0, 10**6])
def test_a_file_that_ends_gives_what_is_whole(fd: int, gap: int) -> None:
    starts, ends = np.array([10, 4000, 4990, 20]), np.array([20, 4010, 5001, 30])
    assert _kernels.read_ranges(fd, starts, ends, gap).tobytes() == DATA[10:20] + DATA[4000:4010]


def test_what_is_wrong_is_refused(fd: int, tmp_path: Path) -> None:
    one, two = np.array([1]), np.array([2])
    for bad in ((one, np.array([0])), (np.array([-1]), two), (one, np.array([2, 3]))):
        with pytest.raises(ValueError, match=r"range|end"):
            _kernels.read_ranges(fd, *bad)
    with pytest.raises(ValueError, match="gap"):
        _kernels.read_ranges(fd, one, two, -1)
    directory = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(IsADirectoryError):
        _kernels.read_ranges(directory, one, two)
    os.close(directory)
