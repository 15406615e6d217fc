"""Crashes the tiered store as often as asked for, each time at another write, and compares all rows after each.

python tools/crash_tiered.py --crashes 1000000 --jobs 1

What it does is in cpp/src/tier_model.cpp. A failure names its seed: `--seed N --crashes 50` shows it again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

from regrow import _kernels

CRASHES_PER_PART = 5000
SEEDS_PER_PART = CRASHES_PER_PART // 50  # a seed is good for fifty


def run_part(part: tuple[int, int, str]) -> tuple[dict[str, int], str]:
    """Some crashes, from a seed on."""
    seed, crashes, bug = part
    return _kernels.run_tier_model(seed, crashes, bug)


def main() -> int:
    """Runs all parts, shows how far it is, and ends with the first failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--crashes", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--bug", default="none")
    given = parser.parse_args()
    parts = [
        (given.seed + number * SEEDS_PER_PART, min(CRASHES_PER_PART, given.crashes - first), given.bug)
        for number, first in enumerate(range(0, given.crashes, CRASHES_PER_PART))
    ]
    total: Counter[str] = Counter()
    began = time.monotonic()
    with ProcessPoolExecutor(given.jobs) as pool:
        for counts, failure in pool.map(run_part, parts):
            total.update(counts)
            seconds = time.monotonic() - began
            print(f"{total['crashes']:,} crashes, {total['crashes'] / seconds:,.0f} a second", flush=True)
            if failure:
                print(f"FAILED: {failure}", flush=True)
                pool.shutdown(cancel_futures=True)
                return 1
    print(", ".join(f"{name} {count:,}" for name, count in total.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
