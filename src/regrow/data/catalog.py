"""From a configuration to its data set: the one place that knows all kinds of data."""

from __future__ import annotations

from regrow.config import TrainConfig
from regrow.data.batch import Dataset
from regrow.data.synthetic import CARDINALITIES, SyntheticDataset
from regrow.errors import UserError
from regrow.nn.presets import ModelConfig

SYNTHETIC_TEST_ROWS = 65_536
CRITEO_TABLES, CRITEO_DENSE = 26, 13
EPOCHS_UNBOUNDED = 1 << 20


def table_rows(model: ModelConfig) -> list[int]:
    """Rows of each table: the model's own, or those of the data set it was published with, cut at `rows_max`."""
    known = model.rows or CARDINALITIES.get(model.name, CARDINALITIES["kaggle"])
    sizes = (known * -(-model.tables // len(known)))[: model.tables]
    return [min(size, model.rows_max) for size in sizes]


def check_fit(config: TrainConfig) -> ModelConfig:
    """The model, which has as many features as the data; UserError otherwise. Reads no data."""
    model = config.load_model()
    shape = (model.tables, model.dense_features)
    if config.data_kind == "criteo" and shape != (CRITEO_TABLES, CRITEO_DENSE):
        raise UserError(
            f"model {model.name} has {model.tables} tables and {model.dense_features} dense features; "
            f"Criteo's data has {CRITEO_TABLES} and {CRITEO_DENSE}",
            hint=f"tables = {CRITEO_TABLES} and dense_features = {CRITEO_DENSE} in its file",
        )
    return model


def open_dataset(config: TrainConfig) -> Dataset:
    """The data of this run. Raises DataError or UserError with the file and line."""
    model = check_fit(config)
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
    return CriteoDataset(
        config.data_path,
        rows=rows,
        train_rows=config.train_rows,
        test_rows=config.test_rows,
        seed=config.seed,
        # Steps are counted by the trainer, and the file is read again when it ends before them.
        epochs=config.epochs or EPOCHS_UNBOUNDED,
        skip_bad_lines=config.skip_bad_lines,
    )
