"""Goal: a CSV file is read as its schema says; any place in it can be gone on from; what is wrong is named.

Method: small files with chunks smaller still. What a line means is compared in `test_samples.py`; here the same lines
come through files, workers, epochs and positions.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regrow.data import lines as text_lines
from regrow.data.batch import Batch, batches_after
from regrow.data.csv_lines import LINE_BYTES_MAX, CsvDataset
from regrow.data.schema import Schema, load_schema
from regrow.errors import DataError, UserError

HEADER = "user,age,liked,unused,genres"
COUNT = 100


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that lines and batches span reads in these small files, as they do in large ones."""
    monkeypatch.setattr(text_lines, "_CHUNK_BYTES", 300)


@pytest.fixture
def schema(tmp_path: Path) -> Schema:
    path = tmp_path / "schema.toml"
    path.write_text(
        '[label]\ncolumn = "liked"\n[[dense]]\ncolumn = "age"\nmissing = -1\n'
        '[[categorical]]\ncolumn = "genres"\nid = "vocabulary"\nwords = ["War", "Drama"]\nmany = true\n'
        '[[categorical]]\ncolumn = "user"\nid = "int"\nrows = 200\n'
    )
    return load_schema(path)


def make_lines(count: int = COUNT) -> list[str]:
    """Line i is of user i, so that a batch tells where it comes from."""
    chance = random.Random(1)
    genres = ["", "War", "Drama|War", '"War|Film, noir"', "||Drama"]
    return [
        f'{i},{chance.choice(["", "7", "2.5"])},{i % 2},"a ""quoted"" text, {i}",{chance.choice(genres)}'
        for i in range(count)
    ]


def write(path: Path, lines: list[str], *, end: str = "\n", header: str = HEADER) -> Path:
    text = "".join(line + end for line in [header, *lines]).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def open_csv(path: Path, schema: Schema, **options: Any) -> CsvDataset:
    return CsvDataset(path, schema=schema, rows=schema.rows, **options)


def users(batch: Batch) -> list[int]:
    assert batch.lengths is not None
    first = int(batch.lengths[: len(batch)].sum())  # the ids of the other feature come first
    return batch.values[first:].tolist()


