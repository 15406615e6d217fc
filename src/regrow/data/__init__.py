"""Data sets: batches a worker can start anywhere in, and test data nobody trains on."""

from regrow.data.batch import Batch, Dataset, Position
from regrow.data.synthetic import SyntheticDataset, table_rows

__all__ = ["Batch", "Dataset", "Position", "SyntheticDataset", "table_rows"]
