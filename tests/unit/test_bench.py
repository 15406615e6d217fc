"""Goal: the benchmarks' own arithmetic is right, and what they compare is the same work.

Method: figures with known answers go through the bookkeeping; kernels and peer run on tables of a few rows.
No test here looks at speed. What needs FBGEMM is skipped without it.
"""

from __future__ import annotations

import inspect
import json
import platform
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from regrow.bench import accuracy, common, kernels, peer, train
from regrow.errors import RegrowError, UserError

needs_fbgemm = pytest.mark.skipif(peer.missing_reason() is not None, reason="FBGEMM is not installed")


# -- ratios, turns, files ------------------------------------------------------------------------------------


def test_ratio_of_few_pairs_has_their_extremes() -> None:
    ratio = common.Ratio.of([1.0, 3.0, 2.0], target=1.5)
    assert (ratio.value, ratio.low, ratio.high) == (2.0, 1.0, 3.0)
    assert ratio.spread == "extremes of pairs"
    assert ratio.met


def test_ratio_of_many_pairs_has_quartiles() -> None:
    ratio = common.Ratio.of([float(value) for value in range(1, 10)], target=6.0)
    assert (ratio.value, ratio.low, ratio.high) == (5.0, 3.0, 7.0)
    assert ratio.spread == "quartiles of pairs"
    assert not ratio.met


def test_ratio_lower_is_better() -> None:
    assert common.Ratio.of([0.5], target=0.6, better="lower").met
    assert not common.Ratio.of([0.7], target=0.6, better="lower").met


def test_ratio_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="at least one pair"):
        common.Ratio.of([], target=1.0)
    with pytest.raises(ValueError, match="better"):
        common.Ratio.of([1.0], target=1.0, better="larger")


def test_interleave_takes_turns() -> None:
    calls: list[str] = []

    def run(name: str, index: int) -> float:
        calls.append(f"{name}{index}")
        return float(index)

    figures = common.interleave(
        {"a": lambda index: run("a", index), "b": lambda index: run("b", index)}, repetitions=2
    )
    assert calls == ["a0", "b0", "a1", "b1"]
    assert figures == {"a": [0.0, 1.0], "b": [0.0, 1.0]}


def test_others_cores_is_what_the_run_did_not_use() -> None:
    before = common.Occupancy(at=10.0, busy_seconds=100.0, own_seconds=1.0)
    after = common.Occupancy(at=14.0, busy_seconds=107.0, own_seconds=6.0)
    assert before.others_cores(after) == pytest.approx(0.5)
    unknown = common.Occupancy(at=14.0, busy_seconds=None, own_seconds=6.0)
    assert before.others_cores(unknown) is None


