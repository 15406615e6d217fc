"""Goal: the merger folds, deletes and asks for fulls as it says: never what a reader needs, never too early, whatever
storage does and clocks say.

Method: it runs round by round on the `World` of the property test, with a clock that the test turns.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
from pathlib import Path

import msgspec
import pytest
from worlds import World

from regrow.checkpoint import merger
from regrow.checkpoint.files import LocalFiles
from regrow.checkpoint.load import verify
from regrow.checkpoint.manifest import MANIFEST, Manifest
from regrow.checkpoint.merge import MARK, fold
from regrow.checkpoint.merger import Event, Merger, clear_wanted, read_wanted_full, watch
from regrow.checkpoint.policy import Choice
from regrow.checkpoint.retention import Rules
from regrow.checkpoint.storage import Storage
from regrow.errors import StorageError

_numbers = itertools.count()


class Run:
    """A world, a merger on it, and what the merger said."""

    def __init__(self, url: str = "", *, s: int = 2, n: int = 100, grace: float = 300.0, keep_last: int = 1) -> None:
        self.world = World(url or f"memory://policy-{next(_numbers)}", seed=4)
        self.events: list[Event] = []
        self.options = {
            "rules": Rules(keep_last=keep_last, keep_full_every_seconds=0.0),
            "choice": Choice(s=s, n=n, reason="test"),
            "grace_seconds": grace,
            "clock": lambda: self.world.now,
            "ticks": lambda: self.world.now,
        }
        self.merger = self.another()

    def another(self, storage: object = None) -> Merger:
        return Merger(storage or self.world.storage, on_event=self.events.append, **self.options)  # type: ignore[arg-type]

    def train(self, cuts: int) -> None:
        for _ in range(cuts):
            self.world.update()
            self.world.save()

    def round(self) -> list[str]:
        """The kinds of what happened, in order."""
        self.events.clear()
        well = self.merger.round()
        assert well == all(event.kind != "error" for event in self.events)
        return [event.kind for event in self.events]

    def pieces(self) -> list[Manifest]:
        return list(self.world.graph().pieces.values())


def test_it_folds_then_waits_then_deletes() -> None:
    run = Run(s=2, n=4)
    run.train(4)
    assert run.round() == ["choice", "folded"]
    assert run.round() == []
    run.world.now += 299.0
    assert run.round() == []
    run.world.now += 1.0
    assert run.round() == ["deleted", "deleted"]
    run.world.check()
    run.train(1)
    assert run.round() == ["folded"], "a full after four deltas"
    newest = run.world.graph().restore_plan()[0]
    assert len(newest.pieces) == 1
    run.world.now += 300.0
    assert set(run.round()) == {"deleted"}
    assert [each.name for each in run.pieces()] == [newest.pieces[0].name]
    assert verify(run.world.storage) == []
    run.world.check()


def test_a_piece_that_is_needed_again_starts_over() -> None:
    """Its replacement breaks during the grace period: the deltas stay, and the replacement is made again."""
    run = Run(s=2)
    run.train(3)
    assert run.round() == ["choice", "folded"]
    merged = next(each for each in run.pieces() if each.folded)
    run.world.lose(merged, how="flip")
    run.world.now += 1000.0
    assert run.round() == ["broken"], "found on reading it back, before anything is deleted"
    run.world.check()
    assert run.round() == ["folded"]
    run.world.damaged.clear()
    assert verify(run.world.storage) == []
    assert run.round() == []
    run.world.now += 1000.0
    assert run.round() == ["deleted", "deleted"]
    run.world.check()


def test_nothing_is_deleted_by_the_round_that_found_it_unneeded() -> None:
    run = Run(s=2, grace=0.0)
    run.train(3)
    assert run.round() == ["choice", "folded"]
    assert run.round() == ["deleted", "deleted"]


def test_nothing_is_deleted_if_a_manifest_rotted_since_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known from an earlier round, and nothing tells that it is another one now."""
    monkeypatch.setattr(LocalFiles, "stamp", lambda self, path: "the same" if (self._root / path).exists() else None)
    run = Run(str(tmp_path), s=2)
    run.train(3)
    assert run.round() == ["choice", "folded"]
    assert run.round() == []
    merged = next(each for each in run.pieces() if each.folded)
    whole = (tmp_path / merged.name / MANIFEST).read_bytes()
    (tmp_path / merged.name / MANIFEST).write_bytes(whole[:-1])
    run.world.now += 1000.0
    assert run.round() == [], "what is left of the chain does without it"
    assert "broken" in run.round()
    assert "deleted" not in run.round()
    (tmp_path / merged.name / MANIFEST).write_bytes(whole)
    run.world.check()


