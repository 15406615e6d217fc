"""Goal: saves of single servers are shown, checked and deleted by those who ask for it, and nobody takes them for cuts.

Method: the small store of ckpt_run.py with saves of two servers beside its cuts, and the commands on it.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from ckpt_run import NOW, Run
from save_worlds import OWNER, Server, make_writer, name, write_save

from regrow.checkpoint.load import verify
from regrow.checkpoint.manifest import MANIFEST
from regrow.checkpoint.merger import Merger
from regrow.checkpoint.retention import Rules
from regrow.checkpoint.saves import IDS, Owner
from regrow.checkpoint.saves_list import find_run, list_saves, verify_saves
from regrow.errors import UserError

OTHER = Owner(run="run", start=0, shard="s1of2-00000000")


@pytest.fixture
def server(empty: Run) -> Server:
    """Saves of two servers, and no cut."""
    server = Server(empty.world.storage, np.random.default_rng(0), 0, {})
    server.writer.clock = lambda: NOW - 60
    for count in (40, 5, 5):
        server.update(count)
        server.save()
    other = make_writer(empty.world.storage, owner=OTHER)
    other.clock = lambda: NOW - 7200
    write_save(other, {}, (), full=True, marks=(3, 4))
    return server


LS = """\
no checkpoints at URL

run    shard           newest save            age        marks  rows     size  a reload reads
run.0  s0of1           0000000000-0000000003  1 min ago  50        5  1.0 KiB  3 saves, 3.9 KiB
run.0  s1of2-00000000  0000000000-0000000001  2 h ago    3, 4      0      0 B  1 save, 0 B

4 saves of single servers, 3.9 KiB: each server's own, no state of the whole model
"""


def test_ls_has_a_line_for_each_server(empty: Run, server: Server) -> None:
    assert empty("ckpt ls URL") == LS
    found = json.loads(empty("ckpt ls URL --json"))
    assert found["cuts"] == [] and found["unfinished"] == []
    first, second = found["saves"]
    assert first["chain"] == [name(0, 3), name(0, 2), name(0, 1)]
    assert (first["newest"]["marks"], first["newest"]["updates"], first["newest"]["full"]) == ([50], 50, False)
    assert second["problem"] is None


def test_ls_says_what_cannot_be_loaded(empty: Run, server: Server) -> None:
    directory = empty.path / OWNER.directory
    shutil.rmtree(directory / name(0, 1))
    text = empty("ckpt ls URL")
    assert f"{name(0, 1)}/{MANIFEST} is not there, and {name(0, 2)} follows it" in text
    shutil.rmtree(directory / name(0, 2))
    (directory / name(0, 3) / MANIFEST).unlink()
    assert "nothing yet" in empty("ckpt ls URL")


def test_verify_names_all_damage(empty: Run, server: Server) -> None:
    assert empty("ckpt verify URL") == "no damage: 0 pieces, 4 saves, 3.9 KiB read; all 0 cuts restorable\n"
    directory = empty.path / OWNER.directory
    chunk = next((directory / name(0, 1)).glob("s0of1-*"))
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"?")
    (directory / name(0, 2) / IDS).unlink()
    (directory / name(0, 4)).mkdir()
    torn = directory / name(0, 5) / MANIFEST
    torn.parent.mkdir()
    torn.write_bytes(b"{")
    text = empty("ckpt verify URL", code=1)
    assert f"damaged   {OWNER.directory}/{name(0, 1)}/{chunk.name}: damaged (checksum)\n" in text
    assert f"damaged   {OWNER.directory}/{name(0, 2)}/{IDS}: missing\n" in text
    assert f"damaged   {OWNER.directory}/{name(0, 5)}/{MANIFEST}: damaged or not a manifest" in text
    assert f"harmless  {OWNER.directory}/{name(0, 4)}/{MANIFEST}: not there" in text
    assert text.endswith("3 problems; 0 pieces, 4 saves, 3.9 KiB read; 0 cuts restorable, 0 not\n")
    shutil.rmtree(torn.parent)
    shutil.rmtree(directory / name(0, 1))
    text = empty("ckpt verify URL --quick", code=1)
    assert f"{OWNER.directory}/: what is saved cannot be loaded: {name(0, 1)}/{MANIFEST} is not there" in text


def test_readers_of_cuts_do_not_see_them(run: Run) -> None:
    """With saves beside them, every command says of cuts what it says without."""
    commands = ["ckpt show URL", "ckpt diff URL 100 710", "ckpt prune URL --keep-last 1 --keep-full-every 0 --dry-run"]
    before = [run(command) for command in commands]
    listed, problems = run.world.storage.manifests(), verify(run.world.storage)
    other = Server(run.world.storage, np.random.default_rng(0), 0, {})
    other.update(10)
    other.save()
    assert [run(command) for command in commands] == before
    assert (run.world.storage.manifests(), verify(run.world.storage)) == (listed, problems)
    files = run.files()
    clock = iter(range(10**6, 10**9, 10**6))
    merger = Merger(
        run.world.storage,
        rules=Rules(keep_last=1, keep_full_every_seconds=0.0),
        grace_seconds=1.0,
        unfinished_seconds=1.0,
        clock=lambda: float(next(clock)),
        ticks=lambda: float(next(clock)),
    )
    for _ in range(4):
        assert merger.round()
    saves_before = {path: data for path, data in files.items() if path.startswith("saves/")}
    assert {path: data for path, data in run.files().items() if path.startswith("saves/")} == saves_before
    assert len(run.files()) < len(files), "the merger did delete something"
    lines = run.fails("ckpt show URL@saves", code=2)
    assert "has no cut 'saves'" in lines[0]


def test_prune_deletes_those_of_a_run_that_is_said_to_be_over(run: Run) -> None:
    keep = make_writer(run.world.storage, owner=Owner(run="alive", start=0, shard="s0of1"))
    write_save(keep, {}, (), full=True)
    server = Server(run.world.storage, np.random.default_rng(0), 0, {})
    server.update(10)
    server.save()
    before = run.files()
    assert run.fails("ckpt prune URL --saves rum", code=2) == [
        "error: no run is 'rum'",
        "hint: there are saves of run",
    ]
    text = run("ckpt prune URL --keep-last 100 --saves run --dry-run")
    assert text.endswith("would delete 2 pieces and the saves of 1 server of run, 3.4 KiB\n"), text
    assert run.files() == before
    text = run("ckpt prune URL --keep-last 100 --saves run --yes")
    assert f"deleted {server.writer.owner.directory}/{name(0, 1)}\n" in text
    assert [each.found.owner.run for each in list_saves(run.world.storage)] == ["alive"]
    run("ckpt prune URL --keep-last 100 --yes")
    assert len(list_saves(run.world.storage)) == 1


def test_runs_by_the_beginning_of_their_names(empty: Run) -> None:
    for run in ("abc", "abd", "x"):
        write_save(make_writer(empty.world.storage, owner=Owner(run=run, start=0, shard="s")), {}, (), full=True)
    listed = list_saves(empty.world.storage)
    assert [find_run(listed, wish) for wish in ("abc", "abd", "x")] == ["abc", "abd", "x"]
    for wish, words in (("ab", "several runs are"), ("y", "no run is"), ("", "no run is")):
        with pytest.raises(UserError, match=words):
            find_run(listed, wish)
    with pytest.raises(UserError, match="no server has saved"):
        find_run([], "x")
    assert verify_saves(empty.world.storage, listed, deep=True) == []
    empty("ckpt prune URL --saves x --yes")
    assert len(list_saves(empty.world.storage)) == 2
