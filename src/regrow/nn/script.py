"""A worker whose training is somebody's own script: `regrow run script.py ARGS`.

The script runs as it would alone, as `__main__` with its own arguments; `regrow.join()` in it finds this worker's seat.
What it prints is in the worker's log, and of worker 0 also with the launcher. When it ends, its worker says so and
waits for what the launcher still wants of it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import linecache
import logging
import math
import runpy
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from regrow.checkpoint import model_names
from regrow.config import TrainConfig
from regrow.core.job import JobSpec, Mode
from regrow.errors import RegrowError, UserError
from regrow.launch import orders, reports
from regrow.launch.saving import Extra
from regrow.metrics import Metric
from regrow.nn import refusals, seat
from regrow.nn.coded import Wish
from regrow.nn.declaring import check_names
from regrow.nn.job import Job
from regrow.nn.progress import Progress
from regrow.nn.together import JudgeShare, Place, judge_together
from regrow.runtime.client import Client, SocketClient
from regrow.runtime.parent import Parent

log = logging.getLogger("regrow.worker")

STEPS = "steps"  # in the run directory
REPORT_SECONDS = 0.5
REPORT_SECONDS_PROTECTED = 0.05  # how exactly the end of a stall is seen: a step may be as short
LINE_LENGTH_MAX = 4000  # of what a script prints, as far as the launcher shows it


class RunSeat:
    """A worker's place in a run that a launcher started."""

    def __init__(self, parent: Parent, config: TrainConfig) -> None:
        who = parent.assignment.identity
        self.worker, self.workers, self.servers = who.id, config.workers, config.servers
        self.mode: Mode = config.mode  # type: ignore[assignment]
        self.seed, self.prefetch = config.seed, config.prefetch
        self.protection: Wish = config.code
        self.flush_seconds = config.flush_seconds
        self.redo_bytes = config.redo_bytes_max
        self.report_seconds = REPORT_SECONDS_PROTECTED if config.replaces_servers else REPORT_SECONDS
        # Whoever is to be killed at a step is killed by the launcher, which must hear of it at once.
        self.report_steps: Collection[int] = frozenset(sabotage.step for sabotage in config.sabotage)
        self.saves = config.saves
        self.extra = find_extra(parent.assignment)
        self.digests: Path | None = None
        if config.step_digests and config.out is not None:
            self.digests = Path(config.out) / STEPS / f"worker-{who.id}.jsonl"
        self.peers: seat.Peers | None = RunPeers(parent) if config.workers > 1 else None
        self.dense_every = find_dense_every(config)
        self.dense_refusal = refusals.find_ddp_refusal(config, listen=parent.assignment.listen)
        self.client: SocketClient | None = None
        self.metrics: dict[str, float] = {}
        self.settle: Callable[[], None] = lambda: None
        self.steps = self.samples = 0
        self.began_at = time.monotonic()
        self._parent = parent
        self._config = config

    def connect(self, job: JobSpec) -> tuple[Client, bool]:
        assignment, config = self._parent.assignment, self._config
        if config.script and config.priority_tables not in ("all", "largest"):
            named = [name.strip() for name in config.priority_tables.split(",")]
            check_names(named, job.tables, option="--priority-tables")
        assert assignment.coordinator is not None
        self.client = SocketClient(
            identity=assignment.identity,
            token=bytes.fromhex(assignment.token),
            coordinator=assignment.coordinator,
            job=job,
            redo_bytes_max=config.redo_bytes_max,
            section_bytes_max=config.frame_bytes_max,
            pulse=self._parent.pulse,
            authenticate=assignment.authenticate,
            tls=assignment.tls,
        )
        self._parent.follow_coordinator(self.client.follow_coordinator)
        self.begin()
        return self.client, assignment.start is not None and assignment.identity.incarnation == 0

    def open(self, job: Job) -> SocketClient:
        """Lets the job meet the servers now, and not with its first step."""
        assert job.client is self.client and self.client is not None
        return self.client

    def begin(self) -> None:
        """Steps from here on: what came before says nothing about how long they take."""
        self.began_at = time.monotonic()
        self._parent.pulse.begin()

    def plan(self, steps: int) -> None:
        self._parent.report(reports.Planned(steps=steps))

    def report(self, progress: Progress, client: Client) -> None:
        self.steps, self.samples = progress.step, progress.samples
        self._parent.report(make_report(progress, client))

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        self.metrics |= metrics

    def name_model(self, names: model_names.ModelNames) -> None:
        start, config = self._parent.assignment.start, self._config
        before = model_names.ModelNames() if start is None or start.model is None else model_names.decode(start.model)
        if before.dense and (difference := model_names.find_difference(before.dense, names.dense)) is not None:
            raise UserError(
                f"the model is not that of the checkpoint: {difference}",
                hint="the dense parameters are stored in their order, so the module must have the same",
            )
        text = model_names.encode(names)
        if self.worker == 0 and text is not None and (config.saves or config.publish is not None):
            self._parent.report(reports.ModelNamed(text=text))

    def save(self, step: int, extra: str | None) -> None:
        if self.worker == 0:
            kept = None if extra is None else Extra(step=step, text=extra)
            self._parent.report(reports.SaveNow(extra=kept))

    def note_waiting(self, step: int) -> None:
        self._parent.report(reports.Awaits(step=step))

    def note_end(self, settle: Callable[[], None]) -> None:
        self.settle = settle

    def note_passed(self, loop: int, step: int, *, read: bool) -> None:
        if read:
            log.info("read all batches of %d steps again to find the place: the data has no numbers", step)
        self._parent.report(reports.Passed(loop=loop, step=step))

    def judge(self, place: Place, metrics: Sequence[Metric], judge: JudgeShare, *, steps: int) -> dict[str, float]:
        found = judge_together(self._parent, place, metrics, judge, steps=steps)
        self._parent.pulse.begin()  # what a script does next may take longer than any step
        return found


