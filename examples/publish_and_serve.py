"""Trains a small model, publishes it every few steps, and looks rows up meanwhile, as another machine would.

    python examples/publish_and_serve.py

In earnest the two are on different machines, with a bucket between them: `regrow train --publish s3://bucket/live` on
one, `Replica("s3://bucket/live")` or `regrow serve-rows s3://bucket/live` on the other.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from regrow.serving import Replica

OPTIONS = ["--model", "tiny", "--steps", "400", "--batch", "256", "--servers", "2", "--workers", "1"]


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        url = str(Path(place) / "live")
        command = [sys.executable, "-m", "regrow", "train", *OPTIONS, "--publish", url, "--publish-every", "0.5s"]
        training = subprocess.Popen([*command, "--out", str(Path(place) / "run")], stdout=subprocess.DEVNULL)
        with Replica(url, poll_seconds=0.1, wait_seconds=120.0) as replica:
            table = "dense"  # changes with every step; any other is looked up in the same way
            step = 0
            while step < 400 and replica.wait_for_step(step + 1, timeout_seconds=120.0):
                step = replica.step
                row = replica.lookup(table, [0])[0]
                print(f"step {step:3d}, {replica.age_seconds:.1f} s old: row 0 of {table} begins {row[:3]}")
        print(f"training ended with {training.wait()}; the replica is at step {step}")


if __name__ == "__main__":
    main()
