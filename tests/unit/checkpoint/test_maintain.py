"""Goal: restore, merge and prune do what they say, whatever is damaged, and leave nothing half-written when stopped.

Method: the entry point is called in process on the store of ckpt_run.py. What is left is compared with the copies that
the world kept. Ctrl-C comes as a real signal in the middle of a write, or as what its second one raises.
"""

from __future__ import annotations

import io
import itertools
import os
import signal
import sys
from pathlib import Path

import pytest
from ckpt_run import Run, cut, flip, name, state

from regrow.checkpoint import maintain
from regrow.checkpoint.guard import Stop
from regrow.checkpoint.manifest import MANIFEST
from regrow.checkpoint.merge import fold
from regrow.checkpoint.merger import Merger
from regrow.checkpoint.storage import Storage

# -- restore -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [100, 300, 400, 600, 710])
def test_restore_is_a_full_of_the_same_state(step: int, run: Run, tmp_path: Path) -> None:
    wish, target = cut(run, step), tmp_path / "new" / "place"
    text = run(f"ckpt restore URL@{wish[:14]} --to {target}")
    assert text.startswith(f"{target}@{wish}: one full, ") and text.endswith(" read back and verified\n")
    assert state(target) == run.world.history[wish]
    assert Storage.open(str(target)).pieces() == [f"{wish}.full"]
    before = run.files()
    lines = run.fails(f"ckpt restore URL@{wish} --to {target}", code=2)
    assert lines[0] == f"error: {target} already has {wish}.full"
    (target / f"{wish}.full" / MANIFEST).unlink()
    lines = run.fails(f"ckpt restore URL@{wish} --to {target}", code=2)
    assert lines[0].startswith(f"error: {target} already has an unfinished {wish}.full")
    assert run.files() == before


def test_restore_goes_around_damage(run: Run, tmp_path: Path) -> None:
    flip(run, name(run, 300))
    flip(run, name(run, 400, 100))
    for step, count in ((300, 1), (400, 2)):
        run(f"ckpt restore URL@{step} --to {tmp_path / 'b'}")
        assert run.err.count("gone around: ") == run.err.count("\n") == count
    assert state(tmp_path / "b", "300") == run.world.history[cut(run, 300)]
    assert state(tmp_path / "b", "400") == run.world.history[cut(run, 400)]


@pytest.mark.parametrize("damage", ["flip", "lose"])
def test_restore_of_what_is_damaged_leaves_nothing(damage: str, run: Run, tmp_path: Path) -> None:
    piece = name(run, 100)
    if damage == "flip":
        flip(run, piece)
    else:
        (run.path / piece / run.piece(piece).chunks[-1].name).unlink()
    for step in (100, 200):
        lines = run.fails(f"ckpt restore URL@{step} --to {tmp_path / 'b'}", code=1)
        assert lines[0].startswith(f"error: cut {cut(run, step)} cannot be restored, there is no way around: ")
        assert piece in lines[0] and "`regrow ckpt verify URL`" in lines[1] and f"@{cut(run, 710)}" in lines[1]
    assert not any(path.is_file() for path in (tmp_path / "b").rglob("*"))


@pytest.mark.parametrize("step", [100, 710])
def test_interrupting_a_restore_leaves_nothing(
    step: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Storage.write

    def interrupt(self: Storage, path: str, data: bytes) -> None:
        write(self, path, data)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Storage, "write", interrupt)
    monkeypatch.setattr(Stop, "_note", lambda self, number, _: setattr(self, "_number", number))
    run(f"ckpt restore URL@{step} --to {tmp_path / 'b'}", code=130)
    assert run.err == "interrupted; nothing half-written is left\n"
    assert list((tmp_path / "b").iterdir()) == []
    monkeypatch.setattr(Storage, "write", write)
    run(f"ckpt restore URL@{step} --to {tmp_path / 'b'}")


