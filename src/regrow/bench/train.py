"""Whole training: five servers and two workers against FBGEMM embeddings in one process with every core.

Same network, same data generator, same batch, same table sizes, same optimizers. The peer has no messages to
send, no second copy of anything and nothing to survive: what is measured is the price of being distributed on
a machine where that brings nothing. Each side runs in processes of its own, one side at a time, in turns;
rates are taken after a warm-up, ours from the workers' own reports.

How ours and a peer are run and compared is here for its siblings too: `models.py` (other models, plain PyTorch as a
second peer) and `worker.py` (one worker alone).
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regrow.bench import common, peer
from regrow.config import TrainConfig
from regrow.errors import RegrowError
from regrow.launch import local
from regrow.launch.status import RunStatus

SUMMARY = "Whole training (5 servers, 2 workers) against FBGEMM in one process: samples per second."

TARGET = 0.9
MODELS = ("kaggle", "terabyte", "mlperf")
BATCH = 2048
SERVERS, WORKERS = 5, 2
SEED = 1
PEERS = {"fbgemm": "regrow.bench.peer", "torch": "regrow.bench.peer_torch"}
PEER_TIMEOUT_SECONDS = 900
# What idle OpenMP threads of a peer do: sleep, as those of our workers; or what OpenMP does if nobody says, spin first.
# Threads that spin take cores from those they wait for: with others on the machine, a step takes several times as long.
WAITINGS = ("passive", "default")
TRIAL_SECONDS, TRIAL_ROWS_MAX = 2.0, 200_000  # of a wait, on tables that are quickly filled
RATE_GUESS = 8_000.0  # until a rate is known, this cautious one decides how many steps fill the time
STEPS_MIN = 8
REPORTS_MIN = 3  # of each worker, about ten a second
TRIES_MAX = 4  # runs that were too short to measure anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    pairs: int
    rows_max: dict[str, int]
    seconds: float  # of steady state, per run
    warmup_seconds: float
    layouts: tuple[str, ...]
    waitings: tuple[str, ...] = ("passive",)


FULL = Size(
    pairs=3,
    # Tables of 2 to 4 GiB: a hundred times the cache, and room for either side in 24 GiB.
    rows_max={"kaggle": 10_000_000, "terabyte": 2_000_000, "mlperf": 1_000_000},
    seconds=10.0,
    warmup_seconds=3.0,
    layouts=peer.LAYOUTS,
    waitings=WAITINGS,
)
QUICK = Size(
    pairs=1,
    rows_max={"kaggle": 500_000, "terabyte": 200_000, "mlperf": 100_000},
    seconds=2.0,
    warmup_seconds=0.5,
    layouts=("merged",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Runs of ours, each paired with one of a peer."""

    name: str  # of the ratio
    label: str  # in tables
    config: TrainConfig
    target: float
    system: str = "fbgemm"  # the peer: one of PEERS


def run(*, quick: bool, json_path: str | None, models: Sequence[str] = MODELS) -> int:
    size = QUICK if quick else FULL
    report = common.Report.start("train")
    comparisons = [
        Comparison(name=f"train_{model}", label=model, config=make_config(model, size), target=TARGET)
        for model in models
    ]
    return measure_all(report, comparisons, size=size, json_path=json_path)


def measure_all(report: common.Report, comparisons: Sequence[Comparison], *, size: Size, json_path: str | None) -> int:
    """One comparison after the other. Where FBGEMM is their peer and is not there, ours is measured alone."""
    missing = peer.missing_reason() if any(each.system == "fbgemm" for each in comparisons) else None
    if missing:
        common.console.print(f"[yellow]{missing}[/]\nMeasuring Regrow alone.")
    for each in comparisons:
        measure_pairs(report, each, size=size, with_peer=missing is None or each.system != "fbgemm")
    _print_rows(report)
    return report.finish(json_path)


def measure_pairs(report: common.Report, comparison: Comparison, *, size: Size, with_peer: bool) -> None:
    config, cores = comparison.config, report.facts["cores"]
    layouts = size.layouts if cores > 1 else ("split", "merged")
    peers: list[dict[str, Any]] = []
    ours: list[dict[str, Any]] = []
    rate = RATE_GUESS
    waiting = choose_waiting(comparison, size=size, cores=cores) if with_peer else ""
    for pair in range(size.pairs):
        if with_peer:
            peers.append(
                run_peer(
                    config,
                    system=comparison.system,
                    size=size,
                    cores=cores,
                    layouts=layouts,
                    rate=rate,
                    waiting=waiting,
                )
            )
            layouts, rate = (peers[-1]["layout"],), peers[-1]["samples_per_second"]
        elif pair == 0:
            rate = run_ours(config, size=size, rate=rate, seconds=5.0)["samples_per_second"]
        ours.append(run_ours(config, size=size, rate=rate))
        _say(comparison, pair, peers, ours)
    _record(report, comparison, peers, ours)


