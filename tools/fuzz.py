"""Sends wrong messages to the real machines until told to stop: `python tools/fuzz.py --minutes 1` (or `make fuzz`).

Each world is a function of its seed, and a finding names the seed: `python tools/fuzz.py --world SEED` shows it again.
What is sent, and what must hold, is said in src/regrow/sim/fuzz.py. The exit code is 1 if something was found.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

from regrow import _kernels
from regrow.sim.fuzz import MEMORY_BYTES_MAX, Fuzz, Tally

PROGRESS_SECONDS = 10.0
IS_SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")  # its shadow memory is larger than any limit


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="stop after so long")
    parser.add_argument("--messages", type=int, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0, help="of the first world (0)")
    parser.add_argument("--world", type=int, help="only this world, again")
    return parser.parse_args()


def is_done(wanted: argparse.Namespace, tally: Tally, seconds: float) -> bool:
    if wanted.world is not None:
        return tally.worlds > 0
    if wanted.messages is None and wanted.minutes is None:
        return seconds > 60.0
    enough = wanted.messages is not None and tally.messages >= wanted.messages
    return enough or (wanted.minutes is not None and seconds >= 60.0 * wanted.minutes)


def describe(tally: Tally, seconds: float, cpu_seconds: float) -> str:
    verdicts: Counter[str] = Counter()
    for (_, verdict), count in tally.verdicts.items():
        verdicts[verdict] += count
    shares = ", ".join(f"{100 * count / tally.messages:.1f} % {verdict}" for verdict, count in verdicts.most_common())
    return (
        f"{tally.messages:,} messages in {tally.worlds:,} worlds, {seconds:.0f} s ({cpu_seconds:.0f} s of a processor: "
        f"{tally.messages / max(cpu_seconds, 1e-9):,.0f} per second); {shares}; {tally.looks:,} compared; "
        f"{tally.finished_refused:,} refused in {tally.finished:,} runs that went on; {len(tally.findings)} found"
    )


def tell_findings(tally: Tally, told: set[str]) -> None:
    for where, finding in tally.findings.items():
        if where not in told:
            told.add(where)
            print(f"\nFOUND {where}\n  again: python tools/fuzz.py --world {finding.world}\n{finding.text}", flush=True)


def count_cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def main() -> int:
    wanted = parse()
    _kernels.set_threads(1)  # a forked process has no others
    tally = Tally()
    told: set[str] = set()
    started, shown = time.monotonic(), 0.0
    seed = wanted.seed if wanted.world is None else wanted.world
    try:
        while not is_done(wanted, tally, time.monotonic() - started):
            tally.add(Fuzz(seed, memory_bytes_max=None if IS_SANITIZED else MEMORY_BYTES_MAX).run())
            tell_findings(tally, told)
            seed += 1
            seconds = time.monotonic() - started
            if seconds - shown >= PROGRESS_SECONDS:
                shown = seconds
                print(f"world {seed}: {describe(tally, seconds, count_cpu_seconds())}", flush=True)
    except KeyboardInterrupt:
        print("stopped")
    print(f"\nworlds {wanted.seed} to {seed - 1}: {describe(tally, time.monotonic() - started, count_cpu_seconds())}")
    for state, count in sorted(tally.states.items()):
        print(f"  {count:12,}  {state}")
    for kind in sorted({kind for kind, _ in tally.verdicts}):
        counts = {verdict: count for (each, verdict), count in sorted(tally.verdicts.items()) if each == kind}
        print(f"  {kind:14} " + ", ".join(f"{count:,} {verdict}" for verdict, count in counts.items()))
    return 1 if tally.findings else 0


if __name__ == "__main__":
    sys.exit(main())
