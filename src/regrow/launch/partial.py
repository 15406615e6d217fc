"""How a run with partial recovery saves: how often, which rows first, and whether full recovery would be cheaper.

What the formulas need (`planner/`) is partly known only once the run has shown it: what a save and a load take, how
long it takes until a successor is there. Until then it is guessed from the bytes of the model. The choice is made
before anything starts, and its sentence is shown; it is made again when the run has shown something else. A user who
names an interval has chosen.

The tables of a script are declared with its first step. Until the servers have them they count as nothing, which makes
partial recovery cheap: a run with a script begins with it, and full recovery is prepared for, if that is what the sizes
say (`note_tables`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from regrow.config import TrainConfig
from regrow.errors import ConfigError
from regrow.launch import memory
from regrow.launch.saving import OwnSaving
from regrow.planner.measured import Basis, FailTime, Measured, choose_fail_time
from regrow.planner.overhead import Costs, interval_full
from regrow.planner.partial import Plan, Request, decide, plan_partial
from regrow.protection import AUTO
from regrow.units import parse_seconds, span_text

# Guesses for what nobody has measured yet. Storage that is faster or slower is seen when it is used.
STORE_BYTES_PER_S = 200e6
LOAD_BYTES_PER_S = 400e6
RESCHEDULE_SECONDS = 0.5  # a spare takes the place
HOLD_SHARE = 0.1  # of the time a save takes: training goes on beside it, on the same processors
WORK_SECONDS_UNKNOWN = 56 * 3600.0  # of a run whose end nobody knows: the job of the published figures


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialPlan:
    """What was decided before a run, and why."""

    config: TrainConfig  # with another protection, if that is cheaper
    own: OwnSaving | None  # None: full recovery is
    cut_seconds: float | None  # between checkpoints of all servers, for the day that everybody has to go back
    reason: str
    numbers: dict[str, Any]
    pls: float | None = None  # of the whole run, to be expected; None: nobody can tell, or there is none
    full: TrainConfig | None = None  # what everybody goes back with after the next loss, if that is cheaper by now


class Planner:
    """Chooses before a run, and again when what it was chosen from has changed by more than a fifth."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self._measured = Measured()
        self.lacks_sizes = bool(config.script)  # until its tables are declared
        self._guess = make_costs(0.0 if self.lacks_sizes else estimate_bytes(config), servers=config.servers)
        self._basis: Basis | None = None
        self._share = 1.0 if config.priority == "none" else config.priority_share

    @property
    def killed_together_min(self) -> int:
        """A failure costs something only if it takes so many servers: with parities, more than they bring back."""
        return self.config.r + 1 if self.config.protection == "ec+partial" else 1

    def plan(
        self,
        *,
        failures: int = 0,
        elapsed_seconds: float = 0.0,
        work_seconds: float | None = None,
        running: bool = False,
    ) -> PartialPlan:
        """Raises ConfigError for an interval in which no save can end. A run that is `running` keeps its protection
        until a server is lost, and prepares for the other one."""
        config = self.config
        fail = self._find_fail_time(failures, elapsed_seconds)
        costs = self._measured.fill(self._guess)
        self._basis = Basis(costs=costs, fail_seconds=fail.seconds)
        request = Request(
            target_pls=config.target_pls,
            servers=config.servers,
            lost_together=min(max(config.mtbf_kill, self.killed_together_min), config.servers),
            work_seconds=work_seconds or WORK_SECONDS_UNKNOWN,
            fail_seconds=fail.seconds,
            fail_reason=fail.reason,
        )
        # Checkpoints of all servers are made as often as whole saves, and cost as much: both are counted.
        decided = decide(request, costs=replace(costs, save_seconds=2 * costs.save_seconds), costs_full=costs)
        cut_seconds = max(interval_full(costs=costs, fail_seconds=fail.seconds), decided.partial.interval_seconds)
        if config.every != AUTO:
            return self._plan_given(decided, request, costs, cut_seconds)
        if decided.decision == "full" and not running:
            return PartialPlan(
                config=make_full(config, decided.full.interval_seconds),
                own=None,
                cut_seconds=None,
                reason=decided.reason,
                numbers=decided.to_dict(),
            )
        own = self._save_every(seconds=decided.partial.interval_seconds)
        full = make_full(config, decided.full.interval_seconds) if decided.decision == "full" else None
        reason = decided.reason + ("; the next loss of a server takes everybody back" if full is not None else "")
        reason += "; how large the tables are is not known yet" if self.lacks_sizes else ""
        return PartialPlan(
            config=config,
            own=own,
            cut_seconds=cut_seconds,
            reason=reason,
            numbers=decided.to_dict(),
            pls=decided.partial.pls,
            full=full,
        )

    def _plan_given(self, decided: Plan, request: Request, costs: Costs, cut_seconds: float) -> PartialPlan:
        """The user has chosen; what is to be expected of that is said."""
        self._check_given(costs)
        given, pls = self.config.interval, None
        if given.seconds is None:
            reason = f"partial: every {given.steps} steps, as asked for"
        else:
            way = plan_partial(request, costs=costs, interval_seconds=given.seconds)
            pls = way.pls
            reason = f"partial: every {span_text(given.seconds)}, as asked for; PLS {way.pls:.3g} is to be expected"
        if self._share < 1.0:
            reason += f" ({self._share:g} of the rows, {1 / self._share:.3g} times as often)"
        own = self._save_every(seconds=given.seconds, steps=given.steps)
        cut_seconds = max(cut_seconds, given.seconds or 0.0)
        return PartialPlan(
            config=self.config, own=own, cut_seconds=cut_seconds, reason=reason, numbers=decided.to_dict(), pls=pls
        )

    def _check_given(self, costs: Costs) -> None:
        given, least = self.config.interval, costs.interval_seconds_min
        if given.seconds is not None and given.seconds < least:
            problem = f"a save takes about {span_text(round(least, 3))}, so none would end within it"
            raise ConfigError("every", self.config.every, problem, hint=f"{span_text(round(2 * least, 1))} or more")

    def _save_every(self, *, seconds: float | None = None, steps: int | None = None) -> OwnSaving:
        """With priorities a share of the rows is saved, so much more often."""
        config = self.config
        return OwnSaving(
            every_seconds=None if seconds is None else seconds * self._share,
            every_steps=None if steps is None else max(1, round(steps * self._share)),
            priority=config.priority,
            share=self._share,
            choice=wish if (wish := config.priority_tables) in ("all", "largest") else "named",  # type: ignore[arg-type]
            tables=() if wish in ("all", "largest") else tuple(name.strip() for name in wish.split(",")),
            period=config.ssu_period,
            seed=config.seed,
        )

    def _find_fail_time(self, failures: int, elapsed_seconds: float) -> FailTime:
        config = self.config
        return choose_fail_time(
            expected_seconds=None if config.expect_mtbf is None else parse_seconds(config.expect_mtbf),
            mtbf_seconds=config.mtbf,
            failures=failures,
            elapsed_seconds=elapsed_seconds,
        )

    # -- while it runs ---------------------------------------------------------------------------------------

    def note_tables(self, size: int) -> None:
        """A script has declared its tables: so many bytes over all servers. Raises ConfigError as `plan` does."""
        self.lacks_sizes = False
        self._guess = make_costs(size, servers=self.config.servers)
        self._check_given(self._measured.fill(self._guess))

    def note_saved(self, seconds: float) -> None:
        """A server has saved its share of rows in so long."""
        takes = max(1e-3, seconds / self._share)
        self._measured = self._measured.mix_in(save_takes_seconds=takes, save_seconds=HOLD_SHARE * takes)

    def note_recovered(self, *, load_seconds: float, reschedule_seconds: float) -> None:
        self._measured = self._measured.mix_in(load_seconds=load_seconds, reschedule_seconds=reschedule_seconds)

    def look(
        self, *, failures: int, elapsed_seconds: float, work_seconds: float | None
    ) -> tuple[PartialPlan, str] | None:
        """Another plan, and why; None: the one there is still stands."""
        if self.config.every != AUTO or self._basis is None:
            return None
        fail = self._find_fail_time(failures, elapsed_seconds)
        now = Basis(costs=self._measured.fill(self._guess), fail_seconds=fail.seconds)
        why = self._basis.find_change(now)
        if why is None:
            return None
        made = self.plan(failures=failures, elapsed_seconds=elapsed_seconds, work_seconds=work_seconds, running=True)
        return made, why


def make_full(config: TrainConfig, seconds: float) -> TrainConfig:
    """The same run with full recovery, which has no use for what is about partial recovery."""
    names = ("target_pls", "priority", "priority_share", "priority_tables", "ssu_period", "expect_mtbf")
    changes = {name: getattr(TrainConfig, name) for name in names}
    protection = "ec+delta" if config.protection == "ec+partial" else "delta"
    return config.replace(protection=protection, every=f"{max(1.0, seconds):g}s", **changes)


def estimate_bytes(config: TrainConfig) -> int:
    """Of the tables of a model of ours, over all servers."""
    return memory.estimate_need(config, config.load_model()).tables


def make_costs(size: float, *, servers: int) -> Costs:
    """What a save and a load take, from the bytes of one server: all save and load at the same time, each its own."""
    per_server = size / servers
    takes = per_server / STORE_BYTES_PER_S
    return Costs(
        save_seconds=max(1e-3, HOLD_SHARE * takes),
        save_takes_seconds=max(1e-3, takes),
        load_seconds=per_server / LOAD_BYTES_PER_S,
        reschedule_seconds=RESCHEDULE_SECONDS,
    )
