"""A whole run on this machine: start the processes, watch them, end them, write down what came of it.

    coordinator listens -> servers and workers start -> all workers trained -> worker 0 evaluates -> all stop

Any process that dies or reports an error ends the run: with one message that names the cause, with every
other process gone, and with a summary that says "failed". So does a signal. What the processes say to each
other is none of the launcher's business, and it never loads torch.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import FrameType
from typing import Any

from regrow.config import TrainConfig
from regrow.errors import ChildFailed, Interrupted, RegrowError, UserError
from regrow.launch import memory
from regrow.launch.causes import Suspect, verdict
from regrow.launch.display import Display, QuietDisplay
from regrow.launch.processes import Child, Children, Ended, Said
from regrow.launch.rundir import RunDir, SocketDir
from regrow.launch.status import RunStatus
from regrow.launch.version import version

# -P: a file named like a module in the user's directory must not replace it.
CHILD_COMMAND = (sys.executable, "-P", "-m", "regrow.launch.child")
METRICS_SECONDS = 1.0
DISPLAY_SECONDS = 0.125
WAKE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the launcher waits for what, in seconds.

    Too short: healthy processes on a busy machine are taken for stuck ones. Too long: the user waits in vain.
    """

    listen: float = 120.0  # for the coordinator's address; imports on a cold disk are slow
    stop: float = 30.0  # for a healthy process to finish after "stop"
    abort: float = 2.0  # for a process of a failed run
    term: float = 3.0  # from SIGTERM to SIGKILL
    cause: float = 0.5  # for the first death to show: its victims may be heard before it


def train(
    config: TrainConfig,
    *,
    overwrite: bool = False,
    display: Display | None = None,
    command: Sequence[str] = CHILD_COMMAND,
    patience: Patience | None = None,
    memory_check: bool = True,
) -> dict[str, Any]:
    """Runs to the end and returns the summary. A run that fails raises, after its summary is written."""
    check_files(config)
    if memory_check:
        memory.check(config)
    run_dir = RunDir.create(config, overwrite=overwrite)
    try:
        run = _Run(config, run_dir, display or QuietDisplay(), tuple(command), patience or Patience())
        return run.run()
    finally:
        run_dir.close()


def check_files(config: TrainConfig) -> None:
    """Files are looked for here, once and early, rather than by every process."""
    path = config.data_path
    if path is not None and not path.exists():
        raise UserError(f"data = {config.data!r}: there is no file {path}")
    config.load_model()


