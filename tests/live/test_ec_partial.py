"""Goal: parities first. Within r losses nothing is lost and nobody notices; beyond, only the lost go back to their
saves, what is lost is exactly what is said, and afterwards every parity is right again.

Method: whole runs with real processes that are killed, in which rows count pushes (partial_runs.py). At the end a
worker compares all parities with all rows (`check_parity`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_runs import Run, undisturbed
from partial_runs import check, partial

pytestmark = pytest.mark.live

CODED: dict[str, Any] = {"protection": "ec+partial", "servers": 5, "k": 3, "r": 1, "check_parity": True}
MODES = ["sync", "async"]


def coded(path: Path, **options: Any) -> Run:
    found = partial(path, **{**CODED, **options})
    assert found.summary["parity_stripes"] > 0
    assert found.summary["parity_wrong"] == 0
    return found


def find_recalled(of: Run) -> list[int]:
    """The servers that went back to their saves, one for each time."""
    return sorted(failure["id"] for failure in of.summary["failures"] if "updates_lost" in failure)


def test_within_r_nothing_is_lost_and_the_model_is_the_same(tmp_path: Path) -> None:
    options = {"learning_rate": 0.03, "optimizer": "rowwise_adagrad", "mode": "sync"}
    found = coded(tmp_path, kill=("server:1@step:60", "server:3@step:120"), **options)
    assert found.roles_lost == ["server", "server"]
    assert find_recalled(found) == []
    assert found.summary["model_sha256"] == undisturbed(found.config)[-1]
    assert found.summary["partial"]["updates_lost"] == 0
    assert found.summary["partial"]["pls"] == 0.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pair", [(1, 2), (1, 3)], ids=["neighbours", "apart"])
def test_beyond_r_only_the_lost_go_back(tmp_path: Path, mode: str, pair: tuple[int, int]) -> None:
    kills = tuple(f"server:{server}@step:75" for server in pair)
    found = coded(tmp_path, mode=mode, kill=kills)
    check(found, roles=["server", "server"])
    assert find_recalled(found) == [*pair]


def test_rings_lose_apart(tmp_path: Path) -> None:
    """Two of one ring are too many; one of the other comes back from parities at the same time."""
    kills = tuple(f"server:{server}@step:75" for server in (0, 1, 4))
    found = coded(tmp_path, mode="async", servers=6, k=2, rings=2, kill=kills)
    check(found, roles=["server"] * 3)
    assert find_recalled(found) == [0, 1]


def test_who_was_recalled_is_decoded_the_next_time(tmp_path: Path) -> None:
    """What its successors count as lost is what was lost before, and no more."""
    kills = ("server:1@step:50", "server:2@step:50", "server:1@step:100")
    found = coded(tmp_path, mode="sync", priority="mfu", kill=kills)
    check(found, roles=["server"] * 3, loses=None)
    assert find_recalled(found) == [1, 2]


def test_killed_again_while_it_comes_back(tmp_path: Path) -> None:
    """Before its claim of the saves is written. Whoever came back with it begins again too."""
    arm = {"server 2": ["", "manifest.rename:1:exit"]}
    found = coded(tmp_path, mode="async", kill=("server:0@step:70", "server:2@step:70"), plan={"arm": arm})
    check(found, roles=["server"] * 3)
    assert set(find_recalled(found)) == {0, 2}


def test_the_coordinator_and_a_worker_die_meanwhile(tmp_path: Path) -> None:
    kills = ("server:1@step:75", "server:2@step:75", "coordinator@step:75", "worker:0@step:76")
    found = coded(tmp_path, mode="sync", kill=kills)
    check(found, roles=["server", "server", "coordinator", "worker"])


def test_when_all_copies_are_lost_everybody_goes_back(tmp_path: Path) -> None:
    """Three neighbours hold all copies of some dense parameters."""
    kills = tuple(f"server:{server}@step:100" for server in (1, 2, 3))
    options = {"learning_rate": 0.03, "optimizer": "rowwise_adagrad", "mode": "sync", "every": "20steps"}
    found = coded(tmp_path, kill=kills, **options)
    assert found.summary["status"] == "ok"
    assert len(found.summary["restores"]) == 1
    assert found.summary["model_sha256"] == undisturbed(found.config)[-1]
