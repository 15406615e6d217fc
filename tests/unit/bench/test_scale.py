"""Goal: cost per sample and role is what the roles' clocks say, and what grows faster than its work is named.

Method: clocks and rows by hand; every sweep's options are those of a run that can be made; one real sweep of the
smallest size (slow).
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from regrow.bench import common, scale, train
from regrow.config import TrainConfig
from regrow.errors import RegrowError, UserError


def make_rows(costs: dict[int, tuple[float, float]], *, sweep: str = "r") -> list[dict[str, Any]]:
    """(server, worker) microseconds by value, the same in two rounds."""
    return [
        {
            "kind": "run",
            "sweep": sweep,
            "round": turn,
            "value": value,
            "microseconds": {"server": server, "worker": worker},
        }
        for turn in range(2)
        for value, (server, worker) in costs.items()
    ]


@pytest.mark.parametrize("sweep", scale.SWEEPS.values(), ids=lambda sweep: sweep.name)
def test_every_value_is_a_run_that_can_be_made(sweep: scale.Sweep) -> None:
    for value in sweep.values:
        changes = sweep.change(value, 1000)
        config = TrainConfig(model="kaggle", batch=64, steps=1, **changes)
        assert config.spare_workers == 0  # it would import torch meanwhile
        assert config.rows_max == (1000 * value if sweep.name == "rows" else 1000)
    with pytest.raises(
        UserError, match="--sweep 'planets' is unknown; choose one of servers, workers, rows, k, r, all"
    ):
        scale.run(quick=True, json_path=None, sweep="planets")


def test_what_grows_faster_than_its_work_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    report = common.Report.start("scale")
    report.rows += make_rows({1: (2.0, 20.0), 2: (3.0, 20.0), 3: (4.8, 44.0)})
    scale.compare(report, scale.SWEEPS["r"])
    # A server's work for r = 3 is three times that for r = 1; a worker's is the same.
    assert report.ratios["r_1_to_3_server"].value == pytest.approx(0.8)
    assert report.ratios["r_1_to_3_worker"].value == pytest.approx(2.2)
    assert [ratio.met for ratio in report.ratios.values()] == [True, False]
    grown = {row["value"]: row["growth"] for row in report.rows if row["kind"] == "growth"}
    assert grown[2] == {"server": 1.5, "worker": 1.0}
    scale.print_rows(report, scale.SWEEPS["r"])
    assert "over those of r = 1" in capsys.readouterr().out


def test_cost_is_what_the_clocks_say_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = scale.Clocks(warmup_seconds=1.0)
    with pytest.raises(RegrowError, match="too short"):
        clocks.cost_per_sample()
    used = {"rg server": 0.0, "rg worker": 0.0, "rg coordinator": 0.0}
    monkeypatch.setattr(train, "children_cpu_seconds", lambda name=None: used.get(name, 0.0))
    for look in range(5):  # the first two looks are warm-up, and costly
        used["rg server"] += 9.0 if look < 3 else 0.5
        used["rg worker"] += 2.0
        worker = SimpleNamespace(state="training", reports=[(0.5 * look, 100 * look)])
        status: Any = SimpleNamespace(phase="training", workers=[worker, worker])
        clocks.update(status, 0.5 * look)
    assert clocks.cost_per_sample() == {"server": 1.0 / 400, "worker": 4.0 / 400, "coordinator": 0.0}
    assert clocks.has_seen(1.0) and not clocks.has_seen(1.1)


def test_all_sweeps_go_into_one_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is compared within itself: what one costs says nothing about another."""
    costs = {"servers": {2: (1.0, 9.0), 40: (1.2, 9.0)}, "workers": {1: (5.0, 9.0), 8: (20.0, 9.0)}}

    def measure_sweep(sweep: scale.Sweep, *, size: scale.Size) -> list[dict[str, Any]]:
        assert size is scale.SHORT
        return make_rows(costs.get(sweep.name, {1: (1.0, 1.0), 2: (1.0, 1.0)}), sweep=sweep.name)

    monkeypatch.setattr(scale, "measure_sweep", measure_sweep)
    path = tmp_path / "scale.json"
    assert scale.run(quick=False, json_path=str(path), sweep="all") == 0
    told = json.loads(path.read_text())
    assert {row["sweep"] for row in told["rows"]} == set(scale.SWEEPS)
    assert told["ratios"]["servers_2_to_40_server"]["value"] == pytest.approx(1.2)
    assert told["ratios"]["workers_1_to_8_server"]["value"] == pytest.approx(4.0)
    assert len(told["ratios"]) == 2 * len(scale.SWEEPS)


@pytest.mark.slow
@pytest.mark.live
def test_a_sweep_of_the_smallest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(scale.QUICK, rows_max=500, batch=64, seconds=0.5, warmup_seconds=0.1)
    monkeypatch.setattr(scale, "QUICK", small)
    path = tmp_path / "scale.json"
    assert scale.run(quick=True, json_path=str(path), sweep="k") == 0
    told = json.loads(path.read_text())
    assert {row["value"] for row in told["rows"]} == {2, 10}
    assert set(told["ratios"]) == {"k_2_to_10_server", "k_2_to_10_worker"}
    assert all(row["microseconds"]["server"] > 0 for row in told["rows"])
