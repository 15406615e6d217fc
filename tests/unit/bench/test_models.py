"""Goal: other models and one worker are compared with peers that do the same work, pair by pair.

Method: the plain PyTorch peer is followed by hand on tables of a few rows, and FBGEMM's padded rows are compared with
the same tables without padding; runs with known figures go through the bookkeeping. No test here looks at speed.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as functional

from regrow.bench import models, peer, peer_run, peer_torch, train, worker
from regrow.config import TrainConfig
from regrow.data.batch import Batch
from regrow.data.catalog import open_dataset

needs_fbgemm = pytest.mark.skipif(peer.missing_reason() is not None, reason="FBGEMM is not installed")
SMALL = train.Size(
    pairs=1, rows_max={"dcn": 40, "deepfm": 40}, seconds=0.05, warmup_seconds=0.0, layouts=("merged", "split")
)


def make_small(model: str, system: str) -> TrainConfig:
    config = train.make_config(model, SMALL, optimizer=models.OPTIMIZERS[system])
    return config.replace(batch=16, steps=peer_run.STEPS_ENDLESS)


def first_batches(config: TrainConfig, count: int) -> tuple[list[int], list[Batch]]:
    dataset = open_dataset(config)
    batches = dataset.train_batches(batch=config.batch, worker=0, workers=1)
    return dataset.rows, list(itertools.islice(batches, count))


# -- plain PyTorch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", models.MODELS)
def test_torch_peer_follows_the_formula(model: str) -> None:
    config = make_small(model, "torch")
    rows, batches = first_batches(config, 2)
    trainer = peer_torch.TorchTrainer(config, rows)
    sums = [torch.zeros_like(bag.weight) for bag in trainer.bags]
    for batch in batches:  # the first step alone would not tell Adagrad from Adam
        tables = [bag.weight.detach().clone().requires_grad_() for bag in trainer.bags]
        ids = torch.from_numpy(batch.values).view(len(rows), -1)
        looked_up = torch.cat([table[each] for table, each in zip(tables, ids, strict=True)], 1)
        logits = trainer.model(torch.from_numpy(batch.dense), looked_up)
        loss = functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels))
        gradients = torch.autograd.grad(loss, tables)
        dense_before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
        assert trainer.step(batch, trainer.prepare(batch)) == pytest.approx(loss.item(), rel=1e-6)
        for table, state, gradient, bag in zip(tables, sums, gradients, trainer.bags, strict=True):
            state += gradient.square()
            expected = table - config.learning_rate * gradient / (state.sqrt() + peer_torch.EPS)
            torch.testing.assert_close(bag.weight, expected, atol=1e-5, rtol=1e-4)
        assert not any(torch.equal(*both) for both in zip(trainer.model.parameters(), dense_before, strict=True))


def test_torch_peer_measures_after_the_warm_up() -> None:
    config = make_small("deepfm", "torch")
    threads = torch.get_num_threads()
    settings = {"config": config.to_dict(), "threads": 1, "layouts": [], "warmup_steps": 2, "seconds": SMALL.seconds}
    try:
        figures = peer_torch.train(settings)
    finally:
        torch.set_num_threads(threads)
    assert figures["samples"] == 16 * figures["steps"] > 0
    assert set(figures["step_milliseconds"]) == {
        "data",
        "embedding forward",
        "dense forward",
        "backward",
        "embedding update",
        "dense update",
    }
    assert figures["rows"] == sum(open_dataset(config).rows)
    json.dumps(figures)


@pytest.mark.parametrize("missing", [None, "there is none"])
def test_peers_answer_in_one_line_whatever_else_is_printed(
    missing: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def repeat(settings: dict[str, Any]) -> dict[str, Any]:
        os.write(1, b"a library says hello\n")
        return {"told": settings}

    monkeypatch.setattr(sys, "stdin", io.StringIO('{"seconds": 1}'))
    path = tmp_path / "stdout"
    stdout = os.dup(1)
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 1)
        code = peer_run.answer(repeat, find_missing=lambda: missing)
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    expected: Any = {"told": {"seconds": 1}} if missing is None else {"error": missing}
    assert path.read_text() == json.dumps(expected) + "\n"
    assert code == (0 if missing is None else 1)


def test_peers_refuse_optimizers_that_they_do_not_have() -> None:
    with pytest.raises(ValueError, match="with adagrad, not rowwise_adagrad"):
        peer_torch.TorchTrainer(make_small("dcn", "fbgemm"), [3])
    with pytest.raises(ValueError, match="with rowwise_adagrad, not adagrad"):
        peer.PeerTrainer(make_small("dcn", "torch"), [3], layout="merged", threads=1)


# -- FBGEMM --------------------------------------------------------------------------------------------------


@needs_fbgemm
@pytest.mark.parametrize("layout", ["merged", "split-threads"])
def test_fbgemm_rows_of_any_width_are_padded(layout: str) -> None:
    config = make_small("deepfm", "fbgemm")
    rows, (batch,) = first_batches(config, 1)
    trainer = peer.PeerTrainer(config, rows, layout=layout, threads=2)
    width = config.load_model().row_floats
    assert (width, trainer.tables.dim) == (17, 20)
    start = [trainer.tables.weights(table).clone() for table in range(len(rows))]
    ids = batch.values.reshape(len(rows), -1)
    looked_up = torch.cat([start[table][torch.from_numpy(ids[table]), :width] for table in range(len(rows))], 1)
    logits = trainer.model(torch.from_numpy(batch.dense), looked_up)
    loss = functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels)).item()
    assert trainer.step(batch, trainer.prepare(batch)) == pytest.approx(loss, rel=1e-6)
    for table, before in enumerate(start):
        after = trainer.tables.weights(table)
        assert torch.equal(after[:, width:], before[:, width:])
        changed = (after[:, :width] != before[:, :width]).any(1).nonzero().ravel()
        assert np.array_equal(changed.numpy(), np.unique(ids[table]))
    trainer.tables.close()


# -- what is compared ----------------------------------------------------------------------------------------


def use_figures(monkeypatch: pytest.MonkeyPatch, peers: dict[str, float], ours: float) -> list[tuple[str, TrainConfig]]:
    """Runs have these rates, a tenth less in every further pair of the peer's; returns who ran, in turn."""
    ran: list[tuple[str, TrainConfig]] = []

    def run_peer(config: TrainConfig, *, system: str, **rest: Any) -> dict[str, Any]:
        before = sum(name == system and was == config for name, was in ran)
        ran.append((system, config))
        facts = {"layout": "split", "waiting": "passive", "rows": 5, "peak_rss_bytes": 1}
        return {"samples_per_second": peers[system] * 0.9**before, "step_milliseconds": {"data": 1.0}, **facts}

    def run_ours(config: TrainConfig, **rest: Any) -> dict[str, Any]:
        ran.append(("regrow", config))
        return {"samples_per_second": ours, "rows": 5, "peak_rss_bytes": 1}

    monkeypatch.setattr(train, "run_peer", run_peer)
    monkeypatch.setattr(train, "run_ours", run_ours)
    monkeypatch.setattr(train, "choose_waiting", lambda comparison, **rest: "passive")
    return ran


