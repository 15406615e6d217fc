"""What the launcher has to do with publications: what processes are told of them, and what it shows."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from regrow.checkpoint.publications import FULL_EVERY, KEEP_LAST
from regrow.config import TrainConfig
from regrow.launch.checkpoints import MERGE_SECONDS_MAX, MERGE_SECONDS_MIN
from regrow.launch.reports import Publication
from regrow.launch.saving import CheckpointTimes, Saving
from regrow.launch.version import version
from regrow.units import size_text


def plan_publications(config: TrainConfig, *, run: str, starts: int = 0) -> Saving | None:
    """As `checkpoints.plan_saving`; None: nothing is published."""
    if config.publish is None:
        return None
    seconds, steps = config.publish_interval
    return Saving(
        url=config.publish,
        encoding="raw",
        bits=config.publish_bits,
        bytes_per_second=None,
        run=run,
        starts=starts,
        salt=secrets.token_hex(8),
        keep_last=KEEP_LAST,
        keep_full_every_seconds=0.0,
        made_by=f"regrow {version()}",
        merge_seconds=min(max(seconds or 0.0, MERGE_SECONDS_MIN), MERGE_SECONDS_MAX),
        times=CheckpointTimes(
            every_seconds=seconds, every_steps=steps, full_every=FULL_EVERY, from_instant=seconds is not None
        ),
    )


@dataclasses.dataclass(slots=True)
class PublicationStatus:
    """How publications go, by the coordinator's word. Times are of one monotonic clock."""

    every_seconds: float | None = None
    saved: int = 0
    failed: int = 0
    last: dict[str, Any] | None = None
    last_error: str | None = None
    slow_seconds: float | None = None  # the most that one took, of those that took longer than the interval
    is_slow: bool = False  # the last did
    rows: int = 0  # of all
    bytes: int = 0
    _is_end_wanted: bool = False  # training has ended well,
    _end: bool | None = None  # and so the last one went
    _instant_at: float | None = None

    def receive(self, report: Publication, now: float) -> None:
        if report.status == "begun":
            return
        if report.status == "failed":
            self.failed += 1
            self.last_error = report.reason
        elif report.kind is not None:
            self._note_saved(report, now)
        if report.still:
            self._end = report.status == "saved"

    def _note_saved(self, report: Publication, now: float) -> None:
        self.saved += 1
        self.rows += report.rows
        self.bytes += report.bytes
        lag = None if report.seconds is None else round(report.seconds - (report.cut_seconds or 0.0), 3)
        self._instant_at = now - (lag or 0.0)
        names = ("cut", "kind", "rows", "bytes", "readers", "readers_step")
        self.last = {name: getattr(report, name) for name in names} | {"lag_seconds": lag}
        seconds = report.seconds or 0.0
        self.is_slow = self.every_seconds is not None and seconds > self.every_seconds
        if self.is_slow:
            self.slow_seconds = max(seconds, self.slow_seconds or 0.0)

    def await_end(self) -> None:
        """The publication of the trained model is asked for."""
        self._is_end_wanted, self._end = True, None

    def is_end_told(self) -> bool:
        return self._end is not None

    @property
    def has_end(self) -> bool:
        return self._end is True

    def describe(self, now: float) -> str | None:
        """One line, once there is one."""
        last = self.last
        if last is None or self._instant_at is None:
            return None
        age = f", {now - self._instant_at:.0f} s old"
        size = f"{last['rows']:,} rows, {size_text(last['bytes'])}"
        readers = f"; {last['readers']} readers, the last at step {last['readers_step']:,}" if last["readers"] else ""
        return f"{self.saved} publications, the last: {last['cut']}, {size}{age}{readers}"

    def describe_failed(self) -> str | None:
        return (
            f"{self.failed} publication{'s' if self.failed > 1 else ''} failed: {self.last_error}"
            if self.failed
            else None
        )

    def describe_slow(self) -> str | None:
        if not self.is_slow:
            return None
        return f"a publication takes {self.slow_seconds:.1f} s, longer than --publish-every: they are made less often"

    def to_dict(self) -> dict[str, Any]:
        names = ("saved", "failed", "last", "last_error", "slow_seconds", "rows", "bytes")
        has_end = self.has_end if self._is_end_wanted else None
        return {name: getattr(self, name) for name in names} | {"has_end": has_end}
