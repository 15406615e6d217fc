"""What do checkpoints cost? Training with them against the same without, storing and loading, torch, and merging.

Ways to train take turns in rounds; a figure is the ratio to the run without checkpoints of the same round. Deltas are
what matters and have more rounds than fulls, in a part of their own. Time between
checkpoints is scaled down with the model: T here is seconds where it is half an hour elsewhere, and a full takes
about as large a part of it. All run on the same cores as training, the merger too.

What is measured of a run lies between two checkpoints (from the end of one to the end of a later one), so it has whole
periods; the first full of a run with deltas, which comes once in its life, lies before it. Processors are not as fast
at all times, and workers do the same work for each sample whatever is stored, so time lost is also given at equal
speed. That is the part of the processors' time which workers had; who had the rest is told by role.

How long a cut holds training up is measured where it happens: in servers, from the moment they hold pushes back until
rows are captured. Beside it, from the workers' reports, two a second with exact numbers of samples: the time by which
the worst of them lies behind the worker's usual pace. The run without checkpoints has such a figure too, and it is
taken off.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regrow.bench import checkpoint_figures, checkpoint_peer, checkpoint_store, common, plots, recovery, train
from regrow.checkpoint.storage import Storage
from regrow.config import TrainConfig
from regrow.errors import UserError
from regrow.launch import local
from regrow.launch.reports import CheckpointSaved, Report, ServerCounters
from regrow.launch.status import RunStatus
from regrow.protection import nearest

SUMMARY = "What checkpoints cost: training time, memory, bytes; storing, loading and merging them."

PER_PERIOD = 12  # deltas in the time between two fulls
NEVER = "1000h"
ROLES = ("worker", "server", "coordinator", "merger")
LOOK_SECONDS = 2.0  # between two looks at what each of them used
REPORTS_MIN = 4  # of each worker in a run: two a second, and one at its end


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to train. `every`: in parts of T."""

    name: str
    label: str
    every: float | None = None
    changes: dict[str, Any] = field(default_factory=dict)