class _Run:
    """One run, from the first process to the summary."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: RunDir,
        display: Display,
        command: tuple[str, ...],
        patience: Patience,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.display = display
        self.command = command
        self.patience = patience
        self.token = secrets.token_hex(32)
        self.started_at = datetime.now().astimezone()
        self.status = RunStatus(config, started_at=time.monotonic())
        self.children = Children()
        self.signals = _SignalWatch(self.children.wake)
        self.suspects: list[Suspect] = []
        self._accused: set[str] = set()
        self._metrics_due = 0.0
        self._display_due = 0.0

    def run(self) -> dict[str, Any]:
        error: BaseException | None = None
        with self.signals, SocketDir() as sockets:
            try:
                with self.children, self.display.live():
                    try:
                        self._train(sockets)
                    except BaseException as failure:
                        error = failure
                        self._abort()
                        raise
            finally:
                # After the children are reaped, so that their usage is known; while signals are still held
                # back, so that a third Ctrl-C cannot lose the summary.
                summary = self._summary(error)
                self.run_dir.write_summary(summary)
        self.display.finish(summary, self.run_dir.path)
        return summary

    # -- the story -------------------------------------------------------------------------------------------

    def _train(self, sockets: SocketDir) -> None:
        config = self.config
        addresses: list[str] = []

        def listening() -> bool:
            return bool(addresses)

        self._start("coordinator", 0, sockets, coordinator=None)
        deadline = time.monotonic() + self.patience.listen
        self._until(listening, deadline=deadline, addresses=addresses)
        if not addresses:
            raise ChildFailed(
                f"the coordinator did not listen within {self.patience.listen:.0f} s",
                hint=f"its log: {self.run_dir.log('coordinator', 0)}",
                role="coordinator",
            )
        for id in range(config.servers):
            self._start("server", id, sockets, coordinator=addresses[0])
        workers = [
            self._start("worker", id, sockets, coordinator=addresses[0]) for id in range(config.workers)
        ]
        self._enter("loading")
        status = self.status
        self._until(lambda: any(worker.state != "starting" for worker in status.workers))
        self._enter("training")
        self._until(lambda: all(worker.state == "trained" for worker in status.workers))
        self._enter("evaluating")
        workers[0].tell({"do": "evaluate"})
        self._until(lambda: bool(status.evaluated))
        self._enter("stopping")
        self._stop()
        self._enter("done")

    def _start(self, role: str, id: int, sockets: SocketDir, *, coordinator: str | None) -> Child:
        config = self.config
        threads = {
            "coordinator": 1,
            "server": config.threads_per_server,
            "worker": config.threads_per_worker,
        }[role]
        listen = "tcp:127.0.0.1:0"
        if config.transport == "unix":
            listen = f"unix:{sockets.path}/{role[0]}{id}"
        log = self.run_dir.log(role, id)
        try:
            child = self.children.start(
                role=role, id=id, command=self.command, env=child_env(role, threads), log=log
            )
        except OSError as error:
            raise RegrowError(f"cannot start {role} {id}: {error.strerror or error}") from None
        # The token goes through the pipe alone: arguments and environments can be read by others.
        child.tell(
            {
                "role": role,
                "id": id,
                "incarnation": 0,
                "token": self.token,
                "listen": listen,
                "coordinator": coordinator,
                "config": config.to_dict(),
                "threads": threads,
                # Of the config, for the roles that need no more of it.
                "servers": config.servers,
                "workers": config.workers,
                "frame_bytes_max": config.frame_bytes_max,
            }
        )
        return child

    def _stop(self) -> None:
        """Nobody is stopped before those who would miss it: workers first, the coordinator last."""
        for role in ("worker", "server", "coordinator"):
            asked = self.children.running(role)
            for news in self.children.end(
                asked,
                asked_seconds=self.patience.stop,
                term_seconds=self.patience.term,
                hurry=lambda: self.signals.count > 0,
            ):
                self._receive(news, stopping=True)
            self._tick()
            self._raise_signal()
            if self.suspects:
                raise self._verdict()

    def _abort(self) -> None:
        """Ends everything that still runs; a second signal ends it at once."""
        known = min(1, self.signals.count)
        for news in self.children.end(
            self.children.all,
            asked_seconds=self.patience.abort,
            term_seconds=self.patience.term,
            hurry=lambda: self.signals.count > known,
        ):
            with contextlib.suppress(Exception):  # the cause is known; these are its echoes
                self._receive(news, stopping=True)

    # -- what the children say -------------------------------------------------------------------------------

    def _until(
        self,
        done: Callable[[], bool],
        *,
        deadline: float | None = None,
        addresses: list[str] | None = None,
    ) -> None:
        """Listens until `done`, or the deadline. A failure is looked into and raised."""
        while not done() and (deadline is None or time.monotonic() < deadline):
            for news in self.children.wait(DISPLAY_SECONDS):
                self._receive(news)
                if addresses is not None and isinstance(news, Said) and news.event["event"] == "listening":
                    addresses.append(str(news.event["address"]))
            self._raise_signal()
            if self.suspects:
                self._gather()
                raise self._verdict()
            self._tick()

    def _gather(self) -> None:
        """Waits for the rest of the bad news: a worker may complain before its server's death shows."""
        deadline = time.monotonic() + self.patience.cause
        while time.monotonic() < deadline:
            for news in self.children.wait(deadline - time.monotonic()):
                self._receive(news)
            self._raise_signal()

    def _receive(self, news: Said | Ended, *, stopping: bool = False) -> None:
        child = news.child
        if isinstance(news, Ended):
            self.status.lost(child.role, child.id)
            if not stopping or news.exit.code != 0:
                self._suspect(Suspect.from_exit(child, news.exit, step=self.status.step, stopping=stopping))
            return
        if news.event["event"] == "error":
            self._suspect(Suspect.from_error(child, news.event))
            return
        try:
            self.status.receive(child.role, child.id, news.event, time.monotonic())
        except (KeyError, TypeError, ValueError) as error:
            raise ChildFailed(
                f"{child.name} sent a malformed {news.event['event']!r} event: {error!r}",
                hint=f"its log: {child.log}",
                role=child.role,
                child_id=child.id,
                log=str(child.log),
            ) from None

    def _suspect(self, suspect: Suspect) -> None:
        """One entry per child: that it exits after its error event is no news."""
        if suspect.child.name not in self._accused:
            self._accused.add(suspect.child.name)
            self.suspects.append(suspect)

    def _verdict(self) -> ChildFailed:
        return verdict(self.suspects).error()

    def _raise_signal(self) -> None:
        number = self.signals.first
        if number is not None:
            what = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
            raise Interrupted(f"{what} at step {self.status.step}", signal_number=number)

    # -- what is shown and kept ------------------------------------------------------------------------------

    def _enter(self, phase: str) -> None:
        self.status.enter(phase, time.monotonic())
        self._display_due = self._metrics_due = 0.0
        self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        if now >= self._metrics_due:
            self._metrics_due = now + METRICS_SECONDS
            self.run_dir.write_metrics(self.status.metrics(now))
        if now >= self._display_due:
            self._display_due = now + DISPLAY_SECONDS
            self.display.update(self.status, now)

    def _summary(self, error: BaseException | None) -> dict[str, Any]:
        config = self.config
        summary: dict[str, Any] = {"status": "ok" if error is None else "failed"}
        if error is not None:
            summary["error"] = error.message if isinstance(error, RegrowError) else repr(error)
        return {
            **summary,
            **self.status.totals(),
            "mode": config.mode,
            "protection": config.protection,
            "servers": config.servers,
            "workers": config.workers,
            "model": config.model,
            "data": config.data,
            "batch": config.batch,
            "optimizer": config.optimizer,
            "seed": config.seed,
            **usage_by_role(self.children.all),
            "run_seconds": round(time.monotonic() - self.status.started_at, 3),
            "started_at": self.started_at.isoformat(timespec="seconds"),
            "command": shlex.join(sys.argv),
            "version": version(),
        }


