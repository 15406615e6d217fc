"""Goal: what a dead process left unfinished goes, and what a living one may still be writing stays.

Method: unfinished pieces of all ages, on a local file system whose times are turned back, in memory, and on a file
system that tells times in its own way or not at all. The merger and `regrow ckpt prune` are let loose on them.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from ckpt_run import NOW, Run
from worlds import World

from regrow.checkpoint.files import TEMPORARY, read_change_time
from regrow.checkpoint.merger import Event, Merger
from regrow.checkpoint.retention import UNFINISHED_SECONDS, plan_unfinished
from regrow.checkpoint.storage import Storage, Unfinished
from regrow.core.names import cut_id, piece_name

DAY = 86400.0
CUTS = [cut_id(step, "unfinished") for step in range(5)]
NAMES = [piece_name(None, cut) for cut in CUTS]
_numbers = itertools.count()


def leave(path: Path, name: str, *, ages: dict[str, float], now: float) -> None:
    """An unfinished piece with files of so many bytes as their names have letters, written so many seconds ago."""
    (path / name).mkdir()
    for file, age in ages.items():
        (path / name / file).write_text(file)
        os.utime(path / name / file, (now - age, now - age))
    oldest = now - max(ages.values(), default=0.0)
    os.utime(path / name, (oldest, oldest))


# -- what storage tells ------------------------------------------------------------------------------------


def test_the_newest_file_counts_temporary_ones_too(tmp_path: Path) -> None:
    leave(tmp_path, NAMES[0], ages={"a": 500.0, "bb": 300.0, f"c{TEMPORARY}1": 100.0}, now=1000.0)
    leave(tmp_path, NAMES[1], ages={}, now=700.0)
    found = Storage.open(str(tmp_path)).look_at_unfinished()
    assert found == [
        Unfinished(name=NAMES[0], bytes=3 + len(f"c{TEMPORARY}1"), changed=900.0),
        Unfinished(name=NAMES[1], bytes=0, changed=700.0),
    ]
    assert [piece.seconds(1000.0) for piece in found] == [100.0, 300.0]
    assert found[0].seconds(5.0) == 0.0, "a clock that is behind makes nothing old"


def test_memory_tells_times_too() -> None:
    store = Storage.open(f"memory://unfinished-{next(_numbers)}")
    store.write(f"{NAMES[0]}/file", b"1234")
    (found,) = store.look_at_unfinished()
    assert (found.name, found.bytes) == (NAMES[0], 4)
    assert found.changed is not None
    assert found.seconds(time.time()) < DAY / 2
    assert found.seconds(found.changed + 5.0) == 5.0


@pytest.mark.parametrize(
    ("entry", "changed"),
    [
        ({"mtime": 5.5, "created": 3.0}, 5.5),
        ({"created": 3}, 3.0),
        ({"LastModified": datetime.datetime(1970, 1, 2, tzinfo=datetime.UTC), "mtime": 9.0}, DAY),
        ({"updated": "1970-01-02T00:00:00.000Z"}, DAY),
        ({"last_modified": datetime.datetime(1970, 1, 2)}, None),  # of which zone?
        ({"mtime": "yesterday"}, None),
        ({"mtime": None}, None),
        ({}, None),
    ],
)
def test_times_of_many_kinds(entry: dict[str, Any], changed: float | None) -> None:
    assert read_change_time(entry) == changed


def test_one_file_without_a_time_makes_the_age_unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = Storage.open(str(tmp_path))
    store.write(f"{NAMES[0]}/file", b"1234")
    monkeypatch.setattr(store._files, "changes", lambda directory: [(4, 10.0), (5, None)])
    assert store.look_at_unfinished() == [Unfinished(name=NAMES[0], bytes=9, changed=None)]


# -- the rule ----------------------------------------------------------------------------------------------


def test_the_rule() -> None:
    world = World(f"memory://unfinished-{next(_numbers)}")
    world.update()
    known = world.save().target.id
    now = 10 * DAY
    found = [
        Unfinished(name=NAMES[0], bytes=1, changed=now - UNFINISHED_SECONDS),
        Unfinished(name=NAMES[1], bytes=1, changed=now - UNFINISHED_SECONDS + 1.0),
        Unfinished(name=NAMES[2], bytes=1, changed=None),
        Unfinished(name=NAMES[3], bytes=1, changed=now),
        Unfinished(name=piece_name(CUTS[0], known), bytes=1, changed=now),
        Unfinished(name=piece_name(None, known), bytes=1, changed=0.0),
    ]
    doomed, why = plan_unfinished(world.graph(), found, now=now, dead=(CUTS[3], known))
    assert doomed == [NAMES[0], NAMES[3]]
    assert [why[piece.name] for piece in found] == [
        "deleted: unfinished, nobody wrote to it for 1 d",
        "kept: unfinished, written to 24 h ago: somebody may be at work",
        "kept: unfinished; the storage does not tell when it was written, so it may be just now",
        "deleted: unfinished, and whoever wrote it has ended",
        "kept: unfinished, written to 0 s ago: somebody may be at work",
        "kept: its manifest was there a moment ago; somebody deletes it",
    ]
    nothing = World(f"memory://unfinished-{next(_numbers)}").graph()
    assert plan_unfinished(nothing, found[:1], now=now)[0] == [], "perhaps manifests cannot be seen just now"


def test_the_merger_deletes_it(tmp_path: Path) -> None:
    world = World(str(tmp_path))
    world.update()
    world.save()
    leave(tmp_path, NAMES[0], ages={"s0of2-00000.safetensors": 2 * DAY}, now=NOW)
    leave(tmp_path, NAMES[1], ages={"s0of2-00000.safetensors": 2 * DAY, "s1of2-00000.safetensors": 60.0}, now=NOW)
    leave(tmp_path, NAMES[2], ages={"s0of2-00000.safetensors": 60.0, f"x{TEMPORARY}5": 60.0}, now=NOW)
    events: list[Event] = []
    now = NOW
    merger = Merger(world.storage, on_event=events.append, clock=lambda: now, ticks=lambda: now, dead=(CUTS[2],))
    assert merger.round()
    ended = f"{NAMES[2]}: unfinished, and whoever wrote it has ended (30 B)"
    assert [event.text for event in events if event.kind == "deleted"] == [ended], "the clock may be wrong"
    now += UNFINISHED_SECONDS - 1.0
    assert merger.round()
    (tmp_path / NAMES[1] / "s1of2-00000.safetensors").write_text("somebody is at work")
    now += 1.0
    assert merger.round()
    silent = f"{NAMES[0]}: unfinished, nobody wrote to it for 1 d (23 B)"
    assert [event.text for event in events if event.kind == "deleted"] == [ended, silent]
    assert world.storage.list_unfinished() == [NAMES[1]]
    world.check()


def test_what_was_finished_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the delete."""
    world = World(str(tmp_path))
    world.update()
    world.save()
    late = world.save(full=True)
    manifest = tmp_path / late.name / "manifest.json"
    text = manifest.read_bytes()
    manifest.unlink()
    look = Storage.look_at_unfinished

    def finish_first(self: Storage) -> list[Unfinished]:
        found = look(self)
        manifest.write_bytes(text)
        return found

    monkeypatch.setattr(Storage, "look_at_unfinished", finish_first)
    merger = Merger(world.storage, unfinished_seconds=0.0)
    assert merger.round()
    assert late.name in world.storage.pieces()
    world.check()


