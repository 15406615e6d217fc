"""How rows are protected, and what is done to a run on purpose: two parts of a configuration with forms of their own.

They check themselves when they are made, so that a script with a `LocalCluster` and the command line say the same about
the same mistake. The checks of single values, which `config.py` uses too, are here as well.
"""

from __future__ import annotations

import difflib
import re
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from regrow.errors import ConfigError
from regrow.fields import parse_field
from regrow.units import GIB, KIB, MIB, parse_interval, parse_seconds

COMMITS = ("exactly-once", "2pc", "none")
AUTO = "auto"  # an interval: as the planner says
PRIORITIES = ("none", "scar", "mfu", "ssu")
SERVERS_MAX = 1024
RANDOM_ROLES = ("server", "worker", "coordinator", "spare")  # a spare has no number that a user could name
MTBF_SHAPE_MIN, MTBF_SHAPE_MAX = 0.1, 100.0  # below: half of all gaps are under a hundredth of the mean; above: a clock
K_DEFAULT, R_DEFAULT, R_MAX = 4, 1, 16
FLUSH_PUSHES_DEFAULT = 16
FLUSH_BYTES_DEFAULT = 32 * MIB

# A field that `__post_init__` fills in: never None for a reader, so its type does not say so.
DERIVED = cast(Any, None)