def make_config(model: str, size: Size, *, workers: int = WORKERS, optimizer: str = "rowwise_adagrad") -> TrainConfig:
    return TrainConfig(
        model=model,
        rows_max=size.rows_max[model],
        batch=BATCH,
        servers=SERVERS,
        workers=workers,
        mode="async",
        protection="none",
        optimizer=optimizer,
        seed=SEED,
        steps=1,
        test_rows=BATCH,
        digest=False,
    )


# -- the peer ------------------------------------------------------------------------------------------------


def choose_waiting(comparison: Comparison, *, size: Size, cores: int) -> str:
    """The one of `size.waitings` with which a short run of the peer is fastest. When others were busy meanwhile, that
    proves nothing, and it is the first: what our own workers do."""
    if len(size.waitings) == 1:
        return size.waitings[0]
    config = comparison.config.replace(rows_max=TRIAL_ROWS_MAX)
    short = replace(size, seconds=TRIAL_SECONDS, warmup_seconds=TRIAL_SECONDS / 4)
    trials = {
        waiting: run_peer(
            config,
            system=comparison.system,
            size=short,
            cores=cores,
            layouts=size.layouts[:1],
            rate=RATE_GUESS,
            waiting=waiting,
        )
        for waiting in size.waitings
    }
    if any((trial["others_cores"] or 0.0) > common.OTHERS_CORES_QUIET for trial in trials.values()):
        return size.waitings[0]
    return max(trials, key=lambda waiting: trials[waiting]["samples_per_second"])


