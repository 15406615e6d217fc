"""What `data`, `schema` and `model` may say, and the shape of the tables that follows from data of one's own.

Checked when a configuration is made, without reading a file; what is in the files is known when the shape is asked for.
"""

from __future__ import annotations

import re
from typing import Any

from regrow.errors import ConfigError
from regrow.nn.presets import MODELS, DataShape
from regrow.protection import nearest

WITH_SCHEMA = ("csv", "parquet", "npz")
FILES = ("criteo", *WITH_SCHEMA)
MODULE = "module"
FORMS = '"synthetic", "criteo:PATH", "csv:PATH", "parquet:PATH", "npz:PATH" or "module:function"'
IMPORTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
# With a data set that somebody has written, these are its own.
DATASETS_OWN = ("train_rows", "test_rows", "skip_bad_lines")
NAMES = {"criteo": "Criteo's", "csv": "CSV", "parquet": "Parquet", "npz": "NumPy's"}
SUFFIXES = {
    ".tsv": "criteo",
    ".txt": "criteo",
    ".csv": "csv",
    ".csv.gz": "csv",
    ".gz": "criteo",
    ".parquet": "parquet",
    ".npz": "npz",
}


def split_data(data: str) -> tuple[str, str | None]:
    """(kind, path): "synthetic" and "module" have no path."""
    kind, _, path = data.partition(":")
    if kind in FILES:
        return kind, path or None
    return (MODULE, None) if IMPORTED.fullmatch(data) else (kind, None)


def check_data(config: Any) -> None:
    """ConfigError if there is no such data, or what is said beside it does not go with it."""
    kind, path = split_data(config.data)
    if kind in FILES and path is None:
        raise ConfigError("data", config.data, f"must be {FORMS}", hint=f"name the file: {kind}:PATH")
    if kind not in ("synthetic", MODULE, *FILES) or (kind == "synthetic" and config.data != kind):
        hint: str | None = None
        meant = [form for suffix, form in SUFFIXES.items() if config.data.endswith(suffix)]
        if config.data.startswith("criteo"):
            hint = "name the file: criteo:PATH"
        elif meant:
            hint = f"for a file in {NAMES[meant[0]]} format: {meant[0]}:{config.data}"
        raise ConfigError("data", config.data, f"must be {FORMS}", hint=hint)
    if kind in WITH_SCHEMA and not config.schema:
        hint = "name a FILE.toml as schema; docs/data.md shows some"
        raise ConfigError("data", config.data, "needs a schema that says what its columns mean", hint=hint)
    if kind not in WITH_SCHEMA and config.schema is not None:
        problem = f"goes with data from a file ({', '.join(WITH_SCHEMA)}), not with {config.data!r}"
        raise ConfigError("schema", config.schema, problem)
    for name in DATASETS_OWN if kind == MODULE else ():
        if getattr(config, name) not in (None, False):
            raise ConfigError(name, getattr(config, name), f"is the business of {config.data} itself")


def check_model(config: Any) -> None:
    names = list(MODELS)
    is_class = all(config.model.partition(":"))
    if config.model in names or is_class or (config.model.endswith(".toml") and len(config.model) > len(".toml")):
        return
    raise ConfigError(
        "model",
        config.model,
        f"must be one of {', '.join(names)}, a FILE.toml or module:Class",
        hint=nearest(config.model, names, quiet=True),
    )


def find_shape(config: Any) -> DataShape | None:
    """The tables of data of one's own: from its schema, or from the data set itself. None: the model knows them."""
    kind, _ = split_data(config.data)
    if kind in WITH_SCHEMA and not config.script:
        from regrow.data.schema import load_schema  # late: most configurations have none

        schema = load_schema(config.schema)
        return DataShape(name=str(schema.path), rows=schema.rows, dense_features=schema.dense_features)
    if kind == MODULE and not config.script:
        from regrow.data.own import open_own

        dataset = open_own(config.data, FILES)
        return DataShape(name=config.data, rows=tuple(dataset.rows), dense_features=dataset.dense_features)
    return None
