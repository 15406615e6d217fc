"""What does the loss of a server cost? One with a gigabyte of rows is killed in the middle of training.

Two things: the time until all rows and parities are back, in which the next loss would be one too many, and the
training that is lost until then: so long would the samples have taken that were not trained, at the throughput of
before. Both are given per GB of lost rows, for the default, which recovers as fast as it can, and for a limit of
8 MiB/s in the background, which was the default once and was chosen for the throughput meanwhile: that rewards
slowness. At a given pace time grows with bytes, so the limit is shown on a smaller server; else it would take minutes.

Every row has been touched before (`prefill`), as after long training, so that every row has to come back. Codes with
k = 4 and k = 2 take turns. Throughput comes from the workers' own reports, twenty a second at most, and between them
samples are taken to come evenly.

Before and during are minutes apart, and on a shared machine processors are not as fast at all times. Workers do the
same work for each sample whether servers recover or not, so their processor time per sample shows that, and throughput
is also given as it would be at equal speed.

A stall is the longest time between two reports of a worker (twenty a second at most, each after a step), counted from
the moment that the death is known, in the five seconds after it; the step that it was in is part of it. The longest
silence of the seconds before is given beside it: so much of a stall is a step as any other. So is the longest that a
worker stood still in one step because rows were not there, by its own clock: what is left of a stall is a step that
takes longer, because all others want the same cores. When the last late step of the first second has ended is given
too, and the longest silence of the whole recovery.

The sketch: for each byte of lost rows, k - 1 bytes of other members go to whoever decodes, one byte goes to the
replacement, and one to make its parities again: (k + 1) x bytes / bandwidth of a socket = expected time, were
nothing else going on. Memory and socket bandwidth are measured in the same run.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow.bench import common, plots, recovery_costs, recovery_today, recovery_worker, train
from regrow.bench.bandwidth import copy_bandwidth, page_seconds, socket_bandwidth
from regrow.bench.trace import Trace
from regrow.config import TrainConfig
from regrow.core.twins import record_floats
from regrow.data.synthetic import CARDINALITIES
from regrow.errors import RegrowError, UserError
from regrow.launch import local
from regrow.launch.failures import DURING_SECONDS_MIN, Failure
from regrow.nn.presets import MODELS
from regrow.protection import nearest

SUMMARY = "A server with a gigabyte of rows is killed: time without protection, training lost, stall."

# Each of at most ten minutes: the default; the limit that was the default once; the same loss with checkpoints; the
# loss of a worker.
PARTS = ("default", "limit", "today", "worker")
STALL_SECONDS_TARGET = 0.2
LOST_TARGET = 3.0  # training seconds lost per GB of lost rows, k = 4
UNPROTECTED_TARGET = 10.0  # seconds without protection per GB, k = 4
PROCESSOR_TARGET = 2.0  # processor seconds / bytes moved over bandwidth, with --profile
LIMITS_TARGET = 1.0  # what the default costs / what the limit costs, per GB
CODES_TARGET = 1.6  # k = 4 / k = 2
OLD_LIMIT = 8 << 20
LIMITS = (0, OLD_LIMIT)  # bytes per second in the background; 0: as fast as it can, the default
PAPER = "the paper: stalls under 30 s, throughput during recovery 0.87 to 0.93, time grows with k"
SHAPE, R, VICTIM = "kaggle", 1, 2
CODES = (4, 2)
STALL_SECONDS = 5.0  # Later silences are those of a machine with much to do; they are told apart.
BEFORE_SECONDS = 10.0  # throughput before the failure: over this time
TAIL_SECONDS = 5.0  # of training wanted after the recovery
PATIENCE = 1.1  # the next recovery may take so much longer than the last
TRIES_MAX = 4  # runs that ended before the recovery did are made longer so often
RATE_GUESS = 8_000.0
UNDISTURBED_SECONDS_MAX = 30.0  # of the run to compare with
COPY_BYTES = 256 << 20  # far more than any cache
TABLE_ROWS_KEPT = 10_000  # smaller tables keep their size, larger ones share the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    server_bytes: int
    before_seconds: float  # of training, until the kill
    after_seconds: float  # first guess: recovery and tail
    rounds: int
    socket_bytes: int
    limited_bytes: int = 0  # of a server that comes back at the limit
    today_seconds: int = 20  # between two checkpoints

    def of(self, limit: int) -> Size:
        """For a recovery with this limit."""
        if not limit:
            return self
        seconds = PATIENCE * self.limited_bytes / limit + 1.5 * TAIL_SECONDS
        return dataclasses.replace(self, server_bytes=self.limited_bytes, after_seconds=seconds)


FULL = Size(
    server_bytes=1_000_000_000,
    before_seconds=15.0,
    after_seconds=30.0,
    rounds=1,
    socket_bytes=1 << 30,
    limited_bytes=250_000_000,
)
QUICK = Size(
    server_bytes=20_000_000,
    before_seconds=3.0,
    after_seconds=6.0,
    rounds=1,
    socket_bytes=128 << 20,
    limited_bytes=20_000_000,
    today_seconds=4,
)


def run(
    *,
    quick: bool,
    json_path: str | None,
    docs: str | None = None,
    profile: bool = False,
    part: str | None = None,
) -> int:
    if part is not None and part not in PARTS:
        raise UserError(f"bench recovery has no part {part!r}", hint=nearest(part, PARTS))
    size = QUICK if quick else FULL
    report = common.Report.start("recovery")
    if not hasattr(TrainConfig, "prefill"):
        common.console.print("[yellow]this version cannot prefill[/]: only rows that training touched are recovered")
    copy, links = copy_bandwidth(COPY_BYTES), socket_bandwidth(size.socket_bytes)
    report.rows.append({"kind": "memory", "bytes_per_second": round(copy)})
    report.rows.append({"kind": "socket", "bytes_per_second": round(links)})
    common.console.print(f"memory is copied at {copy / 1e9:.1f} GB/s, a Unix socket carries {links / 1e9:.1f} GB/s")
    with tempfile.TemporaryDirectory(prefix="regrow-bench-") as directory:
        measure_all(report, Path(directory), size=size, profile=profile, parts=PARTS if part is None else (part,))
    recovery_costs.add_arithmetic(report, links=links, copy=copy)
    if any(row["kind"] == "run" for row in report.rows):
        compare(report)
        print_rows(report)
    recovery_today.compare(report)
    recovery_worker.compare(report)
    recovery_today.print_rows(report)
    recovery_worker.print_rows(report)
    recovery_costs.print_tables(report)
    code = report.finish(json_path)
    plots.save(report.to_dict(), json_path=json_path, docs=docs)
    return code


def measure_all(
    report: common.Report, directory: Path, *, size: Size, profile: bool = False, parts: Sequence[str] = ()
) -> None:
    """The loss of a server; then that of a worker."""
    config = make_config(directory, size)
    small = config.replace(model=SHAPE, rows_max=100_000, **knobs(prefill=False))
    rate = train_undisturbed(small, seconds=2.0, rate=RATE_GUESS).rate_whole()
    if set(parts) - {"worker"}:
        measure_servers(report, directory, config, size=size, rate=rate, profile=profile, parts=parts)
    if "worker" in parts:
        kill_step = steps_of(small, recovery_worker.BEFORE_SECONDS, rate)
        steps = kill_step + steps_of(small, recovery_worker.AFTER_SECONDS, rate)
        recovery_worker.measure(report, small, kill_step=kill_step, steps=steps)


def measure_servers(
    report: common.Report,
    directory: Path,
    config: TrainConfig,
    *,
    size: Size,
    rate: float,
    profile: bool,
    parts: Sequence[str],
) -> None:
    """One undisturbed run to compare with, then the codes in turns, without a limit and with it; then the same loss
    with checkpoints."""
    limits = [limit for limit in LIMITS if not limit or "limit" in parts]
    rate = measure_undisturbed(report, config, size=size, rate=rate)
    after_seconds = {limit: size.of(limit).after_seconds for limit in LIMITS}
    for turn in range(size.rounds):
        for limit in limits:
            config = make_config(directory, size.of(limit)).replace(sweep_bytes_per_s=limit, recovery_profile=profile)
            for k in CODES if turn % 2 == 0 else CODES[::-1]:
                row, trace, after_seconds[limit] = train_struck(
                    config, k=k, size=size.of(limit), rate=rate, after_seconds=after_seconds[limit]
                )
                report.rows.append({"kind": "run", "k": k, "limit": limit, "round": turn, **row})
                if turn == 0 and not limit:
                    report.rows.append(trace)
                common.console.print(f"k = {k}, {name_limit(limit)}: {describe(row)}")

    if "today" in parts:
        config = make_config(directory, size)
        kill_step = steps_of(config, size.today_seconds * 1.5, rate)
        steps = kill_step + steps_of(config, TAIL_SECONDS, rate)
        recovery_today.measure(report, config, interval_seconds=size.today_seconds, kill_step=kill_step, steps=steps)


def measure_undisturbed(report: common.Report, config: TrainConfig, *, size: Size, rate: float) -> float:
    """Samples per second without failure or protection."""
    common.console.print("training without failure or protection ...")
    seconds = min(size.before_seconds + size.after_seconds, UNDISTURBED_SECONDS_MAX)
    # Nothing is lost in this one, so nothing needs a value first.
    quiet = train_undisturbed(config.replace(**knobs(prefill=False)), seconds=seconds, rate=rate)
    rate = quiet.rate_whole()
    common.console.print(f"no protection, no failure: {rate:,.0f} samples/s")
    zero_at = quiet.begin + size.before_seconds
    spread = quiet.speed_spread(BEFORE_SECONDS)
    if spread is not None:
        common.console.print(f"the processors' own speed, over {BEFORE_SECONDS:.0f} s: fastest / slowest {spread:.2f}")
    row = {"kind": "run", "k": None, "round": 0, "samples_per_second": round(rate, 1), "speed_spread": spread}
    report.rows.append(row | quiet.others())
    report.rows.append(quiet.to_row("none", zero_at=zero_at, marks={}))
    return rate


def name_limit(limit: int) -> str:
    return f"{limit >> 20} MiB/s" if limit else "no limit"


def knobs(**wanted: Any) -> dict[str, Any]:
    """Those of these options that this version has."""
    return {name: value for name, value in wanted.items() if hasattr(TrainConfig, name)}


# -- what is trained -----------------------------------------------------------------------------------------


def make_config(directory: Path, size: Size) -> TrainConfig:
    shape = MODELS[SHAPE]
    optimizer = "rowwise_adagrad"
    row_bytes = 4 * record_floats(optimizer, shape.dim)
    rows = table_rows(CARDINALITIES[SHAPE], total=-(-size.server_bytes * train.SERVERS // row_bytes))
    model = directory / "kaggle-large.toml"
    lines = {"dim": shape.dim, "bottom": list(shape.bottom), "top": list(shape.top), "rows": rows}
    model.write_text("".join(f"{name} = {value}\n" for name, value in {**lines, "rows_max": max(rows)}.items()))
    return TrainConfig(
        model=str(model),
        batch=train.BATCH,
        servers=train.SERVERS,
        workers=train.WORKERS,
        optimizer=optimizer,
        seed=train.SEED,
        steps=1,
        r=R,
        test_rows=train.BATCH,
        digest=False,
        out=str(directory / "run"),
        **knobs(prefill=True),
    )


def table_rows(sizes: Sequence[int], *, total: int) -> list[int]:
    """Tables of the same shape with at least `total` rows in all: the large ones are scaled, the small ones stay."""
    small = sum(size for size in sizes if size <= TABLE_ROWS_KEPT)
    large = sum(size for size in sizes if size > TABLE_ROWS_KEPT)
    scale = max(0.0, (total - small) / large)
    return [size if size <= TABLE_ROWS_KEPT else max(TABLE_ROWS_KEPT, int(size * scale) + 1) for size in sizes]


def steps_of(config: TrainConfig, seconds: float, rate: float) -> int:
    return max(8, int(seconds * rate / (config.batch * config.workers)))


def train_undisturbed(config: TrainConfig, *, seconds: float, rate: float) -> Trace:
    trace = Trace()
    local.train(config.replace(steps=steps_of(config, seconds, rate)), overwrite=True, display=trace)
    return trace


def train_struck(
    config: TrainConfig, *, k: int, size: Size, rate: float, after_seconds: float
) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Trains, kills, and goes on until the recovery has been over for a while: (figures, trace, seconds it took)."""
    kill_step = steps_of(config, size.before_seconds, rate)
    for _ in range(TRIES_MAX):
        steps = kill_step + steps_of(config, after_seconds, rate)
        trace = Trace()
        summary = local.train(
            config.replace(protection="ec", k=k, steps=steps, kill=(f"server:{VICTIM}@step:{kill_step}",)),
            overwrite=True,
            display=trace,
        )
        failure = trace.failure()
        if failure.at - trace.begin < size.before_seconds / 2:
            # Workers fill in rows before they train, and one was through much earlier.
            kill_step *= 2
            common.console.print(
                f"not every worker trained for long enough before the failure; now at step {kill_step}"
            )
            continue
        if failure.recovered_at is not None and trace.end - failure.recovered_at >= TAIL_SECONDS / 2:
            row = figures(trace, failure, summary["failures"][0], server=summary["per_server"][VICTIM])
            if config.recovery_profile:
                costs = [server["costs"] for server in summary["per_server"]]
                gigabytes = row["bytes"] / 1e9
                row |= recovery_costs.make_table(costs, gigabytes=gigabytes, page_seconds=page_seconds())
            zero = trace.to_row(f"k{k}", zero_at=failure.at, marks=marks(failure))
            return row, zero, PATIENCE * (failure.recovered_at - failure.at) + 1.5 * TAIL_SECONDS
        after_seconds *= 2
        common.console.print(f"the recovery was not over when training was; again with {after_seconds:.0f} s after it")
    raise RegrowError(
        f"{TRIES_MAX} runs were too short to see a whole recovery, the last for {after_seconds:.0f} s after it"
    )


