"""Will it fit? The bytes a run needs against the bytes this machine, or this container, has left.

Asked before anything is started: a run that does not fit would otherwise be killed by the kernel minutes
later, without a word. The rows are counted exactly, the processes around them estimated from experience.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from regrow import _kernels
from regrow.config import TrainConfig
from regrow.core.job import OptimizerSpec
from regrow.data.catalog import table_rows
from regrow.errors import MemoryShort
from regrow.launch.tiers import Needs
from regrow.nn.presets import ModelConfig
from regrow.protection import ErasureCode
from regrow.units import GIB, MIB

# Resident memory of an interpreter with what its role imports, before it holds any data.
BASE_BYTES = {"coordinator": 60 * MIB, "server": 60 * MIB, "worker": 400 * MIB}
FLOAT_BYTES = 4
TIERED_BYTES = 64 * MIB  # of a server with rows on disk, beside its cache and a byte for each row

CGROUP_ROOT = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 1 << 60  # version 1 says "no limit" with a number near 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a run takes, in bytes."""

    tables: int  # over all servers
    processes: int  # everything else

    @property
    def total(self) -> int:
        return self.tables + self.processes


def check(config: TrainConfig) -> Need:
    """Raises `MemoryShort` with both figures and the option that helps most."""
    model = config.load_model()
    need = estimate_need(config, model)
    available, where = available_bytes()
    if available is not None and need.total > available:
        raise MemoryShort(
            f"not enough memory: {gib(need.total)} needed ({gib(need.tables)} for the rows of "
            f"{config.servers} servers{', with their caches' if config.store == 'tiered' else ''}, "
            f"{gib(need.processes)} for processes{say_spares(config)}), {gib(available)} {where}",
            hint=advise(config, model, need, available),
        )
    return need


def estimate_need(config: TrainConfig, model: ModelConfig) -> Need:
    code = config.code
    copies = 0 if code is None else code.copies
    k, coded, rings = (code.k, code.r, code.rings) if isinstance(code, ErasureCode) else (1, 0, 1)
    if config.store == "tiered":
        # The cache, as far as there are rows to fill it, and what a store on disk keeps in memory of all rows.
        cache = min(config.cache_bytes, Needs(config).cache_bytes_max)
        per_server = cache + TIERED_BYTES + -(-sum(table_rows(model)) // config.servers)
    else:
        per_server = sum(
            _kernels.shard_bytes(rows, model.row_floats, k, coded, rings, config.servers, config.optimizer)
            for rows in table_rows(model)
        )
    if config.saves_own and config.priority != "none":
        # A byte a row counts its updates; scar keeps a copy of its weights too.
        row_bytes = 1 + (model.row_floats * FLOAT_BYTES if config.priority == "scar" else 0)
        per_server += -(-sum(table_rows(model)) * row_bytes // config.servers)
    state = OptimizerSpec(kind=config.dense_optimizer, learning_rate=0.0).state_parts(1)  # type: ignore[arg-type]
    dense = model.count_dense() * (1 + sum(floats for _, floats in state)) * FLOAT_BYTES * (1 + copies)
    # A worker holds batches pulled ahead, as rows and gradients, and the pushes nobody has confirmed yet.
    batch_bytes = config.batch * model.tables * model.row_floats * FLOAT_BYTES
    worker = BASE_BYTES["worker"] + (2 + config.prefetch) * 2 * batch_bytes + config.redo_bytes_max
    server = BASE_BYTES["server"]
    if code is not None:
        # Rows as they were before their changes left, and the flush that carries the changes.
        server += 2 * code.flush_bytes
    return Need(
        tables=config.servers * per_server + dense,
        # As many spares as servers may be lost together.
        processes=BASE_BYTES["coordinator"]
        + (config.servers + copies) * server
        + config.workers * worker
        + config.spare_workers_kept * BASE_BYTES["worker"],
    )


def count_server_bytes(config: TrainConfig) -> int:
    """What one server takes, with its share of the rows."""
    need = estimate_need(config, config.load_model())
    flush_bytes = 0 if config.code is None else 2 * config.code.flush_bytes
    return need.tables // config.servers + BASE_BYTES["server"] + flush_bytes


def say_spares(config: TrainConfig) -> str:
    taken = config.spare_workers_kept * BASE_BYTES["worker"]
    return f", {gib(taken)} of it for {config.spare_workers_kept} spare worker(s)" if taken else ""


def advise(config: TrainConfig, model: ModelConfig, need: Need, available: int) -> str:
    if config.store == "tiered" and need.processes < available:
        left = (available - need.processes) // config.servers - TIERED_BYTES
        return f"lower --cache-bytes to {max(1, left // MIB)}M or less, or --rows-max"
    if need.processes >= available:
        fewer = "--spare-workers, " if config.spare_workers_kept else ""
        return f"lower {fewer}--workers or --servers: the processes alone do not fit"
    frugal = estimate_need(config.replace(optimizer="rowwise_adagrad"), model).total
    if frugal <= available:
        return f"--optimizer rowwise_adagrad needs {gib(frugal)}; or lower --rows-max"
    fits, too_many = 1, model.rows_max
    while too_many - fits > max(1, fits // 100):
        middle = (fits + too_many) // 2
        if estimate_need(config, dataclasses.replace(model, rows_max=middle)).total <= available:
            fits = middle
        else:
            too_many = middle
    return f"lower --rows-max (now {model.rows_max}) to {fits}, or choose a --model with a smaller dim"


def available_bytes(
    *,
    meminfo: Path = Path("/proc/meminfo"),
    cgroup: Path = Path("/proc/self/cgroup"),
    root: Path = CGROUP_ROOT,
) -> tuple[int | None, str]:
    """What can still be taken, and who says so. None where the system does not tell."""
    found: list[tuple[int, str]] = []
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append((int(line.split()[1]) * 1024, "available on this machine"))
    except OSError:
        pass  # not Linux
    for directory, names in _cgroup_directories(cgroup, root):
        left = _cgroup_left(directory, *names)
        if left is not None:
            found.append((left, f"left in this container ({directory})"))
    return min(found, default=(None, "known"))


def _cgroup_directories(cgroup: Path, root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """Every group this process is in, from the inner to the outer: each of them may have a limit."""
    version1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    version2 = ("memory.max", "memory.current", "inactive_file")
    found: list[tuple[Path, tuple[str, str, str]]] = []
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, version2
        elif "memory" in controllers.split(","):
            base, names = root / "memory", version1
        else:
            continue
        inner = Path(path.lstrip("/"))
        found += [(base / level, names) for level in (inner, *inner.parents)]
    return found


def _cgroup_left(directory: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    try:
        limit = int((directory / limit_name).read_text())
        usage = int((directory / usage_name).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # no such file, or "max"
    if limit >= UNLIMITED_BYTES:
        return None
    # The page cache counts as usage but gives way.
    return max(0, limit - usage + int(stat.get(cache_name, 0)))


def gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"