# Name, least and most of the numbers of an erasure code.
CODE_RANGES = (
    ("k", 1, SERVERS_MAX),
    ("r", 1, R_MAX),
    ("rings", 1, SERVERS_MAX),
    ("flush_pushes", 1, 1 << 20),
    ("flush_bytes", 4 * KIB, 64 * GIB),
    ("sweep_bytes_per_s", 0, 1 << 40),
    ("recovery_seconds_max", 1, 86_400),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureCode:
    """Protection of rows by r parities for every k of them; see the fields of the same names in
    `TrainConfig`."""

    k: int = K_DEFAULT
    r: int = R_DEFAULT
    rings: int = 1
    flush_pushes: int = DERIVED  # 16; with commit "2pc" always 1
    flush_bytes: int = FLUSH_BYTES_DEFAULT
    commit: str = "exactly-once"
    sweep_bytes_per_s: int = 0
    recovery_cost: float = 0.0
    recovery_seconds_max: int = 60

    def __post_init__(self) -> None:
        if cast(Any, self.flush_pushes) is None:
            object.__setattr__(self, "flush_pushes", flush_pushes_default(self.commit))
        for name, low, high in CODE_RANGES:
            check_range(self, name, low, high)
        check_choice(self, "commit", COMMITS)
        if self.commit == "2pc" and self.flush_pushes != 1:
            hint = "leave flush_pushes out, or set it to 1"
            raise ConfigError("flush_pushes", self.flush_pushes, 'commit "2pc" stages every push', hint=hint)

    @property
    def copies(self) -> int:
        """Of dense parameters, besides the first: as many servers may be lost together before all is."""
        return self.r

    def check(self, *, servers: int, mode: str) -> None:
        """Raises ConfigError where this code does not fit the cluster, with the arithmetic."""
        if servers % self.rings:
            raise ConfigError("rings", self.rings, f"{servers} servers cannot be divided so")
        if mode == "sync" and self.commit != "exactly-once":
            raise ConfigError("commit", self.commit, 'mode "sync" always commits exactly once')
        ring = servers // self.rings
        if self.k + self.r <= ring:
            return
        rings = f"{self.rings} ring{'s' if self.rings > 1 else ''}"
        raise ConfigError(
            "k",
            self.k,
            f"k + r = {self.k + self.r} members need as many servers in a ring; {servers} servers in {rings}",
            hint=f"k = {ring - self.r} fits" if ring > self.r else f"r = {self.r} needs more servers",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRecovery:
    """Protection of dense parameters by r copies; other rows come back as their server saved them last. See the fields
    of the same names in `TrainConfig`."""

    r: int = R_DEFAULT
    flush_pushes: int = FLUSH_PUSHES_DEFAULT
    flush_bytes: int = FLUSH_BYTES_DEFAULT
    commit: str = "exactly-once"
    sweep_bytes_per_s: int = 0
    recovery_cost: float = 0.0
    recovery_seconds_max: int = 60

    @property
    def copies(self) -> int:
        return self.r

    def check(self, *, servers: int, mode: str) -> None:
        """Raises ConfigError where this does not fit the cluster."""
        if self.commit != "exactly-once":
            raise ConfigError("commit", self.commit, 'protection "partial" always commits exactly once')
        if servers <= self.r:
            hint = f"{self.r + 1} servers, or r = {servers - 1}" if servers > 1 else "2 servers"
            raise ConfigError("r", self.r, f"so many copies need more than {servers} servers", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedRecovery(ErasureCode):
    """Protection by parities, and where more than r servers of a stripe are lost, as their servers saved them last;
    dense parameters have one copy more than rows have parities."""

    @property
    def copies(self) -> int:
        return self.r + 1

    def check(self, *, servers: int, mode: str) -> None:
        if self.commit != "exactly-once":
            raise ConfigError("commit", self.commit, 'protection "ec+partial" always commits exactly once')
        # Not super(): a dataclass with slots is another class than the one that this function was made for.
        ErasureCode.check(self, servers=servers, mode=mode)
        ring = servers // self.rings
        if ring <= self.copies:
            what = (
                f"r + 1 = {self.copies} copies of dense parameters need {self.copies + 1} servers in a ring, not {ring}"
            )
            raise ConfigError("r", self.r, what, hint="more servers, fewer rings, or a smaller r")


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial(PartialRecovery):
    """Partial recovery for a script's own cluster: each server saves its rows by itself, and one that is lost goes back
    alone to what it saved last. Nothing else goes back; what came since is lost.

    `ckpt` is a directory or a URL for saves; a cluster in one process keeps them in memory and needs none. `every` is a
    time ("30s") or a number of pushes of a worker ("100steps"). With a `priority` a save has at most `priority_share`
    of the rows of `priority_tables`, and is made so much more often.
    """

    ckpt: str | None = None
    every: str = "60s"
    priority: str = "none"
    priority_share: float = 0.125
    priority_tables: tuple[str, ...] = ()
    ssu_period: int = 2

    def __post_init__(self) -> None:
        check_choice(self, "priority", PRIORITIES)
        try:
            parse_interval(self.every)
        except ValueError as error:
            raise ConfigError("every", self.every, str(error)) from None
        if not 0.0 < self.priority_share <= 1.0:
            raise ConfigError("priority_share", self.priority_share, "must be above 0 and at most 1")
        if self.ssu_period < 1:
            raise ConfigError("ssu_period", self.ssu_period, "must be at least 1")
        if (self.priority == "none") != (not self.priority_tables):
            hint = 'both or neither: priority="ssu", priority_tables=("users",)'
            raise ConfigError("priority_tables", self.priority_tables, "they go with a priority", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sabotage:
    """Something that is done to a process when the furthest worker has made `step` steps."""

    role: str
    id: int
    step: int
    pause_seconds: float | None = None  # None: it is killed


def flush_pushes_default(commit: str) -> int:
    return 1 if commit == "2pc" else FLUSH_PUSHES_DEFAULT


SABOTAGE_FORMS = {"kill": "server:2@step:100", "pause": "server:1@step:80:5s"}


def parse_sabotage(option: str, text: str) -> Sabotage:
    """A sabotage from its form on the command line; the coordinator needs no number."""
    length = r":(\d[\w.]*[a-z])" if option == "pause" else "()"
    match = re.fullmatch(rf"(server|worker|coordinator)(?::(\d{{1,6}}))?@step:(\d{{1,15}}){length}", text)
    try:
        pause_seconds = parse_seconds(match[4]) if match is not None and match[4] else None
    except ValueError:
        match = None
    if match is None or (match[2] is None and match[1] != "coordinator"):
        hint = "for a server, a worker (with their numbers) or the coordinator (without)"
        raise ConfigError(option, text, f"must be like {SABOTAGE_FORMS[option]}", hint=hint)
    return Sabotage(role=match[1], id=int(match[2] or 0), step=int(match[3]), pause_seconds=pause_seconds)


def check_sabotage(config: Any) -> None:
    """What goes wrong on purpose can be done, and random failures can be survived where several come at once."""
    counts = {"server": config.servers, "worker": config.workers, "coordinator": 1}
    for option in ("kill", "pause"):
        for text in getattr(config, option):
            sabotage = parse_sabotage(option, text)
            if sabotage.id >= counts[sabotage.role]:
                raise ConfigError(
                    option, text, f"there is no {sabotage.role} {sabotage.id}, only {counts[sabotage.role]}"
                )
            if sabotage.step < 1 or (config.steps is not None and sabotage.step > config.steps):
                raise ConfigError(option, text, f"steps are 1 to {config.steps or 'the end of the data'}")
    # Written so that NaN fails too.
    if config.mtbf is not None and not 0.1 <= config.mtbf <= 1e9:
        raise ConfigError("mtbf", config.mtbf, "must be between 0.1 and 10**9 seconds")
    if not MTBF_SHAPE_MIN <= config.mtbf_shape <= MTBF_SHAPE_MAX:
        raise ConfigError("mtbf_shape", config.mtbf_shape, f"must be between {MTBF_SHAPE_MIN:g} and {MTBF_SHAPE_MAX:g}")
    check_range(config, "mtbf_kill", 1, config.servers)
    if config.mtbf is not None and config.mtbf_kill > 1:
        _check_killed_together(config)
    if not set(config.mtbf_roles.split(",")) <= set(RANDOM_ROLES):
        raise ConfigError("mtbf_roles", config.mtbf_roles, f"must be some of {', '.join(RANDOM_ROLES)}, with commas")
    if not 0.0 <= config.mtbf_hangs <= 1.0:
        raise ConfigError("mtbf_hangs", config.mtbf_hangs, "must be between 0 and 1")


def _check_killed_together(config: Any) -> None:
    """Chance may do no more than what the run comes back from, by parities or by a checkpoint."""
    kill = config.mtbf_kill
    if "server" not in config.mtbf_roles.split(","):
        raise ConfigError("mtbf_kill", kill, "only servers die together", hint='add "server" to mtbf_roles')
    survived = 0 if config.code is None else config.code.copies
    if kill > survived and not config.saves:
        what = f'protection "{config.protection}" survives the loss of {survived} together'
        hint = f'protect "ec" with r = {kill} or more, or with checkpoints: "ec+delta", "delta" or "full"'
        raise ConfigError("mtbf_kill", kill, what, hint=hint)


def check_choice(config: Any, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in choices:
        known = ", ".join(choices)
        raise ConfigError(name, value, f"must be one of: {known}", hint=nearest(value, choices, quiet=True))


def check_range(config: Any, name: str, low: int, high: int) -> None:
    value = getattr(config, name)
    if value is None or low <= value <= high:
        return
    bound = f"at least {low}" if value < low else f"at most {high}"
    raise ConfigError(name, value, f"must be {bound}")


def nearest(name: str, known: typing.Iterable[str], *, quiet: bool = False) -> str | None:
    """A hint for a mistyped name; when nothing is near, all names, unless `quiet` (the caller lists them)."""
    known = list(known)
    matches = difflib.get_close_matches(name.replace("-", "_"), known, n=1)
    if matches:
        return f"did you mean {matches[0]!r}?"
    return None if quiet else f"known are: {', '.join(known)}"


def check_checkpoints(config: Any) -> None:
    if config.every == AUTO and not config.saves_own:
        raise ConfigError(
            "every", config.every, 'goes with protection "partial" or "ec+partial" only', hint="60s, or 500steps"
        )
    if config.every != AUTO:
        parse_field(config, "every", parse_interval)
    check_range(config, "full_every", 1, 1 << 20)
    check_range(config, "ckpt_bytes_per_s", 1, 1 << 40)
    check_range(config, "ckpt_keep_last", 1, 1 << 20)
    check_choice(config, "ckpt_encoding", ("raw", "zstd"))
    if config.ckpt_bits not in (32, 8, 4):
        raise ConfigError("ckpt_bits", config.ckpt_bits, "is not 32, 8 or 4")
    if config.saves and config.ckpt is None and not config.saves_epochs:
        hint = "--ckpt DIRECTORY, or a URL such as s3://bucket/run"
        raise ConfigError("protection", config.protection, "needs a place for checkpoints", hint=hint)
    if config.ckpt is not None and config.saves_epochs:
        hint = "leave ckpt out; `regrow ckpt restore DIR --to URL` makes a checkpoint elsewhere of it"
        raise ConfigError("ckpt", config.ckpt, 'protection "batch" keeps checkpoints in store_dir', hint=hint)
    if config.ckpt is not None and not config.saves:
        hint = 'protect "full", "delta", "ec+delta", "partial" or "ec+partial"'
        raise ConfigError("ckpt", config.ckpt, f'protection "{config.protection}" makes no checkpoints', hint=hint)


def check_publications(config: Any) -> None:
    """Where weights are published is nobody else's place."""
    if config.publish_bits not in (32, 8, 4):
        raise ConfigError("publish_bits", config.publish_bits, "is not 32, 8 or 4")
    interval = parse_field(config, "publish_every", parse_interval)
    if config.publish is None:
        for name in ("publish_every", "publish_bits"):
            default = type(config).__dataclass_fields__[name].default
            if getattr(config, name) != default:
                raise ConfigError(name, getattr(config, name), "goes with publish", hint="--publish URL")
        return
    if not any(interval):
        raise ConfigError("publish_every", config.publish_every, "must be above 0", hint="30s, or 500steps")
    for name in ("ckpt", "store_dir"):
        other = getattr(config, name)
        if other is not None and _is_within(config.publish, other):
            hint = "give publications a place of their own: another run's look-ups must not find checkpoints there"
            raise ConfigError("publish", config.publish, f"is inside {name} = {other!r}, or around it", hint=hint)


def _is_within(one: str, other: str) -> bool:
    """Whether one of two places is in the other, or both are the same."""
    first, second = (url.rstrip("/") if "://" in url else str(Path(url).expanduser().resolve()) for url in (one, other))
    first, second = first.removeprefix("file://"), second.removeprefix("file://")
    return f"{first}/".startswith(f"{second}/") or f"{second}/".startswith(f"{first}/")


def check_partial(config: Any) -> None:
    """Numbers must be sane always; that they are asked for without partial recovery is a mistake too."""
    # Written so that NaN fails too.
    if not 0.0 < config.target_pls <= 1.0:
        hint = "0.1: a tenth of the training may be lost, expected over the whole run"
        raise ConfigError("target_pls", config.target_pls, "must be above 0 and at most 1", hint=hint)
    if not 0.0 < config.priority_share <= 1.0:
        hint = "0.125: an eighth of the rows, eight times as often"
        raise ConfigError("priority_share", config.priority_share, "must be above 0 and at most 1", hint=hint)
    check_choice(config, "priority", PRIORITIES)
    check_range(config, "ssu_period", 1, 1 << 20)
    if config.expect_mtbf is not None and not parse_field(config, "expect_mtbf", parse_seconds) > 0.0:
        raise ConfigError("expect_mtbf", config.expect_mtbf, "must be above 0", hint="14h, or 30m")
    if config.saves_own:
        _check_priority_tables(config)
        if config.rings != 1 and config.protection == "partial":
            raise ConfigError("rings", config.rings, 'protection "partial" has one', hint="leave it out")
        return
    for name in ("target_pls", "priority", "priority_share", "priority_tables", "ssu_period", "expect_mtbf"):
        default = type(config).__dataclass_fields__[name].default
        if getattr(config, name) != default:
            problem = f'protection "{config.protection}" does not use it'
            raise ConfigError(name, getattr(config, name), problem, hint='protect "partial" or "ec+partial"')


def _check_priority_tables(config: Any) -> None:
    if config.priority_tables in ("all", "largest") or config.script:  # whose tables are not known yet
        return
    known = [f"t_cat_{index}" for index in range(config.load_model().tables)]
    for name in config.priority_tables.split(","):
        if name.strip() not in known:
            hint = nearest(name.strip(), ["all", "largest", *known])
            raise ConfigError("priority_tables", config.priority_tables, f"there is no table {name!r}", hint=hint)
