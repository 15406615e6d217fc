"""Rows on disk, as the launcher sees them: the directory of their files, what must fit, and what is counted.

    DIR/lock            held by the launcher while a run uses the directory
    DIR/store.json      whose rows are in it: tables, optimizers, seed, servers; and whether they outlive the run
    DIR/server-2/       the files of one server
    DIR/checkpoints/    manifests, with `--protect batch` (checkpoint/epochs.py)

Without checkpoints in it the directory is only room for what does not fit the memory: it is cleared when a run begins,
and when it has ended well. With them nothing is cleared but on the user's word. The rule to keep: all that can be
refused is refused before anything is started, with the arithmetic and with what to do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from regrow.checkpoint.epochs import FOLDER, EpochManifest, find_newest_epochs
from regrow.config import TrainConfig
from regrow.core.job import OptimizerSpec
from regrow.core.layout import Layout
from regrow.data.catalog import table_rows
from regrow.errors import CheckpointError, ConfigError, UserError
from regrow.launch.saving import TieredRows
from regrow.units import MIB, size_text

FORMAT = 1
ORPHANS_SECONDS_MAX = 10.0  # Too small: a run that was killed cannot be resumed at once. Too large: one waits in vain.
LOOK_SECONDS = 0.05
LOCK, STORE = "lock", "store.json"
SERVER = "server-"
NODE = "{node}"  # in the name of a directory: the id of the node that it is on
FLOAT_BYTES = 4
DENSE_ROW_FLOATS = 512  # of a row of dense parameters (nn/dense.py)
DENSE_ROWS_SPARE = 4  # each parameter begins at a multiple of some floats
BLOCK_BYTES = (512, 4096)  # that a disk may have
SEGMENT_BYTES = MIB  # of the log
LOG_SEGMENTS_MIN = 4
FRAME_BYTES_BESIDE = 48  # of a row in the cache, beside its record
RECORD_BYTES_BESIDE = 4  # of a row in a file


class Needs:
    """What the rows of one server need, in a run with this configuration."""

    def __init__(self, config: TrainConfig) -> None:
        model = config.load_model()
        rows = _count_floats(config.optimizer, model.row_floats)
        tables = [(count, rows) for count in table_rows(model)]
        # Dense parameters are a table too; all its rows are in every batch.
        dense_rows = -(-model.count_dense() // DENSE_ROW_FLOATS) + DENSE_ROWS_SPARE
        self._dense = (dense_rows, _count_floats(config.dense_optimizer, DENSE_ROW_FLOATS))
        self._servers = config.servers
        self._cache_bytes = config.cache_bytes
        self._batch = config.batch * (config.workers if config.mode == "sync" else 1)
        self._tables = tables

    def list_tables(self) -> Sequence[tuple[int, int, int]]:
        """Of each table: rows here, rows that one request may name, bytes of a record."""
        found = []
        for index, (rows, floats) in enumerate([*self._tables, self._dense]):
            here = Layout(servers=self._servers, k=1, r=0, rings=1).rows_on(0, rows=rows, table=index) + 1
            at_once = here if index == len(self._tables) else min(here, self._batch)
            found.append((here, at_once, FLOAT_BYTES * floats))
        return found

    @property
    def rows(self) -> int:
        return sum(rows for rows, _, _ in self.list_tables())

    @property
    def rows_at_once(self) -> int:
        return sum(at_once for _, at_once, _ in self.list_tables())

    @property
    def cache_bytes_min(self) -> int:
        """Twice the rows that are needed at once, for each size of rows: those share the cache evenly."""
        return self._share([2 * at_once for _, at_once, _ in self.list_tables()])

    @property
    def cache_bytes_max(self) -> int:
        """For a frame for every row: a larger cache is not used."""
        return sum(rows * (record + FRAME_BYTES_BESIDE) for rows, _, record in self.list_tables())

    def _share(self, wanted: Sequence[int]) -> int:
        """The cache in which each size of rows has room for so many of it. Sizes of which there is little get all they
        need, and the others equal parts of the rest."""
        need: dict[int, int] = {}
        there: dict[int, int] = {}
        for (rows, _, record), count in zip(self.list_tables(), wanted, strict=True):
            need[record] = need.get(record, 0) + min(rows, count) * (record + FRAME_BYTES_BESIDE)
            there[record] = there.get(record, 0) + rows * (record + FRAME_BYTES_BESIDE)
        total = 0
        for place, record in enumerate(sorted(there, key=lambda size: there[size])):
            left = len(there) - place
            total = max(total, sum(sorted(there.values())[:place]) + left * need[record])
        return total

    @property
    def home_bytes(self) -> int:
        """Of all rows in their own places, whatever the blocks of the disk are: no row lies across two of them."""
        return sum(
            max(_count_bytes(rows, record, block) for block in BLOCK_BYTES) for rows, _, record in self.list_tables()
        )

    def count_log_bytes(self, *, least: bool) -> int:
        """Of the log: at least a checkpoint of all that is in the cache, and a few segments. A store that may choose
        takes twice that and more, or as much as the rows take."""
        segments = -(-min(self._cache_bytes, self.cache_bytes_max) // SEGMENT_BYTES) + 2
        if least:
            return (segments + LOG_SEGMENTS_MIN) * SEGMENT_BYTES
        return self.home_bytes + (2 * segments + 8 * LOG_SEGMENTS_MIN) * SEGMENT_BYTES


def _count_bytes(rows: int, record_bytes: int, block_bytes: int) -> int:
    row = record_bytes + RECORD_BYTES_BESIDE
    per_block = block_bytes // row
    bits = rows // 8 + 2 * block_bytes  # which rows are there
    return bits + (-(-rows // per_block) if per_block else rows * -(-row // block_bytes)) * block_bytes


def _count_floats(optimizer: str, dim: int) -> int:
    """Floats of a record, padded as stores do."""
    spec = OptimizerSpec(kind=optimizer, learning_rate=0.0)  # type: ignore[arg-type]
    return -(-(dim + sum(floats for _, floats in spec.state_parts(dim))) // 4) * 4


def check_cache(config: TrainConfig) -> None:
    """Raises ConfigError if a step could need more rows at once than the cache has room for. What a script needs is
    known when it has declared its tables; a server says then what does not fit."""
    if config.script:
        return
    needs = Needs(config)
    least = needs.cache_bytes_min
    if config.cache_bytes >= least:
        return
    who = f"{config.workers} workers x " if config.mode == "sync" and config.workers > 1 else ""
    raise ConfigError(
        "cache_bytes",
        config.cache_bytes,
        f"is too small: {who}{config.batch} samples, and dense parameters, name up to {needs.rows_at_once:,} distinct "
        f"rows of a server at once; twice as many take {size_text(least)}",
        hint=f"--cache-bytes {-(-least // MIB)}M or more, or a smaller --batch",
    )


def check_space(config: TrainConfig, directory: Path, servers: int) -> None:
    """Raises UserError if the files of so many servers cannot grow to what the rows need, as far as that is known."""
    if config.script:
        return
    needs = Needs(config)
    home, log = needs.home_bytes, needs.count_log_bytes(least=True)
    if config.store_bytes_max is not None and config.store_bytes_max < home + log:
        problem = f"the {needs.rows:,} rows of a server need {size_text(home)}, and the log at least {size_text(log)}"
        hint = f"--store-bytes-max {-(-(home + log) // MIB)}M or more, or leave it out"
        raise ConfigError("store_bytes_max", config.store_bytes_max, problem, hint=hint)
    each = config.store_bytes_max or home + needs.count_log_bytes(least=False)
    have = sum(_list_sizes(directory))
    free = shutil.disk_usage(directory).free + have
    if free < servers * each:
        raise UserError(
            f"{directory}: not enough space: {servers} server{'s need' if servers > 1 else ' needs'} {size_text(each)}"
            f"{' each' if servers > 1 else ''}, {size_text(free)} are free",
            hint="another --store-dir, or a lower --rows-max, --cache-bytes or --store-bytes-max",
        )


def _list_sizes(directory: Path) -> Iterator[int]:
    """Bytes on disk of the files that are there: a run may use them again, or clear them away."""
    for path in directory.glob(f"{SERVER}*/*"):
        with contextlib.suppress(OSError):
            yield path.stat().st_blocks * 512


class StoreLock:
    """A directory is used by one at a time. UserError: it is in use."""

    def __init__(self, directory: Path) -> None:
        self._file: int | None = os.open(directory / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            hint = "wait for it, or take another directory"
            raise UserError(f"{directory} is in use by another run", hint=hint) from None
        self._wait_for_servers(directory)

    def _wait_for_servers(self, directory: Path) -> None:
        """Servers of a launcher that was killed end by themselves, a moment later."""
        deadline = time.monotonic() + ORPHANS_SECONDS_MAX
        while held := [path for path in directory.glob(f"{SERVER}*/{LOCK}") if is_locked(path)]:
            if time.monotonic() > deadline:
                self.close()
                hint = "its launcher is gone: end it"
                raise UserError(f"{held[0].parent} is in use by a process of another run", hint=hint)
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> StoreLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RowFiles(Protocol):
    """The files of a run's rows, wherever they are."""

    def clear(self) -> None:
        """What is there is not wanted any more; called before servers begin with new files."""

    def finish(self) -> None:
        """The run has ended well."""

    def close(self) -> None:
        """It has ended, however that was."""


