"""The cost table of protection: every part of a server has its line, and what is added up is what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from regrow.bench import overhead_costs
from regrow.bench.overhead_costs import DELTAS, MESSAGES, OTHERS, PARITIES, SOCKETS, UPDATES, find_part, make_row
from regrow.errors import RegrowError
from regrow.runtime.costs import Costs, make_costs


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("loop", SOCKETS),
        ("send", SOCKETS),
        ("Push/update", UPDATES),
        ("Push/take_flush", DELTAS),
        ("Tick/take_flush", DELTAS),
        ("Flush/parity_apply", PARITIES),
        ("Flush", MESSAGES),
        ("FlushAck", MESSAGES),
        ("Push/pending_bytes", MESSAGES),
        ("Pull/gather", OTHERS),
        ("Tick", OTHERS),
    ],
)
def test_every_part_has_its_line(name: str, part: str) -> None:
    assert find_part(name) == part


def test_a_row_adds_up_all_servers() -> None:
    costs: dict[str, list[float]] = {"loop": [1.0, 0, 8], "Tick/take_flush": [0.5, 4, 2], "send": [0.25, 6, 0]}
    servers = [{"costs": costs | {"bytes/Flush": [300.0]}, "flush_bytes": 100, "flushes": 4} for _ in range(2)]
    summary: dict[str, Any] = {
        "per_server": servers,
        "samples_trained": 2000,
        "steps_done": 10,
        "cpu_seconds": {"server": 8.0, "worker": 40.0},
        "samples_per_s": 5.0,
    }
    row = make_row(summary)
    assert row["parts_ms_per_1000"] == {
        **dict.fromkeys(overhead_costs.PARTS, 0.0),
        SOCKETS: 1250.0,
        DELTAS: 500.0,
    }
    assert row["roles_ms_per_1000"] == {"server": 4000.0, "worker": 20000.0}
    assert [row[name] for name in ("moved_bytes_per_push", "flushed_bytes_per_push")] == [60, 20]
    assert [row[name] for name in ("flushes_per_push", "messages_per_push", "pages_per_push")] == [0.8, 1.2, 2.0]


def test_a_run_that_was_not_measured_has_no_row() -> None:
    with pytest.raises(RegrowError, match="no server has measured"):
        make_row({"per_server": [{"costs": {}}]})


def test_only_what_was_asked_for_is_measured() -> None:
    assert make_costs({}) is None
    assert isinstance(make_costs({"step_profile": True}), Costs)
    assert isinstance(make_costs({"recovery_profile": True}), Costs)