# -- what a failure cost -----------------------------------------------------------------------------------


def marks(failure: Failure) -> dict[str, float]:
    found = {"death": failure.at, "resumed": failure.resumed_at, "recovered": failure.recovered_at}
    return {name: round(at - failure.at, 4) for name, at in found.items() if at is not None}


def during_span(died_at: float, resumed_at: float, recovered_at: float) -> tuple[float, float]:
    """Where throughput during a recovery is measured: from the first step after the failure until all rows are back.

    Of a recovery that leaves no second between the two, the stall is all there is to see: then from the death on.
    """
    if recovered_at - resumed_at >= DURING_SECONDS_MIN:
        return resumed_at, recovered_at
    return died_at, max(recovered_at, resumed_at, died_at + DURING_SECONDS_MIN)


def figures(trace: Trace, failure: Failure, summary: dict[str, Any], *, server: dict[str, Any]) -> dict[str, Any]:
    """What one failure cost, with the throughput taken from the trace."""
    resumed_at, recovered_at = failure.resumed_at, failure.recovered_at
    if resumed_at is None or recovered_at is None:
        raise RegrowError("the failure was not over")
    before = trace.rate(failure.at - BEFORE_SECONDS, failure.at)
    begin, over_at = during_span(failure.at, resumed_at, recovered_at)
    during = trace.rate(begin, over_at)
    work_before = trace.work_per_sample(failure.at - BEFORE_SECONDS, failure.at)
    work_during = trace.work_per_sample(begin, over_at)
    slower = work_during / work_before if work_before and work_during else None
    seconds = recovered_at - failure.detected_at
    rows, row_bytes = summary["rows"], server["bytes"] - server["redundancy_bytes"]
    whole_ratio = trace.rate(failure.at, over_at) / before
    lost = (over_at - failure.at) * (1 - whole_ratio)
    lost_even = None if slower is None else (over_at - failure.at) * (1 - whole_ratio * slower)
    gigabytes = summary["bytes"] / 1e9
    return {
        "unprotected_s": round(recovered_at - failure.at, 4),
        "unprotected_s_per_gb": round((recovered_at - failure.at) / gigabytes, 4),
        # So long would the samples have taken that were not trained until all was back.
        "lost_s": round(lost, 4),
        "lost_s_per_gb": round(lost / gigabytes, 4),
        "lost_at_equal_speed_s_per_gb": None if lost_even is None else round(lost_even / gigabytes, 4),
        **{name: summary[name] for name in ("detected_s", "replaced_s", "resumed_s", "recovered_s")},
        # The longest that a worker stood still, the step that it was in included; and when the last late step ended.
        "stall_after_detection_s": round(
            trace.longest_silence(failure.detected_at, failure.detected_at + STALL_SECONDS), 4
        ),
        # So long of one step it stood still for rows.
        "waited_s": round(trace.longest_wait(failure.at, failure.detected_at + STALL_SECONDS), 4),
        "usual_wait_s": round(trace.longest_wait(failure.at - BEFORE_SECONDS, failure.at), 4),
        "usual_silence_s": round(trace.longest_silence(failure.at - BEFORE_SECONDS, failure.at), 4),
        "resumed_after_detection_s": round(resumed_at - failure.detected_at, 4),
        "silence_s": round(trace.longest_silence(failure.detected_at, recovered_at), 4),
        "recovery_seconds": round(seconds, 4),
        "rows": rows,
        "bytes": summary["bytes"],
        "faults": summary["faults"],
        "server_row_bytes": row_bytes,
        "server_parity_bytes": server["redundancy_bytes"],
        "throughput_before": round(before, 1),
        "throughput_during": round(during, 1),
        "throughput_after": round(trace.rate(over_at, trace.end), 1) if trace.end > over_at else None,
        "ratio_during": round(during / before, 4),
        # The same work took the workers so much more processor time: other users of the machine, its clock.
        "processors_slower": common.round_known(slower, 4),
        "ratio_at_equal_speed": None if slower is None else round(during / before * slower, 4),
        "stall_in_during": begin == failure.at,
        # With the stall in it: the whole price until everything is as before.
        "ratio_with_stall": round(whole_ratio, 4),
        "rows_per_second": round(rows / seconds, 1),
        "bytes_per_second": round(summary["bytes"] / seconds, 1),
        **trace.others(),
    }


