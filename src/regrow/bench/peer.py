"""The peer: FBGEMM's table-batched embeddings (what TorchRec trains with) on one CPU, at their best.

Two things live here: `PeerTables`, which the kernel benchmark times, and a whole single-process training run
around it (`peer_run.py` says how it is started). FBGEMM is optional; nothing outside the benchmarks imports it.

Which of FBGEMM's own paths is fastest depends on machine and build, so there is a choice of layouts, all with
the same numbers, and the benchmarks take the fastest:

- "split": one FBGEMM table per feature. The update is a kernel FBGEMM generates at run time.
- "merged": all tables one FBGEMM table, shared by the features, ids shifted. The update is its compiled loop,
  without the switches between SSE and AVX code that cost the generated kernel 400 ns a row on some CPUs.
- "...-threads": the features in as many parts as threads, each a module of its own in a Python thread of its
  own. The published CPU build does not thread its kernels, whatever `torch.set_num_threads` says.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import itertools
import logging
import resource
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor

from regrow.bench import common, peer_run
from regrow.config import TrainConfig
from regrow.data.batch import Batch
from regrow.data.catalog import open_dataset
from regrow.nn.models import make_model

LAYOUTS = ("merged", "split", "merged-threads", "split-threads")
PACKAGE = "fbgemm-gpu-cpu==1.8.0"
ROW_FLOATS_MULTIPLE = 4  # FBGEMM has no rows of other widths
TRIAL_STEPS, TRIAL_WARMUP_STEPS = 24, 6
Prepared = list[tuple[Tensor, Tensor]]


def missing_reason() -> str | None:
    """Why the peer cannot be measured here, and what to do about it; None when it can."""
    if importlib.util.find_spec("fbgemm_gpu") is None:
        return (
            "FBGEMM is not installed, so nothing can be compared with it.\n"
            f"Install it beside the torch at hand with: pip install --no-deps {PACKAGE}"
        )
    try:
        _import_fbgemm()
    except Exception as error:  # a build for another torch fails in its own ways
        return (
            f"FBGEMM is installed but cannot be loaded ({str(error).splitlines()[0]}).\n"
            f"It must be built for torch {torch.__version__}: pip install --no-deps {PACKAGE}"
        )
    return None


def _import_fbgemm() -> Any:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
    for name in list(logging.root.manager.loggerDict):
        if "fbgemm" in name or name.startswith(("tbe", "split_table")):
            logging.getLogger(name).setLevel(logging.ERROR)
    return training


class PeerTables:
    """Embedding tables of one width, one per feature, with fused row-wise Adagrad; bags of one id."""

    def __init__(
        self,
        rows: Sequence[int],
        dim: int,
        *,
        layout: str = "merged",
        threads: int = 1,
        learning_rate: float = 0.02,
        eps: float = 1e-8,
    ) -> None:
        if layout not in LAYOUTS:
            raise ValueError(f"unknown layout {layout!r}; choose one of {', '.join(LAYOUTS)}")
        self.rows, self.dim, self.layout = list(rows), dim, layout
        parts = min(threads, len(rows)) if layout.endswith("-threads") else 1
        self.merged = layout.startswith("merged")
        bounds = np.linspace(0, len(rows), parts + 1).astype(int)
        self.spans = [slice(int(a), int(b)) for a, b in itertools.pairwise(bounds)]
        self.modules = [self._module(self.rows[span], learning_rate, eps) for span in self.spans]
        self.shifts = [np.cumsum([0, *self.rows[span][:-1]], dtype=np.int64)[:, None] for span in self.spans]
        self._offsets: dict[int, list[Tensor]] = {}
        self._pool = ThreadPoolExecutor(parts - 1) if parts > 1 else None

    def _module(self, rows: list[int], learning_rate: float, eps: float) -> Any:
        training = _import_fbgemm()
        common_ops = sys.modules["fbgemm_gpu.split_table_batched_embeddings_ops_common"]
        configs = sys.modules["fbgemm_gpu.split_embedding_configs"]
        sizes = [sum(rows)] if self.merged else rows
        host, cpu = common_ops.EmbeddingLocation.HOST, training.ComputeDevice.CPU
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            return training.SplitTableBatchedEmbeddingBagsCodegen(
                [(size, self.dim, host, cpu) for size in sizes],
                feature_table_map=[0] * len(rows) if self.merged else None,
                optimizer=configs.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                learning_rate=learning_rate,
                eps=eps,
                pooling_mode=common_ops.PoolingMode.SUM,
                # FBGEMM's kernels check bounds themselves; the separate pass in front of them is spared.
                bounds_check_mode=common_ops.BoundsCheckMode.NONE,
                output_dtype=configs.SparseType.FP32,
            )

    def prepare(self, values: NDArray[np.int64], batch: int) -> Prepared:
        """Ids, feature-major, in the form the modules take."""
        ids = values.reshape(len(self.rows), batch)
        offsets = self._offsets.get(batch)
        if offsets is None:
            offsets = [torch.arange((span.stop - span.start) * batch + 1) for span in self.spans]
            self._offsets[batch] = offsets
        prepared = []
        for span, shift, offset in zip(self.spans, self.shifts, offsets, strict=True):
            part = ids[span] + shift if self.merged else ids[span]
            prepared.append((torch.from_numpy(np.ascontiguousarray(part).reshape(-1)), offset))
        return prepared

    def forward(self, prepared: Prepared) -> list[Tensor]:
        """The rows looked up: per part [batch, features * dim]."""
        return self._each(lambda part: self.modules[part](*prepared[part]))

    def backward(self, outputs: list[Tensor], gradients: Sequence[Tensor]) -> None:
        """Groups equal ids, sums their gradients and updates the rows."""
        self._each(lambda part: torch.autograd.backward(outputs[part], gradients[part]))

    def split_columns(self, matrix: Tensor) -> list[Tensor]:
        """[batch, all features * dim] as one contiguous piece per part."""
        if len(self.spans) == 1:
            return [matrix]
        return [matrix[:, span.start * self.dim : span.stop * self.dim].contiguous() for span in self.spans]

    def weights(self, table: int) -> Tensor:
        """A view of one table's rows."""
        for span, module in zip(self.spans, self.modules, strict=True):
            if span.start <= table < span.stop:
                split: list[Tensor] = module.split_embedding_weights()
                if not self.merged:
                    return split[table - span.start]
                first = sum(self.rows[span.start : table])
                return split[0][first : first + self.rows[table]]
        raise IndexError(f"table {table} of {len(self.rows)}")

    def fill_uniform(self) -> None:
        for table, count in enumerate(self.rows):
            bound = (1.0 / count) ** 0.5
            self.weights(table).data.uniform_(-bound, bound)

    def use_huge_pages(self) -> None:
        """The same pages our own arenas ask for. Call when the tables are filled."""
        for module in self.modules:
            tensors = [*module.parameters(), *module.buffers()]
            tensors += [value for value in vars(module).values() if isinstance(value, Tensor)]
            for tensor in tensors:
                common.collapse_pages(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def _each(self, action: Any) -> list[Any]:
        if self._pool is None:
            return [action(0)]
        others = [self._pool.submit(action, part) for part in range(1, len(self.modules))]
        first = action(0)
        return [first, *(other.result() for other in others)]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self.modules.clear()
        gc.collect()


# -- a whole training run ------------------------------------------------------------------------------------


class PeerTrainer:
    """A model of the package and its tables in one process."""

    def __init__(self, config: TrainConfig, rows: list[int], *, layout: str, threads: int) -> None:
        if config.optimizer != "rowwise_adagrad":
            raise ValueError(f"the peer trains rows with rowwise_adagrad, not {config.optimizer}")
        shape = config.load_model()
        self.batch, self.row_floats = config.batch, shape.row_floats
        # Rows of another width are padded: a second table for the floats beyond would be a second look-up.
        dim = -(-shape.row_floats // ROW_FLOATS_MULTIPLE) * ROW_FLOATS_MULTIPLE
        self.tables = PeerTables(rows, dim, layout=layout, threads=threads, learning_rate=config.learning_rate)
        self.tables.fill_uniform()
        self.tables.use_huge_pages()
        self.model = make_model(shape, seed=config.seed)
        self.optimizer = peer_run.dense_optimizer(
            config.dense_optimizer, list(self.model.parameters()), config.dense_learning_rate
        )
        self.timer = peer_run.Timer()

    def prepare(self, batch: Batch) -> Prepared:
        return self.tables.prepare(batch.values, len(batch))

    def trim(self, rows: Tensor) -> Tensor:
        """Rows without their padding: [batch, tables * row_floats]."""
        if self.tables.dim == self.row_floats:
            return rows
        return rows.view(len(rows), -1, self.tables.dim)[:, :, : self.row_floats].reshape(len(rows), -1)

    def step(self, batch: Batch, prepared: Prepared) -> float:
        timer = self.timer
        timer.lap("data")
        outputs = self.tables.forward(prepared)
        rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        leaf = rows.detach().requires_grad_()
        timer.lap("embedding forward")
        logits = self.model(torch.from_numpy(batch.dense), self.trim(leaf))
        loss = functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels))
        timer.lap("dense forward")
        torch.autograd.backward(loss)
        timer.lap("dense backward")
        assert leaf.grad is not None
        self.tables.backward(outputs, self.tables.split_columns(leaf.grad))
        timer.lap("embedding backward and update")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        timer.lap("dense update")
        return loss.item()


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Trains with each layout asked for, briefly, then with the fastest until the time is over.

    When other processes were busy during the trials, they prove nothing, and the first layout is taken: a layout
    with more threads then gets a larger share of the cores, though it is slower when the machine is free.
    """
    config = TrainConfig.from_dict(settings["config"]).replace(steps=peer_run.STEPS_ENDLESS)
    threads: int = settings["threads"]
    common.keep_memory()
    torch.set_num_threads(threads)
    dataset = open_dataset(config)
    layouts = list(settings["layouts"])
    trials: dict[str, float] = {}
    others = 0.0
    if len(layouts) > 1:
        for layout in layouts:
            trainer = PeerTrainer(config, dataset.rows, layout=layout, threads=threads)
            figures = peer_run.measure_rate(trainer, dataset, warmup_steps=TRIAL_WARMUP_STEPS, steps=TRIAL_STEPS)
            trials[layout] = figures["samples_per_second_unhindered"]
            others = max(others, figures["others_cores"] or 0.0)
            trainer.tables.close()
            del trainer
            gc.collect()
        if others <= common.OTHERS_CORES_QUIET:
            layouts.sort(key=lambda layout: -trials[layout])
    trainer = PeerTrainer(config, dataset.rows, layout=layouts[0], threads=threads)
    figures = peer_run.measure_rate(
        trainer, dataset, warmup_steps=settings["warmup_steps"], seconds_max=settings["seconds"]
    )
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        **figures,
        "layout": layouts[0],
        "trials": {layout: round(rate) for layout, rate in trials.items()},
        "trials_others_cores": round(others, 2),
        "rows": sum(dataset.rows),
        "threads": threads,
        "peak_rss_bytes": usage.ru_maxrss * 1024,
    }


if __name__ == "__main__":
    sys.exit(peer_run.answer(train, find_missing=missing_reason))
