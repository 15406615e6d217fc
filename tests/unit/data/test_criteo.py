"""Criteo's format: the parser against a slow twin, whole and cut anywhere; files, splits, workers, positions.

Lines are made here. Where real data is at hand (REGROW_CRITEO names a directory) the same is tried on it.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest

from regrow._kernels import parse_criteo, skip_lines
from regrow.data import lines as text_lines
from regrow.data.bad_lines import BAD_LINES_RUN_MAX
from regrow.data.batch import Batch
from regrow.data.criteo import LINE_BYTES_MAX, CriteoDataset
from regrow.errors import DataError, UserError

ROWS = [1, 2, 3, 1000, *range(10, 32)]
MASK = (1 << 64) - 1


def id_twin(category: str, rows: int) -> int:
    if not category or rows == 1:
        return 0
    value = int(category, 16)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        value ^= value >> 33
        value = value * factor & MASK
    value ^= value >> 33
    return 1 + value % (rows - 1)


def parse_twin(line: str) -> tuple[float, list[float], list[int]] | None:
    """(label, dense, ids), or None for a bad line."""
    fields = line.removesuffix("\n").removesuffix("\r").split("\t")
    if not 15 <= len(fields) <= 40:
        return None
    fields += [""] * (40 - len(fields))
    label, integers, categories = fields[0], fields[1:14], fields[14:]
    if label not in ("0", "1"):
        return None
    for text in integers:
        digits = text.removeprefix("-")
        if text and (not digits.isascii() or not digits.isdigit() or int(digits) >= 1 << 63):
            return None
    if any(len(text) > 16 or set(text) - set("0123456789abcdefABCDEF") for text in categories):
        return None
    dense = [math.log1p(max(int(text), 0)) if text else 0.0 for text in integers]
    return float(label), dense, [id_twin(text, rows) for text, rows in zip(categories, ROWS, strict=True)]


def make_line(chance: random.Random) -> str:
    fields = [chance.choice("01")]
    fields += [chance.choice(["", str(chance.randrange(-3, 5000)), "0"]) for _ in range(13)]
    fields += [chance.choice(["", f"{chance.getrandbits(32):08x}"]) for _ in range(26)]
    fields[14] = "68fd1e64"
    line = "\t".join(fields)
    return line.rstrip("\t") if chance.random() < 0.3 else line


def make_lines(count: int, *, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return [make_line(chance) for _ in range(count)]


GOOD = make_lines(1)[0]


def write(path: Path, lines: list[str], *, end: str = "\n") -> Path:
    text = "".join(line + end for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def kernel(text: bytes, *, lines_max: int = 100, final: bool = True, skip_bad: bool = True) -> tuple:
    """(lines, bytes, error, samples as the twin gives them)."""
    dense, ids = np.full((lines_max, 13), -1, np.float32), np.full((26, lines_max), -1, np.int64)
    labels = np.full(lines_max, -1, np.float32)
    lines, samples, size, error = parse_criteo(
        np.frombuffer(text, np.uint8),
        lines_max=lines_max,
        final=final,
        skip_bad=skip_bad,
        rows=np.array(ROWS),
        dense=dense,
        ids=ids,
        labels=labels,
    )
    made = [(float(labels[i]), dense[i].tolist(), ids[:, i].tolist()) for i in range(samples)]
    return lines, size, error, made


def assert_samples(made: list, lines: list[str]) -> None:
    wanted = [sample for sample in map(parse_twin, lines) if sample is not None]
    assert [(label, ids) for label, _, ids in made] == [(label, ids) for label, _, ids in wanted]
    np.testing.assert_allclose([d for _, d, _ in made], [d for _, d, _ in wanted], rtol=1e-6)


def join(batches: list[Batch]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.concatenate([batch.values.reshape(26, -1) for batch in batches], axis=1)
    return np.concatenate([b.dense for b in batches]), ids, np.concatenate([b.labels for b in batches])


def assert_same(left: list[Batch], right: list[Batch]) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.position == b.position
        assert np.array_equal(a.dense, b.dense)
        assert np.array_equal(a.values, b.values)
        assert np.array_equal(a.labels, b.labels)


# --- the parser ---


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_parser_equals_its_twin(end: str) -> None:
    lines = make_lines(60)
    text = "".join(line + end for line in lines).encode()
    taken, size, error, made = kernel(text)
    assert (taken, size, error) == (60, len(text), None)
    assert_samples(made, lines)


def test_last_line_without_newline_needs_the_end() -> None:
    lines = make_lines(3)
    text = "\n".join(lines).encode()
    assert kernel(text, final=False)[:2] == (2, text.rindex(b"\n") + 1)
    taken, size, _, made = kernel(text, final=True)
    assert (taken, size) == (3, len(text))
    assert_samples(made, lines)


def test_text_cut_anywhere_gives_the_same() -> None:
    """Whatever part of a file is at hand, whole lines are taken and the rest is left."""
    text = "".join(line + "\r\n" for line in make_lines(4)).encode()
    whole = kernel(text)[3]
    for cut in range(len(text) + 1):
        lines, size, error, made = kernel(text[:cut], final=False)
        assert error is None
        assert size == text.rfind(b"\n", 0, cut) + 1
        rest = kernel(text[size:])
        assert lines + rest[0] == 4
        assert made + rest[3] == whole


def test_trailing_fields_may_be_missing_down_to_the_first_category() -> None:
    full = GOOD.rstrip("\t").split("\t")
    for count in range(1, 43):
        line = "\t".join((full + [""] * 40)[:count]) if count <= 40 else "\t".join(full + ["x"] * (count - len(full)))
        taken, _, error, made = kernel(line.encode())
        assert taken == 1
        assert (error is None) == (15 <= count <= 40)
        assert_samples(made, [line])


def replace_field(field: int, value: str) -> str:
    fields = (GOOD.split("\t") + [""] * 40)[:40]
    fields[field - 1] = value
    return "\t".join(fields)


BAD = [
    (replace_field(1, ""), 1, "'' is not 0 or 1"),
    (replace_field(1, "2"), 1, "'2' is not 0 or 1"),
    (replace_field(1, "01"), 1, "'01' is not 0 or 1"),
    (replace_field(2, "x"), 2, "'x' is not an integer"),
    (replace_field(3, "1.5"), 3, "'1.5' is not an integer"),
    (replace_field(4, "-"), 4, "'-' is not an integer"),
    (replace_field(5, "+1"), 5, "'+1' is not an integer"),
    (replace_field(6, " 1"), 6, "' 1' is not an integer"),
    (replace_field(14, "9" * 19), 14, "'9999999999999999999' does not fit 64 bits"),
    (replace_field(15, "xyz"), 15, "'xyz' is not a hexadecimal number"),
    (replace_field(16, "-1"), 16, "'-1' is not a hexadecimal number"),
    (replace_field(17, "0" * 17), 17, "'00000000000000000' has more than 16 hexadecimal digits"),
    (replace_field(40, "é"), 40, "'\\xc3\\xa9' is not a hexadecimal number"),
    (replace_field(40, "g" * 5000), 40, "'gggggggggggggggggggggggg...' has more than 16 hexadecimal digits"),
    (replace_field(40, "1\t"), 41, "the line has 41 fields instead of 40"),
    (replace_field(40, "1\t2\t3"), 41, "the line has 42 fields instead of 40"),
    ("", 0, "the line is empty"),
    (
        "1\t2",
        0,
        "the line has 2 fields; a whole one has 40, and one without its empty last fields at least 15",
    ),
    ("\0", 1, "'\\x00' is not 0 or 1"),
]


@pytest.mark.parametrize(("line", "field", "reason"), BAD)
def test_bad_line_is_named(line: str, field: int, reason: str) -> None:
    before, after = make_lines(2), make_lines(2, seed=9)
    text = "".join(each + "\n" for each in [*before, line, *after]).encode()
    taken, size, error, made = kernel(text, skip_bad=False)
    assert (taken, error) == (2, (2, field, reason))
    assert size == len("\n".join(before)) + 1
    assert_samples(made, before)
    taken, size, error, made = kernel(text, skip_bad=True)
    assert (taken, size, error) == (5, len(text), (2, field, reason))
    assert_samples(made, [*before, line, *after])


def test_extreme_values() -> None:
    top = str((1 << 63) - 1)
    lines = [
        replace_field(2, top),
        replace_field(2, "-" + top),
        replace_field(15, "F" * 16),
        replace_field(15, "0"),
        replace_field(15, ""),
    ]
    _, _, error, made = kernel("\n".join(lines).encode())
    assert error is None
    assert_samples(made, lines)
    # Zero is a category like any other; only a missing one has row 0 of a table of two rows or more.
    line = "\t".join(["0", *[""] * 13, *["0"] * 26])
    assert kernel(line.encode())[3][0][2] == [0] + [id_twin("0", rows) for rows in ROWS[1:]]
    assert min(id_twin("0", rows) for rows in ROWS[1:]) >= 1


def test_random_bytes_never_break_the_parser() -> None:
    """Mutated lines are accepted or refused exactly as by the twin."""
    chance = random.Random(4)
    alphabet = "\t\t\t\r01ag-. \0é"
    for _ in range(3000):
        line = list(make_line(chance))
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(line))
            line[at : at + chance.randrange(2)] = chance.choice(alphabet)
        text = "".join(line)
        _, _, error, made = kernel(text.encode())
        assert (error is None) == (parse_twin(text) is not None), text
        assert_samples(made, [text])


def test_parser_stops_when_full() -> None:
    text = "".join(line + "\n" for line in make_lines(5)).encode()
    assert kernel(text, lines_max=3)[0] == 3
    assert kernel(b"")[:3] == (0, 0, None)
    assert skip_lines(np.frombuffer(text, np.uint8), lines_max=3, final=True)[0] == 3
    assert skip_lines(np.frombuffer(b"a\nb", np.uint8), lines_max=9, final=False) == (1, 2)
    assert skip_lines(np.frombuffer(b"a\nb", np.uint8), lines_max=9, final=True) == (2, 3)


def test_parser_checks_its_arrays() -> None:
    text = np.frombuffer(GOOD.encode(), np.uint8)

    def call(**changes: np.ndarray) -> None:
        arrays = {
            "rows": np.array(ROWS),
            "dense": np.zeros((1, 13), np.float32),
            "ids": np.zeros((26, 1), np.int64),
            "labels": np.zeros(1, np.float32),
        }
        parse_criteo(text, lines_max=1, final=True, skip_bad=False, **(arrays | changes))

    call()
    with pytest.raises(ValueError, match="26 sizes"):
        call(rows=np.array([1]))
    with pytest.raises(ValueError, match="at least 1"):
        call(rows=np.array([0] * 26))
    with pytest.raises(ValueError, match="dense must be"):
        call(dense=np.zeros((2, 13), np.float32))
    with pytest.raises(ValueError, match="ids must be"):
        call(ids=np.zeros((25, 1), np.int64))
    with pytest.raises(ValueError, match="float32"):
        call(labels=np.zeros(1, np.float64))


# --- files, splits, workers, positions ---


@pytest.fixture(params=["plain.tsv", "packed.tsv.gz"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path / request.param, make_lines(100))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that lines and batches span reads in these small files, as they do in large ones."""
    monkeypatch.setattr(text_lines, "_CHUNK_BYTES", 1000)


