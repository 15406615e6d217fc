"""Amounts as people write and read them: bytes (64M), times (90s, 12h, 7d), and intervals that are a time or a number
of steps (5m, 500steps).

The only parser of each, for the command line, configuration files and Python callers, so that what one of them takes
the others take too. Text in, number out; ValueError says what was given and what would have been right, and the caller
adds which option it was. The words back, for tables and logs, are here as well. Nothing is imported that is slow.
"""

from __future__ import annotations

import contextlib
import math
import re
from typing import NamedTuple

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

BYTES_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}
SECONDS_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

_TIME = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII)
_STEPS = re.compile(r"(\d+)\s*steps?", re.ASCII)


class Interval(NamedTuple):
    """How often something is done: after so much time, or after so many steps. One of them is None."""

    seconds: float | None = None
    steps: int | None = None


def parse_bytes(text: str) -> int:
    """67108864, 64M, 64MiB or 1.5k; units are powers of 1024, and letters may be large or small."""
    short = text.strip().lower().removesuffix("ib").removesuffix("b")
    number = short.rstrip("".join(BYTES_UNITS))
    try:
        return int(float(number) * BYTES_UNITS[short[len(number) :]])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f"{text!r} is not a number of bytes, such as 67108864 or 64M") from None


def parse_seconds(text: str) -> float:
    """90 or 90s, 5m or 5min, 12h, 7d. A number without a unit is seconds; 0 is a time."""
    match = _TIME.fullmatch(text.strip().lower())
    seconds = float(match[1]) * SECONDS_UNITS.get(match[2], math.inf) if match is not None else math.inf
    if not math.isfinite(seconds):
        raise ValueError(f"{text!r} is not a time, such as 90s, 5m, 12h or 7d")
    return seconds


def parse_interval(text: str) -> Interval:
    """60s, 5m, 12h, 1d or 500steps. A bare number is refused, since it could be either, and 0 is no interval."""
    short = text.strip().lower()
    interval = Interval()
    if match := _STEPS.fullmatch(short):
        interval = Interval(steps=int(match[1]))
    elif not short[-1:].isdigit():
        with contextlib.suppress(ValueError):  # said below, with steps among the examples
            interval = Interval(seconds=parse_seconds(short))
    if not (interval.seconds or interval.steps):
        raise ValueError(f'{text!r} is not an interval; "60s", "5m" and "500steps" are')
    return interval


def size_text(count: float) -> str:
    """1.5 GiB"""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} B"


def seconds_text(seconds: float) -> str:
    """12 s, 3 min, 5 h, 9 d: about so long."""
    for unit, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"


def span_text(seconds: float) -> str:
    """The same, not rounded: 1.5 d."""
    for unit, name in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= unit:
            return f"{seconds / unit:g} {name}"
    return f"{seconds:g} s"


def brief_text(seconds: float) -> str:
    """The same to three digits, and in hours up to ten days, as people speak of jobs: 22.4 h, 56 h, 90.5 s."""
    for unit, least, name in ((86400.0, 10 * 86400.0, "d"), (3600.0, 3600.0, "h"), (60.0, 120.0, "min")):
        if seconds >= least:
            return f"{_three_digits(seconds / unit)} {name}"
    return f"{_three_digits(seconds)} s"


def percent_text(share: float) -> str:
    """Of 0.0846 and 0.00446: 8.5 % and 0.45 %."""
    percent = 100.0 * share
    if 0.0 < percent < 0.001:
        return "under 0.001 %"
    return f"{percent:.0f} %" if percent >= 9.95 else f"{percent:.2g} %"


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 999.5 else f"{value:.3g}"


def age_text(seconds: float) -> str:
    """12 s ago"""
    return f"{seconds_text(seconds)} ago"
