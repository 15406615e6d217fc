"""What all tests share: one hypothesis profile, and the mark of those that start processes.

Random tests are seeded and derandomized: the same tests run everywhere, and a failure names its seed. Torch has one
thread, here and in what tests start: as many tests run as there are processors, and threads that wait for each other
took half of their time.
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # before anybody imports torch

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "regrow", deadline=None, derandomize=True, database=None, max_examples=50, print_blob=True
)
hypothesis.settings.load_profile("regrow")

LIVE = Path(__file__).parent / "live"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if LIVE in item.path.parents:
            item.add_marker(pytest.mark.live)
