"""Goal: `--resume URL[@CUT]` means one checkpoint or says what is wrong; and a run falls back to its own newest.

Method: texts with and without cuts; a storage with a few pieces, chunks and all.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from worlds import World

from regrow.checkpoint.files import LocalFiles
from regrow.checkpoint.manifest import MANIFEST, Cut, Manifest, TableInfo
from regrow.checkpoint.merge import fold
from regrow.checkpoint.storage import Storage
from regrow.config import TrainConfig
from regrow.core.names import piece_name
from regrow.errors import CheckpointError, StorageError, UserError
from regrow.launch import checkpoints
from regrow.launch.saving import CheckpointTimes, Saving
from regrow.launch.version import version

TABLE = TableInfo(name="t", rows=10, dim=2, states=(), init_bound=0.0, index=0)
A, B, C, D = "0000000010-aaaaaa", "0000000020-bbbbbb", "0000000030-cccccc", "0000000040-dddddd"


MADE = {"mode": "sync", "workers": 2, "seed": 1, "batch": 64, "data": "csv:x.csv", "schema": "a.toml"}


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of one run a full and a delta, of another a full, and a delta that nothing leads to."""
    storage = Storage.open(str(tmp_path))
    pieces = (
        (None, A, 10, 1.0, "x"),
        (A, B, 20, 2.0, "x"),
        (None, C, 30, 3.0, "y"),
        ("0000000025-eeeeee", D, 40, 4.0, "x"),
    )
    for source, target, step, created, run in pieces:
        cut = Cut(id=target, step=step, marks=(step,), created=created, job={}, extra={"config": MADE, "run": run})
        manifest = Manifest(source=source, target=cut, tables=(TABLE,), seed=1, chunks=(), made_by="a test")
        storage.write_manifest(manifest)
    return str(tmp_path)


def resumed(text: str, **changes: Any) -> TrainConfig:
    return TrainConfig(**{**MADE, "steps": 100, "resume": text, **changes})


@pytest.mark.parametrize(("wish", "cut"), [("", C), ("@latest", C), ("@10", A), ("@0000000020", B), (f"@{A}", A)])
def test_find(url: str, wish: str, cut: str) -> None:
    start = checkpoints.Start(url=url, cut=cut, step=int(cut[:10]))
    assert checkpoints.find(resumed(url + wish)) == start
    assert checkpoints.find(resumed(url + wish, servers=9, protection="ec", rows_max=7)) == start


