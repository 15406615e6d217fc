"""Goal: `regrow bench read` compares the same work, and its figures have the right names.

No test here looks at speed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import csv

from regrow.bench import read, train
from regrow.cli.bench import BENCHES, read_summary


def test_all_read_the_same_samples(tmp_path: Path) -> None:
    read.write_files(tmp_path, lines=300)
    made = [
        list(read.open_file(tmp_path, kind, name, lines=300).train_batches(batch=128, worker=0, workers=1))
        for kind, name in ((read.CsvDataset, "clicks.csv"), (read.ParquetDataset, "clicks.parquet"))
    ]
    assert [len(batch) for batch in made[0]] == [128, 128, 44]
    for ours, theirs in zip(*made, strict=True):
        assert (ours.dense.shape[1], len(ours.values)) == (13, 26 * len(ours))
        assert np.array_equal(ours.values, theirs.values)
        assert np.array_equal(ours.dense, theirs.dense)
    numbers = read.open_file(tmp_path, read.CsvDataset, "numbers.csv", lines=300)
    (batch,) = numbers.train_batches(batch=300, worker=0, workers=1)
    table = csv.read_csv(tmp_path / "numbers.csv")
    assert np.array_equal(batch.dense[:, 5], table["n5"].to_numpy().astype(np.float32))
    assert np.array_equal(batch.values, table["id"].to_numpy())
    assert read.read_pyarrow(tmp_path / "numbers.csv") == read.read_all(numbers) == 300


def test_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def run_ours(config: Any, **options: Any) -> dict[str, Any]:
        asked.append({"workers": config.workers, "model": config.model, **options})
        return {"samples_per_second": 5.0}

    monkeypatch.setattr(train, "run_ours", run_ours)
    monkeypatch.setattr(read, "QUICK", replace(read.QUICK, lines=200))
    assert read.run(quick=True, json_path=str(tmp_path / "read.json")) == 0
    assert [(each["workers"], each["model"], each["rate"]) for each in asked] == [
        (1, "kaggle", read.RATE_GUESS),
        (1, "kaggle", 5.0),
    ]
    found = json.loads((tmp_path / "read.json").read_text())
    assert list(found["ratios"]) == ["read_csv_per_worker", "read_parquet_per_worker", "read_numbers_per_pyarrow"]
    assert [row["reader"] for row in found["rows"]] == ["csv", "parquet", "numbers", "numbers, pyarrow", "worker"]
    assert found["rows"][-1]["rows_per_second"] == [5.0, 5.0]


def test_it_is_offered() -> None:
    assert "read" in BENCHES
    assert read_summary("read") == read.SUMMARY
