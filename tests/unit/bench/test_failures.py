"""Goal: the parts of the failure benchmarks that decide how much is measured, and what is drawn, are right.

Method: figures with known answers go through the bookkeeping; runs are replaced by functions. See test_bench.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_runs import overhead_runs, plant_wrong_parity, trace_of
from helpers import job, table

from regrow.bench import balance, common, overhead, plots, recovery, train
from regrow.config import TrainConfig
from regrow.errors import RegrowError, UserError
from regrow.launch.failures import Failure
from regrow.nn.check import check_parity
from regrow.runtime.inprocess import InProcessCluster


@pytest.mark.parametrize("variant", overhead.VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("size", [overhead.QUICK, overhead.FULL])
def test_overhead_variants_are_possible(variant: overhead.Variant, size: overhead.Size) -> None:
    for model in size.rows_max:
        config = overhead.make_config(model, size).replace(**variant.changes)
        assert (config.code is None) == (variant.name == "none")


def test_overhead_counts_what_servers_flushed_not_the_option() -> None:
    summary = {
        "per_server": [{"flush_bytes": 300, "flush_rows": 3}, {"flush_bytes": 100, "flush_rows": 1}],
        "flush_bytes": 8 << 20,
        "steps_done": 4,
        "table_bytes": 125,
        "redundancy_bytes": 25,
        "distinct_rows_per_step": 9.0,
        "redo_bytes_peak": 5,
        "peak_rss_bytes": {"total": 1},
        "wait_seconds": 0.0,
        "staleness_mean": 0.0,
        "loss": 0.5,
    }
    found = overhead.costs(summary)
    assert (found["flush_bytes_per_push"], found["flush_rows_per_push"]) == (100.0, 1.0)
    assert found["memory_overhead"] == 0.25


def test_trace_of_a_short_run_says_so() -> None:
    with pytest.raises(RegrowError, match="too short"):
        recovery.Trace().rate_whole()
    with pytest.raises(RegrowError, match="should have been killed"):
        recovery.Trace().failure()


def test_steady_state_leaves_the_warm_up_out() -> None:
    trace = trace_of([(0.0, 0), (1.0, 1), (2.0, 2), (3.0, 102), (4.0, 202)])
    trace.warmup_seconds = 2.0
    assert trace.steady()["samples_per_second"] == pytest.approx(100.0)
    trace.warmup_seconds = 30.0
    assert trace.steady()["seconds"] == pytest.approx(2.0)


def test_a_run_that_was_over_too_soon_is_made_again_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is much faster than thought: 100 steps a second, and a report every tenth of one."""
    asked: list[int] = []

    def run(config: TrainConfig, *, display: train.Recorder) -> dict[str, Any]:
        assert config.steps is not None
        asked.append(config.steps)
        display.reports = {0: [(step / 100, step) for step in range(10, config.steps + 1, 10)]}
        known = dict.fromkeys(("samples_per_s", "cpu_seconds", "wait_seconds", "staleness_mean", "rows", "loss"), 0)
        return {**known, "peak_rss_bytes": {"total": 0}}

    monkeypatch.setattr(train.local, "train", run)
    config = train.make_config("kaggle", train.QUICK)
    assert train.run_ours(config, size=train.QUICK, rate=1.0)["samples_per_second"] == pytest.approx(100.0)
    assert asked == [8, 32]
    monkeypatch.setattr(train, "TRIES_MAX", 1)
    with pytest.raises(RegrowError, match="too short to have a steady state"):
        train.run_ours(config, size=train.QUICK, rate=1.0)


def test_recovery_tables_hold_what_is_asked(tmp_path: Path) -> None:
    assert recovery.table_rows([10, 100_000, 300_000], total=800_010) == [10, 200_001, 600_001]
    config = recovery.make_config(tmp_path, recovery.FULL)
    rows = config.load_model().rows
    assert sum(rows) * 80 >= 5 * 1_000_000_000
    assert len(rows) == 26
    assert getattr(config, "prefill", True)


def test_bandwidths_are_measured_and_possible() -> None:
    copy = recovery.copy_bandwidth(1 << 20, repetitions=1)
    assert 0 < recovery.socket_bandwidth(4 << 20) < 1e12
    assert 0 < copy < 1e13


