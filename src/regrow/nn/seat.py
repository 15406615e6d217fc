"""Where a worker sits: how many others there are, how it reaches the servers, and who hears what it has done.

A script does not choose its seat. Under `regrow run` the launcher has one for it; alone it gets servers inside its own
process. `regrow.join()` takes whichever is there, once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from regrow.checkpoint.model_names import ModelNames
from regrow.core.job import JobSpec, Mode
from regrow.errors import UserError
from regrow.launch.orders import CircleIs
from regrow.metrics import Metric
from regrow.nn.coded import REDO_BYTES_DEFAULT, Wish
from regrow.nn.embedding import Cluster
from regrow.nn.progress import Progress
from regrow.nn.together import JudgeShare, Place
from regrow.runtime.client import Client

ALONE_SERVERS = 1  # of a script without a launcher: there is nobody to share rows with
SHOW_SECONDS = 2.0


class Peers(Protocol):
    """The other workers of a run, as one sees them that exchanges dense gradients with them."""

    token: bytes
    is_first: bool  # whether nobody was in this place before

    @property
    def circle(self) -> CircleIs | None:
        """The newest that is known."""

    def open(self, address: str) -> None:
        """What this worker shows is seen there."""

    def complain(self, number: int, reason: str) -> None:
        """Of this circle comes nothing more."""


class Seat(Protocol):
    """One worker's place in a run."""

    worker: int
    workers: int
    servers: int
    mode: Mode
    seed: int
    prefetch: int  # batches that are asked for ahead (asynchronous)
    protection: Wish
    flush_seconds: float | None  # where checkpoints stay in the files of the servers: to be written within so long
    redo_bytes: int  # of pushes a worker keeps at most
    report_seconds: float
    report_steps: Collection[int]  # steps after which somebody wants to hear of it at once
    saves: bool  # whether there are checkpoints
    extra: str | None  # that the script kept with the one this began from, or since
    digests: Path | None  # a file for digests of all steps
    peers: Peers | None  # where there are other workers
    dense_every: int | None  # steps after which a checkpoint may want dense parameters that workers keep
    dense_refusal: str | None  # why workers cannot keep them here

    def connect(self, job: JobSpec) -> tuple[Client, bool]:
        """A client, and whether everybody starts from a checkpoint: then no step is half done."""

    def plan(self, steps: int) -> None:
        """How many steps there will be."""

    def report(self, progress: Progress, client: Client) -> None:
        """What was done since the last report."""

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        """How the model was judged."""

    def judge(self, place: Place, metrics: Sequence[Metric], judge: JudgeShare, *, steps: int) -> dict[str, float]:
        """Judges together with all other workers, after so many steps."""

    def note_passed(self, loop: int, step: int, *, read: bool) -> None:
        """Steps of a loop were done before, up to this one; `read`: their batches had to be read for it."""

    def note_waiting(self, step: int) -> None:
        """This step was pushed, and others have not made it for a while (synchronous)."""

    def note_end(self, settle: Callable[[], None]) -> None:
        """What is to be called when the script has ended."""

    def name_model(self, names: ModelNames) -> None:
        """What the parameters are called, before they are declared; UserError if the checkpoint has others."""

    def save(self, step: int, extra: str | None) -> None:
        """Asks for a checkpoint, with what is to be kept of this step, if anything."""


