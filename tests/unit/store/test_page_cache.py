"""Goal: the page cache is no hidden tier: with O_DIRECT what is in the files of a store is nowhere in memory but in its
cache, so memory is bounded by it.

Method: the kernel is asked which pages of the files it has (mincore), after rows have left, come back, gone home and
been checkpointed. The same through the page cache shows that the question has an answer.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest
from test_paged import ROWS, build, change, make_checkpoint

FILES = ("home", "log")


def count_resident(path: Path) -> int:
    """Pages of a file that are in memory."""
    with path.open("rb") as file:
        pages = -(-path.stat().st_size // mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            found = (ctypes.c_ubyte * pages)()
            here = ctypes.c_char.from_buffer(mapped)
            address = ctypes.c_void_p(ctypes.addressof(here))
            failed = ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(len(mapped)), found)
            del here
            assert not failed, ctypes.get_errno()
            return sum(page & 1 for page in found)


@pytest.mark.parametrize("io", ["direct", "threads"])
def test_rows_on_disk_are_not_in_the_page_cache(tmp_path: Path, io: str) -> None:
    store, rng = build(tmp_path, io=io, bytes_max=16 << 20), np.random.default_rng(1)
    if io == "direct" and not store.io_description.startswith("direct"):
        pytest.skip(f"this file system has no O_DIRECT: {store.io_description}")
    for step in range(1500):
        # Half of the rows change once and go home.
        slots = np.arange(step, ROWS, 40) if step < 40 else rng.permutation(ROWS // 2)[:150]
        change(store, slots, rng.random())
        if step % 300 == 299:
            make_checkpoint(store)
    report = store.tier_report()
    assert report["log_rows_read"] + report["home_rows_read"] > 0 < report["home_rows_written"]
    resident = [count_resident(tmp_path / "server-0" / name) for name in FILES]
    assert all(pages == 0 for pages in resident) if io == "direct" else all(resident)