def test_no_answer_when_pieces_are_read_back_is_not_damage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Run(str(tmp_path), s=2)
    run.train(3)
    assert run.round() == ["choice", "folded"]
    run.world.now += 1000.0
    monkeypatch.setattr("regrow.checkpoint.storage.WAIT_SECONDS", 0.0)
    really = LocalFiles.read, LocalFiles.directories
    silent = False

    def read(self: LocalFiles, path: str) -> object:
        nonlocal silent
        silent |= path.endswith(".safetensors")
        if silent:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really[0](self, path)

    def directories(self: LocalFiles) -> list[str]:
        if silent:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really[1](self)

    with monkeypatch.context() as outage:
        outage.setattr(LocalFiles, "read", read)
        outage.setattr(LocalFiles, "directories", directories)
        assert run.round() == ["error"]
        assert silent
    assert run.round() == ["deleted", "deleted"], "nothing was noted as broken"
    run.world.check()


def test_a_merger_that_starts_anew_remembers() -> None:
    run = Run(s=2)
    run.train(3)
    run.round()
    for told in ([], ["deleted", "deleted"]):  # from one process to the next half of the time counts at most
        run.world.now += 300.0
        run.merger = run.another()
        assert run.round() == ["choice", *told]
    run.train(3)
    run.round()
    run.world.storage.write(merger.STATE, b"{ torn")
    run.world.now += 300.0
    assert run.round() == [], "without memory the time begins again"


def test_a_clock_that_jumps_does_not_end_the_grace_period() -> None:
    """A reader that began a moment ago needs all of it, whatever the clock says now."""
    run = Run(s=2)
    clock, ticks = 0.0, 0.0
    run.options |= {"clock": lambda: clock, "ticks": lambda: ticks}
    run.merger = run.another()
    run.train(3)
    assert run.round() == ["choice", "folded"]
    for jump in (1e6, -1e7, 1e6):
        clock += jump
        ticks += 1.0
        assert run.round() == []
    clock, ticks = clock + 297.0, ticks + 297.0
    assert run.round() == [], "what passed while the clock went back is not known"
    clock, ticks = clock + 2.0, ticks + 2.0
    assert run.round() == ["deleted", "deleted"]
    run.world.check()


def test_two_mergers_do_not_count_the_time_twice() -> None:
    run = Run(s=2)
    run.train(3)
    run.round()
    other = run.another()
    for _ in range(29):
        run.world.now += 5.0
        assert run.round() == []
        run.world.now += 5.0
        assert other.round()
        assert run.events == [] or [event.kind for event in run.events] == ["choice"]
    run.world.now += 10.0
    assert run.round() == ["deleted", "deleted"]


def test_storage_errors_are_reported_and_the_next_round_goes_on() -> None:
    run = Run(s=2, grace=0.0)
    run.train(3)
    real, armed = run.world.storage, [0]

    class Flaky:
        """Every call of storage fails once, one more per round."""

        def __getattr__(self, name: str) -> object:
            found = getattr(real, name)
            if not callable(found):
                return found

            def call(*args: object, **kwargs: object) -> object:
                armed[0] -= 1
                if armed[0] == 0:
                    raise StorageError(f"cannot {name}: no answer")
                return found(*args, **kwargs)

            return call

    run.merger = run.another(Flaky())
    for number in range(1, 40):
        armed[0] = number
        run.events.clear()
        run.merger.round()
        assert all(event.kind != "wanted" for event in run.events), "no answer is not damage"
        run.world.check()
    armed[0] = 0
    run.round()
    run.round()
    assert [each.folded != () for each in run.pieces()] == [False, True]


def test_a_round_folds_so_many_times_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merger, "FOLDS_PER_ROUND_MAX", 2)
    run = Run(s=2)
    run.train(9)
    assert run.round() == ["choice", "folded", "folded"]
    assert [run.round() for _ in range(4)] == [["folded"] * 2, ["folded"] * 2, ["folded"], []]
    run.world.check()


