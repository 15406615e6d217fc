"""Goal: one word, one meaning: the glossary speaks of this code, and words that were given up stay away.

Method: the tables of docs/glossary.md are read. A word must be part of the name of the module where it is said to be
at home, or of an identifier in it; or the identifier named there must exist. A word that is not said any more is looked
for in every name of the package.
"""

from __future__ import annotations

import functools
import re

import pytest
from sources import COMING, MODULES, ROOT, SOURCE, functions, identifiers

PAGE = ROOT / "docs" / "glossary.md"
WORDS, GONE = PAGE.read_text().split("## Not said any more")
HOME = re.compile(r"`([\w/]+\.py)`(?:: `(\w+)`)?")


def table_rows(text: str) -> list[list[str]]:
    """The cells of every table, without heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    return [row for row in cells if row[0] not in ("word", "not", "---")]


TERMS = {word: (meaning, home) for word, meaning, home in table_rows(WORDS)}
GIVEN_UP = table_rows(GONE)


@functools.cache
def parts_of(name: str) -> frozenset[str]:
    """The words of a name: `_redo_bytes`, `RedoBytes` and `REDO_BYTES` have the same two."""
    return frozenset(part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name))


def is_at_home(word: str, path: str, identifier: str | None) -> bool:
    if not (SOURCE / path).exists():
        return path in COMING
    names = identifiers(SOURCE / path) | {(SOURCE / path).stem}
    if identifier:
        return identifier in names
    forms = {word, f"{word}s", f"{word[:-1]}ies"}
    return any(forms & parts_of(name) for name in names)


def test_the_page_is_read() -> None:
    assert len(TERMS) > 70
    assert len(TERMS) == len(table_rows(WORDS)), "a word has one meaning, and one line"
    assert parts_of("_SweepBytesMAX") == {"sweep", "bytes", "max"}
    assert {kind for _, _, kind, _ in GIVEN_UP} <= {"name", "word", "function"}
    assert {state for *_, state in GIVEN_UP} <= {"", "pending"}


@pytest.mark.parametrize("word", TERMS)
def test_every_word_is_at_home_where_it_is_said_to_be(word: str) -> None:
    meaning, home = TERMS[word]
    assert meaning.endswith((".", ".)")), "a meaning is a sentence or two"
    place = HOME.fullmatch(home)
    assert place, f"{word} names no module"
    assert is_at_home(word, *place.groups()), f"no name in {home} has the word {word}"


def places_of(given_up: str, kind: str) -> list[str]:
    found = []
    for module, path in MODULES.items():
        names = {function.name for function in functions(path)} if kind == "function" else identifiers(path)
        if kind == "word":
            found += [f"{module}: {name}" for name in names if given_up in parts_of(name)]
        elif kind == "function":
            found += [f"{module}: {name}" for name in names if name.strip("_") == given_up]
        else:
            found += [f"{module}: {name}" for name in names if name == given_up]
    return sorted(found)


@pytest.mark.parametrize(("given_up", "instead", "kind", "state"), GIVEN_UP, ids=[row[0] for row in GIVEN_UP])
def test_words_that_were_given_up_stay_away(given_up: str, instead: str, kind: str, state: str) -> None:
    assert instead
    places = places_of(given_up, kind)
    if state == "pending" and places:
        pytest.skip(f"still found: {', '.join(places)}")
    assert places == []