# -- what follows from it ------------------------------------------------------------------------------------


def compare(report: common.Report) -> None:
    runs = [row for row in report.rows if row["kind"] == "run" and row["k"] is not None]
    fast = [row for row in runs if not row["limit"]]
    for k in CODES:
        report.ratios[f"stall_seconds_k{k}"] = common.Ratio.of(
            [row["stall_after_detection_s"] for row in fast if row["k"] == k],
            target=STALL_SECONDS_TARGET,
            better="lower",
        )
        for name in ("unprotected", "lost"):
            if not any(row["limit"] for row in runs):
                continue
            costs = [
                [row[f"{name}_s_per_gb"] for row in runs if (row["k"], row["limit"]) == (k, limit)] for limit in LIMITS
            ]
            # On a busy machine even a slow recovery may seem to cost nothing; then there is nothing to compare with.
            if min(costs[1]) > 0:
                report.ratios[f"{name}_to_old_default_k{k}"] = common.Ratio.of(
                    common.pair_ratios(*costs), target=LIMITS_TARGET, better="lower"
                )
    compare_with_targets(report, fast)
    report.ratios["recovery_time_codes"] = common.Ratio.of(slower_to_faster(fast), target=CODES_TARGET, better="lower")


def compare_with_targets(report: common.Report, runs: Sequence[dict[str, Any]]) -> None:
    """Per GB with k = 4, and k = 4 over k = 2 in each of these."""
    targets = {"lost_s_per_gb": LOST_TARGET, "unprotected_s_per_gb": UNPROTECTED_TARGET}
    for name, target in targets.items():
        by_k = {k: [row[name] for row in runs if row["k"] == k] for k in CODES}
        if by_k[4]:
            report.ratios[f"{name}_k4"] = common.Ratio.of(by_k[4], target=target, better="lower")
        if by_k[4] and by_k[2] and min(by_k[2]) > 0:
            pairs = common.pair_ratios(by_k[4], by_k[2])
            report.ratios[f"{name}_k4_to_k2"] = common.Ratio.of(pairs, target=CODES_TARGET, better="lower")
    measured = [row for row in runs if "processor_s_per_gb" in row and "sketch_processor_s_per_gb" in row]
    if measured:
        found = [row["processor_s_per_gb"] / row["sketch_processor_s_per_gb"] for row in measured]
        report.ratios["processor_to_arithmetic"] = common.Ratio.of(found, target=PROCESSOR_TARGET, better="lower")