# -- the commands ------------------------------------------------------------------------------------------


def test_ls_and_prune(run: Run) -> None:
    leave(run.path, NAMES[0], ages={"s0of2-00000.safetensors": 3 * DAY}, now=NOW)
    leave(run.path, NAMES[1], ages={"s0of2-00000.safetensors": 120.0}, now=NOW)
    text = run("ckpt ls URL")
    said = "2 unfinished pieces, 46 B, last written to 2 min ago; `regrow ckpt prune` deletes old ones"
    assert text.splitlines()[-1] == said
    found = json.loads(run("ckpt ls URL --json"))["unfinished"]
    assert found[0] == {"piece": NAMES[0], "bytes": 23, "changed": NOW - 3 * DAY}
    prune = "ckpt prune URL --keep-last 8 --keep-full-every 1d"
    before = run.files()
    lines = run(f"{prune} --dry-run").splitlines()
    goes = [line.split()[:2] for line in lines if line.startswith("delete")]
    assert goes[-1] == ["delete", NAMES[0]]
    assert any(line.startswith(f"keep    {NAMES[1]}") and "somebody may be at work" in line for line in lines)
    assert lines[-1].startswith(f"would delete {len(goes)} piece")
    assert run.files() == before
    run(f"{prune} --yes")
    assert run.world.storage.list_unfinished() == [NAMES[1]]
    run(f"{prune} --unfinished 1m --yes")
    assert run.world.storage.list_unfinished() == []
    assert run("ckpt prune URL --keep-last 8 --keep-full-every 1d --dry-run").endswith("nothing to delete\n")
    run.world.check()


def test_prune_says_how_much_it_would_free(run: Run) -> None:
    run("ckpt prune URL --keep-last 8 --keep-full-every 1d --yes")
    leave(run.path, NAMES[0], ages={"x" * 100: 3 * DAY, "y" * 100: 3 * DAY}, now=NOW)
    line = run("ckpt prune URL --keep-last 8 --keep-full-every 1d --dry-run").splitlines()[-1]
    assert line == "would delete 1 piece, 200 B"


def test_merging_by_hand_deletes_nothing(run: Run) -> None:
    leave(run.path, NAMES[0], ages={"s0of2-00000.safetensors": 3 * DAY}, now=NOW)
    run("ckpt merge URL")
    assert run.world.storage.list_unfinished() == [NAMES[0]]
    run("merge --once URL --unfinished 100000d")
    assert run.world.storage.list_unfinished() == [NAMES[0]]
    run("merge --once URL")  # by the real clock it is older still, but that may have jumped
    assert run.world.storage.list_unfinished() == [NAMES[0]]
    run("merge --once URL --unfinished 0s")
    assert run.world.storage.list_unfinished() == []
