"""Shapes of models by name: the published DLRMs, DCN-v2, DeepFM and two towers.

Only numbers live here, and nothing is imported that is slow to import: the command line, the coordinator and
the servers read these without torch. The sizes of the tables belong to the data
(`regrow.data.synthetic.table_rows`).
"""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import tomllib
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from regrow.errors import UserError

KINDS = ("dlrm", "dcn", "deepfm", "two_tower")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one model."""

    name: str
    # Width of every embedding. With dlrm and deepfm also of the bottom network's output: one more vector.
    dim: int
    # Layer widths of the first network: of the dense features (dlrm, deepfm), of all inputs beside the crosses (dcn),
    # of the query (two_tower).
    bottom: tuple[int, ...]
    # Layer widths of the second network, up to the logit (1); of the item with two_tower, as wide as the query's.
    top: tuple[int, ...]
    # dlrm, dcn, deepfm, two_tower, or a class of one's own, module:Class.
    kind: str = "dlrm"
    cross_layers: int = 3  # dcn: products of up to so many inputs and one more
    query_tables: int = 13  # two_tower: the first so many tables are of the query
    # Tables larger than this are cut to it. Too small and rare ids collide; too large and memory runs out.
    rows_max: int = 1_000_000
    dense_features: int = 13
    # Lookups per sample, each in a table of its own.
    tables: int = 26
    # Rows of each table before the cap; empty for those of the data set the model was published with.
    rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS and not all(self.kind.partition(":")):
            raise ValueError(f"model {self.name}: kind {self.kind!r} must be {', '.join(KINDS)} or module:Class")
        if self.kind in ("dlrm", "deepfm") and (not self.bottom or self.bottom[-1] != self.dim):
            raise ValueError(f"model {self.name}: bottom {list(self.bottom)} must end with dim {self.dim}")
        if self.kind == "two_tower" and (not self.bottom or self.bottom[-1:] != self.top[-1:]):
            raise ValueError(f"model {self.name}: bottom {list(self.bottom)} and top {list(self.top)} end differently")
        if self.kind != "two_tower" and (not self.top or self.top[-1] != 1):
            raise ValueError(f"model {self.name}: top {list(self.top)} must end with 1, the logit")
        if min(self.dim, self.rows_max, self.dense_features, self.tables, *self.bottom, *self.top) < 1:
            raise ValueError(f"model {self.name}: every size must be at least 1")
        if self.kind == "two_tower" and not 0 < self.query_tables < self.tables:
            raise ValueError(f"model {self.name}: query_tables {self.query_tables} of {self.tables}: a tower is empty")
        if self.kind == "dcn" and (self.cross_layers < 1 or not self.bottom):
            raise ValueError(f"model {self.name}: a dcn needs a cross layer and a bottom network")
        if self.rows and (len(self.rows) != self.tables or min(self.rows) < 1):
            raise ValueError(f"model {self.name}: rows needs {self.tables} sizes, one per table, from 1 up")

    @property
    def row_floats(self) -> int:
        """What a look-up gives: the vector and, with deepfm, the weight of the id alone."""
        return self.dim + 1 if self.kind == "deepfm" else self.dim

    def count_dense(self) -> int:
        """Weights and biases of its networks; of somebody's own class as many as a DLRM of this shape would have."""
        inputs, vectors = self.dense_features, self.tables * self.dim
        if self.kind == "dcn":
            inputs += vectors
            crosses = self.cross_layers * (inputs + 1) * inputs
            return crosses + _count_network(inputs, self.bottom) + _count_network(inputs + self.bottom[-1], self.top)
        if self.kind == "deepfm":
            deep = _count_network(vectors + self.dim, self.top)
            return _count_network(inputs, (1,)) + _count_network(inputs, self.bottom) + deep
        if self.kind == "two_tower":
            query = self.query_tables * self.dim
            return _count_network(inputs + query, self.bottom) + _count_network(vectors - query, self.top)
        pairs = (self.tables + 1) * self.tables // 2  # the second network reads them, and the first one's output
        return _count_network(inputs, self.bottom) + _count_network(pairs + self.dim, self.top)


def _count_network(inputs: int, widths: tuple[int, ...]) -> int:
    return sum((wide + 1) * narrow for wide, narrow in itertools.pairwise((inputs, *widths)))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataShape:
    """What data of one's own says about the model."""

    name: str  # who says so: a schema, or a data set
    rows: tuple[int, ...]
    dense_features: int