def slower_to_faster(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Of each round: time to recovery with the slower code / with the faster one."""
    ratios = []
    for turn in sorted({row["round"] for row in runs}):
        times = [row["recovery_seconds"] for row in runs if row["round"] == turn]
        if len(times) == len(CODES):
            ratios.append(max(times) / min(times))
    return ratios


def describe(row: dict[str, Any]) -> str:
    even = row.get("lost_at_equal_speed_s_per_gb")
    return (
        f"stalled for {row['stall_after_detection_s']:.2f} s after detection (usual: {row['usual_silence_s']:.2f}), "
        f"all steps as usual after {row['resumed_after_detection_s']:.2f} s, "
        f"{row['rows']:,} rows ({row['bytes'] / 1e6:,.0f} MB) back after {row['unprotected_s']:.1f} s, "
        f"{row['lost_s']:.2f} s of training lost; per GB {row['unprotected_s_per_gb']:.1f} s without protection and "
        f"{row['lost_s_per_gb']:.2f} s lost"
        + ("" if even is None else f" ({even:.2f} s at equal speed of the processors)")
    )


def print_rows(report: common.Report) -> None:
    runs = [row for row in report.rows if row["kind"] == "run" and row["k"] is not None]
    links = next(row["bytes_per_second"] for row in report.rows if row["kind"] == "socket")
    common.print_table(
        f"what it costs that server {VICTIM} of {train.SERVERS} is killed; seconds, and seconds per GB of lost rows",
        (
            "limit, k",
            "lost MB",
            "stall",
            "usual",
            "of it waited",
            "unprotected",
            "training lost",
            "unprotected / GB",
            "lost / GB",
            "... at equal speed",
        ),
        [
            (
                f"{name_limit(row['limit'])}, {row['k']}",
                f"{row['bytes'] / 1e6:,.0f}",
                f"{row['stall_after_detection_s']:.2f}",
                f"{row['usual_silence_s']:.2f}",
                f"{row['waited_s']:.2f}",
                f"{row['unprotected_s']:.2f}",
                f"{row['lost_s']:.2f}",
                f"{row['unprotected_s_per_gb']:.2f}",
                f"{row['lost_s_per_gb']:.2f}",
                "-" if (even := row["lost_at_equal_speed_s_per_gb"]) is None else f"{even:.2f}",
            )
            for row in runs
        ],
    )
    common.print_table(
        "how it went; seconds from the death",
        ("limit, k", "detected", "resumed", "silence", "faults", "during / before", "MB/s", "of socket", "sketch"),
        [
            (
                f"{name_limit(row['limit'])}, {row['k']}",
                f"{row['detected_s']:.3f}",
                f"{row['resumed_after_detection_s']:.2f}",
                f"{row['silence_s']:.2f}",
                f"{row['faults']:,}",
                f"{row['ratio_during']:.2f}",
                f"{row['bytes_per_second'] / 1e6:,.0f}",
                f"{row['bytes_per_second'] / links:.1%}",
                f"{sketch_seconds(row, links):.2f} s",
            )
            for row in runs
        ],
    )
    common.console.print(PAPER)


def sketch_seconds(row: dict[str, Any], links: float) -> float:
    """(k + 1) x bytes of the lost rows through one socket, and nothing else to do."""
    return float((row["k"] + 1) * row["bytes"] / links)
