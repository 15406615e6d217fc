"""Goal: another launcher goes on in the phase that the run is in, asks nobody twice to judge, and says why it cannot.

Method: estates by hand, as places would answer. Whole jobs whose launcher is killed are in tests/live/test_ray.py.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from test_legacy import COORDINATOR, WORKER, make_template, server

from regrow.core.identity import Identity
from regrow.errors import RegrowError
from regrow.launch import checkpoints, takeover
from regrow.launch.legacy import Memo, encode_memo
from regrow.launch.outpost import Estate
from regrow.launch.ray_posts import Found
from regrow.launch.takeover import Inherited, find_memo

MEMO = Memo(
    run="ab",
    directory="/runs/x",
    started_at=0.0,
    phase="training",
    template=make_template(),
    office=(COORDINATOR, server(0), WORKER),
    start=None,
    asked=None,
    restores=[],
    cuts_dead=[],
    checkpoints={},
    failures=[],
)


def find(who: Identity, *, told: tuple[str, ...] = (), number: tuple[int, int] = (0, 1), **changes: Any) -> Found:
    memo = msgspec.structs.replace(MEMO, **changes)
    estate = Estate(
        who=who,
        born=who,
        bundle=None,
        pid=1,
        said=(),
        told=frozenset(told),
        memo=encode_memo(memo),
        memo_number=number,
    )
    return Found(None, "node", estate)


def inherit(*found: Found) -> Inherited:
    return Inherited(memo=find_memo(list(found)), found=found, room=None, is_old_directory=True)


def test_the_newest_memo_counts_whoever_has_it() -> None:
    found = [
        find(WORKER, number=(0, 9), run="old"),
        find(server(0), number=(1, 2), run="newest"),
        find(COORDINATOR, number=(1, 1), run="older"),
    ]
    assert find_memo(found).run == "newest"


@pytest.mark.parametrize("phase", ["starting", "loading"])
def test_before_training_there_is_nothing_to_go_on_with(phase: str) -> None:
    with pytest.raises(RegrowError, match="before training began"):
        find_memo([find(WORKER, phase=phase)])
    with pytest.raises(RegrowError, match="found none of its processes"):
        find_memo([])


def test_whoever_was_asked_to_judge_is_not_asked_again() -> None:
    """The word to worker 0 may be newer than any memo; and may have gone with worker 0."""
    asked = inherit(find(WORKER, told=("evaluate",)))
    assert (asked.phase, asked.is_judged) == ("evaluating", True)
    unasked = inherit(find(WORKER), find(server(0), number=(0, 2), phase="evaluating"))
    assert (unasked.phase, unasked.is_judged) == ("evaluating", False)
    lost = inherit(find(server(0), phase="evaluating"))
    assert (lost.phase, lost.is_judged) == ("evaluating", True), "its successor is asked when it is through"
    training = inherit(find(WORKER), find(server(0), told=("evaluate",)))
    assert (training.phase, training.is_judged) == ("training", False)
    stopping = inherit(find(WORKER, told=("evaluate", "stop"), phase="stopping"))
    assert stopping.phase == "stopping"


def test_a_start_comes_back_as_it_was() -> None:
    start = checkpoints.Start(url="s3://b", cut="c", step=4, epochs=(1, 2))
    known = {"url": "s3://b", "cut": "c", "step": 4, "protection": None, "epochs": [1, 2], "marks": [], "extra": None}
    assert takeover.recall_start(known) == start
    assert takeover.recall_start(None) is None
