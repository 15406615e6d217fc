"""The published DLRM shapes by name.

Only numbers live here, and nothing is imported that is slow to import: the command line, the coordinator and
the servers read these without torch. The sizes of the tables belong to the data
(`regrow.data.synthetic.table_rows`).
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path

from regrow.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of one DLRM."""

    name: str
    # Width of every embedding, and of the bottom network's output.
    dim: int
    # Layer widths after the dense input; the last equals `dim`.
    bottom: tuple[int, ...]
    # Layer widths after the interaction; the last is 1, the logit.
    top: tuple[int, ...]
    # Tables larger than this are cut to it. Too small and rare ids collide; too large and memory runs out.
    rows_max: int = 1_000_000
    dense_features: int = 13
    # Lookups per sample, each in a table of its own.
    tables: int = 26
    # Rows of each table before the cap; empty for those of the data set the model was published with.
    rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.bottom or self.bottom[-1] != self.dim:
            raise ValueError(f"model {self.name}: bottom {list(self.bottom)} must end with dim {self.dim}")
        if not self.top or self.top[-1] != 1:
            raise ValueError(f"model {self.name}: top {list(self.top)} must end with 1, the logit")
        if min(self.dim, self.rows_max, self.dense_features, self.tables, *self.bottom, *self.top) < 1:
            raise ValueError(f"model {self.name}: every size must be at least 1")
        if self.rows and (len(self.rows) != self.tables or min(self.rows) < 1):
            raise ValueError(f"model {self.name}: rows needs {self.tables} sizes, one per table, from 1 up")


_PRESETS = (
    # For tests and first looks: a step takes a few milliseconds.
    ModelConfig(name="tiny", dim=8, bottom=(32, 8), top=(32, 1), rows_max=2_000),
    # The three shapes of the DLRM and MLPerf publications.
    ModelConfig(name="kaggle", dim=16, bottom=(512, 256, 64, 16), top=(512, 256, 1)),
    ModelConfig(name="terabyte", dim=64, bottom=(512, 256, 64), top=(512, 512, 256, 1)),
    ModelConfig(name="mlperf", dim=128, bottom=(512, 256, 128), top=(1024, 1024, 512, 256, 1)),
)

MODELS: dict[str, ModelConfig] = {preset.name: preset for preset in _PRESETS}


def load(model: str, *, rows_max: int | None = None) -> ModelConfig:
    """A preset by name, or a FILE.toml with the same fields; `rows_max`, when given, replaces its cap."""
    if model in MODELS:
        config = MODELS[model]
    elif model.endswith(".toml"):
        config = _read(Path(model))
    else:
        raise UserError(f"unknown model {model!r}", hint=f"known are {', '.join(MODELS)}, or a FILE.toml")
    return config if rows_max is None else replace(config, rows_max=rows_max)


def _read(path: Path) -> ModelConfig:
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
        whole = [value] if name not in ("name", "bottom", "top", "rows") else value
        if name != "name" and not (isinstance(whole, list) and all(type(item) is int for item in whole)):
            kind = "a list of whole numbers" if name in ("bottom", "top", "rows") else "a whole number"
            raise UserError(f"{path}: {name} = {value!r} must be {kind}")
    missing = [name for name in ("dim", "bottom", "top") if name not in values]
    if missing:
        raise UserError(f"{path}: {missing[0]} is missing")
    for name in ("bottom", "top", "rows"):
        if name in values:
            values[name] = tuple(values[name])
    if "rows" in values:
        values.setdefault("tables", len(values["rows"]))
    try:
        return ModelConfig(**{"name": path.stem, **values})
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
