"""How long a process may be silent before it counts as hung, by role: the defaults, and how users say otherwise.

The numbers only; who watches whom is in `launch/watch.py` (the launcher asks every process) and `core/coordinator.py`
(servers that serve are heard there).
"""

from __future__ import annotations

from collections.abc import Mapping

from regrow.units import parse_seconds

# Too small: a busy machine, or a slow step, is taken for a hung process and costs a replacement. Too large: everybody
# who needs it waits. Of workers it is a floor: ten times their longest step counts if that is more.
SILENT_SECONDS: Mapping[str, float] = {"server": 1.5, "worker": 10.0, "coordinator": 5.0, "spare": 5.0}
SILENT_SECONDS_MIN, SILENT_SECONDS_MAX = 0.5, 86400.0


def parse_silent(text: str) -> dict[str, float]:
    """ "30", for every role, or "worker=30,coordinator=10s" for some; the others keep their default."""
    limits = dict(SILENT_SECONDS)
    for part in filter(None, (part.strip() for part in text.split(","))):
        role, equals, value = part.rpartition("=")
        if equals and role.strip() not in limits:
            raise ValueError(f"{role.strip()!r} is none of {', '.join(limits)}")
        seconds = parse_seconds(value)
        if not SILENT_SECONDS_MIN <= seconds <= SILENT_SECONDS_MAX:
            raise ValueError(
                f"{value.strip()!r} is not between {SILENT_SECONDS_MIN:g} s and {SILENT_SECONDS_MAX:.0f} s"
            )
        limits.update({role.strip(): seconds} if equals else dict.fromkeys(limits, seconds))
    return limits
