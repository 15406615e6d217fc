"""From a configuration to its data set: the one place that knows all kinds of data."""

from __future__ import annotations

from typing import Any

from regrow.config import TrainConfig
from regrow.data.batch import Dataset
from regrow.data.own import open_own
from regrow.data.schema import load_schema
from regrow.data.synthetic import CARDINALITIES, SyntheticDataset
from regrow.errors import ConfigError, UserError
from regrow.inputs import FILES, MODULE, WITH_SCHEMA
from regrow.nn.presets import KINDS, ModelConfig, find_class

SYNTHETIC_TEST_ROWS = 65_536
CRITEO_TABLES, CRITEO_DENSE = 26, 13
EPOCHS_UNBOUNDED = 1 << 20


def table_rows(model: ModelConfig) -> list[int]:
    """Rows of each table: the model's own, or those of the data set it was published with, cut at `rows_max`."""
    known = model.rows or CARDINALITIES.get(model.name, CARDINALITIES["kaggle"])
    sizes = (known * -(-model.tables // len(known)))[: model.tables]
    return [min(size, model.rows_max) for size in sizes]


def check_fit(config: TrainConfig) -> ModelConfig:
    """The model, which has as many features as the data; UserError otherwise. Reads no data but headers."""
    model = config.load_model()
    if model.kind not in KINDS:
        find_class(model.kind)
    shape = (model.tables, model.dense_features)
    if config.data_kind == "criteo" and shape != (CRITEO_TABLES, CRITEO_DENSE):
        raise UserError(
            f"model {model.name} has {model.tables} tables and {model.dense_features} dense features; "
            f"Criteo's data has {CRITEO_TABLES} and {CRITEO_DENSE}",
            hint=f"tables = {CRITEO_TABLES} and dense_features = {CRITEO_DENSE} in its file",
        )
    if config.data_kind in WITH_SCHEMA:
        open_described(config, table_rows(model))
    if config.data_kind == MODULE:
        check_own(config, open_own(config.data, FILES), model)
    return model


def open_dataset(config: TrainConfig) -> Dataset:
    """The data of this run. Raises DataError or UserError with the file and line."""
    if config.data_kind in WITH_SCHEMA:
        return open_described(config, table_rows(config.load_model()))
    model = check_fit(config)
    if config.data_kind == MODULE:
        own: Dataset = open_own(config.data, FILES)
        return own
    rows = table_rows(model)
    if config.data_kind == "synthetic":
        # Without an end of its own, it is as long as the steps asked for.
        train_rows = config.train_rows or (config.steps or 1) * config.batch * config.workers
        return SyntheticDataset(
            rows=rows,
            seed=config.seed,
            skew=config.skew,
            train_rows=train_rows,
            test_rows=config.test_rows or SYNTHETIC_TEST_ROWS,
            dense_features=model.dense_features,
            epochs=config.epochs or 1,
        )
    from regrow.data.criteo import CriteoDataset

    assert config.data_path is not None
    return CriteoDataset(config.data_path, rows=rows, seed=config.seed, **choose_part(config))


def choose_part(config: TrainConfig) -> dict[str, Any]:
    """Which samples of a file are used, and how often, as all its readers are told."""
    return {
        "train_rows": config.train_rows,
        "test_rows": config.test_rows,
        # Steps are counted by the trainer, and the file is read again when it ends before them.
        "epochs": config.epochs or EPOCHS_UNBOUNDED,
        "skip_bad_lines": config.skip_bad_lines,
    }


def open_described(config: TrainConfig, rows: list[int]) -> Dataset:
    """Data with a schema. Reads the names of its columns, and that there is something."""
    assert config.schema is not None
    assert config.data_path is not None
    schema = load_schema(config.schema)
    reader: Any
    # Late: each has libraries of its own.
    if config.data_kind == "csv":
        from regrow.data.csv_lines import CsvDataset as reader
    elif config.data_kind == "parquet":
        from regrow.data.parquet import ParquetDataset as reader
    else:
        from regrow.data.npz import NpzDataset as reader
    dataset: Dataset = reader(config.data_path, schema=schema, rows=rows, **choose_part(config))
    return dataset


def check_own(config: TrainConfig, dataset: Dataset, model: ModelConfig) -> None:
    """What was asked for must be what a data set of one's own does by itself."""
    if table_rows(model) != dataset.rows:
        problem = f"the tables of {config.data} have up to {max(dataset.rows)} rows"
        raise ConfigError("rows_max", model.rows_max, problem, hint="let the data set make smaller ids")
    if config.epochs not in (None, 1, dataset.epochs):
        problem = f"{config.data} makes {dataset.epochs} by itself"
        raise ConfigError("epochs", config.epochs, problem, hint="leave it out, or give steps")
    if config.steps is None and dataset.train_rows_total() is None:
        raise ConfigError("data", config.data, "does not say how long it is", hint="give steps")
