"""Goal: the kernel that makes samples of columns does what a slow twin does, whatever the text; and the same values
give the same ids from lines and from arrays.

Method: lines made of odd pieces, whole and mutated byte by byte, with and without a header's worth of quotes.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass

import numpy as np
import pytest

from regrow._kernels import SampleParser

MASK = (1 << 64) - 1
K1, K2 = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
NUMBER = re.compile(rb"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
WORDS = [b"Action", b"Film-Noir", b"\xff\xfe", b'say "hi"']


@dataclass(frozen=True, kw_only=True)
class Ids:
    kind: str
    rows: int
    values: int = 0
    missing: int = -1
    separator: str | None = None


# As a schema could say: label, three dense columns, one that nobody uses, and ids of every kind.
DENSE = [(0.0, False), (-1.5, True), (7.0, False)]
IDS = [
    Ids(kind="hash", rows=1000),
    Ids(kind="hash", rows=7, missing=3, separator="|"),
    Ids(kind="int", rows=50, values=90, missing=49),
    Ids(kind="int", rows=90, values=90, separator=";"),
    Ids(kind="vocabulary", rows=5),
    Ids(kind="vocabulary", rows=3, values=5, missing=0, separator="|"),
]
ORDER = ["i0", "d0", "label", "i1", "unused", "d1", "i2", "i3", "d2", "i4", "i5"]


def make_parser(*, delimiter: str = ",", threshold: float | None = None) -> SampleParser:
    parser = SampleParser(fields=len(ORDER), delimiter=delimiter, threshold=threshold)
    for field, name in enumerate(ORDER):
        index = int(name[1]) if name[1:].isdigit() else 0
        if name == "label":
            parser.set_label(field)
        elif name[0] == "d":
            parser.set_dense(field, index=index, missing=DENSE[index][0], log1p=DENSE[index][1])
        elif name[0] == "i":
            rule = IDS[index]
            parser.set_ids(
                field,
                index=index,
                kind=rule.kind,
                values=rule.values,
                rows=rule.rows,
                missing=rule.missing,
                separator=rule.separator,
                words=WORDS,
            )
    return parser


# --- the twin ---


class Bad(Exception):
    pass


def hash_twin(text: bytes) -> int:
    value = 0x9E3779B97F4A7C15 ^ (len(text) * K1 & MASK)
    for at in range(0, len(text), 8):
        value = (value ^ int.from_bytes(text[at : at + 8], "little")) * K1 & MASK
        value ^= value >> 32
    value ^= value >> 33
    value = value * K1 & MASK
    value ^= value >> 33
    value = value * K2 & MASK
    return value ^ value >> 33


def number_twin(text: bytes) -> float | None:
    """None: missing."""
    text = text.strip(b" ")
    if not text or text.lower() == b"nan":
        return None
    if not NUMBER.fullmatch(text):
        raise Bad
    value = float(text)
    underflow = value == 0 and any(digit in b"123456789" for digit in re.split(b"[eE]", text)[0])
    if math.isinf(value) or underflow:
        raise Bad
    return value


def dense_twin(text: bytes, *, missing: float, log1p: bool) -> np.float32:
    value = number_twin(text)
    if value is None:
        return np.float32(missing)
    with np.errstate(over="ignore"):
        made = np.float32(math.log1p(max(value, 0.0)) if log1p else value)
    if not np.isfinite(made):
        raise Bad
    return made


def part_twin(part: bytes, rule: Ids) -> list[int]:
    if rule.kind == "int":
        part = part.strip(b" ")
    if not part:
        return []
    if rule.kind == "hash":
        if rule.missing < 0:
            return [hash_twin(part) % rule.rows]
        others = [row for row in range(rule.rows) if row != rule.missing]
        return [others[hash_twin(part) % len(others)]]
    if rule.kind == "vocabulary":
        return [(WORDS.index(part) + 1 if part in WORDS else 0) % rule.rows]
    if not re.fullmatch(rb"-?\d+", part) or not 0 <= int(part) < rule.values:
        raise Bad
    return [int(part) % rule.rows]


def ids_twin(field: bytes, rule: Ids) -> list[int]:
    parts = [field] if rule.separator is None else field.split(rule.separator.encode())
    ids = [found for part in parts for found in part_twin(part, rule)]
    return ids or ([] if rule.missing < 0 else [rule.missing])


def split_twin(line: bytes, delimiter: bytes) -> list[bytes]:
    fields, at = [], 0
    while True:
        if line[at : at + 1] == b'"':
            field, at = b"", at + 1
            while line[at : at + 1] != b'"' or line[at + 1 : at + 2] == b'"':
                if at >= len(line):
                    raise Bad
                step = 2 if line[at : at + 1] == b'"' else 1
                field, at = field + line[at : at + 1], at + step
            at += 1
            if at < len(line) and line[at : at + 1] != delimiter:
                raise Bad
        else:
            stop = line.find(delimiter, at)
            stop = len(line) if stop < 0 else stop
            field, at = line[at:stop], stop
        fields.append(field)
        if at >= len(line):
            return fields
        at += 1


def sample_twin(line: bytes, *, delimiter: str = ",", threshold: float | None = None) -> tuple:
    line = line.removesuffix(b"\r")
    if not line:
        raise Bad
    fields = split_twin(line, delimiter.encode())
    if len(fields) != len(ORDER):
        raise Bad
    named = dict(zip(ORDER, fields, strict=True))
    label = number_twin(named["label"])
    if label is None or (threshold is None and label not in (0, 1)):
        raise Bad
    dense = [dense_twin(named[f"d{i}"], missing=m, log1p=log) for i, (m, log) in enumerate(DENSE)]
    ids = [ids_twin(named[f"i{i}"], rule) for i, rule in enumerate(IDS)]
    return float(label if threshold is None else label >= threshold), dense, ids


def parse_twin(text: bytes, **options: object) -> tuple[int, list[tuple], int | None]:
    """(lines, samples, first bad line)."""
    lines = text.split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    samples, bad = [], None
    for index, line in enumerate(lines):
        try:
            samples.append(sample_twin(line, **options))
        except Bad:
            bad = index if bad is None else bad
    return len(lines), samples, bad


# --- the kernel, as the twin answers ---


def take_apart(count: int, values: np.ndarray, lengths: np.ndarray | None) -> list[list[list[int]]]:
    """[sample][feature] -> ids."""
    sizes = np.ones(len(IDS) * count, np.int32) if lengths is None else lengths
    assert len(sizes) == len(IDS) * count
    bags = [part.tolist() for part in np.split(values, np.cumsum(sizes)[:-1])] if count else []
    assert sizes.sum() == len(values)
    return [[bags[feature * count + sample] for feature in range(len(IDS))] for sample in range(count)]


def parse(text: bytes, *, skip_bad: bool = True, **options: object) -> tuple[int, list[tuple], tuple | None]:
    capacity = text.count(b"\n") + 1
    dense, labels = np.full((capacity, 3), -9, np.float32), np.full(capacity, -9, np.float32)
    lines, count, values, lengths, error = make_parser(**options).parse(
        np.frombuffer(text, np.uint8), skip_bad=skip_bad, dense=dense, labels=labels
    )
    ids = take_apart(count, values, lengths)
    return lines, [(float(labels[i]), list(dense[i]), ids[i]) for i in range(count)], error


def assert_like_twin(text: bytes, **options: object) -> None:
    lines, samples, error = parse(text, **options)
    lines_twin, samples_twin, bad = parse_twin(text, **options)
    assert (lines, samples) == (lines_twin, samples_twin), text
    assert (None if error is None else error[0]) == bad, (text, error)


NUMBERS = ["", "0", "1", "-3", "2.5", "+4", "1e3", "-1e-3", " 7 ", "NaN", "123456789012345678", "0.1", "1e-320", ".5"]
ODD_NUMBERS = ["1.", "-", "+-1", "1e", "0x10", "inf", "1e999", "1e-999", "1e39", "1_0", "½", "--1", "1 2", "1e5e5", "."]
TEXTS = [
    "",
    "a",
    "68fd1e64",
    "Action",
    "Film-Noir",
    'say "hi"',
    "a,b",
    "ümläut",
    "x" * 300,
    "nan",
    " lead",
    "a|b||c|",
    "|",
]
INTS = ["", "0", "49", "50", "89", " 12 ", "5;6;7", "1;;2", "90", "-1", "1.0", "x", "99999999999999999999"]


def quote(chance: random.Random, field: str) -> str:
    if "," in field or '"' in field or chance.random() < 0.2:
        return '"' + field.replace('"', '""') + '"'
    return field


def make_line(chance: random.Random, *, odd: float) -> str:
    fields = []
    for name in ORDER:
        if name == "label":
            fields.append(
                chance.choice(["0", "1", "1.0", "0.0e0"]) if chance.random() > odd else chance.choice(NUMBERS)
            )
        elif name[0] == "d":
            fields.append(chance.choice(NUMBERS if chance.random() > odd else ODD_NUMBERS))
        elif name in ("i2", "i3"):
            good = ["", "3", "71"] if name == "i2" else ["", "3", "5;6", " 1 ;;"]
            fields.append(chance.choice(good if chance.random() > odd else INTS))
        else:
            fields.append(chance.choice(TEXTS))
    return ",".join(quote(chance, field) for field in fields)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("odd", [0.0, 0.05, 0.5])
def test_lines_are_read_as_the_twin_reads_them(end: str, odd: float) -> None:
    chance = random.Random(f"{end}{odd}")
    lines = [make_line(chance, odd=odd) for _ in range(400)]
    text = "".join(line + end for line in lines).encode()
    assert_like_twin(text)
    assert_like_twin(text.removesuffix(b"\n"))
    assert_like_twin(text, threshold=0.5)
    if odd == 0.0:
        assert len(parse(text)[1]) == 400


def test_every_number_is_rounded_as_python_does() -> None:
    chance = random.Random(3)
    texts = [f"{chance.uniform(-1, 1) * 10 ** chance.randint(-30, 30)!r}" for _ in range(500)]
    texts += [f"{chance.randrange(10**15)}.{chance.randrange(10 ** chance.randint(1, 9))}" for _ in range(500)]
    texts += [f"{chance.randrange(10 ** chance.randint(1, 20))}" for _ in range(500)]
    fields = {name: "1" for name in ORDER}
    lines = [",".join((fields | {"d0": text, "d1": text})[name] for name in ORDER) for text in texts]
    assert_like_twin("\n".join(lines).encode())
    assert len(parse("\n".join(lines).encode())[1]) == len(texts)


def test_mutated_bytes_never_differ_from_the_twin() -> None:
    """Quotes, ends of lines, bytes that are no text, anywhere."""
    chance = random.Random(5)
    for _ in range(300):
        text = bytearray("\n".join(make_line(chance, odd=0.1) for _ in range(4)).encode())
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(text))
            piece = chance.choice([b'"', b",", b"\n", b"\r\n", b"\r", b"\0", b"\xff", b"|", b" ", b"", b'""'])
            text[at : at + chance.randint(0, 2)] = piece
        assert_like_twin(bytes(text))
    assert_like_twin(b"")
    assert_like_twin(b"\n\r\n\n")


def test_huge_fields() -> None:
    fields = {name: "1" for name in ORDER}
    huge = [
        fields | {"i0": "y" * 500_000},
        fields | {"i1": "|".join(map(str, range(50_000)))},
        fields | {"unused": '"' + 'a""' * 100_000 + '"'},
        fields | {"d0": "1" * 400},
        fields | {"d0": "0." + "3" * 2_000},
        fields | {"d0": "0" * 2_000 + "5"},
    ]
    assert_like_twin("\n".join(",".join(line[name] for name in ORDER) for line in huge).encode())


def test_other_delimiters() -> None:
    chance = random.Random(7)
    lines = [make_line(chance, odd=0.1).replace(",", "\t") for _ in range(50)]
    assert_like_twin("\n".join(lines).encode(), delimiter="\t")


def line_with(**changes: str) -> bytes:
    fields = {name: "1" for name in ORDER} | changes
    return ",".join(fields[name] for name in ORDER).encode()


@pytest.mark.parametrize(
    ("line", "column", "reason"),
    [
        (b"", -1, "the line is empty"),
        (b"1,2", -1, "the line has 2 fields instead of 11"),
        (line_with() + b",5,6", -1, "the line has 13 fields instead of 11"),
        (line_with(label=""), 2, "the label is missing"),
        (line_with(label="2"), 2, "the label is not 0 or 1"),
        (line_with(d0="abc"), 1, "'abc' is not a number"),
        (line_with(d0="1e999"), 1, "'1e999' is too large or too small"),
        (line_with(d0="1e39"), 1, "the number does not fit 32 bits"),
        (line_with(i2="90"), 6, "90 is not an id from 0 to 89"),
        (line_with(i2="1.0"), 6, "'1.0' is not an integer"),
        (line_with(unused='"abc'), 4, "a field in quotes does not end on its line"),
        (line_with(i0='"a"b'), 0, "there is text after the quotes of a field"),
    ],
)
def test_what_is_wrong_is_said(line: bytes, column: int, reason: str) -> None:
    good = line_with()
    text = good + b"\n" + line + b"\n" + good
    assert parse(text)[2] == (1, column, reason)
    assert len(parse(text)[1]) == 2
    lines, samples, error = parse(text, skip_bad=False)
    assert (lines, len(samples), error) == (1, 1, (1, column, reason))


# --- arrays ---


def join(bags: list[list[int]]) -> list[int]:
    return [found for bag in bags for found in bag]


def offsets_of(texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    return np.cumsum([0, *map(len, texts)], dtype=np.int64), np.frombuffer(b"".join(texts), np.uint8)


def test_arrays_give_what_lines_give() -> None:
    chance = random.Random(11)
    texts = [chance.choice(TEXTS).encode() for _ in range(300)]
    valid = np.array([chance.random() > 0.2 for _ in texts], np.uint8)
    offsets, data = offsets_of(texts)
    parser = make_parser()
    for index in (0, 1, 4, 5):
        bad = np.zeros(300, np.uint8)
        values, lengths, error = parser.take_texts(ORDER.index(f"i{index}"), offsets, data, valid, None, bad)
        wanted = [ids_twin(text if known else b"", IDS[index]) for text, known in zip(texts, valid, strict=True)]
        assert (values.tolist(), lengths.tolist(), error) == (join(wanted), [*map(len, wanted)], None)
        assert not bad.any()


@pytest.mark.parametrize("index", range(6))
def test_whole_numbers_are_their_texts(index: int) -> None:
    numbers = np.array([0, 5, 89, 90, -1, 7, 1 << 62, -(1 << 63)], np.int64)
    bad = np.zeros(len(numbers), np.uint8)
    values, lengths, error = make_parser().take_wholes(ORDER.index(f"i{index}"), numbers, None, None, bad)
    wanted, wrong = [], []
    for number in numbers:
        try:
            wanted.append(ids_twin(str(number).encode(), IDS[index]))
            wrong.append(0)
        except Bad:
            wanted.append([])
            wrong.append(1)
    assert (values.tolist(), lengths.tolist(), bad.tolist()) == (join(wanted), [*map(len, wanted)], wrong)
    assert (error is None) == (sum(wrong) == 0)
    if error is not None:
        assert error == (3, ORDER.index(f"i{index}"), "90 is not an id from 0 to 89")


def test_bags_are_lists() -> None:
    texts = [b"a", b"b|c", b"", b"d", b"e"]
    offsets, data = offsets_of(texts)
    valid, bags = np.array([1, 1, 1, 0, 1], np.uint8), np.array([0, 2, 2, 4, 5], np.int64)
    bad = np.zeros(4, np.uint8)
    values, lengths, _ = make_parser().take_texts(ORDER.index("i1"), offsets, data, valid, bags, bad)
    rule = IDS[1]
    # The parts of a list are not cut again; an empty list, and one of nothing but nulls and empty texts, is missing.
    wanted = [part_twin(b"a", rule) + part_twin(b"b|c", rule), [3], [3], part_twin(b"e", rule)]
    assert (values.tolist(), lengths.tolist()) == (join(wanted), [2, 1, 1, 1])


def test_numbers_from_arrays() -> None:
    values = np.array([0.0, 1.0, np.nan, 2.0, np.inf, 1.0, -5.0, 1e300])
    valid = np.array([1, 1, 1, 1, 1, 0, 1, 1], np.uint8)
    parser, count = make_parser(), len(values)
    labels, bad = np.zeros(count, np.float32), np.zeros(count, np.uint8)
    assert parser.take_labels(2, values, valid, labels, bad) == (2, 2, "the label is missing")
    assert bad.tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    dense, bad = np.zeros((count, 3), np.float32), np.zeros(count, np.uint8)
    assert parser.take_dense(1, values, valid, dense, bad) == (4, 1, "the number does not fit 32 bits")
    assert bad.tolist() == [0, 0, 0, 0, 1, 0, 0, 1]
    assert dense[[0, 1, 2, 3, 5, 6], 0].tolist() == [0, 1, 0, 2, 0, -5]
    bad[:] = 0
    assert parser.take_dense(5, values, valid, dense, bad) == (4, 5, "the number does not fit 32 bits")
    wanted = [0, math.log1p(1), -1.5, math.log1p(2), -1.5, 0, math.log1p(1e300)]
    assert dense[[0, 1, 2, 3, 5, 6, 7], 1].tolist() == np.array(wanted, np.float32).tolist()


def test_wrong_arrays_are_refused() -> None:
    parser, bad = make_parser(), np.zeros(2, np.uint8)
    text = np.zeros(4, np.uint8)
    with pytest.raises(ValueError, match="within the text"):
        parser.take_texts(0, np.array([0, 2, 9]), text, None, None, bad)
    with pytest.raises(ValueError, match="offsets into the values"):
        parser.take_texts(0, np.array([0, 2, 4]), text, None, np.array([0, 3, 2]), bad)
    with pytest.raises(ValueError, match="bad must have 2 entries"):
        parser.take_wholes(0, np.array([1, 2]), None, None, np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match="valid must have 2 entries"):
        parser.take_wholes(0, np.array([1, 2]), np.zeros(3, np.uint8), None, bad)
    with pytest.raises(ValueError, match="is used otherwise"):
        parser.take_wholes(2, np.array([1, 2]), None, None, bad)
    with pytest.raises(ValueError, match="dense must have 6 entries"):
        parser.take_dense(1, np.zeros(2), None, np.zeros(2, np.float32), bad)
    with pytest.raises(IndexError):
        parser.set_label(99)
    with pytest.raises(ValueError, match="word 2 comes twice"):
        parser.set_ids(0, index=0, kind="vocabulary", values=3, rows=3, missing=-1, words=[b"a", b"a"])
    with pytest.raises(ValueError, match="missing must be a row"):
        parser.set_ids(0, index=0, kind="int", values=3, rows=3, missing=3)


def test_hashes_are_fixed() -> None:
    """They are a promise: rows learned yesterday mean the same today."""
    parser = SampleParser(fields=1)
    parser.set_ids(0, index=0, kind="hash", values=0, rows=1 << 62, missing=-1)
    offsets, data = offsets_of([b"a", b"68fd1e64", b"123456789"])
    values, _, _ = parser.take_texts(0, offsets, data, None, None, np.zeros(3, np.uint8))
    hashes = [0x06CE42224BD70366, 0xE9B515B14821D541, 0x34AEE31A931BFE1E]
    assert values.tolist() == [value % (1 << 62) for value in hashes]


def test_hashes_are_spread() -> None:
    counts = np.bincount([hash_twin(b"%d" % number) % 100 for number in range(20_000)], minlength=100)
    assert counts.min() > 140
    assert counts.max() < 260
