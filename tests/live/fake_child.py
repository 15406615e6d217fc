"""A process that speaks to the launcher as the real ones do, does no work, and misbehaves on request.

    python fake_child.py PLAN.json

The plan maps "server 2" or "worker 0" to one of the manners below; who has no entry behaves. Successors are named
"server 2.1"; "server 2 always" is for all incarnations. It names a room where everybody leaves a pid file and other
marks. Workers make `steps` reports (a successor those after `done`) and are through, or, in an endless plan, wait to
be stopped; with `hold` they wait at a step for a mark that somebody leaves.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

BINS = 64
SAYING = threading.Lock()
DEADLINE_SECONDS = 60.0  # nobody waits longer than this for anything


def say(event: str, **fields: Any) -> None:
    with SAYING:  # answers come from another thread, and lines must stay whole
        print(json.dumps({"event": event, **fields}), flush=True)


class FakeChild:
    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.room = Path(plan["room"])
        line = sys.stdin.readline()
        if not line:
            os._exit(3)
        self.commands: list[str] = []
        self.heard = threading.Condition()
        self.take(json.loads(line))
        threading.Thread(target=self.listen, daemon=True).start()

    def take(self, assignment: dict[str, Any]) -> None:
        """This place is ours from now on."""
        self.assignment = assignment
        who = assignment["identity"]
        self.role, self.id, self.incarnation = who["role"], who["id"], who["incarnation"]
        self.name = f"{self.role} {self.id}" + (f".{self.incarnation}" if self.incarnation else "")
        with contextlib.suppress(OSError):  # as the real ones, on Linux
            number = "" if self.role == "coordinator" else f" {self.id}"
            Path("/proc/self/comm").write_text(f"rg {self.role}{number}")
        manners = self.plan.get("manners", {})
        self.manner = manners.get(self.name, manners.get(f"{self.role} {self.id} always", ""))
        stem = self.name.replace(" ", "-")
        (self.room / f"{stem}.json").write_text(json.dumps(assignment))
        (self.room / f"{stem}.new").write_text(str(os.getpid()))
        (self.room / f"{stem}.new").rename(self.room / f"{stem}.pid")  # whole or not there
        (self.room / f"started-{stem}").touch()

    def listen(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "ask":
                if self.manner != "deaf":
                    say("answer")
                continue
            with self.heard:
                if command["do"] == "become":
                    self.take(command["assignment"])
                    (self.room / f"became-{self.role}-{self.id}.{self.incarnation}").touch()
                with (self.room / f"told-{self.role}-{self.id}").open("a") as told:
                    told.write(line)
                self.commands.append(command["do"])
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

    def await_stopped(self, stem: str) -> None:
        self.await_file(f"{stem}.pid")
        pid = (self.room / f"{stem}.pid").read_text()
        deadline = time.monotonic() + DEADLINE_SECONDS
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, f"{stem} was never paused"
            time.sleep(0.005)

    def run(self) -> None:
        if self.manner == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self.manner == "exits at once":
            print("a traceback would be here\nBoom: no luck", file=sys.stderr)
            sys.exit(7)
        if self.role in ("standby", "understudy"):
            with self.heard:
                assert self.heard.wait_for(lambda: self.commands, DEADLINE_SECONDS)
        if self.role in ("standby", "understudy"):
            pass  # told to stop before it was needed
        elif self.role == "worker":
            self.work()
        else:
            self.serve()
        if self.manner == "deaf":
            threading.Event().wait()
        if self.manner == "fails to stop":
            sys.exit(5)
        say("stopped")

    def serve(self) -> None:
        address = self.assignment["listen"]
        if address.startswith("unix:"):
            Path(address.removeprefix("unix:")).touch(exist_ok=False)
        if self.manner != "mute":
            say("listening", address=address)
        if self.role == "server":
            say("ready", rows=1000, bytes=64000)
            say("server", pulls=1, pushes=1, bytes_in=10, bytes_out=20)
            if self.incarnation:
                say("recovery", rows_back=40, rows_total=100, bytes=400, faults=3, seconds=0.05)
                say("recovered", rows_back=100, rows_total=100, bytes=1000, faults=7, seconds=0.1)
                (self.room / f"back-server-{self.id}.{self.incarnation}").touch()
        self.misbehave_after_training_began()
        self.await_command("stop")
        if self.role == "server":
            say("server", pulls=7, pushes=6, bytes_in=1000, bytes_out=2000)

    def work(self) -> None:
        print("a library prints this to stdout", flush=True)
        steps, batch = self.plan["steps"], self.assignment["config"]["batch"]
        for server in range(self.assignment["config"]["servers"]):  # nobody trains without them
            self.await_file(f"started-server-{server}")
        say("planned", steps=steps)
        hold = self.plan.get("hold") or {"step": 0}
        for step in range(1 + (self.plan.get("done", 0) if self.incarnation else 0), steps + 1):
            self.report(step, batch)
            if step == hold["step"]:
                (self.room / f"held-{self.id}").touch()
                self.misbehave_after_training_began()
                self.await_file(hold["for"])
        (self.room / f"trained-{self.id}").touch()
        if not self.plan.get("hold"):
            self.misbehave_after_training_began()
        if self.plan.get("endless"):
            self.await_command("stop")
            return
        say("trained", steps=steps, samples=steps * batch, seconds=0.5)
        if self.id == 0:
            self.await_command("evaluate")
            if self.manner == "dies when asked to evaluate":
                os.kill(os.getpid(), signal.SIGKILL)
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
        if manner in ("", "deaf", "mute", "fails to stop", "dies when asked to evaluate"):
            return
        if manner == "misses server 1" and "server 1" in self.plan["manners"]:
            # At once: it is stopped when the first worker is there, and maybe not any more when the last one is.
            self.await_stopped("server-1")
        mark = "held" if self.plan.get("hold") else "trained"
        for worker in range(self.assignment["config"]["workers"]):
            self.await_file(f"{mark}-{worker}")
        if manner.startswith("is killed after "):
            self.await_file("started-" + manner.removeprefix("is killed after "))
            os.kill(os.getpid(), signal.SIGKILL)
        elif manner == "is killed":
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
        elif manner == "gives up":
            say("error", message="lost server 1", kind="lost")
            sys.exit(1)
        elif manner == "reports data loss":
            say("error", message="rows of 2 tables are gone: t_cat_0 (12)", kind="data_loss")
            sys.exit(1)
        elif manner == "misses server 1":
            # As the real one does when a server has been silent.
            for _ in range(2):
                say("replace", peer={"role": "server", "id": 1, "incarnation": 0}, reason="silent for 1.5 s")
        elif manner == "comes back":
            self.await_file("started-server-1.1")  # it is stopped meanwhile
            (self.room / "came-back").touch()
            say("ready", rows=99999, bytes=99999)
            say("fenced", reason="replaced")
            sys.exit(0)
        elif manner == "talks nonsense":
            say("ready", rows="many") if self.role == "server" else say("trained")
            threading.Event().wait()
        else:
            raise ValueError(manner)


if __name__ == "__main__":
    FakeChild(json.loads(Path(sys.argv[1]).read_text())).run()