class RunPeers:
    """The other workers of such a run; the launcher says who they are."""

    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self.token = bytes.fromhex(parent.assignment.token)
        self.is_first = parent.assignment.identity.incarnation == 0

    @property
    def circle(self) -> orders.CircleIs | None:
        return self._parent.circle

    def open(self, address: str) -> None:
        self._parent.report(reports.BoardAt(address=address))

    def complain(self, number: int, reason: str) -> None:
        log.warning("circle %d: %s", number, reason)
        self._parent.report(reports.CircleBroken(number=number))


def find_dense_every(config: TrainConfig) -> int | None:
    """After how many steps servers must have the dense parameters that workers keep: whenever a checkpoint or a
    publication may be made of that step."""
    wishes = [config.interval] if config.saves else []
    wishes += [config.publish_interval] if config.publish is not None else []
    steps = [wish.steps for wish in wishes]
    return None if not steps else math.gcd(*(each or 1 for each in steps))


def find_extra(assignment: orders.Assignment) -> str | None:
    """What the script kept last: in this run, else with the checkpoint that it began from."""
    if assignment.saving is not None and assignment.saving.extras:
        return assignment.saving.extras[-1].text
    return None if assignment.start is None else assignment.start.extra


def make_report(progress: Progress, client: Client) -> reports.Progress:
    """What a worker has done, as the launcher hears it."""
    return reports.Progress(
        step=progress.step,
        samples=progress.samples,
        steps_before=progress.steps_before,
        samples_before=progress.samples_before,
        loss=progress.loss_sum / progress.loss_samples if progress.loss_samples else None,
        hist_pos=progress.scores.positives.tolist(),
        hist_neg=progress.scores.negatives.tolist(),
        position=progress.position,
        staleness_mean=client.staleness_sum / max(1, client.staleness_count),
        staleness_max=client.staleness_max,
        wait_seconds=progress.wait_seconds,
        lookups=progress.lookups,
        distinct=progress.distinct,
        redo_bytes_peak=client.session.redo_bytes_peak,
        logged={name: value if math.isfinite(value) else None for name, value in progress.logged.items()},
    )