def test_models_are_compared_with_both_peers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = use_figures(monkeypatch, {"torch": 100.0, "fbgemm": 200.0}, ours=120.0)
    monkeypatch.setattr(peer, "missing_reason", lambda: None)
    path = tmp_path / "models.json"
    assert models.run(quick=False, json_path=str(path)) == 0
    told = json.loads(path.read_text())["ratios"]
    assert {name: ratio["target"] for name, ratio in told.items()} == {
        "models_dcn_torch": 1.0,
        "models_dcn_fbgemm": 0.9,
        "models_deepfm_torch": 1.0,
        "models_deepfm_fbgemm": 0.9,
    }
    assert (told["models_dcn_torch"]["low"], told["models_dcn_torch"]["value"]) == (1.2, 1.3333)
    assert told["models_deepfm_fbgemm"]["value"] == 0.6667
    # In turns, and with the same configuration on both sides of a pair.
    assert [system for system, _ in ran[:6]] == ["torch", "regrow"] * 3
    assert all(theirs == ours for (_, theirs), (_, ours) in zip(ran[::2], ran[1::2], strict=True))
    found = {(config.model, config.optimizer, config.workers, config.servers, config.batch) for _, config in ran}
    assert found == {(m, o, 2, 5, 2048) for m in ("dcn", "deepfm") for o in ("adagrad", "rowwise_adagrad")}
    assert "missed: models_dcn_fbgemm is 0.6667" in capsys.readouterr().out