_PRESETS = (
    # For tests and first looks: a step takes a few milliseconds.
    ModelConfig(name="tiny", dim=8, bottom=(32, 8), top=(32, 1), rows_max=2_000),
    # The three shapes of the DLRM and MLPerf publications.
    ModelConfig(name="kaggle", dim=16, bottom=(512, 256, 64, 16), top=(512, 256, 1)),
    ModelConfig(name="terabyte", dim=64, bottom=(512, 256, 64), top=(512, 512, 256, 1)),
    ModelConfig(name="mlperf", dim=128, bottom=(512, 256, 128), top=(1024, 1024, 512, 256, 1)),
    # Other models on the same data as kaggle.
    ModelConfig(name="dcn", kind="dcn", dim=16, bottom=(512, 256), top=(1,)),
    ModelConfig(name="deepfm", kind="deepfm", dim=16, bottom=(64, 16), top=(400, 400, 1)),
    ModelConfig(name="two-tower", kind="two_tower", dim=16, bottom=(256, 64), top=(256, 64)),
)

MODELS: dict[str, ModelConfig] = {preset.name: preset for preset in _PRESETS}


def load(model: str, *, rows_max: int | None = None, data: DataShape | None = None) -> ModelConfig:
    """A preset by name, a FILE.toml with the same fields, or module:Class with the sizes of kaggle; `rows_max`, when
    given, replaces its cap. With `data`, the tables and dense features are those of the data."""
    given: frozenset[str] = frozenset()
    if model in MODELS:
        config = MODELS[model]
    elif model.endswith(".toml"):
        config, given = _read(Path(model))
    elif all(model.partition(":")):
        config = replace(MODELS["kaggle"], name=model.partition(":")[2], kind=model)
    else:
        raise UserError(
            f"unknown model {model!r}", hint=f"known are {', '.join(MODELS)}, or a FILE.toml, or module:Class"
        )
    if data is not None:
        config = _fit(config, given, data)
    return config if rows_max is None else replace(config, rows_max=rows_max)


def _fit(config: ModelConfig, given: Collection[str], data: DataShape) -> ModelConfig:
    """The model with the tables of the data. What its file says about them must be the same."""
    if "rows" in given:
        raise UserError(
            f"model {config.name}: its rows are those of {data.name}", hint="leave rows out of the model's file"
        )
    for name, found in (("tables", len(data.rows)), ("dense_features", data.dense_features)):
        if name in given and getattr(config, name) != found:
            raise UserError(
                f"model {config.name} has {name} = {getattr(config, name)}, but {data.name} has {found}",
                hint=f"leave {name} out of the model's file",
            )
    # The cap of a preset is that of the data it was published with; of its towers, each has half of the tables.
    rows_max = config.rows_max if "rows_max" in given else max(data.rows)
    query_tables = config.query_tables if "query_tables" in given else len(data.rows) // 2
    try:
        return replace(
            config,
            rows=data.rows,
            tables=len(data.rows),
            dense_features=data.dense_features,
            rows_max=rows_max,
            query_tables=query_tables,
        )
    except ValueError as error:
        raise UserError(f"{error}; the tables are those of {data.name}") from None


def find_class(kind: str) -> Callable[..., Any]:
    """A class of somebody's own, module:Class; UserError names what is not there."""
    name, _, attribute = kind.partition(":")
    if os.getcwd() not in sys.path:  # as with `python -m`: modules beside where the command is given
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"model {kind}: cannot import {name}: {error}", hint="start in its directory, or install it"
        ) from None
    found = getattr(module, attribute, None)
    if not callable(found):
        raise UserError(f"model {kind}: {name} has no class {attribute}")
    return cast("Callable[..., Any]", found)


def _read(path: Path) -> tuple[ModelConfig, frozenset[str]]:
    """The model in a file, and which fields the file has."""
    try:
        values = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise UserError(f"cannot read the model {path}: {error.strerror}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read the model {path}: {error}") from None
    known = {field.name: field for field in fields(ModelConfig)}
    for name, value in values.items():
        if name not in known:
            raise UserError(f"{path}: unknown field {name!r}", hint=f"known are {', '.join(known)}")
        whole = [value] if name not in ("bottom", "top", "rows") else value
        if name in ("name", "kind"):
            if not isinstance(value, str):
                raise UserError(f"{path}: {name} = {value!r} must be a text")
        elif not (isinstance(whole, list) and all(type(item) is int for item in whole)):
            kind = "a list of whole numbers" if name in ("bottom", "top", "rows") else "a whole number"
            raise UserError(f"{path}: {name} = {value!r} must be {kind}")
    missing = [name for name in ("dim", "bottom", "top") if name not in values]
    if missing:
        raise UserError(f"{path}: {missing[0]} is missing")
    given = frozenset(values)
    for name in ("bottom", "top", "rows"):
        if name in values:
            values[name] = tuple(values[name])
    if "rows" in values:
        values.setdefault("tables", len(values["rows"]))
    try:
        return ModelConfig(**{"name": path.stem, **values}), given
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
