"""A full of the same tensors by torch.distributed.checkpoint and by us, in turns in one process.

Embedding tables of a torch model, no process group. Four ways from the same model: torch's `save` and `async_save`, and
`DeltaCheckpointer` that lets training wait, or copies first and writes behind its back. The fifth is what a parameter
server does with tables of the same size: its rows live in our store and not in torch, which is why it can store them
without a copy. The fair pairs are the first two against the next two; the fifth shows what the store is good for.

Counted are the seconds until everything is durable (fsync of files and directories, for all), those for which the
caller cannot go on, and the most memory beyond what the process had before. Every way first stores something tiny:
imports are not measured.

    python -m regrow.bench.checkpoint_peer < settings.json
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from regrow.bench import common
from regrow.runtime.parent import peak_rss_bytes

TABLES, DIM = 8, 64
TINY_ROWS = 64
TIMEOUT_SECONDS = 600
LABELS = {
    "torch_save": "torch save",
    "regrow_save": "DeltaCheckpointer, training waits",
    "torch_async": "torch async_save",
    "regrow_async": "DeltaCheckpointer, behind",
    "regrow_server": "parameter server",
}
SYSTEMS = tuple(LABELS)

Figures = tuple[float, float]  # seconds until durable, seconds blocked


def measure(order: Sequence[str], *, directory: Path, size_bytes: int) -> dict[str, dict[str, Any]]:
    """All ways once, one after the other, in one process: figures by system."""
    settings = {"order": list(order), "directory": str(directory), "size_bytes": size_bytes}
    result: dict[str, dict[str, Any]] = common.run_module(
        "regrow.bench.checkpoint_peer", settings, timeout_seconds=TIMEOUT_SECONDS, what="the comparison with torch"
    )
    return result


def missing_reason() -> str | None:
    """Why there is nothing to compare with, or None."""
    if importlib.util.find_spec("torch") is None:
        return "no comparison with torch: it is not installed"
    return None


# -- in the process ------------------------------------------------------------------------------------------


def main() -> int:
    warnings.simplefilter("ignore")  # torch's, about a process group that nobody wants here
    settings = json.load(sys.stdin)
    directory, order = Path(settings["directory"]), settings["order"]
    rows = max(TINY_ROWS, settings["size_bytes"] // (4 * DIM * TABLES))
    tiny = make_model(TINY_ROWS)
    for system in order:
        way(system, tiny, TINY_ROWS, directory / "tiny" / system)()
    model = make_model(rows)
    found = {}
    for system in order:
        folder = directory / system
        run = way(system, model, rows, folder)
        before = reset_peak()
        seconds, blocked = run()
        found[system] = {
            "seconds": round(seconds, 4),
            "blocked_seconds": round(blocked, 6),
            "memory_bytes": peak_rss_bytes() - before,
            "stored_bytes": sum(each.stat().st_size for each in folder.rglob("*") if each.is_file()),
            "tensor_bytes": rows * DIM * 4 * TABLES,
        }
        del run
        shutil.rmtree(folder)
    print(json.dumps(found))
    return 0


def make_model(rows: int) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(1)
    return nn.ModuleList([nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True) for _ in range(TABLES)])


def way(system: str, model: Any, rows: int, directory: Path) -> Callable[[], Figures]:
    """Stores everything once when it is called."""
    return from_server(rows, directory) if system == "regrow_server" else from_model(system, model, directory)


def from_server(rows: int, directory: Path) -> Callable[[], Figures]:
    from regrow.bench import checkpoint_store

    job = checkpoint_store.job_of([(rows, DIM)] * TABLES, optimizer="sgd")
    store = checkpoint_store.make_filled_store(job)

    def run() -> Figures:
        stored = checkpoint_store.save(str(directory), job, store, step=1)
        return stored.seconds, stored.held_seconds

    return run


def from_model(system: str, model: Any, directory: Path) -> Callable[[], Figures]:
    import torch
    from torch.distributed import checkpoint as torch_checkpoint

    from regrow.checkpoint.torch.checkpointer import DeltaCheckpointer

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def torch_save() -> Figures:
        began = time.perf_counter()
        torch_checkpoint.save(model.state_dict(), checkpoint_id=directory, no_dist=True)
        sync(directory)
        seconds = time.perf_counter() - began
        return seconds, seconds

    def torch_async() -> Figures:
        began = time.perf_counter()
        future: Any = torch_checkpoint.async_save(model.state_dict(), checkpoint_id=directory, no_dist=True)
        blocked = time.perf_counter() - began
        future.result()
        sync(directory)
        return time.perf_counter() - began, blocked

    def regrow(copy_bytes_max: int) -> Callable[[], Figures]:
        def run() -> Figures:
            checkpointer = DeltaCheckpointer(
                model, str(directory), optimizers=[optimizer], every=1, copy_bytes_max=copy_bytes_max
            )
            with checkpointer:
                began = time.perf_counter()
                checkpointer.step()
                blocked = time.perf_counter() - began
                checkpointer.wait()
                return time.perf_counter() - began, blocked

        return run

    ways = {"torch_save": torch_save, "torch_async": torch_async}
    return ways.get(system) or regrow(1 << 62 if system == "regrow_async" else 0)


def sync(directory: Path) -> None:
    """Until everything in it is on the disk, and it itself."""
    for path in [*directory.rglob("*"), directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def reset_peak() -> int:
    """Memory in use, from which on the peak is counted (where Linux lets us; else from the start of the process)."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what an earlier way left behind must not look like memory in use
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_rss_bytes()


if __name__ == "__main__":
    sys.exit(main())
