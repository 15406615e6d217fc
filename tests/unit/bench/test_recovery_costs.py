"""The cost table of a recovery: each part has its line, training has none, nothing is counted twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from regrow.bench import bandwidth, recovery_costs
from regrow.bench.recovery_costs import FAULTS, PAGES, PYTHON, READS, SOCKETS, STREAMS, SUMS, find_part, make_table
from regrow.errors import RegrowError
from regrow.runtime import costs
from regrow.runtime.costs import Costs


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("SnapAsk/published", READS),
        ("stream/published", STREAMS),
        ("Stream/parity_apply", STREAMS),
        ("Flush/parity_apply", None),
        ("Pull/gather", None),
        ("retry/update", None),
        ("retry/prepare", FAULTS),
        ("Pull", None),
        ("Snap", SUMS),
        ("missing/prepare", FAULTS),
        ("sweep", PYTHON),
        ("loop", SOCKETS),
    ],
)
def test_every_part_has_its_line(name: str, part: str | None) -> None:
    assert find_part(name) == part


def test_sockets_are_shared_by_bytes_and_pages_are_told_apart() -> None:
    server = {
        "loop": [4.0, 0, 0],
        "send": [2.0, 10, 0],
        "SnapAsk/published": [1.0, 10, 100],
        "Pull": [9.0, 3, 0],
        "bytes/Snap": [3e9],
        "bytes/Rows": [1e9],
    }
    table = make_table([server], gigabytes=2.0, page_seconds=0.005)
    assert table["parts_s_per_gb"][SOCKETS] == pytest.approx((4.0 + 2.0) * 0.75 / 2)
    assert table["parts_s_per_gb"][PAGES] == pytest.approx(100 * 0.005 / 2)
    assert table["parts_s_per_gb"][READS] == pytest.approx((1.0 - 0.5) / 2)
    assert table["processor_s_per_gb"] == pytest.approx((4.5 + 1.0) / 2)
    assert table["moved_per_lost"] == pytest.approx(3 / 2 / 2)


def test_a_run_that_was_not_measured_has_no_table() -> None:
    with pytest.raises(RegrowError, match="no server has measured"):
        make_table([{}, {}], gigabytes=1.0, page_seconds=0.0)


def test_each_moment_is_charged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: the parts add up to the clock, nested or not, and only while somebody comes back. Method: a clock that is
    moved by hand."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(costs.time, "process_time", lambda: clock.now)

    def work(seconds: float) -> None:
        clock.now += seconds

    server: Any = SimpleNamespace(
        view=SimpleNamespace(servers=[SimpleNamespace(recovering=True)]),
        store=SimpleNamespace(published=lambda: work(3.0)),
        holder=SimpleNamespace(decoder=SimpleNamespace(sweep=None, release_faults=None, adjust=None)),
        flusher=SimpleNamespace(stream=lambda: (work(1.0), server.store.published())),
        ways=SimpleNamespace(find_missing=None, tick=None),
        serving=SimpleNamespace(retry=None),
    )
    measured = Costs()
    measured.enter("View")
    work(50.0)
    measured.leave()
    measured.watch(server)
    work(2.0)
    measured.enter("Pull")
    work(5.0)
    server.flusher.stream()
    measured.leave()
    server.view.servers[0].recovering = False
    measured.watch(server)
    work(70.0)
    measured.enter("Pull")
    measured.leave()
    seconds = {name: values[0] for name, values in measured.to_dict().items()}
    assert seconds == {"loop": 2.0, "Pull": 5.0, "stream": 1.0, "stream/published": 3.0}


def test_arithmetic_and_pages() -> None:
    assert recovery_costs.sketch_processor_seconds(4, links=5e9, copy=10e9) == pytest.approx(5 * (0.4 + 0.2))
    assert 0 <= bandwidth.page_seconds() < 0.001
