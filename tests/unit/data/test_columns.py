"""Goal: Parquet and NumPy files give the samples that a CSV file of the same values gives, from any place on.

Method: the same rows are written in all formats, in one file and in several, with row groups smaller than a batch and
larger; every batch is compared with that of the CSV reader. What files cannot be is tried one by one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regrow.data.batch import Batch, Dataset, batches_after
from regrow.data.csv_lines import CsvDataset
from regrow.data.npz import NpzDataset
from regrow.data.parquet import ParquetDataset
from regrow.data.schema import Schema, load_schema
from regrow.errors import DataError, UserError

COUNT = 120
SCHEMA = """
[label]
column = "rating"
threshold = 4
[[dense]]
column = "age"
missing = -1
[[dense]]
column = "price"
transform = "log1p"
[[categorical]]
column = "city"
id = "hash"
rows = 1000
[[categorical]]
column = "user"
id = "int"
rows = 500
missing = 499
[[categorical]]
column = "genres"
id = "vocabulary"
words = ["War", "Drama", "Jazz"]
many = true
[[categorical]]
column = "tags"
id = "hash"
rows = 30
many = true
missing = 0
"""


@pytest.fixture
def schema(tmp_path: Path) -> Schema:
    path = tmp_path / "schema.toml"
    path.write_text(SCHEMA)
    return load_schema(path)


def make_rows(count: int = COUNT) -> dict[str, list[Any]]:
    chance = random.Random(2)

    def sometimes(value: Any) -> Any:
        return None if chance.random() < 0.2 else value

    return {
        "rating": [chance.choice([1.0, 3.5, 4.0, 5.0]) for _ in range(count)],
        "age": [sometimes(chance.uniform(-1e3, 1e3)) for _ in range(count)],
        "price": [sometimes(chance.randrange(-5, 10_000)) for _ in range(count)],
        "city": [sometimes(chance.choice(["Oslo", "São Paulo", "x" * 40, ""])) for _ in range(count)],
        "user": [sometimes(chance.randrange(499)) for _ in range(count)],
        "genres": [chance.sample(["War", "Drama", "Film"], chance.randrange(4)) for _ in range(count)],
        "tags": [[chance.randrange(100) for _ in range(chance.randrange(3))] for _ in range(count)],
    }


def text_of(value: Any) -> str:
    if isinstance(value, list):
        return "|".join(map(str, value))
    return "" if value is None else str(value)


def open_csv(folder: Path, schema: Schema, rows: dict[str, list[Any]], **options: Any) -> Dataset:
    path = folder / "rows.csv"
    lines = [",".join(rows), *(",".join(map(text_of, line)) for line in zip(*rows.values(), strict=True))]
    path.write_text("\n".join(lines) + "\n")
    return CsvDataset(path, schema=schema, rows=schema.rows, **options)


def open_parquet(folder: Path, schema: Schema, rows: dict[str, list[Any]], **options: Any) -> Dataset:
    path = folder / "rows.parquet"
    pq.write_table(pa.table(rows), path, row_group_size=7)
    return ParquetDataset(path, schema=schema, rows=schema.rows, **options)


def open_directory(folder: Path, schema: Schema, rows: dict[str, list[Any]], **options: Any) -> Dataset:
    """Files of different sizes and types: short and long texts, dictionaries, texts of numbers."""
    path = folder / "rows"
    (path / "part=2").mkdir(parents=True)
    table = pa.table(rows)
    strings = table.set_column(3, "city", table["city"].dictionary_encode())
    strings = strings.set_column(4, "user", table["user"].cast(pa.string()))
    pq.write_table(table.slice(0, 50), path / "a.parquet", row_group_size=64)
    pq.write_table(table.slice(50, 0), path / "b.parquet")
    pq.write_table(table.slice(50, 31).cast(widen(table.schema)), path / "c.parquet", row_group_size=10)
    pq.write_table(strings.slice(81), path / "part=2" / "a.parquet", row_group_size=11)
    (path / "_SUCCESS").touch()
    return ParquetDataset(path, schema=schema, rows=schema.rows, **options)


def widen(schema: pa.Schema) -> pa.Schema:
    wider = {"city": pa.large_string(), "genres": pa.large_list(pa.large_string()), "age": pa.float64()}
    return pa.schema([pa.field(field.name, wider.get(field.name, field.type)) for field in schema])


def open_npz(folder: Path, schema: Schema, rows: dict[str, list[Any]], **options: Any) -> Dataset:
    path = folder / "rows.npz"
    widest = max(map(len, rows["tags"]))
    arrays = {
        name: np.array([np.nan if value is None else value for value in rows[name]])
        for name in ("rating", "age", "price")
    }
    arrays["city"] = np.array([value or "" for value in rows["city"]])
    arrays["user"] = np.array([499 if value is None else value for value in rows["user"]], np.int16)
    arrays["genres"] = np.array(["|".join(value) for value in rows["genres"]], "S40")
    arrays["tags"] = np.array([value + [-1] * (widest - len(value)) for value in rows["tags"]])
    np.savez(path, **arrays)
    return NpzDataset(path, schema=schema, rows=schema.rows, **options)


OPENERS = [open_parquet, open_directory, open_npz]
Opener = Callable[..., Dataset]


def assert_same(left: list[Batch], right: list[Batch]) -> None:
    """But for the offsets in a file that only lines have."""
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.position == {name: value for name, value in b.position.items() if name != "offset"}
        assert np.array_equal(a.dense, b.dense)
        assert np.array_equal(a.values, b.values)
        assert np.array_equal(a.labels, b.labels)
        assert (a.lengths is None) == (b.lengths is None)
        assert a.lengths is None or np.array_equal(a.lengths, b.lengths)


@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("batch", [1, 8, 100])
def test_the_samples_of_a_csv_file(tmp_path: Path, schema: Schema, opener: Opener, batch: int) -> None:
    rows = make_rows()
    wanted = open_csv(tmp_path, schema, rows, epochs=2)
    dataset = opener(tmp_path, schema, rows, epochs=2)
    assert (dataset.train_rows, dataset.train_rows_total()) == (103, 206)
    assert (dataset.rows, dataset.dense_features) == (list(schema.rows), 2)
    for worker in range(2):
        made = list(dataset.train_batches(batch=batch, worker=worker, workers=2))
        assert_same(made, list(wanted.train_batches(batch=batch, worker=worker, workers=2)))
    assert_same(list(dataset.test_batches(batch=batch)), list(wanted.test_batches(batch=batch)))
    if batch > 1:
        assert any(made.lengths is not None for made in dataset.test_batches(batch=batch))


@pytest.mark.parametrize("opener", OPENERS)
def test_going_on_anywhere_is_exact(tmp_path: Path, schema: Schema, opener: Opener) -> None:
    dataset = opener(tmp_path, schema, make_rows(), train_rows=70, epochs=2)
    whole = list(dataset.train_batches(batch=8, worker=1, workers=2))
    for done in range(1, len(whole) + 1):
        again = dataset.train_batches(batch=8, worker=1, workers=2, start=whole[done - 1].position)
        assert_same(list(again), whole[done:])
        rest, samples = batches_after(dataset, batch=8, worker=1, workers=2, done=done)
        assert_same(list(rest), whole[done:])
        assert samples == sum(map(len, whole[:done]))


@pytest.mark.parametrize(
    ("opener", "file"), [(open_parquet, "rows.parquet"), (open_directory, "rows/a.parquet"), (open_npz, "rows.npz")]
)
def test_bad_rows(tmp_path: Path, schema: Schema, opener: Opener, file: str) -> None:
    """Named, or left out; then every other row is where it was."""
    rows = make_rows()
    rows["user"][37] = 500
    rows["rating"][90] = float("nan")
    rows["price"] = [value if value is None else float(value) for value in rows["price"]]
    rows["price"][60] = float("inf")
    for name in ("strict", "lenient"):
        (tmp_path / name).mkdir()
    strict = opener(tmp_path / "strict", schema, rows)
    with pytest.raises(DataError) as caught:
        list(strict.train_batches(batch=10, worker=0, workers=1))
    assert caught.value.message == f"{tmp_path}/strict/{file}, row 37, column 'user': 500 is not an id from 0 to 499"
    dataset = opener(tmp_path / "lenient", schema, rows, skip_bad_lines=True, train_rows=80)
    wanted = open_csv(tmp_path, schema, rows, skip_bad_lines=True, train_rows=80)
    made = list(dataset.train_batches(batch=10, worker=0, workers=1))
    assert_same(made, list(wanted.train_batches(batch=10, worker=0, workers=1)))
    assert dataset.bad_lines == 2  # type: ignore[attr-defined]
    assert sum(map(len, dataset.test_batches(batch=10))) == COUNT - 80 - 1


def test_rows_of_the_second_file_are_named_in_it(tmp_path: Path, schema: Schema) -> None:
    rows = make_rows()
    rows["user"][95] = -3
    with pytest.raises(DataError, match=r"rows/part=2/a.parquet, row 14, column 'user': -3 is not an id"):
        list(open_directory(tmp_path, schema, rows).train_batches(batch=10, worker=0, workers=1))


def test_more_types_of_columns(tmp_path: Path) -> None:
    """Booleans, decimals, times, and numbers of all widths, also those that need all 64 bits."""
    path = tmp_path / "schema.toml"
    path.write_text(
        '[label]\ncolumn = "y"\n[[dense]]\ncolumns = ["money", "time", "tall"]\n'
        '[[categorical]]\ncolumns = ["key", "flag"]\nid = "hash"\nrows = 1000\n'
    )
    schema = load_schema(path)
    large = (1 << 64) - 1
    table = pa.table(
        {
            "y": [True, False, True],
            "money": pa.array([1, None, 3], pa.decimal128(10, 2)),
            "time": pa.array([1000, 2000, None], pa.timestamp("ms")),
            "tall": pa.array([1, 2, 3], pa.float16()),
            "key": pa.array([5, large, None], pa.uint64()),
            "flag": [True, False, None],
        }
    )
    pq.write_table(table, tmp_path / "x.parquet")
    (tmp_path / "x.csv").write_text(f"y,money,time,tall,key,flag\n1,1.0,1000,1,5,1\n0,,2000,2,{large},0\n1,3,,3,,\n")
    made, wanted = (
        list(opened(file, schema=schema, rows=schema.rows, train_rows=3).train_batches(batch=3, worker=0, workers=1))
        for opened, file in ((ParquetDataset, tmp_path / "x.parquet"), (CsvDataset, tmp_path / "x.csv"))
    )
    assert_same(made, wanted)


def error_of(make: Callable[[], Any]) -> tuple[str, str | None]:
    with pytest.raises(UserError) as caught:
        make()
    return caught.value.message, caught.value.hint


def test_wrong_parquet_files_are_named(tmp_path: Path, schema: Schema) -> None:
    rows, path = make_rows(20), tmp_path / "x.parquet"

    def error(**changes: Any) -> tuple[str, str | None]:
        pq.write_table(pa.table({**rows, **changes}), path)
        message, hint = error_of(lambda: ParquetDataset(path, schema=schema, rows=schema.rows))
        return message.replace(str(path), "FILE"), hint

    assert error(rating=["4"] * 20) == ("FILE, column 'rating': string is no type of numbers", None)
    hint = "ids are whole numbers or texts; pandas makes Int64 of whole numbers with gaps"
    assert error(user=[1.0] * 20) == ("FILE, column 'user': double is no type of ids", hint)
    assert error(user=[[1]] * 20) == ("FILE, column 'user' has lists", "many = true in the schema")
    assert error(tags=[[1.5]] * 20) == ("FILE, column 'tags': double is no type of ids", hint)
    pq.write_table(pa.table(rows).rename_columns(["stars", *list(rows)[1:]]), path)
    message, _ = error_of(lambda: ParquetDataset(path, schema=schema, rows=schema.rows))
    assert message == f"{schema.path}: there is no column 'rating' in {path}"
    pq.write_table(pa.table(rows).slice(0, 0), path)
    assert error_of(lambda: ParquetDataset(path, schema=schema, rows=schema.rows))[0] == f"{path} holds no rows"
    path.write_bytes(b"PAR1 something else")
    message, hint = error_of(lambda: ParquetDataset(path, schema=schema, rows=schema.rows))
    assert message.startswith(f"{path} cannot be read: ")
    assert hint == "is it a Parquet file?"
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    pq.write_table(pa.table(rows), mixed / "a.parquet")
    pq.write_table(pa.table({**rows, "tags": ["a|b"] * 20}), mixed / "b.parquet")
    message, _ = error_of(lambda: ParquetDataset(mixed, schema=schema, rows=schema.rows))
    assert message == f"{mixed}/b.parquet, column 'tags': lists in some files, and none in others"
    (tmp_path / "none").mkdir()
    message, _ = error_of(lambda: ParquetDataset(tmp_path / "none", schema=schema, rows=schema.rows))
    assert message == f"{tmp_path / 'none'} holds no files that are named *.parquet"
    message, _ = error_of(lambda: open_parquet(tmp_path, schema, rows, train_rows=21))
    assert message == f"{tmp_path / 'rows.parquet'} has only 20 rows, but train_rows is 21"


def test_parquet_without_pyarrow(tmp_path: Path, schema: Schema, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert error_of(lambda: ParquetDataset(tmp_path / "x.parquet", schema=schema, rows=schema.rows)) == (
        "Parquet files need pyarrow, which is not installed",
        'pip install "regrow[parquet]"',
    )


def test_wrong_npz_files_are_named(tmp_path: Path, schema: Schema) -> None:
    rows, path = make_rows(20), tmp_path / "rows.npz"
    open_npz(tmp_path, schema, rows)
    good = dict(np.load(path))

    def error(**changes: Any) -> tuple[str, str | None]:
        np.savez(path, **(good | changes))
        message, hint = error_of(lambda: NpzDataset(path, schema=schema, rows=schema.rows))
        return message.replace(str(path), "FILE"), hint

    assert error(rating=np.array(["4"] * 20)) == ("FILE, array 'rating': <U1 is no type of numbers", None)
    assert error(user=np.zeros(20)) == ("FILE, array 'user': float64 is no type of ids", None)
    assert error(user=np.zeros(19, int)) == ("FILE, array 'user' has 19 rows, but the labels have 20", None)
    hint = "many = true in the schema, for bags of whole numbers"
    assert error(user=np.zeros((20, 2), int)) == ("FILE, array 'user' has 2 dimensions", hint)
    assert error(user=np.array([None] * 20)) == ("FILE, array 'user': object is no type of ids", None)
    assert error(rating=np.zeros(0), user=np.zeros(0, int))[0] == "FILE, array 'age' has 20 rows, but the labels have 0"
    np.savez(path, **{name: array for name, array in good.items() if name != "rating"})
    message, _ = error_of(lambda: NpzDataset(path, schema=schema, rows=schema.rows))
    assert message == f"{schema.path}: there is no column 'rating' in {path}"
    for text in (b"not an archive", b""):
        path.write_bytes(text)
        message, hint = error_of(lambda: NpzDataset(path, schema=schema, rows=schema.rows))
        assert message.startswith(f"{path} cannot be read: ")
        assert hint == "numpy.savez makes such files"
    path.unlink()
    assert error_of(lambda: NpzDataset(path, schema=schema, rows=schema.rows))[0] == f"{path} does not exist"
