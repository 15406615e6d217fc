"""What the processes of a run took, and what is said of one that talks nonsense."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from typing import Any

from regrow.errors import ChildFailed
from regrow.launch.backend import Handle, name_of
from regrow.launch.supervisor import SPARE_ROLES


def explain_malformed(handle: Handle, event: str, problem: str) -> ChildFailed:
    who = handle.who
    return ChildFailed(
        f"{name_of(who)} sent a malformed {event!r} event: {problem}",
        hint=f"its log: {handle.log}",
        role=who.role,
        child_id=who.id,
        log=handle.log,
    )


def sum_usage(handles: Sequence[Handle]) -> dict[str, Any]:
    """Processor time summed and peak memory: per role the largest process, in total the sum over all places.

    Of several incarnations in one place the largest counts, as they were not there at once.
    """
    cpu: dict[str, float] = {"coordinator": 0.0, "server": 0.0, "worker": 0.0, "merger": 0.0}
    peak: dict[str, int] = dict.fromkeys(cpu, 0)
    places: dict[tuple[str, int], int] = {}
    for handle in handles:
        if handle.exit is not None:
            role = {spare: role for role, spare in SPARE_ROLES.items()}.get(handle.who.role, handle.who.role)
            place = (handle.who.role, handle.who.id)
            cpu[role] += handle.exit.cpu_seconds
            peak[role] = max(peak[role], handle.exit.peak_rss_bytes)
            places[place] = max(places.get(place, 0), handle.exit.peak_rss_bytes)
    peak_total = sum(places.values())
    own = resource.getrusage(resource.RUSAGE_SELF)
    cpu["launcher"] = own.ru_utime + own.ru_stime
    total = sum(cpu.values())
    return {
        "cpu_seconds": {name: round(value, 3) for name, value in {"total": total, **cpu}.items()},
        "peak_rss_bytes": {"total": peak_total, **peak},
    }
