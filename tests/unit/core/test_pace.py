"""How fast lost rows come back: the decision is a pure function of what was seen; here are machines that it may meet.

A model of a machine says what share of training a recovery at some rate costs; windows are played against it until the
decision stays, and what is lost in all is compared with the best constant rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from regrow.core.pace import (
    STALL_SECONDS,
    TRIAL_WINDOWS_MIN,
    WINDOW_PUSHES,
    WINDOW_SECONDS,
    PaceKeeper,
    Seen,
    Trial,
    choose_pace,
)
from regrow.core.protection import FlushSpec

GB = 10**9
FASTEST = 250e6  # bytes per second of one server, with nothing in its way


def busy(rate: float) -> float:
    """No idle cores: what recovery takes, training lacks; and pulls wait for rows, whatever the rate."""
    return min(1.0, 0.05 + 0.6 * rate / FASTEST)


def idle(rate: float) -> float:
    """Cores for a fifth of the fastest rate lie idle."""
    return max(0.01, 0.6 * (rate - 0.2 * FASTEST) / FASTEST)


def quiet(rate: float) -> float:
    return 0.01


def see(
    *, trials: Sequence[Trial] = (), left: int = 10 * GB, pushes_per_s: float | None = 100.0, margin: int = 0
) -> Seen:
    return Seen(
        pushes_per_s=pushes_per_s,
        trials=tuple(trials),
        bytes_total=10 * GB,
        bytes_left=left,
        window_seconds=WINDOW_SECONDS,
        margin=margin,
        sharers=4,
    )


def play(
    machine: Callable[[float], float], spec: FlushSpec, *, margin: int = 0, windows: int = 30, left: int = 10 * GB
) -> list[tuple[float, str]]:
    trials: list[Trial] = []
    paces = []
    for _ in range(windows):
        pace = choose_pace(spec, see(trials=trials, left=left, margin=margin))
        paces.append(pace)
        rate = min(FASTEST, pace.bytes_per_s or FASTEST)
        trials.append(Trial(allowed=pace.bytes_per_s, bytes_per_s=rate, lost=machine(rate)))
    return [(pace.bytes_per_s, pace.reason) for pace in paces]


def test_without_idle_cores_the_fastest_recovery_loses_least() -> None:
    paces = play(busy, FlushSpec(recovery_seconds_max=3600))
    assert paces[0] == (0.0, "as fast as it can, to see what that costs")
    assert paces[1] == (FASTEST / 4, "training loses 65%: a quarter is tried")
    assert paces[2] == (0.0, "as fast as it can, to compare: a quarter of the rate lost 20% of training")
    assert {rate for rate, _ in paces[2:]} == {0.0}
    assert "more slowly it is more in all" in paces[-1][1]


def test_with_idle_cores_it_takes_those_and_no_more() -> None:
    rate, reason = play(idle, FlushSpec(recovery_seconds_max=3600))[-1]
    assert 0.1 * FASTEST <= rate <= 0.3 * FASTEST
    assert "far less in all" in reason
    assert idle(rate) / rate < 0.5 * idle(FASTEST) / FASTEST


def test_what_is_over_soon_is_not_tried_with() -> None:
    """A trial at a quarter of the rate, of a recovery that takes seconds, costs more than it can bring."""
    few = int(0.9 * TRIAL_WINDOWS_MIN * WINDOW_SECONDS * FASTEST)
    paces = play(idle, FlushSpec(recovery_seconds_max=3600), left=few)
    assert {rate for rate, _ in paces} == {0.0}
    assert paces[-1][1] == "as fast as it can: training loses 48%, and all is back soon"
    assert play(idle, FlushSpec(recovery_seconds_max=3600), left=2 * few)[-1][0] > 0


def test_what_costs_nothing_needs_no_limit() -> None:
    paces = play(quiet, FlushSpec())
    assert {rate for rate, _ in paces} == {0.0}
    assert paces[-1][1] == "as fast as it can: training loses next to nothing"


def test_the_time_without_protection_is_bounded() -> None:
    """Ten gigabytes within two minutes, though training should lose next to nothing; more slowly if one more may go."""
    spec = FlushSpec(recovery_cost=0.01, recovery_seconds_max=120)
    assert play(busy, spec)[-1] == (10 * GB / 120, "all within 120 s: another loss would be one too many")
    assert play(busy, spec, margin=1)[-1] == (10 * GB / 480, "all within 480 s: 1 more may be lost")


@pytest.mark.parametrize("machine", [busy, idle])
def test_a_share_is_kept(machine: Callable[[float], float]) -> None:
    rate, reason = play(machine, FlushSpec(recovery_cost=0.2, recovery_seconds_max=3600))[-1]
    assert machine(rate) == pytest.approx(0.2, abs=0.05)
    assert "may lose 20%" in reason


def test_a_share_that_is_never_reached_needs_no_limit() -> None:
    paces = play(quiet, FlushSpec(recovery_cost=0.2))
    assert {rate for rate, _ in paces} == {0.0}


def test_the_users_limit_counts_for_all_servers_together() -> None:
    pace = choose_pace(FlushSpec(sweep_bytes_per_s=1000), see())
    assert pace == (250.0, "as --sweep-bytes-per-s says")


def test_nobody_trains() -> None:
    assert choose_pace(FlushSpec(), see(pushes_per_s=None)) == (0.0, "as fast as it can: nobody trains")


class Clock:
    """A server as the keeper sees it: pushes come at a pace, and bytes leave at the one it allows."""

    def __init__(self, keeper: PaceKeeper) -> None:
        self.keeper, self.now, self.pushes, self.bytes = keeper, 0.0, 0.0, 0.0

    def run(self, seconds: float, *, pushes_per_s: float, margin: int | None) -> set[str]:
        reasons = set()
        end = self.now + seconds
        while self.now < end:
            self.now += 0.05
            self.pushes += 0.05 * pushes_per_s
            self.bytes += 0.05 * min(FASTEST, self.keeper.pace.bytes_per_s or FASTEST) * (margin is not None)
            self.keeper.look(
                self.now, pushes=int(self.pushes), bytes_sent=int(self.bytes), bytes_total=10 * GB, margin=margin
            )
            reasons.add(self.keeper.pace.reason)
        return reasons


def test_the_stall_after_a_loss_is_nobodys_fault() -> None:
    """Pushes stop for a second, whatever the rate: that decides nothing. Then training goes on as before."""
    clock = Clock(PaceKeeper(FlushSpec(), sharers=1))
    clock.run(5.0, pushes_per_s=100, margin=None)
    assert clock.run(STALL_SECONDS - 0.1, pushes_per_s=0, margin=0) == {"as fast as it can, to see what that costs"}
    clock.run(4 * WINDOW_SECONDS, pushes_per_s=100, margin=0)
    assert clock.keeper.pace == (0.0, "as fast as it can: training loses next to nothing")
    assert clock.run(1.0, pushes_per_s=100, margin=None) == {""}


def test_it_changes_its_mind_with_what_training_loses() -> None:
    clock = Clock(PaceKeeper(FlushSpec(recovery_seconds_max=3600), sharers=1))
    clock.run(5.0, pushes_per_s=100, margin=None)
    for pushes_per_s, reason in ((40, "is tried"), (100, "to compare"), (40, "far less in all")):
        while reason not in clock.keeper.pace.reason:
            clock.run(0.05, pushes_per_s=pushes_per_s, margin=0)
    assert clock.keeper.pace.bytes_per_s == pytest.approx(FASTEST / 4, rel=0.1)


def test_a_few_pushes_decide_nothing() -> None:
    """Two pushes a second: half a second without one means nothing."""
    clock = Clock(PaceKeeper(FlushSpec(), sharers=1))
    clock.run(8.0, pushes_per_s=2, margin=None)
    reasons = clock.run(STALL_SECONDS + 0.9 * WINDOW_PUSHES / 2, pushes_per_s=0.5, margin=0)
    assert reasons == {"as fast as it can, to see what that costs"}