def test_models_without_fbgemm_are_compared_with_torch_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = use_figures(monkeypatch, {"torch": 100.0}, ours=120.0)
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: None)
    path = tmp_path / "models.json"
    assert models.run(quick=True, json_path=str(path)) == 0
    assert set(json.loads(path.read_text())["ratios"]) == {"models_dcn_torch", "models_deepfm_torch"}
    assert len(ran) == 4
    shown = capsys.readouterr().out
    assert "pip install --no-deps fbgemm-gpu-cpu" in shown
    assert "every target is met (2)" in shown


def test_one_worker_is_compared_with_fbgemm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = use_figures(monkeypatch, {"fbgemm": 100.0}, ours=81.0)
    monkeypatch.setattr(peer, "missing_reason", lambda: None)
    path = tmp_path / "worker.json"
    assert worker.run(quick=False, json_path=str(path)) == 0
    ratios = json.loads(path.read_text())["ratios"]
    assert list(ratios) == ["worker_kaggle"]
    assert (ratios["worker_kaggle"]["value"], ratios["worker_kaggle"]["pairs"]) == (1.0, 5)
    assert ratios["worker_kaggle"]["target"] == 0.95
    assert {(config.model, config.workers, config.servers, config.batch) for _, config in ran} == {
        ("kaggle", 1, 5, 2048)
    }


@pytest.mark.parametrize(("others", "chosen"), [(0.02, "default"), (None, "default"), (1.5, "passive")])
def test_waiting_is_the_faster_one_unless_others_were_busy(
    monkeypatch: pytest.MonkeyPatch, others: float | None, chosen: str
) -> None:
    rates = {"passive": 100.0, "default": 110.0}
    asked: list[int | None] = []

    def run_peer(config: TrainConfig, *, waiting: str, **rest: Any) -> dict[str, Any]:
        asked.append(config.rows_max)
        # Others were there during one of the two alone: that is enough.
        return {"samples_per_second": rates[waiting], "others_cores": others if waiting == "default" else 0.0}

    monkeypatch.setattr(train, "run_peer", run_peer)
    comparison = worker.make_comparison(worker.FULL)
    assert train.choose_waiting(comparison, size=worker.FULL, cores=2) == chosen
    assert asked == [train.TRIAL_ROWS_MAX] * 2
    # Nothing to choose from, nothing to try.
    assert train.choose_waiting(comparison, size=worker.QUICK, cores=2) == "passive"
    assert len(asked) == 2


def test_peers_are_modules_that_are_told_how_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, Any], str | None]] = []

    def run_module(module: str, settings: dict[str, Any], *, environment: Any, **rest: Any) -> dict[str, Any]:
        asked.append((module, settings, environment.get("OMP_WAIT_POLICY")))
        assert environment["PATH"] == os.environ["PATH"]
        return {}

    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")  # of whoever runs the benchmark: not of its peers
    monkeypatch.setattr(train.common, "run_module", run_module)
    for system, waiting in (("fbgemm", "passive"), ("torch", "default")):
        config = make_small("dcn", system)
        found = train.run_peer(
            config, system=system, size=SMALL, cores=2, layouts=("split",), rate=1000.0, waiting=waiting
        )
        assert found == {"waiting": waiting}
    modules, settings, policies = zip(*asked, strict=True)
    assert modules == (peer.__name__, peer_torch.__name__)
    assert [TrainConfig.from_dict(each["config"]).optimizer for each in settings] == ["rowwise_adagrad", "adagrad"]
    assert [each["threads"] for each in settings] == [2, 2]
    assert policies == ("PASSIVE", None)
