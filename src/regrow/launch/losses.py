"""What partial recovery has lost so far: counted from what replacements say, in updates, samples and as PLS.

A replacement says to which marks its saves go back, at which marks it joined the others, and how many updates of its
rows are gone, all of them ever. What is new of that belongs to the failure that it came back from. Two figures:

    PLS    samples that were trained since the last save of the lost server, over all samples times all servers: the
           measure of CPR, which takes every server for equally busy and every row for equally old
    share  updates that are lost, over all updates of rows that could be: what PLS stands for, counted

A server that dies again before it has saved anything goes back to the same save: what the first death lost is not lost
twice, so the interval counts from the later of the two. Pure bookkeeping.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from regrow.launch.reports import Joined, OwnSaved, ServerCounters

SECONDS_KEPT_MAX = 1000  # if nobody asks


@dataclass(slots=True, kw_only=True)
class Loss:
    """Of one failure."""

    samples: int
    updates: int
    pls: float | None  # None: nobody knows how many samples there will be


@dataclass(slots=True)
class ServerLoss:
    """Of one server, over all its incarnations."""

    updates: int = 0  # of rows that could be lost, lost or not
    updates_lost: int = 0
    joined: tuple[int, ...] = ()  # where its last replacement joined
    saves: int = 0
    saves_failed: int = 0
    rows_saved: int = 0
    rows_left: int = 0  # changed, and left out of the newest save by priority
    priority_bytes: int = 0
    count_bytes: int = 0
    last_error: str = ""


@dataclass(slots=True)
class Losses:
    """Of a run with partial recovery."""

    servers: int
    samples_per_push: float  # of one worker; of a script the mean so far
    is_sync: bool = False
    workers: int = 1
    all: list[Loss] = field(default_factory=list)
    by_server: list[ServerLoss] = field(init=False)
    _before: list[ServerLoss] = field(default_factory=list)  # of starts before the run fell back to a checkpoint
    _save_seconds: list[float] = field(default_factory=list)  # of saves that nobody has asked about yet

    def __post_init__(self) -> None:
        self.by_server = [ServerLoss() for _ in range(self.servers)]

    def note_joined(self, server: int, report: Joined, samples_total: float | None) -> Loss:
        """A replacement knows where it stands: what is lost with its predecessor."""
        state = self.by_server[server]
        before = state.joined or (0,) * len(report.joined)
        gaps = [max(0, to - max(saved, at)) for saved, at, to in zip(report.saved, before, report.joined, strict=True)]
        # Synchronously a mark counts a step of all workers.
        samples = round(sum(gaps) * self.samples_per_push * (self.workers if self.is_sync else 1))
        pls = samples / (samples_total * self.servers) if samples_total else None
        loss = Loss(samples=samples, updates=report.updates_lost - state.updates_lost, pls=pls)
        state.joined, state.updates_lost = tuple(report.joined), report.updates_lost
        self.all.append(loss)
        return loss

    def note_saved(self, server: int, report: OwnSaved) -> None:
        state = self.by_server[server]
        if report.error:
            state.saves_failed += 1
            state.last_error = report.error
            return
        state.saves += 1
        self._save_seconds = [*self._save_seconds, report.seconds][-SECONDS_KEPT_MAX:]
        state.rows_saved += report.rows
        state.rows_left = report.rows_left

    def start_over(self) -> None:
        """All begin again from a checkpoint: servers count anew. What was lost stays lost, though some of it is trained
        again; nobody can tell how much."""
        self._before += self.by_server
        self.by_server = [ServerLoss() for _ in range(self.servers)]

    def take_save_seconds(self) -> list[float]:
        """How long saves took since this was last asked."""
        taken, self._save_seconds = self._save_seconds, []
        return taken

    def note_counters(self, server: int, report: ServerCounters) -> None:
        state = self.by_server[server]
        state.updates = max(state.updates, report.updates or 0)
        state.priority_bytes = max(state.priority_bytes, report.priority_bytes or 0)
        state.count_bytes = max(state.count_bytes, report.count_bytes or 0)

    # -- what comes out --------------------------------------------------------------------------------------

    @property
    def pls(self) -> float | None:
        known = [loss.pls for loss in self.all]
        return None if any(pls is None for pls in known) else float(sum(pls or 0.0 for pls in known))

    @property
    def updates_lost(self) -> int:
        return self._sum("updates_lost")

    @property
    def share(self) -> float | None:
        """The true share of lost updates."""
        updates = self._sum("updates")
        return self.updates_lost / updates if updates else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "pls": self.pls,
            "share_lost": self.share,
            "updates": self._sum("updates"),
            "updates_lost": self.updates_lost,
            "samples_lost": sum(loss.samples for loss in self.all),
            "saves": self._sum("saves"),
            "saves_failed": self._sum("saves_failed"),
            "rows_saved": self._sum("rows_saved"),
            "rows_left_by_priority": sum(server.rows_left for server in self.by_server),
            "priority_bytes": sum(server.priority_bytes for server in self.by_server),
            "count_bytes": sum(server.count_bytes for server in self.by_server),
            "last_error": next((server.last_error for server in self.by_server if server.last_error), None),
        }

    def _sum(self, name: str) -> int:
        return sum(getattr(server, name) for server in [*self._before, *self.by_server])
