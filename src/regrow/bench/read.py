"""How fast is data of one's own read? CSV and Parquet of the kaggle shape, with hashed texts, against the samples that
one worker trains in the same time; and a file of numbers alone against pyarrow's CSV reader with one thread.

All read the same file from the system's cache, whole, one after the other in rounds; a figure is the ratio of two of
one round. Ours ends with batches as a trainer takes them, pyarrow's with columns of doubles, which it reads fastest.

The sketch: a line of the kaggle shape has about 290 bytes, 13 numbers and 26 texts. At 1 ns a byte to find the fields,
and 20 ns to hash and divide for each text, that is a microsecond: a million samples per second. One worker trains some
20,000.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regrow.bench import common, train
from regrow.config import TrainConfig
from regrow.data.batch import Dataset
from regrow.data.csv_lines import CsvDataset
from regrow.data.parquet import ParquetDataset, load_pyarrow
from regrow.data.schema import load_schema

SUMMARY = "Reading CSV and Parquet with a schema: rows per second, against one worker and pyarrow's reader."

MODEL = "kaggle"
DENSE, CATEGORIES = 13, 26
NUMBERS = DENSE + CATEGORIES  # in the file of numbers alone: as many columns
TABLE_ROWS = 1_000_000
TARGET_WORKER = 4.0
TARGET_PYARROW = 0.7
RATE_GUESS = 8_000.0  # samples per second of a worker, before anything is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    rounds: int
    lines: int
    runs: train.Size


FULL = Size(
    rounds=7,
    lines=400_000,
    runs=train.Size(pairs=1, rows_max={MODEL: 500_000}, seconds=4.0, warmup_seconds=1.5, layouts=()),
)
QUICK = Size(
    rounds=2,
    lines=40_000,
    runs=train.Size(pairs=1, rows_max={MODEL: 100_000}, seconds=2.0, warmup_seconds=0.5, layouts=()),
)


def run(*, quick: bool, json_path: str | None) -> int:
    size = QUICK if quick else FULL
    load_pyarrow()  # before anything is made: without it there is nothing to compare with
    report = common.Report.start("read")
    with tempfile.TemporaryDirectory(prefix="regrow-bench-") as directory:
        folder = Path(directory)
        write_files(folder, lines=size.lines)
        rates = measure(folder, size)
    for name, found in rates.items():
        report.rows.append({"kind": "rate", "reader": name, "rows_per_second": found})
    for name in ("csv", "parquet"):
        ratios = common.pair_ratios(rates[name], rates["worker"])
        report.ratios[f"read_{name}_per_worker"] = common.Ratio.of(ratios, target=TARGET_WORKER)
    ratios = common.pair_ratios(rates["numbers"], rates["numbers, pyarrow"])
    report.ratios["read_numbers_per_pyarrow"] = common.Ratio.of(ratios, target=TARGET_PYARROW)
    common.print_table(
        f"{size.lines:,} rows, median of {size.rounds} rounds",
        ("reader", "rows/s", "spread"),
        [
            (name, f"{statistics.median(found):,.0f}", f"{min(found):,.0f} to {max(found):,.0f}")
            for name, found in rates.items()
        ],
    )
    return report.finish(json_path)


# -- files ---------------------------------------------------------------------------------------------------


def write_files(folder: Path, *, lines: int) -> None:
    """clicks.csv and clicks.parquet hold the same samples, numbers.csv others; with a schema for each."""
    arrow, _, parquet = load_pyarrow()
    import pyarrow.csv

    rng = np.random.default_rng(train.SEED)
    clicks: dict[str, Any] = {"label": rng.integers(0, 2, lines)}
    for index in range(DENSE):
        clicks[f"d{index}"] = (rng.pareto(0.5, lines) * 3).clip(0, 1e6).astype(np.int64)
    for index in range(CATEGORIES):
        ids = (rng.pareto(0.6, lines) * 20).clip(0, 1e9).astype(np.int64)
        clicks[f"c{index}"] = [f"{(number * 2654435761 + index) & 0xFFFFFFFF:08x}" for number in ids]
    table = arrow.table(clicks)
    pyarrow.csv.write_csv(table, folder / "clicks.csv", pyarrow.csv.WriteOptions(quoting_style="none"))
    parquet.write_table(table, folder / "clicks.parquet", row_group_size=50_000)
    numbers: dict[str, Any] = {"label": clicks["label"], "id": rng.integers(0, TABLE_ROWS, lines)}
    for index in range(NUMBERS - 1):
        numbers[f"n{index}"] = np.round(rng.normal(0, 100, lines), 4)
    pyarrow.csv.write_csv(arrow.table(numbers), folder / "numbers.csv")
    names = [f"d{index}" for index in range(DENSE)], [f"c{index}" for index in range(CATEGORIES)]
    write_schema(folder / "clicks.toml", dense=names[0], categorical=names[1], kind="hash")
    columns = [f"n{index}" for index in range(NUMBERS - 1)]
    write_schema(folder / "numbers.toml", dense=columns, categorical=["id"], kind="int")


def write_schema(path: Path, *, dense: list[str], categorical: list[str], kind: str) -> None:
    path.write_text(
        f'[label]\ncolumn = "label"\n[[dense]]\ncolumns = {dense}\n'
        f'[[categorical]]\ncolumns = {categorical}\nid = "{kind}"\nrows = {TABLE_ROWS}\n'
    )


# -- readers -------------------------------------------------------------------------------------------------


def measure(folder: Path, size: Size) -> dict[str, list[float]]:
    """Rows per second of each reader, and samples per second of a worker, in each round."""
    config = make_config(size)
    rate = RATE_GUESS

    def worker(_: int) -> float:
        nonlocal rate
        rate = float(train.run_ours(config, size=size.runs, rate=rate)["samples_per_second"])
        return rate

    readers = {
        "csv": lambda: read_all(open_file(folder, CsvDataset, "clicks.csv", lines=size.lines)),
        "parquet": lambda: read_all(open_file(folder, ParquetDataset, "clicks.parquet", lines=size.lines)),
        "numbers": lambda: read_all(open_file(folder, CsvDataset, "numbers.csv", lines=size.lines)),
        "numbers, pyarrow": lambda: read_pyarrow(folder / "numbers.csv"),
    }
    for name, read in readers.items():
        found = read()  # once before, so that nobody pays for the first look at a file
        assert found == size.lines, f"{name} read {found} rows"
    timed: dict[str, Callable[[int], float]] = {
        name: lambda _, read=read: size.lines / common.seconds_of(read)  # type: ignore[misc]
        for name, read in readers.items()
    }
    return common.interleave({**timed, "worker": worker}, repetitions=size.rounds)


def open_file(folder: Path, kind: Any, name: str, *, lines: int) -> Dataset:
    schema = load_schema(folder / f"{name.partition('.')[0]}.toml")
    dataset: Dataset = kind(folder / name, schema=schema, rows=schema.rows, train_rows=lines)
    return dataset


def read_all(dataset: Dataset) -> int:
    batch = min(train.BATCH, dataset.train_rows)
    return sum(len(each) for each in dataset.train_batches(batch=batch, worker=0, workers=1))


def read_pyarrow(path: Path) -> int:
    """With the types said beforehand, so that it need not guess them."""
    arrow, _, _ = load_pyarrow()
    from pyarrow import csv

    types = {f"n{index}": arrow.float64() for index in range(NUMBERS - 1)}
    types |= {"label": arrow.int64(), "id": arrow.int64()}
    options = csv.ConvertOptions(column_types=types)
    return int(csv.read_csv(path, csv.ReadOptions(use_threads=False), convert_options=options).num_rows)


def make_config(size: Size) -> TrainConfig:
    """One worker alone: what it needs when nobody shares its processors but the servers."""
    return TrainConfig(
        model=MODEL,
        rows_max=size.runs.rows_max[MODEL],
        batch=train.BATCH,
        servers=2,
        workers=1,
        mode="async",
        seed=train.SEED,
        steps=1,
        test_rows=train.BATCH,
        digest=False,
    )
