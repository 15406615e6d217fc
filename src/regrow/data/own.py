"""Data sets that somebody has written: `module:function` is imported and called, and what comes back is looked at."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

from regrow.errors import UserError
from regrow.protection import nearest

# What the protocol in `batch.py` asks for.
VALUES = ("rows", "dense_features", "epochs", "skip_bad_lines", "train_rows")
METHODS = ("train_batches", "test_batches", "train_rows_total")
HINT = "Dataset in regrow/data/batch.py says what a data set has, and docs/data.md shows one"


@functools.cache
def open_own(data: str, kinds: tuple[str, ...] = ()) -> Any:
    """What `module:function` makes, once in each process; UserError if that is no data set. `kinds` are what else may
    stand before a colon."""
    module_name, _, name = data.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; the processes of a run do not
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        hint = nearest(module_name, kinds, quiet=True) or "it is looked for in the current directory too"
        raise UserError(f"data = {data!r}: there is no module {error.name}", hint=hint) from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(f"data = {data!r}: {module_name} has no {name}", hint=nearest(part, dir(found), quiet=True))
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"data = {data!r}: {name} is no function", hint="name one that returns a data set")
    dataset = found()
    problem = find_problem(dataset)
    if problem is not None:
        raise UserError(f"data = {data!r}: what {name}() returned ({type(dataset).__name__}) {problem}", hint=HINT)
    return dataset


def find_problem(dataset: Any) -> str | None:
    """Why this is no data set; None: it is one, as far as can be seen without reading from it."""
    lacking = [name for name in VALUES if not hasattr(dataset, name)]
    lacking += [f"{name}()" for name in METHODS if not callable(getattr(dataset, name, None))]
    if lacking:
        return f"is no data set: it lacks {', '.join(lacking)}"
    rows = dataset.rows
    if not isinstance(rows, list) or not rows or not all(type(size) is int and size > 0 for size in rows):
        return f"has rows = {rows!r}, which must be a list of table sizes from 1 up"
    for name in ("dense_features", "epochs"):
        value = getattr(dataset, name)
        if type(value) is not int or value < 1:
            return f"has {name} = {value!r}, which must be a whole number from 1 up"
    return None