def run(parent: Parent, config: TrainConfig) -> RunSeat:
    """Runs the script to its end. Everything that it pushed is safe then."""
    place = RunSeat(parent, config)
    seat.offer(place)
    if place.worker == 0:
        sys.stdout = Echo(sys.stdout, lambda line: parent.report(reports.Said(text=line)))
    try:
        _run_script(list(config.script))
    finally:
        _end_as_python()
    if not seat.is_taken():
        raise UserError("the script ended, and did not join the run", hint="job = regrow.join() is its first line")
    if place.client is None:
        raise UserError(
            "the script ended, and trained nothing", hint="for batch in job.loop(loader): ... job.step(loss)"
        )
    place.settle()  # a loop that was left early has not
    return place


def _end_as_python() -> None:
    """This process ends without being taken apart (`launch/child.py`), so what a script leaves to its end is done now:
    exit functions, and files that nobody closed."""
    atexit._run_exitfuncs()
    for thing in gc.get_objects():
        if issubclass(type(thing), io.IOBase) and not thing.closed:  # `type`: some objects answer for their class
            with contextlib.suppress(OSError, ValueError):
                thing.flush()


def _run_script(words: list[str]) -> None:
    """As `python` would: `__main__`, with its own arguments, and its directory first on the path."""
    here = Path.cwd()  # what relative names in a traceback begin from, wherever the script goes
    own = here if words[0] == "-m" else Path(words[0]).resolve().parent
    complaints: deque[str] = deque(maxlen=1)  # the last line that the script wrote to standard error
    errors = sys.stderr
    sys.stderr = Echo(errors, lambda line: complaints.append(line) if line.strip() else None)
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, "")
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except RegrowError:
        raise
    except SystemExit as end:
        if end.code not in (None, 0):
            raise _explain_exit(end.code, complaints) from None
    except BaseException as error:
        traceback.print_exc()
        raise UserError(f"{type(error).__name__}: {error}", hint=_find_line(error, own, here=here)) from None
    finally:
        sys.stderr = errors


def _explain_exit(code: Any, complaints: Sequence[str]) -> UserError:
    """`sys.exit("why")` has said why; what ends with a number, as argparse does, has written it before."""
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        return UserError(f"the script ended: {code}")
    hint = f"its last words: {complaints[-1].strip()}" if complaints else None
    return UserError(f"the script ended with exit code {code}", hint=hint)


def _find_line(error: BaseException, own: Path, *, here: Path) -> str | None:
    """Where in the user's own files it happened: the innermost line that is not ours or a library's."""
    found = None
    for frame in traceback.extract_tb(error.__traceback__):
        path = (here / frame.filename).resolve()  # that of the script itself is as it was given
        if frame.filename[:1] != "<" and path.is_relative_to(own) and "site-packages" not in path.parts:
            text = linecache.getline(str(path), frame.lineno or 0).strip()
            found = f"{path.name}, line {frame.lineno}: {text}"
    return None if found is None else f"{found} (the whole traceback is in the worker's log)"


class Echo(io.TextIOBase):
    """An output stream of a script: to its log, and its lines to `hear`. Whatever else is asked of it (`reconfigure`,
    `fileno`, `buffer`) is asked of the log."""

    def __init__(self, log: Any, hear: Callable[[str], None]) -> None:
        self._log = log
        self._hear = hear
        self._line = ""

    def __getattribute__(self, name: str) -> Any:
        if name in ("fileno", "isatty", "encoding", "errors", "reconfigure", "buffer"):
            return getattr(self._log, name)
        return super().__getattribute__(name)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._log.write(text)
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._hear(line[:LINE_LENGTH_MAX])
        self._line = self._line[-LINE_LENGTH_MAX:]
        return len(text)

    def flush(self) -> None:
        self._log.flush()