def test_write_json_replaces_whole_files(tmp_path: Any) -> None:
    path = tmp_path / "figures.json"
    path.write_text("old")
    common.write_json(str(path), {"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["figures.json"]
    with pytest.raises(TypeError):
        common.write_json(str(path), {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["figures.json"]


def test_report_says_what_is_missed_and_still_succeeds(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/some/where/bin/regrow", "bench", "kernels", "--quick"])
    report = common.Report.start("kernels")
    report.rows.append({"kind": "run", "others_cores": 0.5})
    report.ratios["slow"] = common.Ratio.of([0.5], target=1.0)
    report.ratios["fast"] = common.Ratio.of([2.0], target=1.0)
    assert report.finish(str(tmp_path / "out.json")) == 0
    told = json.loads((tmp_path / "out.json").read_text())
    assert set(told) == {"bench", "command", "machine", "rows", "ratios"}
    assert told["command"] == "regrow bench kernels --quick"
    assert set(told["ratios"]["slow"]) >= {"value", "low", "high", "target", "better"}
    assert told["ratios"]["slow"]["value"] == 0.5
    shown = capsys.readouterr().out
    assert "missed: slow is 0.5" in shown
    assert "missed: fast" not in shown
    assert "other processes used up to 0.50 cores" in shown


def test_machine_has_no_names() -> None:
    facts = common.machine()
    assert facts["cores"] >= 1
    host = platform.node()
    if len(host) > 3:
        assert host not in json.dumps(facts)
    assert str(facts["cpu"]) in common.machine_line(facts)


def test_bandwidth_is_measured_per_thread_count() -> None:
    one, two = (common.bandwidth(threads=count, size_bytes=1 << 20, repetitions=1) for count in (1, 2))
    assert (one.threads, two.threads) == (1, 2)
    assert min(one.copy, one.random_rows, two.copy, two.random_rows) > 0


@pytest.mark.parametrize("module", [kernels, train, accuracy])
def test_benches_have_the_same_door(module: Any) -> None:
    assert module.SUMMARY.endswith(".")
    parameters = inspect.signature(module.run).parameters
    assert list(parameters)[:2] == ["quick", "json_path"]
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())
    further = list(parameters.values())[2:]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in further)


# -- kernels -------------------------------------------------------------------------------------------------


def test_bytes_moved_by_hand() -> None:
    count = {"lookups": 10, "distinct": 5, "dim": 16}
    assert kernels.bytes_moved("gather", **count) == 5 * 64 + 10 * 64
    assert kernels.bytes_moved("update", **count) == 10 * 64 + 5 * 2 * 68
    assert kernels.bytes_moved("both", **count) == 2 * 10 * 64 + 5 * 2 * 68


@pytest.fixture
def small_kernels(monkeypatch: pytest.MonkeyPatch) -> kernels.Size:
    monkeypatch.setattr(kernels, "BATCH", 16)
    return kernels.Size(table_bytes=26 * 64 * 50, repetitions=2, skewed=True)


def test_kernels_run_without_the_peer(
    small_kernels: kernels.Size,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(kernels, "QUICK", small_kernels)
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: None)
    path = tmp_path / "kernels.json"
    assert kernels.run(quick=True, json_path=str(path), dims=(16,)) == 0
    told = json.loads(path.read_text())
    assert "pip install --no-deps fbgemm-gpu-cpu" in capsys.readouterr().out
    assert told["ratios"] == {}
    operations = [row for row in told["rows"] if row["kind"] == "operation"]
    assert {row["operation"] for row in operations} == set(kernels.OPERATIONS)
    assert {row["ids"] for row in operations} == {"uniform", "skewed"}
    assert all(row["regrow_ms"] > 0 for row in operations)


@needs_fbgemm
def test_kernels_agree_with_the_peer_and_a_planted_difference_is_caught(small_kernels: kernels.Size) -> None:
    rows, dim = [50] * 26, 16
    ours = kernels.Ours(rows, dim)
    peers = {layout: kernels._peer_tables(ours, layout, 2) for layout in peer.LAYOUTS}
    kernels.check_equal(ours, peers, rows, dim)
    peers["merged"].weights(3).data[:] += 1e-3
    with pytest.raises(RuntimeError, match="FBGEMM merged: the two sides differ"):
        kernels.check_equal(ours, peers, rows, dim)


@needs_fbgemm
def test_kernels_run_with_the_peer(
    small_kernels: kernels.Size, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(kernels, "QUICK", small_kernels)
    path = tmp_path / "kernels.json"
    threads = torch.get_num_threads()
    assert kernels.run(quick=True, json_path=str(path), dims=(16,)) == 0
    assert torch.get_num_threads() == threads
    ratios = json.loads(path.read_text())["ratios"]
    assert "both_dim16_threads1" in ratios
    assert all(ratio["target"] == 1.0 for ratio in ratios.values())


# -- the peer ------------------------------------------------------------------------------------------------


@needs_fbgemm
@pytest.mark.parametrize("layout", peer.LAYOUTS)
def test_peer_layouts_follow_the_formula(layout: str) -> None:
    rows, dim, batch, rate, eps = [7, 5, 9], 8, 4, 0.1, 1e-8
    tables = peer.PeerTables(rows, dim, layout=layout, threads=2, learning_rate=rate, eps=eps)
    tables.fill_uniform()
    start = [tables.weights(table).clone() for table in range(3)]
    # Table 0 sees one id twice: its gradients must be summed before the update.
    ids = np.array([[1, 1, 2, 6], [0, 1, 2, 3], [8, 7, 6, 5]])
    gradient = torch.randn(batch, 3 * dim, generator=torch.Generator().manual_seed(0))
    outputs = tables.forward(tables.prepare(ids.reshape(-1), batch))
    looked_up = torch.cat([start[table][torch.from_numpy(ids[table])] for table in range(3)], 1)
    assert torch.equal(torch.cat(outputs, 1).detach(), looked_up)
    tables.backward(outputs, tables.split_columns(gradient))
    for table in range(3):
        expected = start[table].clone()
        for row in np.unique(ids[table]):
            mine = gradient[np.flatnonzero(ids[table] == row), table * dim : (table + 1) * dim].sum(0)
            expected[row] -= rate / (mine.square().mean().sqrt() + eps) * mine
        torch.testing.assert_close(tables.weights(table), expected, atol=1e-6, rtol=1e-5)
    tables.close()


def test_peer_names_unknown_choices() -> None:
    with pytest.raises(ValueError, match="unknown layout 'sideways'"):
        peer.PeerTables([3], 4, layout="sideways")
    with pytest.raises(ValueError, match="unknown dense optimizer"):
        peer.dense_optimizer("lion", [], 0.1)


def test_peer_reason_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: None)
    assert f"pip install --no-deps {peer.PACKAGE}" in str(peer.missing_reason())

    def broken() -> None:
        raise OSError("undefined symbol: x\nmore")

    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(peer, "_import_fbgemm", broken)
    assert "undefined symbol: x)" in str(peer.missing_reason())


@needs_fbgemm
@pytest.mark.live
def test_peer_trains_in_a_process_of_its_own() -> None:
    size = train.Size(
        pairs=1, rows_max={"tiny": 50}, seconds=0.2, warmup_seconds=0.0, layouts=("split", "merged")
    )
    config = train.make_config("tiny", size).replace(batch=64)
    figures = train.run_peer(config, size=size, cores=1, layouts=size.layouts, rate=1000.0)
    assert figures["samples_per_second"] > 0
    assert figures["layout"] in size.layouts
    assert set(figures["trials"]) == set(size.layouts)
    assert sum(figures["step_milliseconds"].values()) > 0


def test_peer_failure_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess(
        args=[], returncode=1, stdout="", stderr="Traceback\nValueError: no\n"
    )
    monkeypatch.setattr(train.subprocess, "run", lambda *args, **options: failed)
    config = train.make_config("kaggle", train.QUICK)
    with pytest.raises(RegrowError, match=r"the peer failed .*ValueError: no"):
        train.run_peer(config, size=train.QUICK, cores=1, layouts=("split",), rate=1.0)


# -- training ------------------------------------------------------------------------------------------------


def _status(now: float, samples: tuple[int, int], state: str = "training") -> Any:
    workers = [SimpleNamespace(state=state, reports=[(now, done)]) for done in samples]
    return SimpleNamespace(phase="training", workers=workers)


def test_steady_rate_leaves_the_warm_up_out() -> None:
    recorder = train.Recorder(warmup_seconds=2.0)
    # Two slow seconds, then 100 and 50 samples per second.
    for second, samples in enumerate([(0, 0), (1, 1), (2, 2), (102, 52), (202, 102), (302, 152)]):
        recorder.update(_status(float(second), samples), float(second))
    assert recorder.steady()["samples_per_second"] == pytest.approx(150.0)


def test_steady_rate_needs_reports() -> None:
    recorder = train.Recorder(warmup_seconds=0.0)
    with pytest.raises(RegrowError, match="too short"):
        recorder.steady()
    recorder.update(_status(0.0, (0, 0)), 0.0)
    with pytest.raises(RegrowError, match="too short"):
        recorder.steady()


def test_train_compares_run_by_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    rates = iter([100.0, 95.0, 200.0, 160.0, 100.0, 80.0])

    def figures(**more: Any) -> dict[str, Any]:
        return {"samples_per_second": next(rates), "rows": 5, "peak_rss_bytes": 1, **more}

    asked: list[tuple[str, ...]] = []

    def run_peer(config: Any, *, layouts: Any, **rest: Any) -> dict[str, Any]:
        asked.append(tuple(layouts))
        return figures(layout="merged", step_milliseconds={"data": 1.0})

    monkeypatch.setattr(train, "run_peer", run_peer)
    monkeypatch.setattr(train, "run_ours", lambda config, **rest: figures())
    monkeypatch.setattr(train.peer, "missing_reason", lambda: None)
    path = tmp_path / "train.json"
    assert train.run(quick=False, json_path=str(path), models=("mlperf",)) == 0
    told = json.loads(path.read_text())
    assert told["ratios"]["train_mlperf"]["value"] == 0.8
    assert told["ratios"]["train_mlperf"]["high"] == 0.95
    # The layout is chosen once and kept.
    assert len(asked[0]) > 1
    assert asked[1:] == [("merged",), ("merged",)]


# -- accuracy ------------------------------------------------------------------------------------------------


def test_accuracy_compares_seed_by_seed() -> None:
    auc = {"reference": [0.75, 0.76], "async": [0.749, 0.757], "sync": [0.75, 0.761]}
    rows = [{"system": system, "auc": value} for system, values in auc.items() for value in values]
    ratios = accuracy.compare(rows, judged=True)
    assert ratios["auc_async"].value == pytest.approx(0.753)
    assert not ratios["auc_async"].met
    assert ratios["auc_sync"].met
    assert ratios["auc_async_minus_reference"].value == pytest.approx(-0.002)
    assert ratios["auc_async_minus_reference"].target == pytest.approx(-0.01)
    assert set(accuracy.compare(rows, judged=False)) == {
        "auc_async_minus_reference",
        "auc_sync_minus_reference",
    }


@pytest.mark.parametrize("data", [None, "/nowhere/clicks.tsv"])
def test_accuracy_without_data_says_what_to_give(data: str | None) -> None:
    with pytest.raises(UserError, match="--data PATH"):
        accuracy.run(quick=True, json_path=None, data=data)