def test_split_and_order(path: Path) -> None:
    lines = make_lines(100)
    dataset = CriteoDataset(path, rows=ROWS, train_rows=70)
    train = list(dataset.train_batches(batch=16, worker=0, workers=1))
    test = list(dataset.test_batches(batch=16))
    assert [len(batch) for batch in train] == [16, 16, 16, 16, 6]
    assert [len(batch) for batch in test] == [16, 14]
    assert dataset.train_rows_total() == 70
    dense, ids, labels = join(train + test)
    made = [(float(labels[i]), dense[i].tolist(), ids[:, i].tolist()) for i in range(100)]
    assert_samples(made, lines)
    assert (train[0].dense.dtype, train[0].values.dtype, train[0].labels.dtype) == (
        np.float32,
        np.int64,
        np.float32,
    )
    assert train[0].values.shape == (26 * 16,)
    assert train[0].lengths is None


def test_last_seventh_is_held_out(path: Path) -> None:
    dataset = CriteoDataset(path, rows=ROWS)
    assert dataset.lines_total() == 100
    assert dataset.train_rows_total() == 86
    assert sum(len(batch) for batch in dataset.test_batches(batch=9)) == 14
    limited = CriteoDataset(path, rows=ROWS, train_rows=50, test_rows=20)
    assert [len(batch) for batch in limited.test_batches(batch=12)] == [12, 8]


