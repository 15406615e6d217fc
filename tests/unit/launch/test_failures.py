"""Goal: a failure is timed from the death to the last row, and told once however often a successor begins again.

Method: reports at made-up times, as they come when a server is killed.
"""

from __future__ import annotations

from run_reports import LISTENING, progress, recovered, started

from regrow.launch import display
from regrow.launch.failures import Failures, History
from regrow.launch.reports import Recovery, ServerCounters
from regrow.launch.status import RunStatus


def killed_server(run: RunStatus) -> None:
    """Server 1 is killed at 20 s, in a run that trains 1000 samples/s, and is there again half a second later."""
    for tenth in range(101):
        run.receive("worker", 0, progress(tenth, 100 * tenth), 10.0 + tenth / 10)
    run.receive("server", 1, ServerCounters(pulls=5, pushes=6, bytes_in=7, bytes_out=8), 19.0)
    run.note_end("server", 1)
    run.failures.note_death("server", 1, incarnation=0, step=100, reason="was killed by SIGKILL", at=20.0, now=20.1)
    run.note_successor("server", 1, 1)
    run.receive("server", 1, LISTENING, 20.2)
    run.receive("worker", 0, progress(101, 10100), 20.5)


def test_failure_from_death_to_recovery() -> None:
    run = started()
    killed_server(run)
    assert (run.servers[1].state, run.servers_down, run.servers_alive) == ("recovering", [1], 2)
    run.receive("server", 1, Recovery(rows_back=40, rows_total=100, bytes=400, faults=3, seconds=0.4), 20.6)
    (failure,) = run.failures.all
    assert display.failure_line(failure, 21.0) == "S1 died at step 100; rows back 40 / 100, 3 faults served, 1.0 s"
    assert (run.metrics(20.6)["recovering"], run.metrics(20.6)["missing_rows"]) == ([1], 60)
    for tenth in range(1, 21):
        run.receive("worker", 0, progress(101 + tenth, 10100 + 90 * tenth), 20.5 + tenth / 10)
    run.receive("server", 1, recovered(100, 900, 5, 2.0), 22.5)
    run.failures.tick(22.5)
    assert run.totals()["failures"] == [
        {
            "role": "server",
            "id": 1,
            "incarnation": 0,
            "step": 100,
            "reason": "was killed by SIGKILL",
            "detected_s": 0.1,
            "replaced_s": 0.2,
            "resumed_s": 0.5,
            "recovered_s": 2.5,
            "stall_s": 0.5,
            "rows": 100,
            "bytes": 900,
            "faults": 5,
            "pace": None,
            "throughput_before": 1000.0,
            "throughput_during": 900.0,
            "ratio": 0.9,
        }
    ]
    assert display.failure_line(failure, 30.0) == (
        "S1 died at step 100; rows back 100 / 100, 5 faults served, 2.5 s; throughput 0.90 of before"
    )
    assert (run.servers[1].state, run.servers_down, run.metrics(23.0)["recovering"]) == ("ready", [], [])
    # Counts go on from those of the dead.
    counters = ServerCounters(pulls=1, pushes=1, bytes_in=1, bytes_out=1, flush_bytes=3, redundancy_bytes=9)
    run.receive("server", 1, counters, 23.0)
    totals = run.totals()
    assert (totals["bytes_in"], totals["flush_bytes"], totals["redundancy_bytes"]) == (8, 3, 9)


def test_a_step_from_rows_pulled_ahead_is_no_resumption() -> None:
    run = started()
    killed_server(run)
    run.receive("worker", 0, progress(102, 10200), 20.6)
    run.receive("worker", 0, progress(103, 10300), 21.4)
    run.receive("worker", 0, progress(104, 10400), 21.5)
    (failure,) = run.failures.all
    assert (failure.since(failure.resumed_at), round(failure.stall_seconds, 3)) == (1.4, 0.8)
    run.receive("worker", 0, progress(105, 10500), 24.0)  # slow for some other reason: it was at work before
    assert (failure.since(failure.resumed_at), round(failure.stall_seconds, 3)) == (1.4, 2.5)


def test_successor_that_dies_too() -> None:
    """Each death is a failure; only the last is waited for."""
    run = started()
    killed_server(run)
    run.failures.note_death("server", 1, incarnation=1, step=101, reason="exited", at=20.6, now=20.6)
    run.note_successor("server", 1, 2)
    assert [failure.settled for failure in run.failures.all] == [True, False]
    run.receive("server", 1, LISTENING, 20.7)
    run.receive("server", 1, recovered(100, 900, 5, 1.0), 21.0)
    run.failures.finish(22.0)
    assert [failure["recovered_s"] for failure in run.totals()["failures"]] == [None, 0.4]


def test_successor_that_begins_anew_is_the_same_failure() -> None:
    run = started()
    killed_server(run)
    assert run.failures.begin_anew("server", 1)
    assert not run.failures.begin_anew("server", 0)
    run.note_successor("server", 1, 2)
    run.receive("server", 1, LISTENING, 21.0)
    run.receive("worker", 0, progress(102, 10200), 21.5)
    run.receive("server", 1, recovered(9, 1, 5, 1.0), 22.0)
    run.failures.finish(30.0)
    (failure,) = run.totals()["failures"]
    assert (failure["replaced_s"], failure["resumed_s"], failure["recovered_s"], failure["rows"]) == (1.0, 1.5, 2.0, 9)


def test_speed_between_two_times() -> None:
    """As if samples came evenly between two reports; nothing is said of a time that nobody reported."""
    history = History()
    assert history.samples_per_s(0.0, 10.0) is None
    for second in range(11):
        history.add(float(second), 100 * second if second < 5 else 400 + 20 * (second - 4))
    assert history.samples_per_s(0.0, 4.0) == 100.0
    assert history.samples_per_s(-5.0, 4.0) == 100.0
    assert history.samples_per_s(2.5, 3.5) == 100.0
    assert history.samples_per_s(6.0, 99.0) == 20.0
    assert history.samples_per_s(3.0, 3.1) is None


def test_news_of_others_do_not_end_a_failure() -> None:
    failures = Failures()
    failure = failures.note_death("server", 1, incarnation=0, step=9, reason="x", at=1.0, now=1.0)
    counters = ServerCounters(pulls=0, pushes=0, bytes_in=0, bytes_out=0, recovering=False)
    for role, id in (("server", 0), ("worker", 1)):
        failures.receive(role, id, LISTENING, 2.0)
        failures.receive(role, id, counters, 2.0)
    assert (failure.replaced_at, failure.recovered_at) == (None, None)
    failures.receive("server", 1, counters, 3.0)  # it has nothing to bring back
    assert failure.recovered_at == 3.0


def test_the_silence_of_a_worker_counts_though_another_goes_on() -> None:
    """A failure is not settled while somebody has not been heard since all was back: its stall is the longest."""
    run = started()
    run.receive("worker", 1, progress(50, 5000), 19.9)
    killed_server(run)
    run.receive("server", 1, recovered(100, 1000, 3, 0.4), 20.6)
    for tenth in range(1, 31):
        run.receive("worker", 0, progress(101 + tenth, 10100 + 100 * tenth), 20.5 + tenth / 10)
        run.failures.tick(20.5 + tenth / 10)
    (failure,) = run.failures.all
    assert not failure.settled
    run.receive("worker", 1, progress(51, 5100), 23.6)
    run.receive("worker", 0, progress(140, 14000), 24.9)
    run.failures.tick(25.0)
    assert failure.settled
    assert failure.stall_seconds == 23.6 - 20.0
