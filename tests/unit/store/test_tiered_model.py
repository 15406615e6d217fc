"""Goal: whatever a crash loses, a tiered store goes back to exactly the rows of its checkpoint, and damage is found.

Method: the kernels' model (cpp/src/tier_model.cpp): random pulls, pushes, upkeep, checkpoints and commits on a disk in
memory that at a crash, at any write, keeps any part of what was not synced, torn at sectors and in any order; then
everything is compared with a dictionary per checkpoint, and goes on. `tools/crash_tiered.py` runs as many as one likes.
Each bug that is planted must be found.
"""

from __future__ import annotations

import pytest

from regrow import _kernels

CRASHES = 4000
# So many crashes find it at the latest, from seed 1 on; most need a handful.
BUGS = {
    "no_incarnation": 3000,
    "freed_first": 3000,
    "no_sync": 3000,
    "pin_ignored": 3000,
    "pinned_not_written": 3000,
    "home_not_synced": 3000,
    "neighbour_too_new": 3000,
    "noted_too_new": 3000,
}


def test_every_crash_leaves_the_checkpoint() -> None:
    counts, failure = _kernels.run_tier_model(1, CRASHES)
    assert failure == ""
    assert counts["crashes"] == CRASHES
    idle = [name for name, count in counts.items() if not count and name != "full"]
    assert idle == [], "the model does not reach this any more"


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found(bug: str) -> None:
    _, failure = _kernels.run_tier_model(1, BUGS[bug], bug)
    assert failure != ""


def test_the_seed_that_filled_its_log_for_ever() -> None:
    counts, failure = _kernels.run_tier_model(1000848, 50)
    assert (failure, counts["crashes"]) == ("", 50)


def test_the_same_seed_is_the_same_run() -> None:
    assert _kernels.run_tier_model(7, 200) == _kernels.run_tier_model(7, 200)
    with pytest.raises(ValueError):
        _kernels.run_tier_model(7, 1, "no such bug")
