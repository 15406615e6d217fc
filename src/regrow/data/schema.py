"""What the columns of somebody's own data mean: a TOML file that names the label, the dense columns and those with ids.

It is read and checked before anything starts; an error names the file, the key and a way out. The order of features is
the order in the file: feature f looks up in table f. What is here is plain values, and nothing of the data is read but
vocabularies. `docs/data.md` explains every key to users.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow.errors import UserError
from regrow.fields import read_toml
from regrow.protection import nearest

ID_KINDS = ("hash", "int", "vocabulary")
TRANSFORMS = ("none", "log1p")
EMPTY = "empty"  # `missing` of a categorical column: its bag has no id
SEPARATOR_DEFAULT = "|"
ROWS_MAX = (1 << 32) - 1
NAMES_SHOWN = 50  # of the columns there are, where one is not among them
KEYS = {
    "": ("delimiter", "label", "dense", "categorical"),
    "label": ("column", "threshold"),
    "dense": ("column", "columns", "transform", "missing"),
    "categorical": ("column", "columns", "id", "rows", "words", "words_file", "many", "separator", "missing"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """A column of numbers."""

    column: str
    missing: float = 0.0  # taken as it is, after the transform
    transform: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Categorical:
    """A column whose values are, or become, rows of a table of its own."""

    column: str
    id: str
    rows: int  # of its table
    words: tuple[str, ...] = ()  # of a vocabulary: word i is row i + 1
    separator: str | None = None  # between the values of a bag; None: there is one value
    missing: int | None = None  # the row of a value that is missing; None: an empty bag


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """What is in a schema file."""

    path: Path
    label: str
    threshold: float | None  # the label is 1 from here on; None: the column has 0 and 1
    dense: tuple[Dense, ...]
    categorical: tuple[Categorical, ...]
    delimiter: str = ","

    @property
    def columns(self) -> list[str]:
        """All that are used: the label, then dense ones, then those with ids."""
        return [self.label, *(each.column for each in self.dense), *(each.column for each in self.categorical)]

    @property
    def dense_features(self) -> int:
        """A model has at least one; if no column is named, it is always 0."""
        return max(1, len(self.dense))

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(each.rows for each in self.categorical)

    def check_columns(self, names: list[str], *, where: str) -> None:
        """UserError for the first column that the data does not have, or has twice."""
        for column in self.columns:
            if names.count(column) > 1:
                raise UserError(f"{where} has {names.count(column)} columns {column!r}", hint="rename one of them")
            if column not in names:
                raise UserError(
                    f"{self.path}: there is no column {column!r} in {where}", hint=nearest(column, names[:NAMES_SHOWN])
                )


def load_schema(path: str | Path) -> Schema:
    """Reads and checks a schema file."""
    top = _Block(Path(path), "", read_toml(Path(path)))
    label = top.take_block("label")
    delimiter = top.take_character("delimiter", ",")
    threshold = label.take_number("threshold")
    dense = [made for block in top.take_blocks("dense") for made in _read_dense(block)]
    categorical = [made for block in top.take_blocks("categorical") for made in _read_categorical(block)]
    schema = Schema(
        path=top.path,
        label=label.take_text("column"),
        threshold=threshold,
        dense=tuple(dense),
        categorical=tuple(categorical),
        delimiter=delimiter,
    )
    if not categorical:
        raise top.fail("categorical", "is missing", hint="a model needs at least one column of ids: [[categorical]]")
    for column in schema.columns:
        if schema.columns.count(column) > 1:
            raise UserError(f"{top.path}: column {column!r} is named twice", hint="a column has one use")
    return schema


class _Block:
    """The keys of one part of the file. Every error names the file, the part and the key."""

    def __init__(self, path: Path, name: str, values: dict[str, Any]) -> None:
        self.path = path
        self.name = name
        self.values = values
        for key in values:
            if key not in KEYS[name]:
                raise UserError(f"{path}: {self.place}unknown key {key!r}", hint=nearest(key, KEYS[name]))

    @property
    def place(self) -> str:
        if not self.name:
            return ""
        brackets = f"[{self.name}]" if self.name == "label" else f"[[{self.name}]]"
        named = self.values.get("column", self.values.get("columns"))
        return f"{brackets} " if named is None or self.name == "label" else f"{brackets} {named!r}: "

    def fail(self, key: str, problem: str, *, hint: str | None = None) -> UserError:
        value = f" = {self.values[key]!r}" if key in self.values else ""
        return UserError(f"{self.path}: {self.place}{key}{value}: {problem}", hint=hint)

    def take_block(self, key: str) -> _Block:
        found = self.values.get(key)
        if not isinstance(found, dict):
            raise self.fail(key, "is missing" if found is None else "must be a table", hint=f'[{key}]\ncolumn = "..."')
        return _Block(self.path, key, found)

    def take_blocks(self, key: str) -> list[_Block]:
        found = self.values.get(key, [])
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
            raise self.fail(key, "must be a list of tables", hint=f"write [[{key}]] above each")
        return [_Block(self.path, key, item) for item in found]

    def take_text(self, key: str, default: str | None = None) -> str:
        found = self.values.get(key, default)
        if not isinstance(found, str) or not found:
            raise self.fail(key, "is missing" if found is None else "must be text")
        return found

    def take_character(self, key: str, default: str) -> str:
        found = self.take_text(key, default)
        if len(found) != 1 or not found.isascii() or found in '"\r\n':
            raise self.fail(key, "must be one ASCII character, and no quote or end of line")
        return found

    def take_choice(self, key: str, choices: tuple[str, ...], default: str | None = None) -> str:
        found = self.take_text(key, default)
        if found not in choices:
            raise self.fail(key, f"must be one of {', '.join(choices)}", hint=nearest(found, choices, quiet=True))
        return found

    def take_number(self, key: str, default: float | None = None) -> float | None:
        found = self.values.get(key, default)
        if found is not None and (type(found) not in (int, float) or not math.isfinite(found)):
            raise self.fail(key, "must be a number")
        return None if found is None else float(found)

    def take_flag(self, key: str) -> bool:
        found = self.values.get(key, False)
        if type(found) is not bool:
            raise self.fail(key, "must be true or false")
        return found

    def take_columns(self) -> list[str]:
        """`column`, or `columns` for several that are alike."""
        if ("column" in self.values) == ("columns" in self.values):
            both = "column" in self.values
            raise self.fail("column", "columns is given too" if both else "is missing", hint="give one of the two")
        if "column" in self.values:
            return [self.take_text("column")]
        found = self.values["columns"]
        if not isinstance(found, list) or not found or not all(isinstance(item, str) and item for item in found):
            raise self.fail("columns", "must be a list of names")
        return found


def _read_dense(block: _Block) -> list[Dense]:
    missing = block.take_number("missing", 0.0)
    assert missing is not None
    if abs(missing) > 3e38:
        raise block.fail("missing", "does not fit 32 bits")
    transform = block.take_choice("transform", TRANSFORMS, "none")
    return [Dense(column=column, missing=missing, transform=transform) for column in block.take_columns()]


def _read_categorical(block: _Block) -> list[Categorical]:
    columns = block.take_columns()
    kind = block.take_choice("id", ID_KINDS)
    words = _read_words(block) if kind == "vocabulary" else ()
    rows = len(words) + 1 if kind == "vocabulary" else _read_rows(block)
    if kind != "vocabulary":
        for key in ("words", "words_file"):
            if key in block.values:
                raise block.fail(key, f"goes with a vocabulary, and id is {kind}", hint='id = "vocabulary"')
    separator = None
    if block.take_flag("many"):
        separator = block.take_character("separator", SEPARATOR_DEFAULT)
    elif "separator" in block.values:
        raise block.fail("separator", "goes with columns of many values", hint="many = true")
    missing = _read_missing(block, rows)
    if kind == "hash" and missing is not None and rows < 2:
        raise block.fail("rows", "the row of missing values leaves none for others", hint="2 rows or more")
    return [
        Categorical(column=column, id=kind, rows=rows, words=words, separator=separator, missing=missing)
        for column in columns
    ]


def _read_rows(block: _Block) -> int:
    rows = block.values.get("rows")
    if type(rows) is not int or not 1 <= rows <= ROWS_MAX:
        problem = "is missing" if rows is None else f"must be a whole number from 1 to {ROWS_MAX}"
        raise block.fail("rows", problem, hint="how many rows the table of this column has")
    return rows


def _read_missing(block: _Block, rows: int) -> int | None:
    missing = block.values.get("missing", EMPTY)
    if missing == EMPTY:
        return None
    if type(missing) is not int or not 0 <= missing < rows:
        raise block.fail("missing", f'must be "{EMPTY}" or a row from 0 to {rows - 1}')
    return missing


def _read_words(block: _Block) -> tuple[str, ...]:
    """Of a vocabulary: in the file itself, or one per line in another, whose path begins at this one."""
    if "rows" in block.values:
        raise block.fail("rows", "follows from the words of a vocabulary: one more than there are", hint="leave it out")
    if ("words" in block.values) == ("words_file" in block.values):
        both = "words" in block.values
        raise block.fail("words", "words_file is given too" if both else "is missing", hint="words, or words_file")
    if "words" in block.values:
        words = block.values["words"]
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise block.fail("words", "must be a list of texts")
        key = "words"
    else:
        key = "words_file"
        words = _read_lines(block, block.path.parent / block.take_text(key))
    if not words or not all(words):
        raise block.fail(key, "has an empty word" if words else "has no words")
    if len(set(words)) != len(words):
        seen: set[str] = set()
        twice = next(word for word in words if word in seen or seen.add(word))  # type: ignore[func-returns-value]
        raise block.fail(key, f"has {twice!r} twice")
    return tuple(words)


def _read_lines(block: _Block, path: Path) -> list[str]:
    try:
        # Bytes that are no text keep their value, so that any word of the data can be in a vocabulary.
        text = path.read_bytes().decode(errors="surrogateescape")
    except OSError as error:
        raise block.fail("words_file", f"cannot read {path}: {error.strerror}") from None
    return text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else []
