"""A process that speaks to the launcher as the real ones do, does no work, and misbehaves on request.

    python fake_child.py PLAN.json

The plan maps "server 2" or "worker 0" to one of the manners below; who has no entry behaves. It names a room
where everybody leaves a pid file and other marks. Workers make `steps` reports and are through, or, in an
endless plan, wait to be stopped.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

BINS = 64
DEADLINE_SECONDS = 60.0  # nobody waits longer than this for anything


def say(event: str, **fields: Any) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


class FakeChild:
    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.room = Path(plan["room"])
        line = sys.stdin.readline()
        if not line:
            os._exit(3)
        self.assignment = json.loads(line)
        self.role, self.id = self.assignment["role"], self.assignment["id"]
        self.name = f"{self.role} {self.id}"
        self.manner = plan.get("manners", {}).get(self.name, "")
        self.commands: list[str] = []
        self.heard = threading.Condition()
        (self.room / f"{self.role}-{self.id}.pid").write_text(str(os.getpid()))
        (self.room / f"{self.role}-{self.id}.json").write_text(json.dumps(self.assignment))
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        for line in sys.stdin:
            with self.heard:
                self.commands.append(json.loads(line)["do"])
                (self.room / f"{self.commands[-1]}-{self.role}-{self.id}").touch()
                self.heard.notify_all()
        os._exit(3)  # the launcher is gone

    def await_command(self, name: str) -> None:
        with self.heard:
            assert self.heard.wait_for(lambda: name in self.commands, DEADLINE_SECONDS)

    def await_file(self, name: str) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (self.room / name).exists():
            assert time.monotonic() < deadline, f"{self.name} waited in vain for {name}"
            time.sleep(0.005)

    def run(self) -> None:
        if self.manner == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.manner == "exits at once":
            print("a traceback would be here\nBoom: no luck", file=sys.stderr)
            sys.exit(7)
        if self.role == "worker":
            self.work()
        else:
            self.serve()
        if self.manner == "deaf":
            threading.Event().wait()
        if self.manner == "fails to stop":
            sys.exit(5)
        say("stopped", cpu_seconds=0.1)

    def serve(self) -> None:
        address = self.assignment["listen"]
        if address.startswith("unix:"):
            Path(address.removeprefix("unix:")).touch()
        if self.manner != "mute":
            say("listening", address=address)
        if self.role == "server":
            say("ready", rows=1000, bytes=64000)
            say("server", pulls=1, pushes=1, bytes_in=10, bytes_out=20)
        self.misbehave_after_training_began()
        self.await_command("stop")
        if self.role == "server":
            say("server", pulls=7, pushes=6, bytes_in=1000, bytes_out=2000)

    def work(self) -> None:
        print("a library prints this to stdout", flush=True)
        steps, batch = self.plan["steps"], self.assignment["config"]["batch"]
        say("planned", steps=steps)
        for step in range(1, steps + 1):
            self.report(step, batch)
        (self.room / f"trained-{self.id}").touch()
        self.misbehave_after_training_began()
        if self.plan.get("endless"):
            self.await_command("stop")
            return
        say("trained", steps=steps, samples=steps * batch, seconds=0.5)
        if self.id == 0:
            self.await_command("evaluate")
            say("evaluated", auc=0.75, logloss=0.5, test_samples=100, model_sha256="ab" * 32)
        self.await_command("stop")

    def report(self, step: int, batch: int) -> None:
        positives, negatives = [0] * BINS, [0] * BINS
        positives[40], negatives[20] = batch // 4, batch - batch // 4
        say(
            "progress",
            step=step,
            samples=step * batch,
            loss=1.0 / step,
            hist_pos=positives,
            hist_neg=negatives,
            position={"batch": step},
            staleness_mean=1.0,
            wait_seconds=0.01 * step,
            lookups=26 * step,
            distinct=10 * step,
        )

    def misbehave_after_training_began(self) -> None:
        manner = self.manner
        if manner in ("", "deaf", "mute", "fails to stop"):
            return
        for worker in range(self.assignment["config"]["workers"]):
            self.await_file(f"trained-{worker}")
        if manner == "is killed":
            (self.room / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        elif manner == "exits":
            print("Boom: no luck", file=sys.stderr)
            sys.exit(7)
        elif manner == "reports a mistake":
            say("error", message="the file x.tsv has no rows", kind="user")
            sys.exit(1)
        elif manner == "has a bug":
            say("error", message="ZeroDivisionError: division by zero", kind="bug")
            sys.exit(1)
        elif manner == "misses the dead":
            # Complains before the launcher can have seen the death it complains about.
            say("error", message="lost server 1", kind="lost")
            (self.room / "complained").touch()
            sys.exit(1)
        elif manner == "dies after the complaint":
            self.await_file("complained")
            os.kill(os.getpid(), signal.SIGKILL)
        elif manner == "talks nonsense":
            say("ready", rows="many") if self.role == "server" else say("trained")
            threading.Event().wait()
        else:
            raise ValueError(manner)


if __name__ == "__main__":
    FakeChild(json.loads(Path(sys.argv[1]).read_text())).run()
