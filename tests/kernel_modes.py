"""The ways the kernels can run: every instruction set this CPU has, with one thread and with three.

All of them must give the same bits, so a test compares its kernel with its twin in each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from regrow import _kernels


class Mode(NamedTuple):
    simd: str
    threads: int


LEVELS = _kernels.simd_levels()
MODES = [Mode(simd, threads) for simd in LEVELS for threads in (1, 3)]


@contextmanager
def running(mode: Mode) -> Iterator[None]:
    before = Mode(_kernels.simd_level(), _kernels.get_threads())
    _kernels.set_simd(mode.simd)
    _kernels.set_threads(mode.threads)
    try:
        yield
    finally:
        _kernels.set_simd(before.simd)
        _kernels.set_threads(before.threads)
