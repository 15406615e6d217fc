"""What goes wrong on purpose: whom to kill or to pause, and when.

Pure decisions about steps, times and names; the launcher sends the signals. Random failures come from the run's seed,
so that two runs are hit in the same order (their times depend on the machine). The rule to keep: chance never does more
than what is claimed to be survived, and a server that hangs is down long before anybody has noticed.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from regrow.config import Sabotage, TrainConfig

# How long those hang that go on one day. Longer than it takes to notice them, so that they come back as zombies.
HANG_SECONDS = 20.0
BACK_SECONDS = 5.0  # until one that went on, and was not replaced, is as before


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """Chance hits the process in this place. As in `supervisor.Harm`, `pause_seconds` None kills it."""

    role: str
    id: int
    pause_seconds: float | None = None

    @property
    def kind(self) -> str:
        return "kill" if self.pause_seconds is None else "hang" if math.isinf(self.pause_seconds) else "late"


class Saboteur:
    """What a config asks for that has not been done yet."""

    def __init__(self, config: TrainConfig) -> None:
        self._by_step = list(config.sabotage)
        self._mtbf = config.mtbf
        self._hangs = config.mtbf_hangs
        counts = {"server": config.servers, "worker": config.workers, "coordinator": 1, "spare": config.r}
        self._targets = [(role, id) for role in config.mtbf_roles.split(",") for id in range(counts[role])]
        # A string, because hash seeds of tuples differ from process to process. Its word is part of the order of kills.
        self._random = random.Random(f"faults {config.seed}")
        self._next_at: float | None = None
        self._next: Blow | None = None
        self._struck: dict[int, tuple[int, float]] = {}  # servers that were hit: which incarnation, and for how long
        self._done: Counter[tuple[str, str]] = Counter()
        # With parities, a server is spared while as many others are down as may be: random failures shall show
        # what is survived, not what is not.
        self._down_max = config.r if config.replaces_servers else config.servers

    @property
    def unreached(self) -> list[Sabotage]:
        """Those whose step never came."""
        return list(self._by_step)

    @property
    def done(self) -> list[dict[str, str | int]]:
        """What chance did so far: role, kind (kill, hang, late) and how often."""
        return [{"role": role, "kind": kind, "count": count} for (role, kind), count in sorted(self._done.items())]

    def take_due(self, step: int) -> list[Sabotage]:
        """What is done now that this step has been reached; each is given out once."""
        found = [sabotage for sabotage in self._by_step if sabotage.step <= step]
        self._by_step = self._by_step[len(found) :]
        return found

    def choose_target(self, now: float, *, down: Sequence[int], incarnations: Sequence[int]) -> Blow | None:
        """Whom chance hits now, if anybody. `down` are the servers that are known to be dead or recovering,
        `incarnations` those of the servers: one that was hit is down until it has a successor, known or not."""
        if self._mtbf is None:
            return None
        if self._next_at is None:
            self._next_at = now + self._random.expovariate(1.0 / self._mtbf)
            self._next = self._choose()
        blow = self._next
        assert blow is not None
        self._struck = {id: hit for id, hit in self._struck.items() if incarnations[id] <= hit[0] and now < hit[1]}
        all_down = {*down, *self._struck}
        if now < self._next_at or (blow.role == "server" and (blow.id in all_down or len(all_down) >= self._down_max)):
            return None
        self._next_at = None
        self._done[blow.role, blow.kind] += 1
        if blow.role == "server":
            pause_seconds = math.inf if blow.pause_seconds is None else blow.pause_seconds
            self._struck[blow.id] = (incarnations[blow.id], now + pause_seconds + BACK_SECONDS)
        return blow

    def _choose(self) -> Blow:
        role, id = self._random.choice(self._targets)
        if not self._hangs or self._random.random() >= self._hangs:
            return Blow(role=role, id=id)
        return Blow(role=role, id=id, pause_seconds=self._random.choice((HANG_SECONDS, math.inf)))