class AloneSeat:
    """The only worker, with its servers inside the same process: for a notebook, and for `python script.py`."""

    worker, workers, servers = 0, 1, ALONE_SERVERS
    mode: Mode = "async"
    prefetch = 0  # nothing is gained by asking ahead where everything is answered at once
    protection: Wish = None
    flush_seconds: float | None = None
    redo_bytes = REDO_BYTES_DEFAULT
    report_seconds = SHOW_SECONDS
    report_steps: Collection[int] = ()
    saves = False
    extra: str | None = None
    digests: Path | None = None
    peers: Peers | None = None
    dense_every: int | None = None
    dense_refusal: str | None = None

    def __init__(self, *, seed: int = 0, mode: Mode = "async", servers: int = ALONE_SERVERS) -> None:
        self.seed = seed
        self.mode = mode
        self.servers = servers
        self._steps: int | None = None
        self._shown: tuple[float, int] | None = None

    def connect(self, job: JobSpec) -> tuple[Client, bool]:
        from regrow.runtime.inprocess import InProcessCluster

        return InProcessCluster(servers=self.servers).client(job), False

    def plan(self, steps: int) -> None:
        self._steps = steps

    def report(self, progress: Progress, client: Client) -> None:
        now = time.monotonic()
        before, self._shown = self._shown, (now, progress.samples)
        loss = progress.loss_sum / progress.loss_samples if progress.loss_samples else None
        words = [f"step {progress.step}" + (f" of {self._steps}" if self._steps else "")]
        words += [] if loss is None else [f"loss {loss:.4f}"]
        words += [f"{name} {value:.4g}" for name, value in progress.logged.items() if name != "loss"]
        if before is not None and now > before[0]:
            words.append(f"{(progress.samples - before[1]) / (now - before[0]):,.0f} samples/s")
        print("  ".join(words), flush=True)

    def note_metrics(self, metrics: Mapping[str, float]) -> None:
        """The script has them."""

    def judge(self, place: Place, metrics: Sequence[Metric], judge: JudgeShare, *, steps: int) -> dict[str, float]:
        judge(metrics, 0, 1)
        return {metric.name: metric.compute() for metric in metrics}

    def note_passed(self, loop: int, step: int, *, read: bool) -> None:
        """There is nobody to wait for."""

    def note_waiting(self, step: int) -> None:
        """Nor who would hear of it."""

    def note_end(self, settle: Callable[[], None]) -> None:
        """The script has its own end."""

    def name_model(self, names: ModelNames) -> None:
        """There are no checkpoints."""

    def save(self, step: int, extra: str | None) -> None:
        raise AssertionError("there are no checkpoints")


class ClusterSeat(AloneSeat):
    """The only worker, on servers that somebody else has made, and who hears its reports."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        seed: int = 0,
        mode: Mode = "async",
        prefetch: int = 0,
        protection: Wish = None,
        resumed: bool = False,
        report: Callable[[Progress], None] = lambda progress: None,
        report_seconds: float = SHOW_SECONDS,
        report_steps: Collection[int] = (),
    ) -> None:
        super().__init__(seed=seed, mode=mode, servers=cluster.server_count)
        self.prefetch, self.protection = prefetch, protection
        self.report_seconds, self.report_steps = report_seconds, report_steps
        self._cluster = cluster
        self._resumed = resumed
        self._hear = report

    def connect(self, job: JobSpec) -> tuple[Client, bool]:
        return self._cluster.client(job), self._resumed

    def report(self, progress: Progress, client: Client) -> None:
        self._hear(progress)


_offered: Seat | None = None
_taken = False


def offer(seat: Seat) -> None:
    """What the next `take` gives: before the script of a worker runs."""
    global _offered, _taken
    _offered, _taken = seat, False


def is_taken() -> bool:
    return _taken


def take(*, seed: int | None = None, mode: Mode | None = None, servers: int | None = None) -> Seat:
    """The seat of this process. Under a launcher it has one seat, and what it is like was said there."""
    global _taken
    if _offered is None:
        return AloneSeat(seed=seed or 0, mode=mode or "async", servers=servers or ALONE_SERVERS)
    if _taken:
        raise UserError("this script joins twice", hint="call regrow.join() once, and pass the job around")
    for name, wanted in (("seed", seed), ("mode", mode), ("servers", servers)):
        if wanted is not None and wanted != getattr(_offered, name):
            raise UserError(
                f"the script joins with {name} = {wanted!r}, the run has {getattr(_offered, name)!r}",
                hint=f"leave it out of regrow.join(), or say --{name} {wanted}",
            )
    _taken = True
    return _offered
