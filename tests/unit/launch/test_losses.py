"""What partial recovery lost is counted once, whoever dies how often: intervals of marks in, samples and shares out."""

from __future__ import annotations

import pytest

from regrow.launch.losses import Losses
from regrow.launch.reports import Joined, OwnSaved, ServerCounters


def count(
    losses: Losses, server: int, saved: tuple[int, ...], joined: tuple[int, ...], updates: int
) -> tuple[int, int]:
    report = Joined(saved=saved, joined=joined, updates_lost=updates)
    loss = losses.note_joined(server, report, samples_total=10_000)
    return loss.samples, loss.updates


def test_a_loss_is_what_came_since_the_save() -> None:
    losses = Losses(servers=4, samples_per_push=10)
    assert count(losses, 1, (5, 6), (8, 6), updates=70) == (30, 70)
    assert losses.pls == pytest.approx(30 / (10_000 * 4))
    assert losses.updates_lost == 70


def test_a_second_death_before_the_next_save_does_not_lose_the_same_again() -> None:
    losses = Losses(servers=2, samples_per_push=1)
    assert count(losses, 0, (5,), (8,), updates=7) == (3, 7)
    assert count(losses, 0, (5,), (12,), updates=15) == (4, 8)
    assert losses.updates_lost == 15


def test_a_save_in_between_counts() -> None:
    losses = Losses(servers=2, samples_per_push=1)
    count(losses, 0, (5,), (8,), updates=7)
    assert count(losses, 0, (10,), (12,), updates=9) == (2, 2)


def test_a_synchronous_mark_is_a_step_of_all_workers() -> None:
    losses = Losses(servers=2, samples_per_push=8, is_sync=True, workers=3)
    assert count(losses, 0, (4,), (6,), updates=1) == (2 * 8 * 3, 1)


def test_without_a_known_end_there_is_no_pls_but_a_share() -> None:
    losses = Losses(servers=2, samples_per_push=8)
    losses.note_counters(0, ServerCounters(pulls=0, pushes=0, bytes_in=0, bytes_out=0, updates=60, priority_bytes=5))
    losses.note_counters(1, ServerCounters(pulls=0, pushes=0, bytes_in=0, bytes_out=0, updates=40))
    loss = losses.note_joined(1, Joined(saved=(0,), joined=(3,), updates_lost=10), samples_total=None)
    assert loss.pls is None and losses.pls is None
    assert losses.share == pytest.approx(0.1)
    assert losses.to_dict()["priority_bytes"] == 5


def test_saves_are_counted_and_the_first_error_is_told() -> None:
    losses = Losses(servers=2, samples_per_push=8)
    losses.note_saved(0, OwnSaved(number=1, rows=10, rows_left=3))
    losses.note_saved(0, OwnSaved(number=2, rows=5, rows_left=1))
    losses.note_saved(1, OwnSaved(number=1, error="full"))
    found = losses.to_dict()
    assert (found["saves"], found["saves_failed"], found["rows_saved"]) == (2, 1, 15)
    assert (found["rows_left_by_priority"], found["last_error"]) == (1, "full")


def test_after_a_fall_back_servers_count_anew() -> None:
    losses = Losses(servers=2, samples_per_push=1)
    count(losses, 0, (5,), (8,), updates=900)
    losses.start_over()
    assert count(losses, 0, (3,), (4,), updates=30) == (1, 30)
    assert losses.updates_lost == 930