def test_two_mergers_at_once_do_no_harm(tmp_path: Path) -> None:
    run = Run(str(tmp_path), s=2, n=6, grace=0.0)
    for _ in range(4):
        run.train(4)
        mergers = [run.another() for _ in range(2)]
        threads = [threading.Thread(target=lambda m=m: [m.round() for _ in range(3)]) for m in mergers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        newest = list(run.world.history)[-1]
        assert run.world.restore_rows()[0] == run.world.history[newest]
    run.merger = run.another()
    for _ in range(3):
        run.round()
    assert [problem for problem in verify(run.world.storage) if problem.harmful] == []
    run.world.check()


def test_leftovers_of_a_dead_merger_go_when_nothing_is_added_to_them(tmp_path: Path) -> None:
    run = Run(str(tmp_path), s=8)
    run.train(3)
    cuts = list(run.world.graph().cuts)
    made = fold(run.world.storage, run.world.graph(), cuts[0], cuts[2])
    run.world.storage.delete(f"{made.name}/{MANIFEST}")
    run.round()
    run.world.now += 200.0
    (tmp_path / made.name / f"s0of2-{MARK}0123456789-00000.safetensors").write_bytes(b"a new file")
    run.round()
    run.world.now += 200.0
    assert run.round() == [], "somebody wrote here 200 s ago"
    run.world.now += 100.0
    assert run.round() == ["deleted"]
    assert not (tmp_path / made.name).exists()
    run.world.check()


# -- asking for a full -------------------------------------------------------------------------------------


def test_a_broken_delta_makes_it_ask_for_a_full() -> None:
    run = Run(s=2)
    run.train(4)
    broken = run.pieces()[1]
    run.world.lose(broken, how="flip")
    assert read_wanted_full(run.world.storage) is None
    assert run.round() == ["choice", "broken", "wanted"]
    asked = read_wanted_full(run.world.storage)
    assert asked is not None
    assert asked.cut == list(run.world.history)[-1]
    assert broken.name in asked.why and "damaged" in asked.why
    assert run.round() == [], "asked once"
    run.train(1)
    run.world.save(full=True)
    clear_wanted(run.world.storage)
    assert run.round() == []
    assert read_wanted_full(run.world.storage) is None
    run.world.check()


def test_a_missing_delta_is_waited_for_one_round() -> None:
    run = Run(s=2)
    run.train(4)
    gone = run.pieces()[2]
    manifest = run.world.storage.read(f"{gone.name}/{MANIFEST}")
    run.world.storage.delete(f"{gone.name}/{MANIFEST}")
    assert "wanted" not in run.round()
    run.world.storage.write(f"{gone.name}/{MANIFEST}", manifest)
    assert "wanted" not in run.round()
    run.world.check()


@pytest.mark.parametrize("meanwhile", [0, 1])
def test_a_missing_delta_for_good_makes_it_ask(meanwhile: int) -> None:
    """Also when there is a new delta with every round."""
    run = Run(s=8)
    run.train(4)
    gone = run.pieces()[2]
    run.world.storage.delete_piece(gone.name)
    assert run.round() == ["choice"]
    run.train(meanwhile)
    assert run.round() == ["wanted"]
    asked = read_wanted_full(run.world.storage)
    assert asked is not None and asked.why.endswith(f"no piece leads to {gone.target.id}")


@pytest.mark.parametrize("full", [False, True])
def test_a_torn_manifest_of_the_newest_cut_makes_it_ask(full: bool) -> None:
    run = Run(s=8)
    run.train(3)
    run.world.update()
    torn = run.world.save(full=full)
    run.world.storage.write(f"{torn.name}/{MANIFEST}", b"torn")
    assert run.round() == ["broken", "wanted", "choice"]
    asked = read_wanted_full(run.world.storage)
    assert asked is not None and asked.cut == torn.target.id


def test_damage_in_a_branch_that_was_left_is_nothing_to_ask_about() -> None:
    run = Run(s=8)
    run.train(4)
    old = run.pieces()
    run.world.go_back(old[1].target.id)
    run.train(1)
    run.world.storage.write(f"{old[3].name}/{MANIFEST}", b"torn")
    assert run.round() == ["broken", "choice"]
    assert run.round() == []
    assert read_wanted_full(run.world.storage) is None


def test_a_request_that_cannot_be_read_is_a_request() -> None:
    run = Run()
    run.world.storage.write(merger.WANTED, b"{")
    asked = read_wanted_full(run.world.storage)
    assert asked is not None and "cannot be read" in asked.why
    clear_wanted(run.world.storage)
    clear_wanted(run.world.storage)
    assert read_wanted_full(run.world.storage) is None


# -- the loop ----------------------------------------------------------------------------------------------


def test_watch_measures_as_it_goes_and_stops_when_told() -> None:
    run = Run()
    rounds = itertools.count(1)

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            run.train(4)
            return next(rounds) == 5

    run.train(6)
    assert watch(
        run.world.storage, interval_seconds=7.0, on_event=run.events.append, stop=Stop(), clock=lambda: run.world.now
    )
    state = msgspec.json.decode(run.world.storage.read(merger.STATE), type=merger.State)
    assert state.overlap is not None and 0.0 < state.overlap < 1.0
    assert state.speed_ratio is not None and state.speed_ratio > 0.0
    assert state.full_deltas is not None and state.full_deltas > 1.0
    kinds = [event.kind for event in run.events]
    assert kinds.count("choice") >= 2 and "folded" in kinds and "error" not in kinds
    assert "defaults" in run.events[0].text
    run.world.check()


def test_watch_once_is_one_round() -> None:
    run = Run()
    run.train(5)
    events: list[Event] = []
    assert watch(run.world.storage, once=True, on_event=events.append, choice=Choice(s=4, n=9, reason="fixed"))
    assert [event.kind for event in events] == ["choice", "folded"]
    assert Storage.open(run.world.storage.url).pieces() == run.world.storage.pieces()
