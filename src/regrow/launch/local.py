"""A whole run on this machine: start the processes, watch them, end them, write down what came of it.

    coordinator listens -> servers and workers start -> all workers trained -> worker 0 evaluates -> all stop

With protection, a process that dies while the model is trained or judged has a successor, and the run goes on. Any
other death, or an error that a process reports, ends the run: with one message that names the cause, with every
other process gone, and with a summary that says "failed". So does a signal. What the processes say to each
other is none of the launcher's business, and it never loads torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from regrow.config import TrainConfig
from regrow.errors import CheckpointError, ChildFailed, DataLoss, Interrupted, NotSaved, RegrowError, UserError
from regrow.launch import checkpoints, memory
from regrow.launch.causes import KILLED, MISSES_ANOTHER, Suspect, verdict
from regrow.launch.crew import CHILD_COMMAND, Crew
from regrow.launch.display import Display, QuietDisplay
from regrow.launch.processes import Child, Children, Ended, Exit, Said
from regrow.launch.rundir import RunDir, SocketDir
from regrow.launch.sabotage import Saboteur
from regrow.launch.signals import SignalWatch
from regrow.launch.status import RunStatus
from regrow.launch.version import version

METRICS_SECONDS = 1.0
METRICS_SECONDS_PROTECTED = 0.25  # a failure and its end may be less than a second apart
# Starting a spare takes a core for a moment, which a recovery needs more; but the next failure may come during it.
SPARE_SECONDS, SPARE_SECONDS_MAX = 1.0, 10.0
SURVIVING_PHASES = ("training", "evaluating")
SAVE_TRIES, SAVE_SECONDS_MAX = 3, 3600.0  # of the last checkpoint
DISPLAY_SECONDS = 0.125


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
    start = None if config.resume is None else checkpoints.find(config)
    run_dir = RunDir.create(config, overwrite=overwrite)
    try:
        run = _Run(config, run_dir, display or QuietDisplay(), tuple(command), patience or Patience(), start)
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
        start: checkpoints.Start | None,
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
        self.signals = SignalWatch(self.children.wake)
        self.sabotage = Saboteur(config)
        self.crew: Crew
        self.run_id = secrets.token_hex(8)
        self.start = self.asked = start  # None: from nothing; `asked` stays what the user said
        self.suspects: list[Suspect] = []
        self.data_loss: DataLoss | None = None
        self.not_saved: NotSaved | None = None
        self._paused: list[tuple[float, Child]] = []  # until when
        self._spare_due: float | None = None
        self._accused: set[str] = set()
        self._metrics_due = 0.0
        self._display_due = 0.0

    def run(self) -> dict[str, Any]:
        error: BaseException | None = None
        with self.signals:
            try:
                with self.children, self.display.live():
                    try:
                        self._train_to_the_end()
                    except BaseException as failure:
                        error = failure
                        self._abort()
                        raise
            finally:
                # After the children are reaped, so that their usage is known; while signals are still held
                # back, so that a third Ctrl-C cannot lose the summary.
                summary = self._summary(error or self.not_saved)
                written = self.run_dir.write_summary(summary)
        if written:
            self.display.finish(summary, self.run_dir.path)
        if self.not_saved is not None:
            raise self.not_saved
        return summary

    # -- the story -------------------------------------------------------------------------------------------

    def _train_to_the_end(self) -> None:
        """Starts over from the last checkpoint as often as that is needed, and does any good."""
        while True:
            try:
                with SocketDir() as sockets:
                    self._train(sockets)
                return
            except (ChildFailed, DataLoss) as failure:
                if not self._may_start_over(failure):
                    raise
                self._abort()
                self._start_over(failure)

    def _may_start_over(self, failure: ChildFailed | DataLoss) -> bool:
        """A death is no reason to give up where there are checkpoints; nor is a damaged one if there are others, but
        for the one that the user asked for. A mistake, or a bug, would come again."""
        cause = verdict(self.suspects) if self.suspects else None
        dead = isinstance(failure, DataLoss) or (cause is not None and cause.rank in (KILLED, MISSES_ANOTHER))
        dead |= cause is not None and cause.damage and bool(self.status.restores)
        phases = ("loading", *SURVIVING_PHASES)
        here = None if self.start is None else self.start.cut
        tries = sum(restore["cut"] == here for restore in self.status.restores)  # without a newer one since
        return self.config.saves and dead and self.status.phase in phases and tries < checkpoints.RESTORES_MAX

    def _start_over(self, failure: RegrowError) -> None:
        for child in self.children.all:
            child.retired = True
        assert self.config.ckpt is not None
        damaged = bool(self.suspects) and verdict(self.suspects).damage
        found, damage = checkpoints.newest(
            self.config.ckpt, run=self.run_id, progress=self._reading if damaged else None
        )
        if found is None and damaged:
            if self.start == self.asked or self.asked is None:
                hint = f"`regrow ckpt verify {self.config.ckpt}` lists all damage"
                raise CheckpointError(f"{failure.message}; no older checkpoint can be restored either", hint=hint)
            found = self.asked
        self.start = found or self.start
        self.suspects, self.data_loss, self._accused, self._spare_due = [], None, set(), None
        cut, step = (None, 0) if self.start is None else (self.start.cut, self.start.step)
        self.status.start_over(reason=failure.message, cut=cut, cut_step=step, damage=damage, now=time.monotonic())
        self._display_due = self._metrics_due = 0.0

    def _reading(self, done: int, total: int) -> None:
        """A checkpoint is read to see whether it is sound."""
        self.status.checking = (done, total)
        self._raise_signal()
        self._tick()

    def _save_the_end(self) -> None:
        """The last checkpoint, of the trained model. Where it fails, the model is judged all the same."""
        self.not_saved = None
        if any(self._saved_the_end() for _ in range(SAVE_TRIES)):
            return
        reason = self.status.checkpoints["last_error"] or f"it was not stored within {SAVE_SECONDS_MAX:.0f} s"
        last = self.status.checkpoints["last"]
        have = "no checkpoint of this run is stored" if last is None else f"the newest that is stored is {last['cut']}"
        self.not_saved = NotSaved(
            f"the model is trained, but its checkpoint failed {SAVE_TRIES} times: {reason}",
            hint=f"{have}; when storage is well again, --resume goes on from it",
        )

    def _saved_the_end(self) -> bool:
        self.status.still = None
        deadline = time.monotonic() + SAVE_SECONDS_MAX
        asked: Child | None = None
        while self.status.still is None and time.monotonic() < deadline:
            if asked is not self.crew.current("coordinator", 0):  # it may have died with the question
                asked = self.crew.current("coordinator", 0)
                asked.tell({"do": "checkpoint", "still": True})
            self._until(
                lambda asked=asked: (
                    self.status.still is not None  # type: ignore[misc]
                    or self.crew.current("coordinator", 0) is not asked
                ),
                deadline=deadline,
            )
        return self.status.still is True

    def _train(self, sockets: SocketDir) -> None:
        config = self.config
        crew = self.crew = Crew(
            children=self.children,
            command=self.command,
            sockets=sockets.path,
            transport=config.transport,
            logs=self.run_dir.logs,
            threads={
                "coordinator": 1,
                "server": config.threads_per_server,
                "standby": config.threads_per_server,
                "worker": config.threads_per_worker,
                "merger": 1,
            },
            assignment={
                "token": self.token,
                "config": config.to_dict(),
                # Of the config, for the roles that need no more of it.
                "servers": config.servers,
                "workers": config.workers,
                "frame_bytes_max": config.frame_bytes_max,
                "checkpoints": checkpoints.told(config, run=self.run_id, start=self.start, dead=self.status.cuts_dead),
                "resume": None if self.start is None else {"url": self.start.url, "cut": self.start.cut},
            },
        )
        crew.start("coordinator", 0)
        deadline = time.monotonic() + self.patience.listen
        self._until(lambda: crew.coordinator_address is not None, deadline=deadline)
        if crew.coordinator_address is None:
            raise ChildFailed(
                f"the coordinator did not listen within {self.patience.listen:.0f} s",
                hint=f"its log: {self.run_dir.logs.log('coordinator', 0)}",
                role="coordinator",
            )
        for id in range(config.servers):
            crew.start("server", id)
        for id in range(config.workers):
            crew.start("worker", id)
        if config.saves:  # now, while workers import torch: training has all processors
            crew.start("merger", 0)
        self._enter("loading")
        status = self.status
        self._until(lambda: any(worker.state != "starting" for worker in status.workers))
        self._enter("training")
        self._spare_due = time.monotonic() if config.code is not None else None
        self._until(lambda: all(worker.state == "trained" for worker in status.workers))
        if config.saves:
            self._save_the_end()
        self._enter("evaluating")
        crew.current("worker", 0).tell({"do": "evaluate"})
        # A worker that died meanwhile is through only when its successor is.
        self._until(lambda: bool(status.evaluated) and all(worker.state == "trained" for worker in status.workers))
        self._enter("stopping")
        self._stop()
        self._enter("done")

    def _stop(self) -> None:
        """Nobody is stopped before those who would miss it: workers first, the coordinator last."""
        self._release()
        for role in ("standby", "merger", "worker", "server", "coordinator"):
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
        self._release()
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

    def _until(self, done: Callable[[], bool], *, deadline: float | None = None) -> None:
        """Listens until `done`, or the deadline. A failure is looked into and raised."""
        while not done() and (deadline is None or time.monotonic() < deadline):
            for news in self.children.wait(DISPLAY_SECONDS):
                self._receive(news)
                self._inject()
            self._raise_signal()
            if self.data_loss is not None:
                raise self.data_loss
            if self.suspects:
                self._gather()
                raise self._verdict()
            self._inject()
            self._tend_spares()
            self._tick()

    def _gather(self) -> None:
        """Waits for the rest of the bad news: a worker may complain before its server's death shows."""
        deadline = time.monotonic() + self.patience.cause
        while time.monotonic() < deadline:
            for news in self.children.wait(deadline - time.monotonic()):
                self._receive(news)
            self._raise_signal()

    def _receive(self, news: Said | Ended, *, stopping: bool = False) -> None:
        if isinstance(news, Ended):
            self._ended(news.child, news.exit, stopping=stopping)
        elif not news.child.retired:  # nothing that a zombie says counts any more
            self._said(news.child, news.event)

    def _said(self, child: Child, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "error":
            self._complained(child, event)
            return
        if kind == "replace":
            self._replace(event)
            return
        if kind == "fenced":
            child.complaint = "was taken for dead and replaced"
            return
        try:
            if child.role == "coordinator" and kind == "listening":
                self.crew.coordinator_address = str(event["address"])
            self.status.receive(child.role, child.id, event, time.monotonic())
        except (KeyError, TypeError, ValueError) as error:
            raise ChildFailed(
                f"{child.name} sent a malformed {kind!r} event: {error!r}",
                hint=f"its log: {child.log}",
                role=child.role,
                child_id=child.id,
                log=str(child.log),
            ) from None
        if kind == "trained" and child.role == "worker" and child.id == 0 and self.status.phase == "evaluating":
            # The one that was asked is dead; this is its successor.
            child.tell({"do": "evaluate"})

    def _complained(self, child: Child, event: dict[str, Any]) -> None:
        kind, message = event.get("kind"), str(event.get("message", "unknown error"))
        if kind == "data_loss":
            self.data_loss = self.data_loss or DataLoss(message, hint=event.get("hint"))
        elif kind == "lost" and self._survives:
            child.complaint = message  # it will exit, and have a successor
        elif child.role not in ("standby", "merger"):
            self._suspect(Suspect.from_error(child, event))

    # -- deaths and successors -------------------------------------------------------------------------------

    @property
    def _survives(self) -> bool:
        """Whether a death now is not the end of the run."""
        surviving = self.status.phase in SURVIVING_PHASES and not self.status.loading
        return self.config.code is not None and surviving and not self.suspects

    def _ended(self, child: Child, exit: Exit, *, stopping: bool) -> None:
        if child.retired:
            return
        now = time.monotonic()
        if child.role == "standby":
            self.crew.lost_spare(child)
            self._spare_due = now + SPARE_SECONDS
            return
        if child.role == "merger":
            if not stopping and self.crew.refusal(child, now) is None:  # training does not depend on it
                self.crew.start("merger", 0, incarnation=child.incarnation + 1)
            return
        self.status.lost(child.role, child.id)
        if stopping and exit.code == 0:
            return
        if stopping or not self._survives:
            if not stopping and self.config.code is not None and self.suspects:
                return  # the run ends for another reason; this one would have been survived
            self._suspect(Suspect.from_exit(child, exit, step=self.status.step, stopping=stopping))
            return
        refusal = self.crew.refusal(child, now)
        if refusal is not None:
            suspect = Suspect.from_exit(child, exit, step=self.status.step, stopping=False)
            message = f"{refusal}; the last time it {exit}; its log: {child.log}"
            self._suspect(dataclasses.replace(suspect, message=message))
            return
        self._succeed(child, child.complaint or str(exit), now)

    def _replace(self, event: dict[str, Any]) -> None:
        """The coordinator has not heard of somebody for too long."""
        child = self.crew.current(str(event["role"]), int(event["id"]))
        if child.incarnation == int(event["incarnation"]) and self.config.saves and self.status.loading:
            child.signal(signal.SIGKILL)  # nobody else has the rows it was loading: all begin again
            return
        if child.incarnation != int(event["incarnation"]) or not self._survives:
            return  # it has a successor already, or nobody needs one
        now, reason = time.monotonic(), str(event.get("reason", "silent"))
        refusal = self.crew.refusal(child, now, alive=True)
        if refusal is not None:
            raise ChildFailed(f"{refusal}; the last time: {reason}", hint="is this machine too busy?")
        if not child.paused:
            # One that was paused on purpose comes back as a zombie, to show that it is fenced off.
            child.signal(signal.SIGKILL)
        self.status.lost(child.role, child.id)
        self._succeed(child, reason, now, alive=True)

    def _succeed(self, child: Child, reason: str, now: float, *, alive: bool = False) -> None:
        # One that came back in vain, because others died meanwhile, begins again: that is the same failure.
        if not (alive and self.status.failures.again(child.role, child.id)):
            self.status.failures.died(
                child.role,
                child.id,
                incarnation=child.incarnation,
                step=self.status.step,
                reason=reason,
                at=child.doomed_at if child.doomed_at is not None else now,
                now=now,
            )
        successor = self.crew.succeed(child)
        self.status.succeeded(child.role, child.id, successor.incarnation)
        self._spare_due = now + SPARE_SECONDS
        self._display_due = self._metrics_due = 0.0

    def _tend_spares(self) -> None:
        """As many spares as servers may die together; started when nothing else is urgent."""
        now = time.monotonic()
        code = self.config.code
        if code is None or not self._survives or self._spare_due is None or now < self._spare_due:
            return
        if self.status.servers_down and now < self._spare_due + SPARE_SECONDS_MAX:
            return
        self._spare_due = None
        self.crew.keep_spares(code.r)

    def _inject(self) -> None:
        """Faults whose time has come."""
        now = time.monotonic()
        for until, child in self._paused:
            if now >= until:
                child.signal(signal.SIGCONT)
                child.paused, child.doomed_at = False, None
        self._paused = [(until, child) for until, child in self._paused if now < until]
        if self.status.phase not in SURVIVING_PHASES:
            return
        for fault in self.sabotage.due(self.status.step):
            child = self.crew.current(fault.role, fault.id)
            child.doomed_at = now
            if fault.pause_seconds is None:
                child.signal(signal.SIGKILL)
            else:
                child.paused = True
                child.signal(signal.SIGSTOP)
                self._paused.append((now + fault.pause_seconds, child))
        target = self.sabotage.random_target(now, down=self.status.servers_down)
        if target is not None and self.status.phase == "training":
            child = self.crew.current(*target)
            child.doomed_at = now
            child.signal(signal.SIGKILL)

    def _release(self) -> None:
        """Zombies go, and who was only paused can hear again."""
        for child in self.children.running():
            if child.retired:
                child.signal(signal.SIGKILL)
            elif child.paused:
                child.signal(signal.SIGCONT)
        self._paused = []

    # -- who is to blame -------------------------------------------------------------------------------------

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
        self.status.failures.tick(now)
        if now >= self._metrics_due:
            self._metrics_due = now + (METRICS_SECONDS if self.config.code is None else METRICS_SECONDS_PROTECTED)
            self.run_dir.write_metrics(self.status.metrics(now))
        if now >= self._display_due:
            self._display_due = now + DISPLAY_SECONDS
            self.display.update(self.status, now)

    def _summary(self, error: BaseException | None) -> dict[str, Any]:
        config = self.config
        self.status.failures.finish(time.monotonic())
        status = "ok" if error is None else "not saved" if isinstance(error, NotSaved) else "failed"
        summary: dict[str, Any] = {"status": status}
        if error is not None:
            summary["error"] = error.message if isinstance(error, RegrowError) else repr(error)
        return {
            **summary,
            **self.status.totals(),
            "mode": config.mode,
            "protection": config.protection,
            "code": None if config.code is None else dataclasses.asdict(config.code),
            "sabotage_unreached": [dataclasses.asdict(fault) for fault in self.sabotage.unreached],
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


def usage_by_role(children: Sequence[Child]) -> dict[str, Any]:
    """Processor time summed and peak memory: per role the largest process, in total the sum over all places.

    Of several incarnations in one place the largest counts, as they were not there at once.
    """
    cpu: dict[str, float] = {"coordinator": 0.0, "server": 0.0, "worker": 0.0, "merger": 0.0}
    peak: dict[str, int] = dict.fromkeys(cpu, 0)
    places: dict[tuple[str, int], int] = {}
    for child in children:
        if child.exit is not None:
            role = "server" if child.role == "standby" else child.role
            place = (child.role, child.id)
            cpu[role] += child.exit.cpu_seconds
            peak[role] = max(peak[role], child.exit.peak_rss_bytes)
            places[place] = max(places.get(place, 0), child.exit.peak_rss_bytes)
    peak_total = sum(places.values())
    own = resource.getrusage(resource.RUSAGE_SELF)
    cpu["launcher"] = own.ru_utime + own.ru_stime
    total = sum(cpu.values())
    return {
        "cpu_seconds": {name: round(value, 3) for name, value in {"total": total, **cpu}.items()},
        "peak_rss_bytes": {"total": peak_total, **peak},
    }