def test_find_nothing(url: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no cut is '77'; there are {D}"):
        checkpoints.find(resumed(f"{url}@77"))
    with pytest.raises(CheckpointError, match=f"cut {D} cannot be restored: no pieces lead to 0000000025-eeeeee"):
        checkpoints.find(resumed(f"{url}@40"))
    with pytest.raises(UserError, match="nowhere: there is no checkpoint"):
        checkpoints.find(resumed(str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match="not a URL"):
        checkpoints.find(resumed("nonsense://x"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("mode", "async"), ("workers", 3), ("seed", 2), ("batch", 65), ("data", "csv:y.csv"), ("schema", "b.toml")],
)
def test_data_that_would_not_go_on(url: str, name: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        checkpoints.find(resumed(url, **{name: value}))
    assert caught.value.message == f"{C} was made with {name} = {MADE[name]!r}, this run has {value!r}"
    assert f"--{name} {MADE[name]}" in str(caught.value.hint)


def test_a_run_that_ended_before(url: str) -> None:
    with pytest.raises(UserError, match=f"{C} is of step 30, this run shall end at step 29"):
        checkpoints.find(resumed(url, steps=29))
    assert checkpoints.find(resumed(url, steps=30)).cut == C


def test_newest_of_this_run(url: str, tmp_path: Path) -> None:
    """Not of another, and nothing that cannot be restored."""
    assert checkpoints.find_newest(url, run="x") == (checkpoints.Start(url=url, cut=B, step=20), [])
    assert checkpoints.find_newest(url, run="y") == (checkpoints.Start(url=url, cut=C, step=30), [])
    assert checkpoints.find_newest(url, run="z") == (None, [])
    assert checkpoints.find_newest(str(tmp_path / "nowhere"), run="x") == (None, [])


def test_a_manifest_that_cannot_be_read_is_named(url: str, tmp_path: Path) -> None:
    """If it leads beyond what is taken."""
    for piece in (f"{B}.{A}", f"{C}.full"):
        (tmp_path / piece / MANIFEST).write_text("torn")
    found, damage = checkpoints.find_newest(url, run="x")
    assert found == checkpoints.Start(url=url, cut=A, step=10)
    assert [what.partition("/")[0] for what in damage] == [f"{B}.{A}", f"{C}.full"]
    (tmp_path / f"{A}.full" / MANIFEST).write_text("torn")
    assert checkpoints.find_newest(url, run="x")[0] is None


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A full and five deltas of one run, with a shortcut from the first to the fourth."""
    world = World(str(tmp_path / "world"))
    for _ in range(6):
        world.update()
        world.save()
    cuts = list(world.history)
    fold(world.storage, world.graph(), cuts[0], cuts[3])
    return world


def sound(world: World) -> tuple[str | None, list[str], int]:
    """The newest without damage, the pieces that have some, and the bytes read."""
    read = 0

    def progress(done: int, total: int) -> None:
        nonlocal read
        assert 0 <= done <= total
        read += 1

    found, damage = checkpoints.find_newest(world.storage.url, run=None, progress=progress)  # type: ignore[arg-type]
    return None if found is None else found.cut, sorted(what.partition("/")[0] for what in damage), read


def test_damage_is_gone_around_or_an_older_one_is_taken(world: World) -> None:
    """Files are read, each once, and a shortcut that is damaged is no loss while what it stands for is there."""
    cuts, pieces = list(world.history), world.graph().pieces
    assert sound(world)[:2] == (cuts[5], [])
    shortcut = piece_name(cuts[0], cuts[3])
    world.lose(pieces[shortcut], how="flip")
    assert sound(world) == (cuts[5], [shortcut], sum(len(piece.chunks) for piece in pieces.values()))
    fifth = piece_name(cuts[3], cuts[4])
    world.lose(pieces[fifth], how="flip")
    assert sound(world)[:2] == (cuts[3], [shortcut, fifth])
    full = piece_name(None, cuts[0])
    world.lose(pieces[full], how="flip")
    assert sound(world)[0] is None
    assert full in sound(world)[1]


def test_a_storage_that_does_not_answer_is_not_damage(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is older may be worth hours less. But one file that cannot be read, where all others can, is lost."""
    cuts, pieces = list(world.history), world.graph().pieces
    monkeypatch.setattr("regrow.checkpoint.storage.WAIT_SECONDS", 0.0)
    really = LocalFiles.read, LocalFiles.directories
    silent = [piece_name(cuts[4], cuts[5])]

    def read(self: LocalFiles, path: str) -> Any:
        if any(path.startswith(name) and not path.endswith(MANIFEST) for name in silent):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really[0](self, path)

    def directories(self: LocalFiles) -> list[str]:
        if out and next(out, None) is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really[1](self)

    out: Any = None
    monkeypatch.setattr(LocalFiles, "read", read)
    monkeypatch.setattr(LocalFiles, "directories", directories)
    assert sound(world)[:2] == (cuts[4], silent)
    silent += list(pieces)
    out = iter(["the listing before"])
    with pytest.raises(StorageError, match="Input/output error"):
        sound(world)


def plan_saving(**options: Any) -> Saving:
    found = checkpoints.plan_saving(TrainConfig(ckpt="c", **options), run="x", start=None)
    assert found is not None
    return found


def test_what_processes_are_told() -> None:
    for protection in ("none", "ec"):
        assert checkpoints.plan_saving(TrainConfig(protection=protection), run="x", start=None) is None
    delta = plan_saving(protection="delta", every="50steps", full_every=7, ckpt_encoding="zstd")
    assert delta == Saving(
        url="c",
        run="x",
        salt=delta.salt,
        made_by=f"regrow {version()}",
        encoding="zstd",
        bits=32,
        bytes_per_second=None,
        times=CheckpointTimes(every_seconds=None, every_steps=50, full_every=7, pause=False),
        keep_last=12,
        merge_seconds=checkpoints.MERGE_SECONDS_MIN,
    )
    assert plan_saving(protection="delta").salt != delta.salt, "cuts of another start have other names"
    full = plan_saving(protection="full", every="5m", ckpt_pause=True)
    assert full.times == CheckpointTimes(every_seconds=300.0, every_steps=None, full_every=1, pause=True)
    assert full.merge_seconds == checkpoints.MERGE_SECONDS_MAX


def test_where_a_run_began_is_kept() -> None:
    start = checkpoints.Start(url="c", cut=A, step=10)
    config = TrainConfig(ckpt="c", protection="delta", ckpt_keep_last=3)
    found = checkpoints.plan_saving(config, run="x", start=start, dead=[B])
    assert found is not None
    assert (found.keep_last, found.pinned, found.dead) == (3, (A,), (B,))


@pytest.mark.parametrize(
    "before, now, told", [("ec+delta", "none", True), ("none", "none", False), ("ec", "ec", False)]
)
def test_going_on_without_the_protection_of_before_is_told(before: str, now: str, told: bool) -> None:
    start = checkpoints.Start(url="u", cut=A, step=10, protection=before)
    note = checkpoints.note_protection(resumed("u", protection=now), start)
    assert (note is not None) == told
    assert note is None or note.startswith(f"{A} was made with --protect {before}, this run has --protect none: ")


def test_a_compressed_checkpoint_needs_its_library_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = Cut(id=A, step=10, marks=(10,), created=1.0, job={}, extra={"config": MADE, "run": "x"})
    manifest = Manifest(source=None, target=cut, tables=(TABLE,), seed=1, chunks=(), made_by="a test", encoding="zstd")
    Storage.open(str(tmp_path)).write_manifest(manifest)
    assert checkpoints.find(resumed(str(tmp_path))).cut == A
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match="need the zstandard library"):
        checkpoints.find(resumed(str(tmp_path)))
