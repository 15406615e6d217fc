"""How a run with partial recovery saves: how often, which rows first, and whether full recovery would be cheaper.

What the formulas need (`planner/`) is partly known only once the run has shown it: what a save and a load take, how
long it takes until a successor is there. Until then it is guessed from the bytes of the model. The choice is made
before anything starts, and its sentence is shown; a user who names an interval has chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from regrow.config import TrainConfig
from regrow.data.catalog import table_rows
from regrow.errors import ConfigError
from regrow.launch import memory
from regrow.launch.orders import OwnSaving
from regrow.planner.measured import choose_fail_time
from regrow.planner.overhead import Costs, interval_full
from regrow.planner.partial import Plan, Request, decide, plan_partial
from regrow.units import parse_seconds, span_text

# Guesses for what nobody has measured yet. Storage that is faster or slower is seen when it is used.
STORE_BYTES_PER_S = 200e6
LOAD_BYTES_PER_S = 400e6
RESCHEDULE_SECONDS = 0.5  # a spare takes the place
HOLD_SHARE = 0.1  # of the time a save takes: training goes on beside it, on the same processors
WORK_SECONDS_UNKNOWN = 56 * 3600.0  # of a run whose end nobody knows: the job of the published figures
LARGEST_SHARE = 0.99  # of all rows, in the tables that count as the largest


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialPlan:
    """What was decided before a run, and why."""

    config: TrainConfig  # with another protection, if that is cheaper
    own: OwnSaving | None  # None: full recovery is
    cut_seconds: float | None  # between checkpoints of all servers, for the day that everybody has to go back
    reason: str
    numbers: dict[str, Any]


def plan(config: TrainConfig, *, work_seconds: float | None = None) -> PartialPlan:
    """Raises ConfigError for an interval in which no save can end."""
    costs = guess_costs(config)
    fail = choose_fail_time(
        expected_seconds=None if config.expect_mtbf is None else parse_seconds(config.expect_mtbf),
        mtbf_seconds=config.mtbf,
        failures=0,
        elapsed_seconds=0.0,
    )
    request = Request(
        target_pls=config.target_pls,
        servers=config.servers,
        lost_together=min(config.mtbf_kill, config.servers),
        work_seconds=work_seconds or WORK_SECONDS_UNKNOWN,
        fail_seconds=fail.seconds,
        fail_reason=fail.reason,
    )
    decided = decide(request, costs=costs)
    cut_seconds = interval_full(costs=costs, fail_seconds=fail.seconds)
    given = config.interval
    if given.steps is not None:
        reason = f"partial: every {given.steps} steps, as asked for"
        return _make(config, decided, reason, steps=given.steps, cut_seconds=cut_seconds)
    if given.seconds is not None:
        way = plan_partial(request, costs=costs, interval_seconds=given.seconds)
        reason = f"partial: every {span_text(given.seconds)}, as asked for; PLS {way.pls:.3g} is to be expected"
        return _make(config, decided, reason, seconds=given.seconds, cut_seconds=cut_seconds)
    if decided.decision == "full":
        every = f"{max(1.0, decided.full.interval_seconds):g}s"
        changes = {name: getattr(TrainConfig, name) for name in ("target_pls", "priority", "priority_share")}
        changes |= {name: getattr(TrainConfig, name) for name in ("priority_tables", "ssu_period", "expect_mtbf")}
        full = config.replace(protection="delta", every=every, **changes)
        return PartialPlan(config=full, own=None, cut_seconds=None, reason=decided.reason, numbers=decided.to_dict())
    seconds = decided.partial.interval_seconds
    return _make(config, decided, decided.reason, seconds=seconds, cut_seconds=cut_seconds)


def _make(
    config: TrainConfig,
    decided: Plan,
    reason: str,
    *,
    seconds: float | None = None,
    steps: int | None = None,
    cut_seconds: float,
) -> PartialPlan:
    share = 1.0 if config.priority == "none" else config.priority_share
    least = guess_costs(config).save_takes_seconds or 0.0
    if seconds is not None and config.every != "auto" and seconds * share < least * share:
        problem = f"a save takes about {span_text(round(least, 3))}, so none would end within it"
        raise ConfigError("every", config.every, problem, hint=f"{span_text(round(2 * least, 1))} or more")
    own = OwnSaving(
        every_seconds=None if seconds is None else seconds * share,
        every_steps=None if steps is None else max(1, round(steps * share)),
        priority=config.priority,
        share=share,
        tables=choose_tables(config),
        period=config.ssu_period,
        seed=config.seed,
    )
    return PartialPlan(config=config, own=own, cut_seconds=cut_seconds, reason=reason, numbers=decided.to_dict())


def guess_costs(config: TrainConfig) -> Costs:
    """What a save and a load take, from the bytes of one server: all save and load at the same time, each its own."""
    tables = memory.estimate_need(config, config.load_model()).tables
    per_server = tables / config.servers
    takes = per_server / STORE_BYTES_PER_S
    return Costs(
        save_seconds=max(1e-3, HOLD_SHARE * takes),
        save_takes_seconds=max(1e-3, takes),
        load_seconds=per_server / LOAD_BYTES_PER_S,
        reschedule_seconds=RESCHEDULE_SECONDS,
    )


def choose_tables(config: TrainConfig) -> tuple[str, ...]:
    """The tables whose rows have priorities: all, those named, or the largest."""
    rows = table_rows(config.load_model())
    names = [f"t_cat_{index}" for index in range(len(rows))]
    if config.priority_tables == "all":
        return tuple(names)
    if config.priority_tables != "largest":
        return tuple(name.strip() for name in config.priority_tables.split(","))
    return tuple(names[index] for index in find_largest(rows))


def find_largest(rows: Sequence[int]) -> list[int]:
    """The fewest tables that hold LARGEST_SHARE of all rows, by their numbers."""
    order = sorted(range(len(rows)), key=lambda index: (-rows[index], index))
    found: list[int] = []
    held = 0
    for index in order:
        if held >= LARGEST_SHARE * sum(rows):
            break
        found.append(index)
        held += rows[index]
    return sorted(found)
