"""Rows on disk with a cache in memory, as a part of a configuration: what goes together, and how much of it is needed.

Only numbers and words are looked at here; files, and what is in them, in `launch/tiers.py`. The rule to keep: whatever
can be refused before anything is started is refused, with the arithmetic.
"""

from __future__ import annotations

from typing import Any

from regrow.errors import ConfigError
from regrow.protection import check_choice, check_range
from regrow.units import GIB, KIB, Interval

STORES = ("memory", "tiered")
STORE_IO = ("auto", "direct", "mmap", "threads")
CACHE_POLICIES = ("lru", "none", "self")
CACHE_BYTES_DEFAULT = GIB
CACHE_BYTES_MIN = 64 * KIB
THREADS_MAX = 256
TIERED_PROTECTIONS = ("none", "full", "delta", "batch")
# Rows of a checkpoint are written within a part of the time between two, so that the next one finds the disk free.
FLUSH_SECONDS_MAX, FLUSH_SHARE = 10.0, 0.5
FLUSH_SECONDS_OF_STEPS = 2.0  # where checkpoints are counted in steps, nobody knows how long that is


def check_store(config: Any) -> None:
    """Raises ConfigError for options of rows on disk that cannot be, or that nobody would look at."""
    check_choice(config, "store", STORES)
    check_choice(config, "store_io", STORE_IO)
    check_choice(config, "cache_policy", CACHE_POLICIES)
    check_range(config, "cache_bytes", CACHE_BYTES_MIN, 1 << 50)
    check_range(config, "store_threads", 1, THREADS_MAX)
    check_range(config, "store_bytes_max", CACHE_BYTES_MIN, 1 << 50)
    if config.store == "memory":
        _check_unused(config)
        return
    if config.store_dir is None:
        raise ConfigError("store", config.store, "needs a directory for its files", hint="--store-dir DIR")
    if config.protection not in TIERED_PROTECTIONS:
        problem = 'parities and copies of rows are in memory only; protection "{}" does not go with rows on disk'
        hint = f"protect {', '.join(TIERED_PROTECTIONS[:-1])} or {TIERED_PROTECTIONS[-1]}"
        if config.protection.startswith("ec"):  # docs/tiered-use.md, "Parities on disk"
            hint += "; parities on the disk would need more than twice the reads"
        raise ConfigError("store", config.store, problem.format(config.protection), hint=hint)


def _check_unused(config: Any) -> None:
    if config.protection == "batch":
        hint = '--store tiered --store-dir DIR, or protect "full" or "delta" with --ckpt'
        raise ConfigError("protection", "batch", "keeps checkpoints in the files of tiered rows", hint=hint)
    for name in ("store_dir", "cache_bytes", "store_io", "store_threads", "store_bytes_max", "cache_policy"):
        value, default = getattr(config, name), type(config).__dataclass_fields__[name].default
        if value != default:
            raise ConfigError(name, value, 'store "memory" does not use it', hint="--store tiered")


def choose_flush_seconds(interval: Interval) -> float:
    """How long the rows of a checkpoint may take to be written, by the time between two."""
    seconds, _ = interval
    return FLUSH_SECONDS_OF_STEPS if seconds is None else min(FLUSH_SECONDS_MAX, FLUSH_SHARE * seconds)