def test_recovery_runs_grow_until_the_recovery_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []

    def run(config: TrainConfig, *, overwrite: bool, display: recovery.Trace) -> dict[str, Any]:
        assert overwrite
        assert config.steps is not None
        asked.append(config.steps)
        end = config.steps / 10
        for worker in (0, 1):
            display.reports[worker] = [(at / 10, at) for at in range(config.steps + 1)] + [(end + 9.0, config.steps)]
        failure = Failure(role="server", id=2, incarnation=0, step=1, reason="", at=2.0, detected_at=2.0)
        failure.resumed_at, failure.recovered_at = 2.1, 8.0 if end > 8.0 else None
        display.status = SimpleNamespace(failures=SimpleNamespace(all=[failure]))  # type: ignore[assignment]
        server = {"bytes": 10, "redundancy_bytes": 2}
        return {"failures": [{**failure.to_dict(), "rows": 1, "bytes": 1}], "per_server": [server] * 5}

    monkeypatch.setattr(recovery.local, "train", run)
    config = recovery.make_config(tmp_path, recovery.QUICK).replace(batch=1, workers=2)
    size = recovery.QUICK
    row, trace, after = recovery.train_struck(config, k=4, size=size, rate=20.0, after_seconds=4.0)
    assert asked == [30 + 40, 30 + 80]
    assert row["recovered_s"] == 6.0
    assert (trace["name"], trace["marks"]["recovered"]) == ("k4", 6.0)
    assert after == pytest.approx(recovery.PATIENCE * 6.0 + 1.5 * recovery.TAIL_SECONDS)
    assert "again with 8 s" in capsys.readouterr().out


def test_load_needs_counters_and_files() -> None:
    with pytest.raises(RegrowError, match="did not count rows_updated"):
        balance.loads([{"parity_rows_applied": 1}])
    with pytest.raises(RegrowError, match="without any load"):
        balance.imbalance([3, 0])
    with pytest.raises(UserError, match="there is no file"):
        balance.run(quick=True, json_path=None, data="/nowhere/clicks.tsv")


def test_the_dead_of_a_run_are_not_other_processes() -> None:
    """Processor time that a child used is this run's own, also after its end."""
    before = train.children_cpu_seconds()
    burn = "import time; begin = time.process_time()\nwhile time.process_time() < begin + 0.5: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    after = train.children_cpu_seconds()
    if before is None or after is None:
        pytest.skip("/proc does not tell")
    assert 0.5 <= after - before < 5.0


def test_a_check_tries_again_where_something_may_be_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("regrow.nn.check.time.sleep", pauses.append)
    client = InProcessCluster(servers=3).client(job(table(rows=20, bound=0.5, k=2, r=1), servers=3))
    stripes, _ = check_parity(client)
    plant_wrong_parity(client, 0, monkeypatch, times=2)
    assert check_parity(client, tries=2, pause_seconds=0.5) == (stripes, 1)
    assert pauses == [0.5]
    monkeypatch.undo()
    monkeypatch.setattr("regrow.nn.check.time.sleep", pauses.append)
    plant_wrong_parity(client, 0, monkeypatch, times=2)
    assert check_parity(client, tries=3) == (stripes, 0)


def test_a_run_directory_has_a_trace(tmp_path: Path) -> None:
    def line(t: float, rate: float | None, failures: int) -> str:
        return json.dumps({"t": t, "samples_per_s_now": rate, "failures": failures})

    lines = [line(0.0, None, 0), line(1.0, 50.0, 0), line(2.5, 0.0, 1), line(3.0, 40.0, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    failure = {"detected_s": 0.5, "resumed_s": 0.75, "recovered_s": None}
    (tmp_path / "summary.json").write_text(json.dumps({"model": "kaggle", "failures": [failure]}))
    assert plots.run_trace(tmp_path) == {
        "kind": "trace",
        "name": "kaggle",
        "t": [-1.0, 0.5, 1.0],
        "samples_per_second": [50.0, 0.0, 40.0],
        "marks": {"death": 0.0, "resumed": 0.75},
    }


def test_pictures_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    trace = {"kind": "trace", "t": [-1.0, 0.0, 1.0], "samples_per_second": [5.0, 0.0, 5.0]}
    marks = {"death": 0.0, "resumed": 0.1, "recovered": 0.9}
    rows = [{**trace, "name": "none", "marks": {}}, {**trace, "name": "k4", "marks": marks}]
    drawn = plots.save(
        {"bench": "recovery", "rows": rows}, json_path=str(tmp_path / "r.json"), docs=str(tmp_path / "img")
    )
    assert drawn == [tmp_path / "r.png", tmp_path / "img" / "recovery.png"]
    report = common.Report.start("overhead")
    overhead.compare(report, "kaggle", overhead_runs())
    drawn += plots.save(report.to_dict(), json_path=str(tmp_path / "o.json"), docs=None)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    with pytest.raises(UserError, match="has no picture"):
        plots.draw({"bench": "balance"}, tmp_path / "l.png")