@pytest.mark.parametrize("workers", [2, 3, 7])
def test_workers_share_the_global_batches(path: Path, workers: int) -> None:
    def batches(worker: int, workers: int) -> list[Batch]:
        dataset = CriteoDataset(path, rows=ROWS, train_rows=70, epochs=2)
        return list(dataset.train_batches(batch=16, worker=worker, workers=workers))

    alone = batches(0, 1)
    shared = [batches(worker, workers) for worker in range(workers)]
    assert sum(map(len, shared)) == len(alone) == 10
    for index, batch in enumerate(alone):
        other = shared[index % workers][index // workers]
        assert np.array_equal(batch.values, other.values)
        assert np.array_equal(batch.dense, other.dense)


@pytest.mark.parametrize(("worker", "workers"), [(0, 1), (1, 2), (0, 3), (2, 6)])
def test_every_position_resumes_exactly(path: Path, worker: int, workers: int) -> None:
    """Also across epochs, and when an epoch has fewer batches than there are workers."""

    def batches(start: dict | None = None) -> list[Batch]:
        dataset = CriteoDataset(path, rows=ROWS, train_rows=70, epochs=3)
        return list(dataset.train_batches(batch=16, worker=worker, workers=workers, start=start))

    whole = batches()
    for index, batch in enumerate(whole):
        assert_same(batches(json.loads(json.dumps(batch.position))), whole[index + 1 :])


def test_position_names_a_byte_of_the_text(tmp_path: Path) -> None:
    lines = make_lines(20)
    dataset = CriteoDataset(write(tmp_path / "a.tsv", lines, end="\r\n"), rows=ROWS, train_rows=20)
    position = next(dataset.train_batches(batch=3, worker=0, workers=2)).position
    assert position == {"epoch": 0, "batch": 2, "line": 6, "offset": sum(len(line) + 2 for line in lines[:6])}


def test_position_of_another_run_is_refused(path: Path) -> None:
    dataset = CriteoDataset(path, rows=ROWS, train_rows=70)
    position = next(dataset.train_batches(batch=16, worker=0, workers=2)).position
    for changes, message in [
        ({"offset": position["offset"] + 1}, "no line starts at byte"),
        ({"offset": 10**9}, "no line starts at byte"),
        ({"offset": None}, "lacks the byte offset"),
        ({"line": 31}, "another batch size"),
    ]:
        with pytest.raises(UserError, match=message):
            list(dataset.train_batches(batch=16, worker=0, workers=2, start=position | changes))


def test_bad_line_stops_with_file_line_and_field(tmp_path: Path) -> None:
    lines = make_lines(30)
    lines[16] = replace_field(5, "abc")
    bad = write(tmp_path / "bad.tsv", lines)
    dataset = CriteoDataset(bad, rows=ROWS, train_rows=30)
    batches = dataset.train_batches(batch=10, worker=0, workers=1)
    assert len(next(batches)) == 10
    with pytest.raises(DataError) as caught:
        next(batches)
    assert caught.value.message == f"{bad}, line 17, field 5 (integer 4): 'abc' is not an integer"
    # Lines of another worker are not looked at; that worker finds them.
    assert [len(b) for b in dataset.train_batches(batch=10, worker=0, workers=2)] == [10, 10]
    for line, message in [
        (replace_field(1, "7"), "line 17, field 1 (label): '7'"),
        (replace_field(20, "?"), "line 17, field 20 (category 6): '?'"),
        (replace_field(40, "a\tb"), "line 17, field 41: the line has 41"),
        ("", "line 17: the line is empty"),
    ]:
        lines[16] = line
        dataset = CriteoDataset(write(bad, lines), rows=ROWS, train_rows=30)
        with pytest.raises(DataError) as caught:
            list(dataset.train_batches(batch=10, worker=0, workers=1))
        assert message in str(caught.value)


def test_skipped_lines_keep_their_place(tmp_path: Path) -> None:
    """Split, batches and positions are the same with and without bad lines; batches are just shorter."""
    good = make_lines(60)
    bad = list(good)
    for index in (0, 7, 8, 9, 39, 40, 59):
        bad[index] = "rubbish"
    clean = CriteoDataset(write(tmp_path / "good.tsv", good), rows=ROWS, train_rows=40)
    dirty = CriteoDataset(write(tmp_path / "bad.tsv", bad), rows=ROWS, train_rows=40, skip_bad_lines=True)
    train = list(dirty.train_batches(batch=8, worker=0, workers=1))
    assert [len(batch) for batch in train] == [6, 6, 8, 8, 7]
    assert dirty.bad_lines == 5
    assert dirty.bad_line_first == f"{tmp_path}/bad.tsv, line 1, field 1 (label): 'rubbish' is not 0 or 1"
    test = list(dirty.test_batches(batch=100))
    assert [len(batch) for batch in test] == [18]
    for got, wanted in zip(train, clean.train_batches(batch=8, worker=0, workers=1), strict=True):
        assert {k: got.position[k] for k in ("epoch", "batch", "line")} == {
            k: wanted.position[k] for k in ("epoch", "batch", "line")
        }
    kept = [index for index in range(60) if bad[index] == good[index]]
    all_good = join([*clean.train_batches(batch=40, worker=0, workers=1), *clean.test_batches(batch=20)])
    dense, ids, labels = join(train + test)
    assert np.array_equal(dense, all_good[0][kept])
    assert np.array_equal(ids, all_good[1][:, kept])
    assert np.array_equal(labels, all_good[2][kept])
    # And a position past a bad line still resumes exactly.
    again = CriteoDataset(tmp_path / "bad.tsv", rows=ROWS, train_rows=40, skip_bad_lines=True)
    assert_same(list(again.train_batches(batch=8, worker=0, workers=1, start=train[1].position)), train[2:])


def test_batch_of_bad_lines_alone_is_left_out(tmp_path: Path) -> None:
    lines = make_lines(30)
    lines[10:20] = ["rubbish"] * 10
    dataset = CriteoDataset(write(tmp_path / "a.tsv", lines), rows=ROWS, train_rows=30, skip_bad_lines=True)
    made = list(dataset.train_batches(batch=10, worker=0, workers=1))
    assert [(len(batch), batch.position["batch"]) for batch in made] == [(10, 1), (10, 3)]


def test_another_format_is_refused_even_when_skipping(tmp_path: Path) -> None:
    wrong = write(tmp_path / "a.csv", ["1,2,3"] * (BAD_LINES_RUN_MAX + 5000))
    dataset = CriteoDataset(wrong, rows=ROWS, skip_bad_lines=True)
    with pytest.raises(DataError, match=r"in a row are malformed; the first: .*line 1, field 1"):
        list(dataset.train_batches(batch=1000, worker=0, workers=1))


def test_wrong_files_are_named(tmp_path: Path) -> None:
    def error(path: Path, text: bytes | None = None) -> str:
        if text is not None:
            path.write_bytes(text)
        with pytest.raises(DataError) as caught:
            dataset = CriteoDataset(path, rows=ROWS)
            list(dataset.train_batches(batch=1, worker=0, workers=1))
        assert str(path) in caught.value.message
        return caught.value.message.replace(str(path), "FILE")

    packed = gzip.compress("".join(line + "\n" for line in make_lines(200)).encode())
    assert error(tmp_path / "none.tsv") == "FILE does not exist"
    assert error(tmp_path) == "FILE cannot be opened: Is a directory"
    assert error(tmp_path / "empty.tsv", b"") == "FILE is empty"
    assert error(tmp_path / "empty.tsv.gz", gzip.compress(b"")) == "FILE holds no lines"
    assert error(tmp_path / "plain.gz", GOOD.encode()) == "FILE is named .gz, but is not gzip-compressed"
    assert error(tmp_path / "cut.gz", packed[:-2000]).startswith("FILE is cut off: its gzip stream ends too early")
    assert error(tmp_path / "cut_at_the_end.gz", packed[:-3]).startswith("FILE is cut off")
    assert error(tmp_path / "flipped.gz", packed[:3000] + b"\xff" * 50 + packed[3050:]).startswith("FILE is damaged")
    assert error(tmp_path / "trailing.gz", packed + b"junk").startswith("FILE is damaged")
    assert error(tmp_path / "long.tsv", b"x" * (LINE_BYTES_MAX + 2000)) == (
        f"FILE, line 1: the line is longer than {LINE_BYTES_MAX:,} bytes"
    )


def test_gzip_under_another_name_and_in_several_parts(tmp_path: Path) -> None:
    lines = make_lines(40)
    parts = ["".join(line + "\n" for line in part).encode() for part in (lines[:13], lines[13:])]
    path = tmp_path / "day_0"
    path.write_bytes(b"".join(map(gzip.compress, parts)))
    plain = CriteoDataset(write(tmp_path / "plain", lines), rows=ROWS)
    packed = CriteoDataset(path, rows=ROWS)
    assert_same(
        list(packed.train_batches(batch=8, worker=0, workers=1)),
        list(plain.train_batches(batch=8, worker=0, workers=1)),
    )


def test_wrong_settings_are_named(path: Path) -> None:
    with pytest.raises(UserError, match="26 table sizes"):
        CriteoDataset(path, rows=[1, 2])
    with pytest.raises(UserError, match="train_rows must be"):
        CriteoDataset(path, rows=ROWS, train_rows=0)
    with pytest.raises(UserError, match="batch 101 is larger than the training data, 86 rows"):
        CriteoDataset(path, rows=ROWS).train_batches(batch=101, worker=0, workers=1)
    dataset = CriteoDataset(path, rows=ROWS, train_rows=101)
    with pytest.raises(DataError, match="only 100 lines, but train_rows is 101"):
        list(dataset.train_batches(batch=10, worker=0, workers=1))
    with pytest.raises(DataError, match="only 100 lines, but train_rows is 101"):
        list(dataset.test_batches(batch=10))


@pytest.mark.skipif("REGROW_CRITEO" not in os.environ, reason="REGROW_CRITEO does not name a directory of Criteo data")
@pytest.mark.parametrize("name", ["criteo_1000.tsv", "criteo_1000_ragged.tsv"])
def test_real_lines(name: str) -> None:
    path = Path(os.environ["REGROW_CRITEO"]) / name
    if not path.exists():
        pytest.skip(f"{path} does not exist")
    dataset = CriteoDataset(path, rows=ROWS, train_rows=1000)
    dense, ids, labels = join(list(dataset.train_batches(batch=300, worker=0, workers=1)))
    made = [(float(labels[i]), dense[i].tolist(), ids[:, i].tolist()) for i in range(1000)]
    assert_samples(made, path.read_text().splitlines())