def assert_same(left: list[Batch], right: list[Batch]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.position == b.position
        assert np.array_equal(a.dense, b.dense)
        assert np.array_equal(a.values, b.values)
        assert np.array_equal(a.labels, b.labels)
        assert (a.lengths is None) == (b.lengths is None)
        assert a.lengths is None or np.array_equal(a.lengths, b.lengths)


def test_what_a_line_becomes(tmp_path: Path, schema: Schema) -> None:
    path = write(tmp_path / "a.csv", ["5,,1,x,Drama||War|Jazz", "6,2.5,0,,", "199,-1e1,1,,War"])
    (batch,) = open_csv(path, schema, train_rows=3).train_batches(batch=3, worker=0, workers=1)
    assert batch.lengths is not None
    assert (batch.labels.tolist(), batch.dense.tolist()) == ([1, 0, 1], [[-1.0], [2.5], [-10.0]])
    assert (batch.values.tolist(), batch.lengths.tolist()) == ([2, 1, 0, 1, 5, 6, 199], [3, 0, 1, 1, 1, 1])


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_splits_epochs_and_workers(tmp_path: Path, schema: Schema, name: str, end: str) -> None:
    path = write(tmp_path / name, make_lines(), end=end)
    dataset = open_csv(path, schema, epochs=2)
    assert (dataset.train_rows, dataset.train_rows_total(), dataset.lines_total()) == (86, 172, 100)
    assert (dataset.rows, dataset.dense_features) == ([3, 200], 1)
    whole = list(dataset.train_batches(batch=10, worker=0, workers=1))
    assert [user for batch in whole for user in users(batch)] == [*range(86), *range(86)]
    shared = [list(dataset.train_batches(batch=10, worker=worker, workers=3)) for worker in range(3)]
    for index, batch in enumerate(whole):
        assert users(shared[index % 3][index // 3]) == users(batch)
    tested = list(dataset.test_batches(batch=5))
    assert [user for batch in tested for user in users(batch)] == [*range(86, 100)]
    assert [len(batch) for batch in open_csv(path, schema, test_rows=7).test_batches(batch=5)] == [5, 2]


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_going_on_anywhere_is_exact(tmp_path: Path, schema: Schema, name: str) -> None:
    """From a stored position, and from nothing but the number of batches done."""
    dataset = open_csv(write(tmp_path / name, make_lines()), schema, train_rows=70, epochs=2)
    for worker in range(2):
        whole = list(dataset.train_batches(batch=8, worker=worker, workers=2))
        for done in range(1, len(whole) + 1):
            start = json.loads(json.dumps(whole[done - 1].position))
            rest = dataset.train_batches(batch=8, worker=worker, workers=2, start=start)
            assert_same(list(rest), whole[done:])
            rest, samples = batches_after(dataset, batch=8, worker=worker, workers=2, done=done)
            assert_same(list(rest), whole[done:])
            assert samples == sum(map(len, whole[:done]))


def test_the_last_line_may_lack_its_end(tmp_path: Path, schema: Schema) -> None:
    path = write(tmp_path / "a.csv", make_lines(5))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    dataset = open_csv(path, schema, train_rows=5)
    assert [user for batch in dataset.train_batches(batch=2, worker=0, workers=1) for user in users(batch)] == [
        *range(5)
    ]


def test_bad_lines_are_named(tmp_path: Path, schema: Schema) -> None:
    lines = make_lines(30)
    lines[17] = "17,old,1,,"
    path = write(tmp_path / "a.csv", lines)
    dataset = open_csv(path, schema, train_rows=30)
    with pytest.raises(DataError) as caught:
        list(dataset.train_batches(batch=10, worker=0, workers=1))
    # As an editor counts: the header is line 1.
    assert caught.value.message == f"{path}, line 19, column 'age': 'old' is not a number"
    assert caught.value.hint == "Mend the line, or leave such lines out and count them: skip_bad_lines."


def test_bad_lines_are_skipped_and_keep_their_place(tmp_path: Path, schema: Schema) -> None:
    lines = make_lines(60)
    bad = {3, 4, 25, *range(40, 50), 55}
    for index in bad:
        lines[index] = f'{index},1,1,"never closed,War'
    dataset = open_csv(write(tmp_path / "a.csv", lines), schema, train_rows=50, skip_bad_lines=True)
    batches = list(dataset.train_batches(batch=10, worker=0, workers=1))
    assert [users(batch) for batch in batches] == [
        [user for user in range(first, first + 10) if user not in bad] for first in range(0, 40, 10)
    ]
    assert [users(batch) for batch in dataset.test_batches(batch=10)] == [[50, 51, 52, 53, 54, 56, 57, 58, 59]]
    assert dataset.bad_lines == len(bad)
    assert dataset.bad_line_first is not None
    assert dataset.bad_line_first.endswith("line 5, column 'unused': a field in quotes does not end on its line")
    resumed = open_csv(tmp_path / "a.csv", schema, train_rows=50, skip_bad_lines=True)
    rest, samples = batches_after(resumed, batch=10, worker=0, workers=1, done=2)
    assert_same(list(rest), batches[2:])
    assert samples == sum(map(len, batches[:2]))


def test_headers(tmp_path: Path, schema: Schema) -> None:
    path = tmp_path / "a.csv"
    write(path, make_lines(5), header='\ufeff"user",age,"liked",unused,genres')
    assert open_csv(path, schema).lines_total() == 5
    for header, message in {
        "user,age,like,unused,genres": f"{schema.path}: there is no column 'liked' in the header of {path}",
        "user,user,liked,age,genres": f"the header of {path} has 2 columns 'user'",
        '"user,age,liked,unused,genres': f"{path}, line 1: this is no header of a CSV file: unexpected end of data",
    }.items():
        write(path, make_lines(5), header=header)
        with pytest.raises(UserError) as caught:
            open_csv(path, schema)
        assert caught.value.message == message
    write(path, make_lines(5), header="user,age,like,unused,genres")
    with pytest.raises(UserError) as caught:
        open_csv(path, schema)
    assert caught.value.hint == "did you mean 'like'?"


def test_wrong_files_are_named(tmp_path: Path, schema: Schema) -> None:
    def error(path: Path, text: bytes | None = None) -> str:
        if text is not None:
            path.write_bytes(text)
        with pytest.raises(DataError) as caught:
            list(open_csv(path, schema).train_batches(batch=1, worker=0, workers=1))
        return caught.value.message.replace(str(path), "FILE")

    header = HEADER.encode()
    assert error(tmp_path / "none.csv") == "FILE does not exist"
    assert error(tmp_path / "empty.csv", b"") == "FILE is empty"
    assert error(tmp_path / "short.csv", header) == "FILE holds no lines after its header"
    packed = gzip.compress(header + b"\n" + "\n".join(make_lines()).encode())
    assert error(tmp_path / "cut.csv.gz", packed[:-300]).startswith("FILE is cut off")
    long = header + b"\n" + b"x" * (LINE_BYTES_MAX + 2000)
    assert error(tmp_path / "long.csv", long) == f"FILE, line 2: the line is longer than {LINE_BYTES_MAX:,} bytes"


def test_a_schema_without_dense_columns_has_a_zero(tmp_path: Path) -> None:
    path = tmp_path / "schema.toml"
    path.write_text('[label]\ncolumn = "liked"\n[[categorical]]\ncolumn = "user"\nid = "hash"\nrows = 50\n')
    dataset = open_csv(write(tmp_path / "a.csv", make_lines(6)), load_schema(path), train_rows=6)
    (batch,) = dataset.train_batches(batch=6, worker=0, workers=1)
    assert dataset.dense_features == 1
    assert batch.dense.tolist() == [[0.0]] * 6
    assert batch.lengths is None  # one id in every bag
    assert len(batch.values) == 6