class _SignalWatch:
    """Ctrl-C, SIGTERM and SIGHUP are counted, and acted on where the run is in a known state."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.count = 0
        self.first: int | None = None
        self._wake = wake
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _SignalWatch:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python has no say in signals
            for number in WAKE_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.first is None:
            self.first = number
        self._wake()


def child_env(role: str, threads: int) -> dict[str, str]:
    """Ours, with a bound on the threads that numeric libraries would start: one per core and process."""
    env = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        env[name] = str(threads)
    # Idle OpenMP threads would spin on cores that servers need.
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    env["PYTHONUNBUFFERED"] = "1"
    if role != "worker":
        # glibc keeps up to 8 arenas per core, each with unused memory of its own; rows are not in them.
        env.setdefault("MALLOC_ARENA_MAX", "2")
    return env


def usage_by_role(children: Sequence[Child]) -> dict[str, Any]:
    """Processor time summed and peak memory: per role the largest process, in total the sum of all."""
    cpu: dict[str, float] = {"coordinator": 0.0, "server": 0.0, "worker": 0.0}
    peak: dict[str, int] = dict.fromkeys(cpu, 0)
    peak_total = 0
    for child in children:
        if child.exit is not None:
            cpu[child.role] += child.exit.cpu_seconds
            peak[child.role] = max(peak[child.role], child.exit.peak_rss_bytes)
            peak_total += child.exit.peak_rss_bytes
    own = resource.getrusage(resource.RUSAGE_SELF)
    cpu["launcher"] = own.ru_utime + own.ru_stime
    total = sum(cpu.values())
    return {
        "cpu_seconds": {name: round(value, 3) for name, value in {"total": total, **cpu}.items()},
        "peak_rss_bytes": {"total": peak_total, **peak},
    }
