"""A whole run on this machine: start the processes, watch them, end them, write down what came of it.

    coordinator listens -> servers and workers start -> all workers trained -> worker 0 evaluates -> all stop

With protection, a process that dies while the model is trained or judged has a successor, and the run goes on. Any
other death, or an error that a process reports, ends the run: with one message that names the cause, with every
other process gone, and with a summary that says "failed". So does a signal. What the processes say to each
other is none of the launcher's business, and it never loads torch.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from regrow.config import TrainConfig
from regrow.errors import CheckpointError, ChildFailed, DataLoss, Interrupted, NotSaved, RegrowError
from regrow.launch import checkpoints, endings, partial, takeover
from regrow.launch.backend import Begun, Delayed, Ended, Handle, News, Noted, end, list_running, name_of
from regrow.launch.causes import KILLED, MISSES_ANOTHER, Suspect, find_cause
from regrow.launch.circles import TALLIES, Gatherings
from regrow.launch.crew import Crew
from regrow.launch.display import Display, QuietDisplay
from regrow.launch.farewell import Farewell
from regrow.launch.hosting import Host
from regrow.launch.legacy import encode_memo
from regrow.launch.orders import Command, Conclude, Evaluate
from regrow.launch.patience import Patience
from regrow.launch.precheck import check_start
from regrow.launch.processes import CHILD_COMMAND, LocalProcesses
from regrow.launch.publications import plan_publications
from regrow.launch.replan import Replanner
from regrow.launch.reports import (
    Answer,
    AnyReport,
    Condemn,
    Error,
    Fenced,
    Listening,
    Malformed,
    ModelNamed,
    Ready,
    Replace,
    Said,
    SaveNow,
    Trained,
)
from regrow.launch.rundir import Logs, RunDir
from regrow.launch.sabotage import Saboteur
from regrow.launch.saving import Hanging
from regrow.launch.signals import SignalWatch
from regrow.launch.status import RunStatus
from regrow.launch.summary import make_summary
from regrow.launch.supervisor import (
    Accuse,
    Appoint,
    CoordinatorListens,
    Event,
    GiveUp,
    Harm,
    KeepSpares,
    NoteEnd,
    NoteSuccessor,
    ProcessAnswered,
    ProcessBegun,
    ProcessCondemned,
    ProcessDelayed,
    ProcessEnded,
    ProcessFailed,
    ProcessFenced,
    ProcessMissed,
    ProcessReady,
    Release,
    Stance,
    Supervisor,
    TakeStance,
    Tick,
)
from regrow.launch.tiers import RowFiles, plan_tiers
from regrow.launch.usage import explain_malformed
from regrow.launch.watch import Watch
from regrow.runtime.sockets import SocketDir

if TYPE_CHECKING:
    from regrow.launch.ray_posts import Seat

METRICS_SECONDS = 1.0
METRICS_SECONDS_PROTECTED = 0.25  # a failure and its end may be less than a second apart
LOSSES = (ProcessEnded, ProcessMissed, ProcessCondemned)
SURVIVING_PHASES = ("training", "evaluating")
MEMO_SECONDS = 0.5  # between two looks at whether a successor would need to know something else by now
DISPLAY_SECONDS = 0.125
PLACES_SECONDS_MAX = 3600.0  # for the place of a coordinator on another host: queues of clusters are long


def train(
    config: TrainConfig,
    *,
    overwrite: bool = False,
    display: Display | None = None,
    command: Sequence[str] = CHILD_COMMAND,
    patience: Patience | None = None,
    memory_check: bool = True,
    token: str | None = None,
    make_backend: Callable[[Logs], Any] | None = None,
    seat: Seat | None = None,
    on_start: Callable[[Launch], object] = lambda run: None,
) -> dict[str, Any]:
    """Runs to the end and returns the summary. A run that fails raises, after its summary is written. Without another
    backend its processes are of this machine. With a `seat` another launcher may go on with it (`takeover.py`)."""
    check_start(config)
    host = Host(config, command=command, memory_check=memory_check, make_backend=make_backend, seat=seat)
    start = None if config.resume is None else checkpoints.find(config)
    planner = partial.Planner(config) if config.saves_own else None
    planned = None if planner is None else planner.plan()
    config = config if planned is None else planned.config
    with contextlib.ExitStack() as open_until_then:
        files = host.open_files(overwrite=overwrite)
        if files is not None:
            open_until_then.callback(files.close)
        run_dir = RunDir.create(config, overwrite=overwrite)
        open_until_then.callback(run_dir.close)
        run = Launch(config, run_dir, display or QuietDisplay(), host, patience or Patience(), start)
        run.token = token or run.token
        run.files = files
        if seat is not None:
            run_dir.mark(run.run_id)
        on_start(run)
        if planner is not None and planned is not None:
            run.replanner = Replanner(planner, planned, run.status)
        return run.run()


class Launch:
    """One run, from the first process to the summary."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: RunDir,
        display: Display,
        host: Host,
        patience: Patience,
        start: checkpoints.Start | None,
    ) -> None:
        self.config = config
        self.replanner: Replanner | None = None  # with partial recovery
        self.files: RowFiles | None = None  # of rows on disk
        self.run_dir = run_dir
        self.display = display
        self.patience = patience
        self.token = secrets.token_hex(32)
        self.inherited: takeover.Inherited | None = None  # from a launcher before this one
        self.started_at = datetime.now().astimezone()
        self.status = RunStatus(config, started_at=time.monotonic())
        if start is not None and (note := checkpoints.note_protection(config, start)) is not None:
            self.status.notes.append(note)
        self.host = host
        self.backend = host.make(run_dir.logs)
        self.status.notes += host.notes
        self.signals = SignalWatch(self.backend.wake)
        self.saboteur = Saboteur(config)
        self.supervisor = Supervisor(replaces=config.replaces_servers)
        self.crew: Crew
        self.run_id = secrets.token_hex(8)
        self.start = self.asked = start  # None: from nothing; `asked` stays what the user said
        directory = str(run_dir.path.resolve())
        self.gatherings = Gatherings(workers=config.workers, directory=directory, shares=config.cluster == "local")
        self.suspects: list[Suspect] = []
        self.data_loss: DataLoss | None = None
        self.not_saved: NotSaved | None = None
        self.farewell = Farewell()
        self._ending = False  # whoever ends now was told to
        self._memo_due = 0.0
        self._metrics_due = 0.0
        self._display_due = 0.0

    def run(self) -> dict[str, Any]:
        error: BaseException | None = None
        with self.signals:
            try:
                with contextlib.closing(self.backend), self.display.live():
                    try:
                        self._train_to_the_end()
                    except BaseException as failure:
                        error = failure
                        self._abort()
                        raise
            finally:
                # After the children are reaped, so that their usage is known; while signals are still held
                # back, so that a third Ctrl-C cannot lose the summary.
                summary = make_summary(self, error or self.not_saved)
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
                with SocketDir() if self.config.transport == "unix" else contextlib.nullcontext() as sockets:
                    self._train(sockets)
                return
            except (ChildFailed, DataLoss) as failure:
                cause = find_cause(self.suspects) if self.suspects else None
                if not self._may_start_over(failure, cause):
                    raise
                self._abort()
                self._start_over(failure, damaged=cause is not None and cause.damage)

    def _may_start_over(self, failure: ChildFailed | DataLoss, cause: Suspect | None) -> bool:
        """A death is no reason to give up where there are checkpoints; nor is a damaged one if there are others, but
        for the one that the user asked for. A mistake, or a bug, would come again."""
        dead = isinstance(failure, DataLoss) or (cause is not None and cause.rank in (KILLED, MISSES_ANOTHER))
        if cause is not None and cause.damage:  # where it was a save of one server, a cut may be sound
            dead |= bool(self.status.restores) or (self.config.saves_own and cause.who.incarnation > 0)
        if cause is not None and cause.rows_damaged:  # files are made anew, unless the checkpoint is in them
            dead |= not self.config.saves_epochs
        phases = ("loading", *SURVIVING_PHASES)
        here = None if self.start is None else self.start.cut
        tries = sum(restore["cut"] == here for restore in self.status.restores)  # without a newer one since
        return self.config.saves and dead and self.status.phase in phases and tries < checkpoints.RESTORES_MAX

    def _start_over(self, failure: RegrowError, *, damaged: bool) -> None:
        found, damage = self._find_newest(damaged=damaged)
        if found is None and damaged and not self.config.saves_own:  # else it may be a save that is damaged
            if self.start == self.asked or self.asked is None:
                hint = f"`regrow ckpt verify {self.config.ckpt}` lists all damage"
                raise CheckpointError(f"{failure.message}; no older checkpoint can be restored either", hint=hint)
            found = self.asked
        self.start = found or self.start
        self.suspects, self.data_loss, self._ending = [], None, False
        self.saboteur.start_over()
        self.gatherings.start_over()
        if self.replanner is not None and self._full:
            self.config = self.status.config = self.replanner.change_over()
        cut, step = (None, 0) if self.start is None else (self.start.cut, self.start.step)
        self.status.start_over(reason=failure.message, cut=cut, cut_step=step, damage=damage, now=time.monotonic())
        self._display_due = self._metrics_due = 0.0

    def _find_newest(self, *, damaged: bool) -> tuple[checkpoints.Start | None, list[str]]:
        if self.config.saves_epochs:
            return checkpoints.find_newest_here(self.config), []
        assert self.config.ckpt is not None
        reading = self._show_reading if damaged else None
        return checkpoints.find_newest(self.config.ckpt, run=self.run_id, progress=reading)

    def _show_reading(self, done: int, total: int) -> None:
        """A checkpoint is read to see whether it is sound."""
        self.status.checking = (done, total)
        self._raise_signal()
        self._tick()

    def _ask_coordinator(self, command: Command, is_answered: Callable[[], bool], deadline: float) -> None:
        """Who was asked may die with the question: then its successor is."""
        current = self.supervisor.current
        while not is_answered() and time.monotonic() < deadline:
            asked = current("coordinator", 0)
            self.crew.tell(asked, command)
            self._until(lambda who=asked: is_answered() or current("coordinator", 0) != who, deadline=deadline)  # type: ignore[misc]

    def _train(self, sockets: SocketDir | None) -> None:
        config, status = self.config, self.status
        if self.files is not None and (self.start is None or not self.start.epochs):
            self.files.clear()
        if isinstance(self.backend, LocalProcesses):
            self.backend.use_sockets(None if sockets is None else sockets.path)
        self.supervisor = Supervisor(
            replaces=config.replaces_servers,
            watch=Watch(silent_seconds=config.silent_limits, patience_seconds=config.patience_seconds),
            prefer=self.backend.prefer,
            numbers=takeover.number(self),
        )
        self.crew = self._hire()
        inherited, self.inherited = self.inherited, None
        self._start_all() if inherited is None else takeover.adopt(self, inherited)
        copies = 0 if config.code is None else config.code.copies
        if status.phase != "stopping":
            self.supervise(KeepSpares(count=copies, now=time.monotonic()))
            self._until(lambda: status.phase in SURVIVING_PHASES)
            self.supervise(KeepSpares(count=copies, workers=config.spare_workers_kept, now=time.monotonic()))
            if status.phase == "training":
                self._until(lambda: all(worker.state == "trained" for worker in status.workers))
                self.not_saved = endings.save(status, self._ask_coordinator) if config.saves else None
                if config.publish is not None:
                    endings.publish(status, self._ask_coordinator)
                self.enter("evaluating")
            if inherited is None or not inherited.is_judged:
                self.crew.tell(self.supervisor.current("worker", 0), Evaluate())
            # A worker that died meanwhile is through only when its successor is.
            self._until(
                lambda: status.evaluated is not None and all(worker.state == "trained" for worker in status.workers)
            )
            self.enter("stopping")
        self._stop()
        if self.replanner is not None and self.not_saved is None:
            checkpoints.clear_saves(config, run=self.run_id)
        if self.files is not None:
            self.files.finish()
        self.enter("done")

    def _start_all(self) -> None:
        config, crew = self.config, self.crew
        self.supervise(Appoint(role="coordinator", id=0, now=time.monotonic()))
        deadline = time.monotonic() + self.patience.listen
        self._until(lambda: crew.coordinator_address is not None, deadline=deadline)
        if crew.coordinator_address is None:
            raise ChildFailed(
                f"the coordinator did not listen within {self.patience.listen:.0f} s",
                hint=f"its log: {self.run_dir.logs.log('coordinator', 0)}",
                role="coordinator",
            )
        # The merger now, while workers import torch: training has all processors.
        counts = {"server": config.servers, "worker": config.workers, "merger": config.mergers}
        for role, count in counts.items():
            for id in range(count):
                self.supervise(Appoint(role=role, id=id, now=time.monotonic()))
        self.enter("loading")

    def _hire(self) -> Crew:
        config, start = self.config, self.start
        return Crew(
            backend=self.backend,
            threads=config.threads,
            token=self.token,
            servers=config.servers,
            frame_bytes_max=config.frame_bytes_max,
            authenticate=config.authenticate,
            tls=config.tls,
            config={**config.to_dict(), **({"out": str(self.run_dir.path.resolve())} if config.step_digests else {})},
            saving=checkpoints.plan_saving(
                config,
                run=self.run_id,
                start=start,
                starts=len(self.status.restores),
                dead=self.status.cuts_dead,
                partial=None if self.replanner is None else self.replanner.partial,
            ),
            publications=plan_publications(config, run=self.run_id, starts=len(self.status.restores)),
            start=checkpoints.make_stored(start),
            tiers=plan_tiers(config),
            hanging=Hanging(silent_seconds=config.silent_limits["server"], patience_seconds=config.patience_seconds),
        )

    def _stop(self) -> None:
        """Nobody is stopped before those who would miss it: workers first, the coordinator last."""
        self.supervise(Release())
        for role in ("standby", "understudy", "merger", "worker", "server", "coordinator"):
            for news in end(
                self.backend,
                list_running(self.backend, role),
                asked_seconds=self.patience.stop,
                term_seconds=self.patience.term,
                hurry=lambda: self.signals.count > 0,
            ):
                self._receive(news)
            self._tick()
            self._raise_signal()
            if self.suspects:
                raise find_cause(self.suspects).error()

    def _abort(self) -> None:
        """Ends everything that still runs; a second signal ends it at once."""
        self._ending = True
        self.supervise(Release())
        known = min(1, self.signals.count)
        for news in end(
            self.backend,
            list_running(self.backend),
            asked_seconds=self.patience.abort,
            term_seconds=self.patience.term,
            hurry=lambda: self.signals.count > known,
        ):
            with contextlib.suppress(Exception):  # the cause is known; these are its echoes
                self._receive(news)

    # -- what the processes say --------------------------------------------------------------------------------

    def _until(self, done: Callable[[], bool], *, deadline: float | None = None) -> None:
        """Listens until `done`, or the deadline. A failure is looked into and raised."""
        while not done() and (deadline is None or time.monotonic() < deadline):
            for news in self.backend.wait(DISPLAY_SECONDS):
                self._receive(news)
                self._do_harm()
            self._raise_signal()
            if self.data_loss is not None:
                raise self.data_loss
            if self.suspects:
                self._gather()
                raise find_cause(self.suspects).error()
            self._check_for_stall()
            self._do_harm()
            self.supervise(Tick(now=time.monotonic(), busy=bool(self.status.servers_down)))
            self._tick()

    def _check_for_stall(self) -> None:
        """Everybody answers, or would have been replaced; if nothing moves all the same, nobody else will say so."""
        quiet = time.monotonic() - self.status.moved_at
        if quiet >= self.patience.stall:
            raise ChildFailed(
                f"nothing has moved for {quiet:.0f} s, although all processes answer",
                hint=self.gatherings.judges.describe_waiting() or f"their logs: {self.run_dir.logs.path}",
            )

    def _gather(self) -> None:
        """Waits for the rest of the bad news: a worker may complain before its server's death shows."""
        deadline = time.monotonic() + self.patience.cause
        while time.monotonic() < deadline:
            for news in self.backend.wait(deadline - time.monotonic()):
                self._receive(news)
            self._raise_signal()

    def _receive(self, news: News) -> None:
        if isinstance(news, Ended):
            self.supervise(ProcessEnded(who=news.handle.who, exit=news.exit, now=time.monotonic()))
        elif isinstance(news, Noted):
            self.display.say(news.text)
        elif isinstance(news, Begun):
            self.supervise(ProcessBegun(who=news.handle.who, now=time.monotonic()))
        elif isinstance(news, Delayed):
            self._note_delay(news)
        elif self.supervisor.counts(news.handle.who):  # nothing that a zombie says counts any more
            self.receive_report(news.handle, news.report)

    def _note_delay(self, news: Delayed) -> None:
        """For as long as the user likes: that nothing moves then is no mistake."""
        self.status.moved_at = time.monotonic()
        self.supervise(ProcessDelayed(who=news.handle.who))
        if news.is_new:
            self.display.say(f"{name_of(news.handle.who)} waits: {news.reason}")

    def receive_report(self, handle: Handle, report: AnyReport | Malformed) -> None:
        who, now = handle.who, time.monotonic()
        match report:
            case Answer(busy_seconds=busy, longest_seconds=longest):
                self.supervise(ProcessAnswered(who=who, now=now, busy_seconds=busy, longest_seconds=longest))
            case Malformed(event=event, problem=problem):
                raise explain_malformed(handle, event, problem)
            case Error(kind="data_loss"):
                self.data_loss = self.data_loss or DataLoss(report.message, hint=report.hint)
            case Error():
                self.supervise(ProcessFailed(who=who, words=report))
            case Replace(peer=peer, reason=reason):
                self.supervise(ProcessMissed(who=peer, reason=reason, now=now))
            case Condemn(peer=peer, reason=reason):
                self.supervise(ProcessCondemned(who=peer, reason=reason, now=now))
            case Fenced():
                self.supervise(ProcessFenced(who=who))
            case Said(text=text):
                self.display.say(text)
            case _:
                if who.role == "coordinator" and isinstance(report, Listening):
                    self.crew.coordinator_address = report.address
                    self.supervise(CoordinatorListens(who=who, address=report.address))
                if isinstance(report, Ready):
                    self.supervise(ProcessReady(who=who))
                try:
                    self.status.receive(who.role, who.id, report, now)
                except ValueError as error:
                    raise explain_malformed(handle, str(report.__struct_config__.tag), str(error)) from None
                # At once: what comes next, maybe in the same breath, is a death in training and not before it.
                if self.status.phase == "loading" and any(worker.state != "starting" for worker in self.status.workers):
                    self.enter("training")
                if who.role == "worker":
                    self._let_gather(who.id, report)
                if isinstance(report, SaveNow | ModelNamed):
                    self._save_now(report)
                if isinstance(report, Trained) and who.id == 0 and self.status.phase == "evaluating":
                    handle.tell(Evaluate())  # the one that was asked is dead; this is its successor

    def _let_gather(self, worker: int, report: AnyReport) -> None:
        """What workers do together: evaluations, and the exchange of dense gradients."""
        for other, command in self.gatherings.receive(worker, report):
            self.crew.tell(self.supervisor.current("worker", other), command)
            if isinstance(command, Conclude):
                shutil.rmtree(self.run_dir.path / TALLIES, ignore_errors=True)
        while self.gatherings.judges.notes:
            self.display.say(self.gatherings.judges.notes.pop(0))

    def _save_now(self, said: SaveNow | ModelNamed) -> None:
        """A script wants a checkpoint, or says what is in them."""
        self.crew.tell(self.supervisor.current("coordinator", 0), self.crew.keep(said))

    # -- deaths and successors -------------------------------------------------------------------------------

    @property
    def _full(self) -> bool:
        return self.replanner is not None and self.replanner.full is not None

    def _choose_stance(self) -> Stance:
        """What a death means now."""
        if self._ending or self.status.phase in ("stopping", "done"):
            return Stance.STOPPING
        if self.status.is_loading:
            return Stance.LOADING if self.config.saves else Stance.STRICT
        replaces = self.config.replaces_servers and self.status.phase in SURVIVING_PHASES
        return Stance.REPLACING if replaces else Stance.STRICT

    def supervise(self, event: Event) -> None:
        """Tells the supervisor, and does what it says."""
        stance = self._choose_stance()
        if stance is Stance.REPLACING and isinstance(event, LOSSES) and event.who.role == "server" and self._full:
            stance = Stance.STRICT  # full recovery is cheaper by now: nobody replaces it, and all go back
        if stance is not self.supervisor.stance:
            self.supervisor.receive(TakeStance(stance=stance))
        for order in self.supervisor.receive(event):
            match order:
                case NoteEnd(who=who):
                    self.status.note_end(who.role, who.id)
                case NoteSuccessor():
                    self._note_successor(order)
                case Accuse():
                    handle, stopping = self.crew.handle(order.who), self.supervisor.stance is Stance.STOPPING
                    self.suspects.append(Suspect.from_order(handle, order, step=self.status.step, stopping=stopping))
                case GiveUp(reason=reason):
                    raise ChildFailed(reason, hint="is this machine too busy?")
                case _:
                    self.crew.carry_out(order)

    def _note_successor(self, order: NoteSuccessor) -> None:
        who, failures = order.who, self.status.failures
        # One that came back in vain, because others died meanwhile, begins again: that is the same failure.
        if not (order.counts_as_dead and failures.begin_anew(who.role, who.id)):
            failures.note_death(
                who.role,
                who.id,
                incarnation=who.incarnation,
                step=self.status.step,
                reason=order.reason,
                at=order.died_at,
                now=time.monotonic(),
            )
        self.status.note_successor(who.role, who.id, order.heir.incarnation)
        if who.role == "worker":
            self.gatherings.note_successor(who.id)
        self._display_due = self._metrics_due = self._memo_due = 0.0

    def _do_harm(self) -> None:
        """Sabotage whose time has come."""
        if self.status.phase not in SURVIVING_PHASES:
            return
        now = time.monotonic()
        for sabotage in self.saboteur.take_due(self.status.step):
            harm = Harm(role=sabotage.role, id=sabotage.id, pause_seconds=sabotage.pause_seconds, now=now)
            self.supervise(harm)
        incarnations = [server.incarnation for server in self.status.servers]
        if self.status.phase != "training":
            return
        down = self.status.servers_down
        for blow in self.saboteur.choose_targets(now, down=down, incarnations=incarnations):
            role = "standby" if blow.role == "spare" else blow.role
            self.supervise(Harm(role=role, id=blow.id, pause_seconds=blow.pause_seconds, now=now))

    def _raise_signal(self) -> None:
        number = self.signals.first
        if number is not None:
            what = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
            raise Interrupted(f"{what} at step {self.status.step}", signal_number=number)

    # -- what is shown and kept ------------------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        self.status.enter(phase, time.monotonic())
        self._display_due = self._metrics_due = self._memo_due = 0.0
        self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        self.status.failures.tick(now)
        self.farewell.look(
            self.status.checkpoints["saved"], save=lambda: self._save_now(SaveNow()), end=self.signals.stop
        )
        if self.replanner is not None and (every := self.replanner.look(now)) is not None:
            self.crew.change_saves(every)
            for id in range(self.config.servers):
                self.crew.tell(self.supervisor.current("server", id), every)
        if self.replanner is not None and self.replanner.is_checkpoint_due(now):
            self._save_now(SaveNow())
        if now >= self._memo_due and self.host.seat is not None:
            self._memo_due = now + MEMO_SECONDS
            self.backend.keep(encode_memo(takeover.make_memo(self)), self.token)
        if now >= self._metrics_due:
            self._metrics_due = now + (METRICS_SECONDS_PROTECTED if self.config.replaces_servers else METRICS_SECONDS)
            self.run_dir.write_metrics(self.status.metrics(now))
        if now >= self._display_due:
            self._display_due = now + DISPLAY_SECONDS
            self.display.update(self.status, now)
