"""What goes wrong on purpose: whom to kill or to pause, and when.

Pure decisions about steps, times and names; the launcher sends the signals. Random kills come from the run's seed, so
that two runs are hit in the same order (their times depend on the machine).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from regrow.config import Sabotage, TrainConfig


class Saboteur:
    """What a config asks for that has not been done yet."""

    def __init__(self, config: TrainConfig) -> None:
        self._by_step = list(config.sabotage)
        self._mtbf = config.mtbf
        counts = {"server": config.servers, "worker": config.workers, "coordinator": 1}
        self._targets = [(role, id) for role in config.mtbf_roles.split(",") for id in range(counts[role])]
        # A string, because hash seeds of tuples differ from process to process. Its word is part of the order of kills.
        self._random = random.Random(f"faults {config.seed}")
        self._next_at: float | None = None
        self._next: tuple[str, int] | None = None
        # With parities, a server is spared while as many others are down as may be: random failures shall show
        # what is survived, not what is not.
        self._down_max = config.r if config.replaces_servers else config.servers

    @property
    def unreached(self) -> list[Sabotage]:
        """Those whose step never came."""
        return list(self._by_step)

    def take_due(self, step: int) -> list[Sabotage]:
        """What is done now that this step has been reached; each is given out once."""
        found = [sabotage for sabotage in self._by_step if sabotage.step <= step]
        self._by_step = self._by_step[len(found) :]
        return found

    def choose_target(self, now: float, *, down: Sequence[int]) -> tuple[str, int] | None:
        """Whom chance kills now, if anybody. `down` are the servers that are dead or recovering."""
        if self._mtbf is None:
            return None
        if self._next_at is None:
            self._next_at = now + self._random.expovariate(1.0 / self._mtbf)
            self._next = self._random.choice(self._targets)
        assert self._next is not None
        role, id = self._next
        if now < self._next_at or (role == "server" and (id in down or len(down) >= self._down_max)):
            return None
        self._next_at = None
        return role, id