def run_peer(
    config: TrainConfig,
    *,
    system: str = "fbgemm",
    size: Size,
    cores: int,
    layouts: Sequence[str],
    rate: float,
    waiting: str = WAITINGS[0],
) -> dict[str, Any]:
    """One run in a process of its own; several layouts: the fastest of them. Plain torch has one alone."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if waiting == "passive":
        environment["OMP_WAIT_POLICY"] = "PASSIVE"
    settings = {
        "config": config.to_dict(),
        "threads": cores,
        "layouts": list(layouts),
        "warmup_steps": max(3, int(size.warmup_seconds * rate / config.batch)),
        "seconds": size.seconds,
    }
    result: dict[str, Any] = common.run_module(
        PEERS[system],
        settings,
        timeout_seconds=PEER_TIMEOUT_SECONDS,
        what=f"the peer ({system})",
        environment=environment,
    )
    return {**result, "waiting": waiting}


# -- ours ----------------------------------------------------------------------------------------------------


class Recorder:
    """A display that shows nothing and remembers when each worker had done how much."""

    def __init__(self, *, warmup_seconds: float) -> None:
        self.warmup_seconds = warmup_seconds
        # Per worker: (when, samples) of every report.
        self.reports: dict[int, list[tuple[float, int]]] = {}
        # Processor time of the run and of the machine, at each look while training.
        self.usage: list[tuple[float, common.Occupancy]] = []

    def live(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def say(self, text: str) -> None:
        """No script runs here."""

    def update(self, status: RunStatus, now: float) -> None:
        if status.phase != "training":
            return
        training = all(worker.state == "training" for worker in status.workers)
        for index, worker in enumerate(status.workers):
            seen = self.reports.setdefault(index, [])
            last = seen[-1][0] if seen else -1.0
            seen += [report for report in worker.reports if report[0] > last]
        if training:
            cpu = children_cpu_seconds()
            if cpu is not None:
                self.usage.append((now, common.Occupancy.read(cpu)))

    def finish(self, summary: dict[str, Any], path: Path) -> None:
        pass

    @property
    def is_steady(self) -> bool:
        return bool(self.reports) and all(len(seen) >= REPORTS_MIN for seen in self.reports.values())

    def steady(self) -> dict[str, Any]:
        """Samples per second of all workers, from the end of the warm-up until one of them is through."""
        if not self.is_steady:
            raise RegrowError("the run was too short to have a steady state: workers need time for reports")
        begin = max(seen[0][0] for seen in self.reports.values()) + self.warmup_seconds
        end = min(seen[-1][0] for seen in self.reports.values())
        total = 0.0
        for seen in self.reports.values():
            inside = [point for point in seen if begin <= point[0] <= end]
            if len(inside) < 2:
                inside = [point for point in seen if point[0] <= end][-2:]
            (first_at, first), (last_at, last) = inside[0], inside[-1]
            total += (last - first) / (last_at - first_at)
        figures: dict[str, Any] = {"samples_per_second": total, "seconds": end - begin}
        looks = [look for at, look in self.usage if begin <= at <= end]
        if len(looks) >= 2:
            before, after = looks[0], looks[-1]
            rate = (after.own_seconds - before.own_seconds) / (after.at - before.at)
            figures["cpu_seconds_per_1000_samples"] = rate * 1000 / total
            figures["others_cores"] = common.round_known(before.others_cores(after), 2)
        return figures


def run_ours(config: TrainConfig, *, size: Size, rate: float, seconds: float | None = None) -> dict[str, Any]:
    """Through the same door as `regrow train`. A run that was over too soon is made again, longer."""
    wanted = (seconds or size.seconds) + size.warmup_seconds
    for _ in range(TRIES_MAX):
        steps = max(STEPS_MIN, int(wanted * rate / (config.batch * config.workers)))
        recorder = Recorder(warmup_seconds=size.warmup_seconds)
        with tempfile.TemporaryDirectory(prefix="regrow-bench-") as directory:
            summary = local.train(config.replace(steps=steps, out=f"{directory}/run"), display=recorder)
        if recorder.is_steady:
            break
        rate = 4 * steps * config.batch * config.workers / wanted  # much faster than thought
    return {
        **recorder.steady(),
        "whole_samples_per_second": summary["samples_per_s"],
        "cpu_seconds": summary["cpu_seconds"],
        "peak_rss_bytes": summary["peak_rss_bytes"]["total"],
        "wait_seconds": summary["wait_seconds"],
        "staleness_mean": summary["staleness_mean"],
        "rows": summary["rows"],
        "distinct_rows_per_step": summary.get("distinct_rows_per_step"),
        "loss": summary["loss"],
    }


def children_cpu_seconds(name: str | None = None) -> float | None:
    """Processor time of this process and its direct children so far, those that have ended included; or of living
    children whose name begins so. None where /proc does not tell."""
    ticks = 0
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended_seconds = ended.ru_utime + ended.ru_stime if name is None else 0.0
    try:
        tasks = [Path(task.path, "children").read_text() for task in os.scandir("/proc/self/task")]
        for process in [os.getpid(), *" ".join(tasks).split()]:
            with contextlib.suppress(OSError):
                # The name in parentheses may hold anything; the fields follow its end.
                head, _, tail = Path(f"/proc/{process}/stat").read_text().rpartition(")")
                if name is None or head.partition("(")[2].startswith(name):
                    fields = tail.split()
                    ticks += int(fields[11]) + int(fields[12])
    except OSError:
        return None
    return ended_seconds + ticks / os.sysconf("SC_CLK_TCK")


# -- what is shown -------------------------------------------------------------------------------------------


def _say(comparison: Comparison, pair: int, peers: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    mine = ours[-1]["samples_per_second"]
    text = f"{comparison.label}, run {pair + 1}: regrow {mine:,.0f} samples/s"
    if peers:
        theirs = peers[-1]["samples_per_second"]
        chosen = f"{peers[-1]['layout']}, {peers[-1]['waiting']}"
        text += f", {comparison.system} {theirs:,.0f} samples/s ({chosen}), ratio {mine / theirs:.2f}"
    common.console.print(text)


def _record(
    report: common.Report, comparison: Comparison, peers: list[dict[str, Any]], ours: list[dict[str, Any]]
) -> None:
    facts = {"comparison": comparison.name, "label": comparison.label, "model": comparison.config.model}
    for system, runs in (("regrow", ours), (comparison.system, peers)):
        for index, figures in enumerate(runs):
            report.rows.append({"kind": "run", "system": system, **facts, "run": index, **figures})
    if peers:
        rates = [[run["samples_per_second"] for run in runs] for runs in (ours, peers)]
        report.ratios[comparison.name] = common.Ratio.of(common.pair_ratios(*rates), target=comparison.target)


def _print_rows(report: common.Report) -> None:
    rows = []
    for name in dict.fromkeys(row["comparison"] for row in report.rows):
        for system in (*PEERS, "regrow"):
            runs = [row for row in report.rows if row["comparison"] == name and row["system"] == system]
            if runs:
                rows.append(_summary_row(system, runs))
    common.print_table(
        f"batches of {BATCH}, medians of the runs",
        ("model", "system", "table rows", "samples/s", "CPU s per 1000 samples", "peak memory"),
        rows,
    )
    for row in report.rows:
        if row["system"] in PEERS and row["run"] == 0:
            parts = row["step_milliseconds"]
            total = sum(parts.values())
            told = ", ".join(f"{name} {value:.1f} ms ({value / total:.0%})" for name, value in parts.items())
            common.console.print(f"{row['system']}'s step, {row['label']}: {told}")


def _summary_row(system: str, runs: list[dict[str, Any]]) -> tuple[str, ...]:
    cpu = [row["cpu_seconds_per_1000_samples"] for row in runs if "cpu_seconds_per_1000_samples" in row]
    return (
        runs[0]["label"],
        system,
        f"{runs[0]['rows']:,}",
        f"{statistics.median(row['samples_per_second'] for row in runs):,.0f}",
        f"{statistics.median(cpu):.4f}" if cpu else "-",
        f"{max(row['peak_rss_bytes'] for row in runs) / 2**30:.1f} GiB",
    )
