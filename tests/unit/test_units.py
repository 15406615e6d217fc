"""Goal: an amount means the same wherever it is given, and one that means nothing is refused with an example.

Method: tables of texts; then every place that takes one is asked for a unit that some of them did not know.
"""

from __future__ import annotations

import pytest

from regrow import units
from regrow.cli import options
from regrow.config import TrainConfig
from regrow.errors import ConfigError
from regrow.protection import parse_sabotage
from regrow.units import GIB, KIB, MIB, Interval

DAY = 86400.0


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1", 1),
        ("64M", 64 * MIB),
        ("64m", 64 * MIB),
        (" 64MiB ", 64 * MIB),
        ("64MB", 64 * MIB),
        ("1.5k", 1536),
        ("2GiB", 2 * GIB),
        ("1T", 1024 * GIB),
        ("12b", 12),
        ("1e3", 1000),
        ("-1", -1),  # whether it makes sense is for the option to say
    ],
)
def test_bytes(text: str, count: int) -> None:
    assert units.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "M", "3X", "1mk", "nan", "inf", "infM", "1 2", "5steps"])
def test_no_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number of bytes, such as 67108864 or 64M") as caught:
        units.parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("90", 90.0),
        ("90s", 90.0),
        ("1.5m", 90.0),
        ("5min", 300.0),
        ("12H", 43200.0),
        (" 7 d ", 7 * DAY),
    ],
)
def test_seconds(text: str, seconds: float) -> None:
    assert units.parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-1s", "1w", "1.s", ".5s", "1h30m", "1e3", "nan", "٣s", "9" * 400, "0w"])
def test_no_seconds(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time, such as 90s, 5m, 12h or 7d") as caught:
        units.parse_seconds(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("60s", Interval(seconds=60.0)),
        ("2.5m", Interval(seconds=150.0)),
        ("1h", Interval(seconds=3600.0)),
        ("1d", Interval(seconds=DAY)),
        ("500steps", Interval(steps=500)),
        ("1 step", Interval(steps=1)),
    ],
)
def test_intervals(text: str, interval: Interval) -> None:
    assert units.parse_interval(text) == interval


@pytest.mark.parametrize("text", ["", "60", "0s", "0steps", "1.5steps", "-1s", "steps", "1w"])
def test_no_intervals(text: str) -> None:
    with pytest.raises(ValueError, match="is not an interval") as caught:
        units.parse_interval(text)
    assert '"500steps"' in str(caught.value)


def test_all_places_know_a_day() -> None:
    assert options.SECONDS.convert("1d", None, None) == DAY
    assert TrainConfig(every="1d").interval == Interval(seconds=DAY)
    assert parse_sabotage("pause", "server:1@step:80:1d").pause_seconds == DAY
    from regrow.checkpoint.torch.cuts import _parse_every

    assert _parse_every("1d") == Interval(seconds=DAY)
    assert _parse_every("500steps") == _parse_every(500) == Interval(steps=500)


def test_errors_name_the_option_once() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(every="1w")
    assert caught.value.message == 'every = \'1w\': is not an interval; "60s", "5m" and "500steps" are'
    with pytest.raises(ConfigError, match="must be like server:1@step:80:5s"):
        parse_sabotage("pause", "server:1@step:80:5w")


def test_words() -> None:
    assert [units.size_text(count) for count in (0, 1023, KIB, 5 * MIB, 7 * GIB, 3072 * GIB)] == [
        *("0 B", "1023 B", "1.0 KiB", "5.0 MiB", "7.0 GiB", "3.0 TiB")
    ]
    assert [units.age_text(s) for s in (-3.0, 5.0, 130.0, 7200.0, 200_000.0)] == [
        *("0 s ago", "5 s ago", "2 min ago", "2 h ago", "2 d ago")
    ]
    assert [units.span_text(s) for s in (5.0, 90.0, 1.5 * DAY)] == ["5 s", "1.5 min", "1.5 d"]
    brief = (0.0, 0.05, 90.5, 150.0, 22.4 * 3600, 56 * 3600.0, 30 * DAY, 5000 * DAY)
    assert [units.brief_text(s) for s in brief] == [
        *("0 s", "0.05 s", "90.5 s", "2.5 min", "22.4 h", "56 h", "30 d", "5000 d")
    ]
    shares = (0.0, 1e-7, 0.00446, 0.0846, 0.0996, 0.45, 1.3)
    assert [units.percent_text(share) for share in shares] == [
        *("0 %", "under 0.001 %", "0.45 %", "8.5 %", "10 %", "45 %", "130 %")
    ]