VARIANTS = (
    Variant(name="none", label="no checkpoints"),
    Variant(
        name="pausing",
        label="full every T, training waits",
        every=1.0,
        changes={"protection": "full", "ckpt_pause": True},
    ),
    Variant(name="full", label="full every T", every=1.0, changes={"protection": "full"}),
    Variant(
        name="delta",
        label=f"delta every T/{PER_PERIOD}, merged",
        every=1 / PER_PERIOD,
        changes={"protection": "delta", "full_every": 1 << 20},  # the merger makes fulls
    ),
)
NONE, DELTA = VARIANTS[0], VARIANTS[-1]
# What deltas cost in training; what fulls cost; storing, loading, merging, torch, and noting which rows changed.
PARTS = ("deltas", "fulls", "storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    rounds: int
    rounds_of_fulls: int
    server_bytes: int  # of rows, in each of five servers
    period_seconds: float  # T
    periods: float  # of training in a run; the first one counts little
    tracking_rounds: int
    tracking_rows_max: int
    tracking_seconds: float
    store_bytes: int  # of a full that is stored and loaded
    store_repetitions: int
    torch_bytes: int
    torch_rounds: int
    chain_bytes: int  # of the full under 47 deltas
    chain_batches: int  # in each delta
    chain_repetitions: int
    update_repetitions: int


# Each part of at most ten minutes.
FULL = Size(
    rounds=2,
    rounds_of_fulls=1,
    server_bytes=48_000_000,
    period_seconds=60.0,
    periods=2.2,
    tracking_rounds=3,
    tracking_rows_max=2_000_000,
    tracking_seconds=8.0,
    store_bytes=500_000_000,
    store_repetitions=3,
    torch_bytes=1_000_000_000,
    torch_rounds=2,
    chain_bytes=200_000_000,
    chain_batches=16,
    chain_repetitions=3,
    update_repetitions=100,
)
QUICK = Size(
    rounds=1,
    rounds_of_fulls=1,
    server_bytes=4_000_000,
    period_seconds=1.8,
    periods=3.0,
    tracking_rounds=1,
    tracking_rows_max=100_000,
    tracking_seconds=2.5,
    store_bytes=40_000_000,
    store_repetitions=1,
    torch_bytes=40_000_000,
    torch_rounds=1,
    chain_bytes=10_000_000,
    chain_batches=1,
    chain_repetitions=1,
    update_repetitions=20,
)


def run(*, quick: bool, json_path: str | None, docs: str | None = None, part: str | None = None) -> int:
    if part is not None and part not in PARTS:
        raise UserError(f"bench checkpoint has no part {part!r}", hint=nearest(part, PARTS))
    size = QUICK if quick else FULL
    report = common.Report.start("checkpoint")
    with tempfile.TemporaryDirectory(prefix="regrow-bench-") as name:
        directory = Path(name)
        say_disk(report, directory)
        for each in PARTS if part is None else (part,):
            if each == "storage":
                measure_tracking(report, directory, size=size)
                measure_stores(report, directory, size=size)
                measure_torch(report, directory, size=size)
            else:
                measure_training(report, directory, each, size=size)
    checkpoint_figures.compare(report, labels={variant.name: variant.label for variant in VARIANTS})
    checkpoint_figures.print_rows(report)
    code = report.finish(json_path)
    plots.save(report.to_dict(), json_path=json_path, docs=docs)
    return code


def say_disk(report: common.Report, directory: Path) -> None:
    kind = checkpoint_store.filesystem(directory)
    report.rows.append({"kind": "disk", "filesystem": kind})
    if kind in checkpoint_store.FILESYSTEMS_IN_MEMORY:
        common.console.print(f"[yellow]checkpoints go to {kind}[/], which is memory; TMPDIR=DIRECTORY chooses a disk")
    else:
        common.console.print(f"checkpoints go to a temporary directory on {kind or 'a disk'}; TMPDIR chooses another")


# -- training ------------------------------------------------------------------------------------------------


class Trace(recovery.Trace):
    """Keeps every checkpoint too, and what servers say of theirs: the status remembers the last one only."""

    def __init__(self, *, warmup_seconds: float = 0.0) -> None:
        super().__init__(warmup_seconds=warmup_seconds)
        self.cuts: list[dict[str, Any]] = []
        self.capture_seconds_max = 0.0
        self.capture_work_seconds_max = 0.0  # of the processor
        self.cut_hold_seconds_max = 0.0
        self.by_role: list[tuple[float, dict[str, float]]] = []  # processor time so far, now and then

    def update(self, status: RunStatus, now: float) -> None:
        if self.status is None:
            self._listen(status)
        super().update(status, now)
        if status.phase == "training" and (not self.by_role or now >= self.by_role[-1][0] + LOOK_SECONDS):
            seconds = {role: train.children_cpu_seconds(f"rg {role}") for role in ROLES}
            self.by_role.append((now, {role: each for role, each in seconds.items() if each is not None}))

    def _listen(self, status: RunStatus) -> None:
        receive = status.receive

        def hear_and_pass_on(role: str, id: int, report: Report, now: float) -> None:
            self.hear(report, now)
            receive(role, id, report, now)

        setattr(status, "receive", hear_and_pass_on)  # noqa: B010  (mypy knows that methods are not assigned to)

    def hear(self, report: Report, now: float) -> None:
        if isinstance(report, ServerCounters):
            self.capture_seconds_max = max(self.capture_seconds_max, report.capture_seconds_max or 0.0)
            work = report.capture_work_seconds_max or 0.0
            self.capture_work_seconds_max = max(self.capture_work_seconds_max, work)
            self.cut_hold_seconds_max = max(self.cut_hold_seconds_max, report.hold_seconds_max or 0.0)
        elif isinstance(report, CheckpointSaved) and report.kind is not None:
            known = {"cut": report.cut, "kind": report.kind}
            self.cuts.append({**known, "seconds": report.seconds, "cut_seconds": report.cut_seconds, "at": now})

    def window(self, settle_seconds: float) -> tuple[float, float]:
        """From one checkpoint's end to the last one's; without two of them, all that was trained but for the start."""
        begin = min(self.begin + settle_seconds, (self.begin + self.end) / 2)
        ends = [cut["at"] for cut in self.cuts if begin <= cut["at"] <= self.end]
        return (ends[0], ends[-1]) if len(ends) >= 2 else (begin, self.end)

    def costs(self, begin: float, end: float) -> dict[str, Any]:
        """Samples per second and processor time of training between two times, and how long it was held up."""
        rate = self.rate(begin, end)
        found: dict[str, Any] = {"samples_per_second": rate, "seconds": end - begin}
        looks = [look for at, look in self.usage if begin <= at <= end]
        if len(looks) > 1:
            cores = (looks[-1].own_seconds - looks[0].own_seconds) / (looks[-1].at - looks[0].at)
            found["cpu_seconds_per_1000_samples"] = cores * 1000 / rate
            found["others_cores"] = common.round_known(looks[0].others_cores(looks[-1]), 2)
        if (work := self.work_per_sample(begin, end)) is not None:
            found["worker_seconds_per_sample"] = work
        found["cores"] = self._cores(begin, end)
        spans = [inside(seen, begin, end) for seen in self._points()]
        found["hold_seconds"] = max(longest_hold(seen) for seen in spans)
        found["silence_seconds"] = max(longest_silence(seen) for seen in spans)
        return found

    def _cores(self, begin: float, end: float) -> dict[str, float]:
        """Processors that each role had, of those the machine has."""
        within = [look for look in self.by_role if begin <= look[0] <= end]
        if len(within) < 2:
            return {}
        (first, before), (last, after) = within[0], within[-1]
        return {role: (after[role] - before[role]) / (last - first) for role in after if role in before}


def inside(seen: Sequence[tuple[float, int]], begin: float, end: float) -> list[tuple[float, int]]:
    """Reports between two times, and the last one before: what begins within has its whole length."""
    before = [point for point in seen if point[0] < begin][-1:]
    return before + [point for point in seen if begin <= point[0] <= end]


def longest_silence(seen: Sequence[tuple[float, int]]) -> float:
    return max((after[0] - before[0] for before, after in itertools.pairwise(seen)), default=0.0)


def longest_hold(seen: Sequence[tuple[float, int]]) -> float:
    """The most by which a worker was late with a report, by the number of samples in it and its median pace."""
    gaps = [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(seen)]
    moving = [seconds / samples for seconds, samples in gaps if samples > 0]
    if not moving:
        return 0.0
    pace = statistics.median(moving)
    return max(0.0, *(seconds - samples * pace for seconds, samples in gaps))


def measure_tracking(report: common.Report, directory: Path, *, size: Size) -> None:
    """Training with changed rows being noted and never stored, against training without."""
    base = TrainConfig(
        model="kaggle",
        rows_max=size.tracking_rows_max,
        batch=train.BATCH,
        servers=train.SERVERS,
        workers=train.WORKERS,
        seed=train.SEED,
        steps=1,
        test_rows=train.BATCH,
        digest=False,
    )
    update = checkpoint_store.tracking(
        size_bytes=size.server_bytes, batch=train.BATCH, repetitions=size.update_repetitions
    )
    report.rows.append(update)
    rate = train_tracked(base, directory, "off", seconds=1.5, rate=recovery.RATE_GUESS)["samples_per_second"]
    for turn in range(size.tracking_rounds):
        for name in ("off", "on") if turn % 2 == 0 else ("on", "off"):
            row = train_tracked(base, directory, name, seconds=size.tracking_seconds, rate=rate)
            report.rows.append({"kind": "tracking", "variant": name, "round": turn, **row})
            speed = row["samples_per_second"]
            common.console.print(f"tracking {name}, round {turn + 1} of {size.tracking_rounds}: {speed:,.0f} samples/s")


def train_tracked(base: TrainConfig, directory: Path, name: str, *, seconds: float, rate: float) -> dict[str, Any]:
    # Nothing is stored before training is over. The merger finds nothing to do, every two seconds; that counts.
    changes = {"protection": "full", "every": NEVER} if name == "on" else {}
    while True:
        trace = Trace(warmup_seconds=seconds / 4)
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            if changes:
                changes["ckpt"] = f"{folder}/checkpoints"
            steps = recovery.steps_of(base, 1.25 * seconds, rate)
            local.train(base.replace(steps=steps, out=f"{folder}/run", **changes), display=trace)
        if all(len(seen) >= REPORTS_MIN for seen in trace.reports.values()):
            return trace.steady()
        rate *= 4  # much faster than thought


def measure_training(report: common.Report, directory: Path, part: str, *, size: Size) -> None:
    """Rounds of one part; those of the other have other numbers, as each is compared within its round."""
    tables = recovery.Size(
        server_bytes=size.server_bytes, before_seconds=0.0, after_seconds=0.0, rounds=1, socket_bytes=0
    )
    base = recovery.make_config(directory, tables)
    turns = range(size.rounds) if part == "deltas" else range(size.rounds, size.rounds + size.rounds_of_fulls)
    rate = recovery.RATE_GUESS
    rate = recovery.train_undisturbed(base.replace(prefill=False), seconds=2.0, rate=rate).rate_whole()
    for turn in turns:
        for variant in order(turn, part):
            row, trace = train_variant(base, variant, directory, size=size, rate=rate)
            report.rows.append({"kind": "run", "variant": variant.name, "round": turn, **row})
            if turn == turns[0] and not any(old.get("name") == variant.name for old in report.rows):
                report.rows.append(trace)
            rate = row["samples_per_second"] if variant is NONE else rate
            common.console.print(f"{variant.label}, round {turn + 1}: {describe(row)}")


def order(turn: int, part: str) -> list[Variant]:
    """Of a round: that without checkpoints first, or last in every other round."""
    fulls = [variant for variant in VARIANTS if variant not in (NONE, DELTA)]
    found = [NONE, DELTA] if part == "deltas" else [NONE, *fulls]
    return found if turn % 2 == 0 else found[::-1]


def train_variant(
    base: TrainConfig, variant: Variant, directory: Path, *, size: Size, rate: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(figures, trace for the picture) of one run."""
    trace = Trace()
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        url = f"{folder}/checkpoints"
        changes = dict(variant.changes)
        if variant.every is not None:
            changes |= {"every": f"{variant.every * size.period_seconds:.4g}s", "ckpt": url}
        steps = recovery.steps_of(base, size.periods * size.period_seconds, rate)
        summary = local.train(base.replace(steps=steps, out=f"{folder}/run", **changes), display=trace)
        stored, merged = count_stored(url) if variant.every is not None else ({}, 0)
    begin, end = trace.window(size.period_seconds / 4)
    within = [cut for cut in trace.cuts if begin < cut["at"] <= end]
    step_seconds = base.batch * base.workers / trace.rate(begin, end)
    written = sum(stored.get(cut["cut"], 0) for cut in within)
    row = {
        **trace.costs(begin, end),
        "step_seconds": step_seconds,
        "period_seconds": size.period_seconds,
        "checkpoints": len(within),
        "checkpoints_all": len(trace.cuts),
        "checkpoints_failed": summary["checkpoints"]["failed"],
        "written_bytes": written,
        "written_bytes_per_period": round(written * size.period_seconds / (end - begin)),
        "merged_bytes_all": merged,
        "store_seconds_max": max((cut["seconds"] for cut in within), default=0.0),
        "cut_seconds_max": max((cut["cut_seconds"] for cut in within), default=0.0),
        "capture_seconds_max": trace.capture_seconds_max,
        "cut_hold_seconds_max": trace.cut_hold_seconds_max,
        "table_bytes": summary["table_bytes"],
        # The merger is a process of its own, which may as well run elsewhere.
        "peak_rss_bytes": summary["peak_rss_bytes"]["total"] - summary["peak_rss_bytes"].get("merger", 0),
        "peak_rss_server_bytes": summary["peak_rss_bytes"]["server"],
        "peak_rss_merger_bytes": summary["peak_rss_bytes"].get("merger", 0),
        "cpu_seconds": summary["cpu_seconds"],
        "merger_cpu_share": summary["cpu_seconds"].get("merger", 0.0) / summary["cpu_seconds"]["total"],
    }
    picture = trace.to_row(variant.name, zero_at=begin, marks={}, bin_seconds=0.5)
    return row, {**picture, "cuts": [round(cut["at"] - begin, 3) for cut in trace.cuts]}


def count_stored(url: str) -> tuple[dict[str, int], int]:
    """(bytes that training stored, by cut; bytes that merging wrote beside them)."""
    manifests, _ = Storage.open(url).manifests()
    own = {piece.target.id: piece.bytes for piece in manifests if not piece.folded}
    return own, sum(piece.bytes for piece in manifests if piece.folded)


def describe(row: Mapping[str, Any]) -> str:
    return (
        f"{row['samples_per_second']:,.0f} samples/s over {row['seconds']:.0f} s, {row['checkpoints']} checkpoints, "
        f"held up for {row['hold_seconds'] * 1e3:.0f} ms at most (a step takes {row['step_seconds'] * 1e3:.0f} ms)"
    )


# -- without training ----------------------------------------------------------------------------------------


def measure_stores(report: common.Report, directory: Path, *, size: Size) -> None:
    with tempfile.TemporaryDirectory(dir=directory) as folder, watched(report, "stores"):
        for row in checkpoint_store.bandwidth(
            Path(folder), size_bytes=size.store_bytes, repetitions=size.store_repetitions
        ):
            report.rows.append(row)
            names = ("save", "plain_write", "load", "plain_read")
            save, write, load, read = (f"{row[f'{name}_bytes_per_second'] / 1e6:,.0f}" for name in names)
            common.console.print(
                f"full of {row['bytes'] / 1e6:,.0f} MB: stored at {save} MB/s (a plain file: {write}), "
                f"loaded at {load} MB/s (a plain file: {read})"
            )
        report.rows += checkpoint_store.restores(
            Path(folder),
            size_bytes=size.chain_bytes,
            batch=train.BATCH,
            batches_per_delta=size.chain_batches,
            repetitions=size.chain_repetitions,
        )


def measure_torch(report: common.Report, directory: Path, *, size: Size) -> None:
    if reason := checkpoint_peer.missing_reason():
        common.console.print(reason, style="yellow", markup=False)
        return
    systems = checkpoint_peer.SYSTEMS
    with watched(report, "torch"):
        for turn in range(size.torch_rounds):
            order = [*systems[turn % len(systems) :], *systems[: turn % len(systems)]]
            with tempfile.TemporaryDirectory(dir=directory) as folder:
                found = checkpoint_peer.measure(order, directory=Path(folder), size_bytes=size.torch_bytes)
            for system, row in found.items():
                report.rows.append({"kind": "torch", "system": system, "round": turn, **row})


class watched:
    """Adds a row that says who else used the machine meanwhile."""

    def __init__(self, report: common.Report, part: str) -> None:
        self.report, self.part = report, part

    def __enter__(self) -> None:
        self.before = self._look()

    def __exit__(self, *_: object) -> None:
        cores = self.before.others_cores(self._look())
        self.report.rows.append({"kind": "others", "part": self.part, "others_cores": common.round_known(cores, 2)})

    def _look(self) -> common.Occupancy:
        # With children that have ended, which train.children_cpu_seconds cannot see.
        return common.Occupancy.read(sum(os.times()[:4]))