class StoreDir:
    """The directory of one run, locked until it is closed; a `RowFiles`."""

    def __init__(self, config: TrainConfig) -> None:
        assert config.store_dir is not None
        self.path = Path(config.store_dir)
        self._config = config
        self._lock: StoreLock | None = None

    @classmethod
    def open(cls, config: TrainConfig, *, overwrite: bool, servers: int | None = None) -> StoreDir:
        """Looks at everything that could be wrong, and takes the lock. UserError says what to do. `servers`: so many
        have their files here, of those of the run."""
        check_cache(config)
        directory = cls(config)
        try:
            directory.path.mkdir(parents=True, exist_ok=True)
            directory._lock = StoreLock(directory.path)
        except OSError as error:
            problem, hint = f"cannot be used: {error.strerror or error}", "a directory in which files can be made"
            raise ConfigError("store_dir", config.store_dir, problem, hint=hint) from None
        try:
            directory._check_contents(overwrite=overwrite)
            check_space(config, directory.path, config.servers if servers is None else servers)
            if config.resume is None or not holds_epochs(config.resume, config):
                directory.clear()
            directory._write_identity()
        except BaseException:
            directory.close()
            raise
        return directory

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _check_contents(self, *, overwrite: bool) -> None:
        """Files of others are not touched, and checkpoints only on the user's word."""
        known = (LOCK, STORE, FOLDER)
        strange = [p.name for p in self.path.iterdir() if p.name not in known and not p.name.startswith(SERVER)]
        there = read_identity(self.path)
        if there is None and (strange or any(self.path.glob(f"{SERVER}*"))):
            some = ", ".join(sorted(strange)[:3]) or f"{SERVER}*"
            raise UserError(f"{self.path} has other files in it ({some})", hint="an empty or new --store-dir")
        if there is None or not there.get("has_checkpoints"):
            return
        resumes = self._config.resume is not None and holds_epochs(self._config.resume, self._config)
        if resumes:
            self._check_identity(there)
        elif not overwrite:
            hint = f"--resume {self.path} goes on with it; --overwrite deletes it; or another --store-dir"
            raise UserError(f"{self.path} has a checkpoint of a run in it", hint=hint)

    def _check_identity(self, there: dict[str, Any]) -> None:
        if there.get("format") != FORMAT:
            raise UserError(
                f"{self.path} is of format {there.get('format')}, this Regrow reads format {FORMAT}",
                hint="use the Regrow it was made with, or another --store-dir",
            )
        here = make_identity(self._config)
        for name, value in here.items():
            before = there.get("job", {}).get(name)
            if before == value:
                continue
            hint = "the same options as then, or another --store-dir"
            if name == "servers":
                hint = f"`regrow ckpt restore {self.path} --to URL`, then --resume URL with another --store-dir"
            told = "other tables" if name == "rows" else f"{name} {before}"
            raise UserError(f"{self.path} was made with {told}; this run has {describe(name, value)}", hint=hint)

    def _write_identity(self) -> None:
        content = {
            "format": FORMAT,
            "has_checkpoints": self._config.saves_epochs,
            "job": make_identity(self._config),
        }
        temporary = self.path / f"{STORE}.new"
        with temporary.open("w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.path / STORE)

    def clear(self) -> None:
        """The rows and checkpoints in it are not wanted any more: nobody may use them now."""
        remove_all([self.path / FOLDER, *self.path.glob(f"{SERVER}*")])

    def finish(self) -> None:
        """The run has ended well. What only it could use takes space."""
        if not self._config.saves_epochs:
            remove_all([*self.path.glob(f"{SERVER}*"), self.path / STORE])


def is_locked(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def remove_all(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def describe(name: str, value: Any) -> str:
    return "those of its model" if name == "rows" else f"{name} {value}"


def make_identity(config: TrainConfig) -> dict[str, Any]:
    """What must be the same for rows in files to be rows of this run. Servers compare the tables of a script."""
    if config.script:
        return {"servers": config.servers, "seed": config.seed}
    model = config.load_model()
    return {
        "servers": config.servers,
        "seed": config.seed,
        "optimizer": config.optimizer,
        "learning_rate": config.learning_rate,
        "dense_optimizer": config.dense_optimizer,
        "dense_learning_rate": config.dense_learning_rate,
        "dim": model.row_floats,
        "rows": list(table_rows(model)),
        "dense_parameters": model.count_dense(),
    }


def read_identity(directory: Path) -> dict[str, Any] | None:
    """What store.json says; None: there is none. UserError if it cannot be read."""
    try:
        found = json.loads((directory / STORE).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{directory / STORE} cannot be read: {error}", hint="another --store-dir") from None
    return found if isinstance(found, dict) else {}


def holds_epochs(resume: str, config: TrainConfig | None = None) -> bool:
    """Whether this names a directory of rows on disk. UserError if it is that of another run than `config`'s."""
    directory = Path(resume)
    if not (directory / STORE).exists():
        return False
    if config is not None and (config.store_dir is None or not same(directory, Path(config.store_dir))):
        hint = f"--store tiered --store-dir {resume}; or `regrow ckpt restore {resume} --to URL` and --resume URL"
        raise UserError(f"{resume} has rows on disk, which only a run in that directory can go on with", hint=hint)
    if config is not None and not config.saves_epochs:
        hint = "--protect batch; or `regrow ckpt restore` makes an ordinary checkpoint of it"
        raise UserError(f"{resume} has checkpoints in its files", hint=hint)
    return True


def same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()


def find_epochs(directory: str) -> EpochManifest:
    """The newest checkpoint of such a directory; UserError or CheckpointError if there is none."""
    found = find_newest_epochs(directory)
    if found is None:
        raise UserError(f"{directory}: there is no checkpoint", hint="it is made by --protect batch")
    if found.job.servers != len(found.epochs):
        raise CheckpointError(f"{directory}: the newest checkpoint names {len(found.epochs)} servers")
    return found


def plan_tiers(config: TrainConfig) -> TieredRows | None:
    """What servers are told. On a cluster each node puts its id into the directory (`name_directory`), and what a link
    means is its own business."""
    if config.store != "tiered":
        return None
    assert config.store_dir is not None
    directory = Path(config.store_dir)
    return TieredRows(
        directory=str(directory.resolve() if config.cluster == "local" else directory.absolute()),
        temporary=not config.saves_epochs,
        cache_bytes=config.cache_bytes,
        io=config.store_io,
        threads=config.store_threads,
        bytes_max=config.store_bytes_max,
        policy=config.cache_policy,
    )


def name_directory(directory: str, node: str) -> str:
    """Of one node, where `{node}` is in the name: for nodes that share a file system."""
    return directory.replace(NODE, node)


def check_empty(directory: Path) -> None:
    """Makes a directory, if it is not there; UserError if something is in it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        found = next(directory.iterdir(), None)
    except OSError as error:
        raise UserError(f"{directory} cannot be used: {error.strerror or error}") from None
    if found is not None:
        raise UserError(f"{directory} has files in it ({found.name})", hint="an empty or new directory")
