"""What goes wrong on purpose: whom to kill or to pause, and when.

Pure decisions about steps, times and names; the launcher sends the signals. Random failures come from the run's seed,
so that two runs are hit in the same order (their times depend on the machine). The rule to keep: chance never does more
than what is claimed to be survived, and a server that hangs is down long before anybody has noticed. Where several
servers die together (`--mtbf-kill`), all of them wait until that many may be down; if parities do not survive so many,
a checkpoint does, and everybody begins again.
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
        self._shape = config.mtbf_shape
        self._together = config.mtbf_kill
        self._servers = range(config.servers)
        self._hangs = config.mtbf_hangs
        counts = {"server": config.servers, "worker": config.workers, "coordinator": 1, "spare": config.r}
        self._targets = [(role, id) for role in config.mtbf_roles.split(",") for id in range(counts[role])]
        # A string, because hash seeds of tuples differ from process to process. Its word is part of the order of kills.
        self._random = random.Random(f"faults {config.seed}")
        self._next_at: float | None = None
        self._next: tuple[Blow, ...] = ()
        self._struck: dict[int, tuple[int, float]] = {}  # servers that were hit: which incarnation, and for how long
        self._done: Counter[tuple[str, str]] = Counter()
        # With parities, a server is spared while as many others are down as may be: random failures shall show
        # what is survived, not what is not.
        self._down_max = max(config.r, config.mtbf_kill) if config.replaces_servers else config.servers

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

    def start_over(self) -> None:
        """All processes are new, with the first incarnation again: nobody is down because of us. The time to the next
        blow begins with training: else it would pass while everybody loads, and each attempt would end with its first
        step."""
        self._struck.clear()
        self._next_at = None

    def choose_targets(self, now: float, *, down: Sequence[int], incarnations: Sequence[int]) -> tuple[Blow, ...]:
        """Whom chance hits now, if anybody: one process, or several servers at one instant. `down` are the servers that
        are known to be dead or recovering, `incarnations` those of the servers: one that was hit is down until it has a
        successor, known or not."""
        if self._mtbf is None:
            return ()
        if self._next_at is None:
            self._next_at = now + self._draw_gap(self._mtbf)
            self._next = self._choose()
        self._struck = {id: hit for id, hit in self._struck.items() if incarnations[id] <= hit[0] and now < hit[1]}
        all_down = {*down, *self._struck}
        servers = {blow.id for blow in self._next if blow.role == "server"}
        spared = bool(servers) and (servers & all_down or len(all_down) + len(servers) > self._down_max)
        if now < self._next_at or spared:
            return ()
        self._next_at = None
        for blow in self._next:
            self._done[blow.role, blow.kind] += 1
            if blow.role == "server":
                pause_seconds = math.inf if blow.pause_seconds is None else blow.pause_seconds
                self._struck[blow.id] = (incarnations[blow.id], now + pause_seconds + BACK_SECONDS)
        return self._next

    def _draw_gap(self, mean: float) -> float:
        """The time until the next one. An exponential draw is a gamma draw of shape 1, but not the same one: seeds keep
        their meaning."""
        if self._shape == 1.0:
            return self._random.expovariate(1.0 / mean)
        return self._random.gammavariate(self._shape, mean / self._shape)

    def _choose(self) -> tuple[Blow, ...]:
        role, id = self._random.choice(self._targets)
        pause_seconds = None
        if self._hangs and self._random.random() < self._hangs:
            pause_seconds = self._random.choice((HANG_SECONDS, math.inf))
        ids = [id]
        if role == "server" and self._together > 1:
            ids += self._random.sample([other for other in self._servers if other != id], self._together - 1)
        return tuple(Blow(role=role, id=each, pause_seconds=pause_seconds) for each in ids)
