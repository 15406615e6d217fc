"""Goal: what `regrow bench checkpoint` makes of its runs is right: holds, windows, ratios, tables and the picture; and
what it stores is what it loads.

Method: recorded reports and checkpoints with known answers go through the bookkeeping; whole runs are replaced by
functions. The store's part runs for real, with a few rows.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from regrow.bench import checkpoint, checkpoint_figures, checkpoint_peer, checkpoint_store, common, plots
from regrow.checkpoint.storage import Storage
from regrow.errors import RegrowError, UserError
from regrow.launch import reports


def _report() -> common.Report:
    return common.Report(bench="checkpoint", facts={}, rows=[], ratios={})


def _trace(*workers: list[tuple[float, int]], cuts: tuple[float, ...] = ()) -> checkpoint.Trace:
    trace = checkpoint.Trace()
    for index, seen in enumerate(workers):
        # The last report comes after the last push is durable and is left out.
        trace.reports[index] = [*seen, (seen[-1][0] + 100.0, seen[-1][1])]
    for number, at in enumerate(cuts):
        trace.hear(_save_report(f"c{number}"), at)
    return trace


def _save_report(cut: str) -> reports.CheckpointSaved:
    return reports.CheckpointSaved(cut=cut, count=1, still=False, kind="full", seconds=1.5, cut_seconds=0.05)


def _counters(**more: float) -> reports.ServerCounters:
    return reports.ServerCounters(pulls=0, pushes=0, bytes_in=0, bytes_out=0, **more)  # type: ignore[arg-type]


def _steady(seconds: float, rate: int = 100) -> list[tuple[float, int]]:
    return [(half / 2, half * rate // 2) for half in range(int(2 * seconds) + 1)]


# -- what a trace tells --------------------------------------------------------------------------------------


def test_bench_has_the_door_of_the_others() -> None:
    assert checkpoint.SUMMARY.endswith(".")
    parameters = inspect.signature(checkpoint.run).parameters
    assert list(parameters) == ["quick", "json_path", "docs", "part"]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())


def test_hold_is_what_is_missing_at_the_usual_pace() -> None:
    seen = _steady(3.0)
    assert checkpoint.longest_hold(seen) == pytest.approx(0.0)
    # A report that came late with as many samples as usual, and one that came in time with too few.
    late = [*seen, (3.9, 350)]
    short = [*seen, (3.5, 320)]
    assert checkpoint.longest_hold(late) == pytest.approx(0.4)
    assert checkpoint.longest_hold(short) == pytest.approx(0.3)
    assert checkpoint.longest_silence(late) == pytest.approx(0.9)
    # Longer steps with as many more samples are no hold.
    assert checkpoint.longest_hold([*seen, (3.9, 390)]) == pytest.approx(0.0)


def test_hold_of_hardly_anything_is_nothing() -> None:
    assert checkpoint.longest_hold([]) == checkpoint.longest_silence([]) == 0.0
    assert checkpoint.longest_hold([(1.0, 5)]) == 0.0
    assert checkpoint.longest_hold([(1.0, 5), (2.0, 5)]) == 0.0


def test_reports_inside_begin_with_the_one_before() -> None:
    seen = _steady(3.0)
    assert checkpoint.inside(seen, 1.2, 2.2) == [(1.0, 100), (1.5, 150), (2.0, 200)]
    assert checkpoint.inside(seen, 0.0, 0.4) == [(0.0, 0)]


def test_window_lies_between_two_checkpoints() -> None:
    points = _steady(40.0)
    assert _trace(points, cuts=(1.0, 12.5, 25.0, 37.5)).window(3.0) == (12.5, 37.5)
    # One before training has settled does not count, nor does the one when it was over.
    assert _trace(points, cuts=(2.0, 15.0, 28.0, 41.0)).window(3.0) == (15.0, 28.0)
    assert _trace(points, cuts=(20.0,)).window(3.0) == (3.0, 40.0)
    assert _trace(points).window(3.0) == (3.0, 40.0)
    # A run that was too short for that still has a second half.
    assert _trace(points).window(60.0) == (20.0, 40.0)


def test_costs_of_a_window() -> None:
    # The second worker stands still from 10 to 12; what happens outside of the window does not matter.
    stopped = [(at, count) for at, count in _steady(10.0)] + [(12.0 + at, 1000 + count) for at, count in _steady(8.0)]
    before = [(at, count) for at, count in _steady(20.0) if not 1.0 < at < 4.0]
    found = _trace(stopped, before).costs(5.0, 15.0)
    assert found["samples_per_second"] == pytest.approx((800 + 1000) / 10)
    assert found["hold_seconds"] == pytest.approx(2.0)
    assert found["silence_seconds"] == pytest.approx(2.0)
    assert "cpu_seconds_per_1000_samples" not in found  # nobody looked


def test_processor_time_counts_within_the_window() -> None:
    trace = _trace(_steady(20.0), _steady(20.0))
    trace.usage = [
        (float(at), common.Occupancy(at=float(at), busy_seconds=2.0 * at, own_seconds=1.5 * at if at > 4 else 0.0))
        for at in range(21)
    ]
    found = trace.costs(5.0, 15.0)
    assert found["cpu_seconds_per_1000_samples"] == pytest.approx(1.5 * 1000 / 200)
    assert found["others_cores"] == pytest.approx(0.5)


def test_trace_hears_of_every_checkpoint_and_passes_it_on() -> None:
    heard: list[Any] = []
    status: Any = SimpleNamespace(
        phase="loading", workers=[], receive=lambda role, id, report, now: heard.append((role, id, report, now))
    )
    trace = checkpoint.Trace()
    trace.update(status, 0.0)
    trace.update(status, 0.1)  # listens once
    status.receive("coordinator", 0, _save_report("a"), 1.0)
    status.receive("coordinator", 0, reports.CheckpointBegun(cut="b", kind="delta"), 2.0)
    status.receive("coordinator", 0, reports.CheckpointFailed(reason="x", failed=1, still=False), 3.0)
    status.receive("server", 3, _counters(capture_seconds_max=0.004, hold_seconds_max=0.01), 4.0)
    status.receive("server", 1, _counters(capture_seconds_max=0.002), 5.0)
    # Nothing new since the last one: told as saved, without a kind.
    status.receive("coordinator", 0, reports.CheckpointSaved(cut="a", count=1, still=False), 6.0)
    assert [(cut["cut"], cut["at"], cut["seconds"]) for cut in trace.cuts] == [("a", 1.0, 1.5)]
    assert (trace.capture_seconds_max, trace.cut_hold_seconds_max) == (0.004, 0.01)
    assert [entry[3] for entry in heard] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


# -- what is run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [checkpoint.QUICK, checkpoint.FULL])
@pytest.mark.parametrize("variant", checkpoint.VARIANTS, ids=lambda variant: variant.name)
def test_one_run_becomes_a_row(
    variant: checkpoint.Variant, size: checkpoint.Size, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def run(config: Any, *, display: checkpoint.Trace) -> dict[str, Any]:
        asked.append(config)
        done = _trace(_steady(40.0), _steady(40.0), cuts=(16.0, 26.0, 36.0) if config.saves else ())
        display.reports, display.cuts = done.reports, done.cuts
        return {
            "checkpoints": {"failed": 1},
            "table_bytes": 5,
            "peak_rss_bytes": {"total": 7, "server": 3, "merger": 2},
            "cpu_seconds": {"total": 10.0, "merger": 1.0},
        }

    monkeypatch.setattr(checkpoint.local, "train", run)
    monkeypatch.setattr(checkpoint, "count_stored", lambda url: ({"c0": 1, "c1": 10, "c2": 100}, 1000))
    tables = checkpoint.recovery.Size(
        server_bytes=size.server_bytes, before_seconds=0.0, after_seconds=0.0, rounds=1, socket_bytes=0
    )
    base = checkpoint.recovery.make_config(tmp_path, tables)
    row, picture = checkpoint.train_variant(base, variant, tmp_path, size=size, rate=200.0)
    (config,) = asked
    assert config.prefill
    assert config.saves == (variant.every is not None)
    assert row["samples_per_second"] == pytest.approx(200.0)
    assert row["step_seconds"] == pytest.approx(2 * config.batch / 200)
    assert row["merger_cpu_share"] == pytest.approx(0.1)
    assert row["peak_rss_bytes"] == 5  # without the merger
    if variant.every is not None:
        assert config.interval[0] == pytest.approx(variant.every * size.period_seconds)
        # From the end of the first to the end of the last: two whole periods.
        assert (row["seconds"], row["checkpoints"], row["written_bytes"]) == (20.0, 2, 110)
        assert row["written_bytes_per_period"] == round(110 * size.period_seconds / 20)
        assert picture["cuts"] == [0.0, 10.0, 20.0]
    else:
        assert (row["checkpoints"], row["written_bytes"], picture["cuts"]) == (0, 0, [])
    assert list(tmp_path.glob("tmp*")) == []  # nothing is left behind


# -- ratios, tables and the picture --------------------------------------------------------------------------


def _run_row(variant: str, turn: int, speed: float, hold: float, **more: Any) -> dict[str, Any]:
    return {
        "kind": "run",
        "variant": variant,
        "round": turn,
        "samples_per_second": speed,
        "cpu_seconds_per_1000_samples": 100.0 / speed,
        "worker_seconds_per_sample": 1.0 if variant == "none" else 1.2,  # slower processors
        "hold_seconds": hold,
        "cut_hold_seconds_max": hold / 2,
        "silence_seconds": 0.6,
        "step_seconds": 0.1,
        "cut_seconds_max": 0.05,
        "capture_seconds_max": 0.003,
        "store_seconds_max": 1.0,
        "peak_rss_bytes": 1000,
        "peak_rss_server_bytes": 200,
        "peak_rss_merger_bytes": 0,
        "checkpoints": 2,
        "checkpoints_failed": 0,
        "written_bytes_per_period": 10,
        "merged_bytes_all": 0,
        "merger_cpu_share": 0.0,
        **more,
    }


def _whole_report() -> common.Report:
    report = _report()
    for turn, speed in enumerate((1000.0, 2000.0)):  # the machine became faster: rounds are compared within
        report.rows += [
            _run_row("none", turn, speed, 0.05),
            _run_row("pausing", turn, 0.9 * speed, 2.05),
            _run_row("full", turn, 0.97 * speed, 0.20, peak_rss_bytes=1300),
            _run_row("delta", turn, 0.996 * speed, 0.10, peak_rss_bytes=1100, merged_bytes_all=10**6),
        ]
        for name, share in (("off", 1.0), ("on", 0.998)):
            row = {"samples_per_second": share * speed, "cpu_seconds_per_1000_samples": 0.1 / share}
            report.rows.append({"kind": "tracking", "variant": name, "round": turn, **row})
        for index, system in enumerate(checkpoint_peer.SYSTEMS, start=1):
            row = dict.fromkeys(("seconds", "blocked_seconds", "memory_bytes", "stored_bytes", "tensor_bytes"), index)
            report.rows.append({"kind": "torch", "system": system, "round": turn, **row})
        for chain, seconds in (("unmerged", 4.0), ("merged", 1.0)):
            row = {"seconds": seconds, "bytes": 5, "rows": 6, "pieces": 7}
            report.rows.append({"kind": "restore", "chain": chain, "round": turn, **row})
        rates = {"save": 8, "plain_write": 10, "load": 6, "plain_read": 10}
        report.rows.append({"kind": "bandwidth", **{f"{name}_bytes_per_second": rate for name, rate in rates.items()}})
    ratio = {"value": 1.01, "low": 1.0, "high": 1.02, "pairs": 3, "spread": ""}
    extras = [0.0001, 0.0002, 0.0003]
    report.rows.append(
        {
            "kind": "update",
            "rows_per_batch": 9,
            "update_ratio": ratio,
            "extras": extras,
            "extra_seconds_per_1000_samples": 0.0002,
        }
    )
    report.rows.append({"kind": "merge", "s": 4, "n": 64, "seconds": 1.0, "folds": 13, "bytes": 5})
    labels = {variant.name: variant.label for variant in checkpoint.VARIANTS}
    checkpoint_figures.compare(report, labels=labels)
    return report


def test_ratios_compare_within_a_round() -> None:
    report = _whole_report()
    values = {name: ratio.value for name, ratio in report.ratios.items()}
    assert values["lost_delta"] == pytest.approx(0.004)
    assert values["lost_delta_less_pausing"] == pytest.approx(0.004 - 0.1)
    assert values["late_steps_full"] == pytest.approx(1.5)
    assert values["late_steps_delta"] == pytest.approx(0.5)
    assert values["hold_steps_full"] == pytest.approx(1.0)
    assert values["hold_steps_delta"] == pytest.approx(0.5)
    assert values["lost_equal_speed_delta"] == pytest.approx(1 - 0.996 * 1.2)
    assert values["lost_equal_speed_delta_less_pausing"] == pytest.approx((0.9 - 0.996) * 1.2)
    assert values["tracking_time"] == pytest.approx(1 / 0.998 - 1)
    assert values["tracking_cpu"] == pytest.approx(1 / 0.998 - 1)
    assert values["tracking_share"] == pytest.approx(0.002)
    assert (values["save_bandwidth"], values["load_bandwidth"]) == (0.8, 0.6)
    assert values["restore_merged"] == 0.25
    assert values["torch_save_seconds"] == 2.0
    assert values["torch_async_blocked"] == pytest.approx(4 / 3)
    missed = {name for name, ratio in report.ratios.items() if not ratio.met}
    assert {"late_steps_full", "load_bandwidth"} <= missed
    assert not missed & {"lost_delta", "lost_delta_less_pausing", "tracking_share", "save_bandwidth", "restore_merged"}


def test_costs_are_told_by_variant() -> None:
    costs = {row["variant"]: row for row in _whole_report().rows if row["kind"] == "cost"}
    assert list(costs) == ["none", "pausing", "full", "delta"]
    assert costs["none"]["lost"]["value"] == 0.0
    assert costs["full"]["memory_bytes"] == 300
    assert costs["pausing"]["hold_seconds"] == 2.05
    assert costs["delta"]["cpu"]["value"] == pytest.approx(1 / 0.996 - 1, abs=1e-4)
    assert costs["delta"]["checkpoints"] == 4


def test_who_had_the_time_that_workers_lost() -> None:
    """The parts of all roles and of the rest make up what is lost at equal speed."""
    report = _report()
    without = {"worker": 1.8, "server": 0.15, "coordinator": 0.01, "merger": 0.0}
    within = {"worker": 1.782, "server": 0.159, "coordinator": 0.01, "merger": 0.0036}
    for name, cores in (("none", without), ("delta", within)):
        report.rows.append(_run_row(name, 0, 10.0, 0.0, cores=cores))
    checkpoint_figures.compare(report, labels={"none": "no", "delta": "some"})
    row = next(row for row in report.rows if row["kind"] == "cost" and row["variant"] == "delta")
    moved = {role: part["value"] for role, part in row["moved"].items()}
    assert moved == pytest.approx({"server": 0.005, "coordinator": 0.0, "merger": 0.002, "rest": 0.003})
    assert sum(moved.values()) == pytest.approx(1 - within["worker"] / without["worker"])


def test_the_order_of_runs() -> None:
    deltas, fulls = (
        [[variant.name for variant in checkpoint.order(turn, part)] for turn in range(2)]
        for part in ("deltas", "fulls")
    )
    assert deltas == [["none", "delta"], ["delta", "none"]]
    assert fulls == [["none", "pausing", "full"], ["full", "pausing", "none"]]


def test_what_roles_used_is_of_the_time_that_counts() -> None:
    trace = _trace(_steady(40.0), _steady(40.0))
    trace.by_role = [(float(at), {"worker": 1.5 * at, "server": 0.1 * at}) for at in range(0, 40, 2)]
    assert trace.costs(11.0, 31.0)["cores"] == pytest.approx({"worker": 1.5, "server": 0.1})
    trace.by_role = trace.by_role[:3]
    assert trace.costs(11.0, 31.0)["cores"] == {}


def test_a_figure_that_was_not_measured_is_left_out() -> None:
    report = _report()
    row = _run_row("none", 0, 10.0, 0.0)
    del row["cpu_seconds_per_1000_samples"], row["worker_seconds_per_sample"]
    report.rows += [row, _run_row("delta", 0, 10.0, 0.0)]
    checkpoint_figures.compare(report, labels={"none": "no", "delta": "some"})
    assert set(report.ratios) == {"lost_delta", "hold_steps_delta", "late_steps_delta"}
    assert [row["cpu"] for row in report.rows if row["kind"] == "cost"] == [None, None]
    checkpoint_figures.print_rows(report)


def test_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint_figures.print_rows(_whole_report())
    out = capsys.readouterr().out
    for words in ("time lost", "torch async_save", "unmerged", "merging took 0.0% of all", "1.010 times as long"):
        assert words in out, words


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")
def test_picture_is_drawn(tmp_path: Path) -> None:
    report = _whole_report()
    with pytest.raises(UserError, match="nothing to draw"):
        plots.draw(report.to_dict(), tmp_path / "a.png")
    for variant in checkpoint.VARIANTS:
        picture = _trace(_steady(20.0), cuts=(5.0, 9.0)).to_row(variant.name, zero_at=1.0, marks={})
        report.rows.append({**picture, "cuts": [4.0, 8.0]})
    plots.draw(report.to_dict(), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# -- the store -----------------------------------------------------------------------------------------------

TINY = 1_000  # bytes; the small tables keep their size, a megabyte or two


def test_what_is_stored_is_loaded(tmp_path: Path) -> None:
    job = checkpoint_store.job_of([(1000, 4), (10, 4)], optimizer="rowwise_adagrad")
    store = checkpoint_store.make_filled_store(job)
    url = str(tmp_path)
    full = checkpoint_store.save(url, job, store, step=1)
    store.update(*checkpoint_store.push_of(job, [range(5, 25), range(3)], seed=1), 1)
    delta = checkpoint_store.save(url, job, store, step=2, source=full.cut)
    rows = {piece.target.id: piece.rows for piece in Storage.open(url).manifests()[0]}
    assert rows == {full.cut: 1010, delta.cut: 23}
    assert full.bytes > 1010 * 24 > delta.bytes > 0
    _, report, loaded = checkpoint_store.load(url, delta.cut, job)
    assert (report.rows, len(report.pieces)) == (1033, 2)
    checkpoint_store.check_same(job, store, loaded)
    with pytest.raises(RegrowError, match="did not come back"):
        checkpoint_store.check_same(job, store, checkpoint_store.load(url, full.cut, job)[2])


def test_bandwidth_and_restores_have_rows_of_figures(tmp_path: Path) -> None:
    found = list(checkpoint_store.bandwidth(tmp_path, size_bytes=TINY, repetitions=2))
    assert [row["round"] for row in found] == [0, 1]
    assert all(row[name] > 0 for row in found for name in row if name.endswith("bytes_per_second"))
    assert list(tmp_path.iterdir()) == []
    merged, *chains = checkpoint_store.restores(tmp_path, size_bytes=TINY, batch=16, batches_per_delta=1, repetitions=1)
    # 47 in base 4 is 233: so many pieces are left, beside the full.
    assert merged["folds"] == 11 + 2
    assert {row["chain"]: row["pieces"] for row in chains} == {"unmerged": 48, "merged": 1 + 2 + 3 + 3}
    assert chains[0]["bytes"] > chains[1]["bytes"]


def test_tracking_measures_both_sides() -> None:
    found = checkpoint_store.tracking(size_bytes=TINY, batch=64, repetitions=3)
    assert len(found["extras"]) == 3
    assert found["update_ratio"]["value"] > 0
    assert 0 < found["rows_per_batch"] <= 26 * 64


def test_file_systems_are_told_by_the_longest_mount(tmp_path: Path) -> None:
    mounts = f"/dev/a / ext4 rw 0 0\ntmpfs {tmp_path} tmpfs rw 0 0\n/dev/b {tmp_path}x xfs rw 0 0\n"
    assert checkpoint_store.filesystem(tmp_path / "a", mounts) == "tmpfs"
    assert checkpoint_store.filesystem(Path("/"), mounts) == "ext4"
    assert checkpoint_store.filesystem(tmp_path, "") is None


def test_peer_says_why_it_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nOSError: disk full\n")
    monkeypatch.setattr(common.subprocess, "run", lambda *args, **options: done)
    with pytest.raises(RegrowError, match=r"exit 1.*disk full"):
        checkpoint_peer.measure(checkpoint_peer.SYSTEMS, directory=tmp_path, size_bytes=1)


def test_peer_stores_the_same_in_every_way(tmp_path: Path) -> None:
    rows = 100
    model = checkpoint_peer.make_model(rows)
    for system in checkpoint_peer.SYSTEMS:
        with pytest.warns(UserWarning) if system.startswith("torch") else contextlib.nullcontext():
            seconds, blocked = checkpoint_peer.way(system, model, rows, tmp_path / system)()
        assert seconds >= blocked > 0
        stored = sum(path.stat().st_size for path in (tmp_path / system).rglob("*") if path.is_file())
        assert stored >= rows * checkpoint_peer.DIM * 4 * checkpoint_peer.TABLES
    assert checkpoint_peer.peak_rss_bytes() >= checkpoint_peer.reset_peak() > 0