def test_restore_with_little_memory_leaves_one_piece(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for two of the four pieces: shortcuts are made on the way, read from the copy's side, and removed."""
    made: list[str] = []
    write = Storage.write_manifest
    monkeypatch.setattr(Storage, "write_manifest", lambda self, found: (made.append(found.name), write(self, found)))
    monkeypatch.setattr(maintain, "fold", lambda *args, **options: fold(*args, **options, memory_bytes_max=9_050))
    run(f"ckpt restore URL@600 --to {tmp_path / 'b'}")
    assert len(made) > 1 and made[-1] == name(run, 600)
    assert os.listdir(tmp_path / "b") == [name(run, 600)]
    assert state(tmp_path / "b") == run.world.history[cut(run, 600)]


def test_quantised_pieces_are_mixed_only_if_told(empty: Run, tmp_path: Path) -> None:
    empty.save(1)
    empty.save(2, bits=8)
    for line in (f"ckpt restore URL --to {tmp_path / 'b'}", "ckpt merge URL --to latest"):
        lines = empty.fails(line, code=2)
        assert lines[0] == "error: exact and quantised pieces (8 and 32 bits) would become one"
        assert "--approximate" in lines[1]
        empty(f"{line} --approximate")
    assert ", approximate" in empty("ckpt ls URL")


# -- merge -------------------------------------------------------------------------------------------------


def test_merge_between_two_cuts(run: Run) -> None:
    text = run("ckpt merge URL --from 500 --to 710")
    assert text.startswith(f"{name(run, 710, 500)} written: ")
    assert run("ckpt merge URL --from 500 --to 710").startswith(f"{name(run, 710, 500)} was there already: ")
    run("ckpt merge URL --to 500")
    assert run.world.graph().pieces[name(run, 500)].folded
    run.world.check()
    lines = run.fails("ckpt merge URL --from 600 --to 710", code=1)
    assert lines[0] == f"error: no path of pieces leads from {cut(run, 600)} to {cut(run, 710)}"


def test_merge_goes_around_damage(run: Run) -> None:
    flip(run, name(run, 400, 100))
    run("ckpt merge URL --to 400")
    assert state(run.path, "400") == run.world.history[cut(run, 400)]
    flip(run, name(run, 710, 610))
    assert name(run, 710, 610) in run.fails("ckpt merge URL --to 710", code=1)[0]


def test_merge_as_the_policy_says(run: Run) -> None:
    before = set(run.world.graph().pieces)
    lines = run("ckpt merge URL").splitlines()
    assert "choice  s=4, N=64: defaults" in lines[0]
    assert f"folded  {name(run, 710, 100)}: 4 pieces" in lines[1] and "s=4" in lines[1]
    assert set(run.world.graph().pieces) == before | {name(run, 710, 100)}  # nothing was deleted
    assert run("ckpt merge URL").endswith("nothing is due\n")
    run.world.check()


def test_interrupting_a_merge_leaves_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write, before = Storage.write, run.files()

    def interrupt(self: Storage, path: str, data: bytes) -> None:
        write(self, path, data)
        raise KeyboardInterrupt  # as the second Ctrl-C does

    monkeypatch.setattr(Storage, "write", interrupt)
    for line in ("ckpt merge URL --to 710", "ckpt merge URL", "merge --watch URL"):
        run(line, code=130)
        assert {path for path in run.files() if not path.startswith("merge/")} == set(before)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_watch_goes_on_until_it_is_stopped(number: int, code: int, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []
    real = Merger.round

    def one_round(self: Merger) -> bool:
        rounds.append(real(self))
        if len(rounds) == 3:
            os.kill(os.getpid(), number)
        return True

    monkeypatch.setattr(Merger, "round", one_round)
    text = run("merge --watch URL --interval 0s --grace 0s --keep-last 1 --keep-full-every 0", code=code)
    assert run.err.startswith("watching URL every 0 s; Ctrl-C ends it\n")
    assert [line.split()[1] for line in text.splitlines()][:2] == ["choice", "folded"]
    assert f"deleted {name(run, 710, 610)}: no kept cut needs it" in text
    assert rounds == [True, True, True]
    assert state(run.path) == run.world.history[run.world.graph().newest().id]  # type: ignore[union-attr]


def test_watch_waits_for_checkpoints_that_do_not_exist_yet(
    empty: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stop, "wait", lambda self, timeout=None: True)
    empty(f"merge --watch {tmp_path}/later")
    assert empty.fails(f"merge --once {tmp_path}/later", code=2)[0].endswith("is not there")


def test_an_outage_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = itertools.count(1)
    monkeypatch.setattr(Stop, "wait", lambda self, timeout=None: next(rounds) == 4)
    (run.path / "merge").write_text("in the way")  # of merge/state.json
    assert "error" in run("merge --watch URL")
    assert run.out.count("error") == 1
    run("merge --once URL", code=1)


# -- prune -------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


PRUNE = "ckpt prune URL --keep-last 1 --keep-full-every 0"


def test_prune_shows_what_stays_and_why(run: Run) -> None:
    before = run.files()
    lines = run(f"{PRUNE} --dry-run").splitlines()
    stays = [line.split()[1] for line in lines if line.startswith("keep")]
    assert stays == [piece.name for piece in run.world.graph().restore_plan()[0].pieces]
    assert f"{cut(run, 710)}, the newest cut, needs it" in lines[1]
    assert lines[-1] == "would delete 5 pieces, 6.2 KiB"
    assert run.files() == before


def test_prune_asks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = run.files()
    lines = run.fails(PRUNE, code=2)
    assert lines == [
        "error: this would delete 5 pieces, 6.2 KiB, and there is nobody to ask",
        "hint: add --yes to delete them",
    ]
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    assert run(PRUNE, code=1).endswith("nothing was deleted\n")
    assert run.files() == before
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert run(PRUNE).endswith("deleted 5 pieces, 6.2 KiB\n")
    assert set(run.world.graph().pieces) == {piece.name for piece in run.world.graph().restore_plan()[0].pieces}
    assert run(f"{PRUNE} --yes").endswith("nothing to delete\n")
    run.world.check()


def test_prune_keeps_what_is_named(run: Run) -> None:
    run(f"{PRUNE} --yes --keep 600 --keep {cut(run, 200)}")
    restorable = {found.id for found in run.world.graph().restorable()}
    assert {cut(run, 600), cut(run, 200), cut(run, 710)} <= restorable
    assert name(run, 300) not in run.world.graph().pieces
    run.world.check()


def test_prune_trusts_no_damaged_piece(run: Run) -> None:
    """The shortcut looks cheaper than the deltas it was made of; it is damaged, so the deltas stay."""
    run.world.damaged.add(name(run, 400, 100))
    flip(run, name(run, 400, 100))
    text = run(f"{PRUNE} --yes")
    assert f"keep    {name(run, 400, 100)}  merged  1.6 KiB  damaged (" in text
    assert state(run.path) == run.world.history[cut(run, 710)]
    run.world.check()


def test_interrupting_a_prune_stops_between_two_pieces(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    delete = Storage.delete_piece

    def interrupt(self: Storage, piece: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        delete(self, piece)

    monkeypatch.setattr(Storage, "delete_piece", interrupt)
    text = run(f"{PRUNE} --yes", code=130)
    assert run.err == "interrupted; what was not listed as deleted is still there\n"
    assert text.count("\ndeleted ") == 1
    assert run.world.storage.list_unfinished() == []
    run.world.check()
