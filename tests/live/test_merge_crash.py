"""Goal: a merger or a reader may be killed at any moment, and the newest complete cut is still there, as it was.

Method: a merger's work on a small directory (folds, a full, deletions, its notes) is recorded once, pass by pass
through the failpoints: every mkdir, open, write, fsync, rename and delete. Then it is done again on a fresh copy for
each pass, in a process that ends there without a word, and for each write also in one that leaves half of it. After
each the newest cut is restored and its hash compared; then another merger finishes the work, and nothing is left over.
A reader passes no failpoint at all, which is shown, and is killed between chunks.

Processes are forked from one that has imported everything and has no threads: a hundred starts would take a minute.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "checkpoint"))

from worlds import World, digest

from regrow.checkpoint import failpoints
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.load import restore, verify
from regrow.checkpoint.merge import fold
from regrow.checkpoint.merger import Event, Merger
from regrow.checkpoint.policy import Choice
from regrow.checkpoint.retention import Rules
from regrow.checkpoint.storage import Storage

CUTS = 2
ROUNDS = 3  # one folds, one deletes what was replaced or left behind, one finds nothing more to do
NOW = 1e6


def merge(url: str) -> list[Event]:
    """All rounds of a merger. What is not needed is deleted one round later."""
    events: list[Event] = []
    merger = Merger(
        Storage.open(url, attempts=1),
        rules=Rules(keep_last=1, keep_full_every_seconds=0.0),
        choice=Choice(s=2, n=1, reason="test"),
        grace_seconds=0.0,
        on_event=events.append,
        clock=lambda: NOW,
    )
    for _ in range(ROUNDS):
        merger.round()
    return events


def read(url: str, chunks_max: int) -> None:
    """A reader that dies after so many chunks."""
    left = chunks_max

    def apply(piece: object, chunk: object) -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            failpoints.die()

    storage = Storage.open(url)
    restore(storage, Graph(storage.manifests()[0]).restore_plan()[0], apply)


def serve() -> None:
    """In the process of its own: a line says what to do, a fork does it, the answer is its exit code."""
    for line in sys.stdin:
        url, what = line.split()
        child = os.fork()
        if child == 0:
            if what.isdecimal():
                read(url, int(what))
            else:
                failpoints.arm(what)
                merge(url)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


class Forks:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, directory: Path, what: str) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(directory, what, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A full and a delta, in two shards: the merger makes a full of them."""
    world = World(str(tmp_path / "world"), seed=9, shards=2, chunk_bytes=300)
    for _ in range(CUTS):
        world.update(20)
        world.save()
    return world


def newest_hash(storage: Storage) -> tuple[str, str]:
    copy = World(storage.url)
    model, report = copy.restore_rows()
    assert report.broken == ()
    newest = Graph(storage.manifests()[0]).newest()
    assert newest is not None
    return newest.id, digest(model)


def test_a_merger_killed_anywhere(world: World, forks: Forks, tmp_path: Path) -> None:
    expected = world.cut, digest(world.model)
    recorded = tmp_path / "recorded"
    shutil.copytree(tmp_path / "world", recorded)
    with failpoints.recording() as passed:
        events = merge(str(recorded))
    assert {"folded", "deleted"} <= {event.kind for event in events}
    after = Storage.open(str(recorded)).pieces()
    assert len(after) == 1, "a full, and nothing else"

    kills = [f"{name}:{passed[: index + 1].count(name)}:exit" for index, name in enumerate(passed)]
    kills += [kill.replace(":exit", ":tear") for kill in kills if ".data:" in kill]
    assert {kill.partition(":")[0] for kill in kills} >= {
        *(f"{kind}.{what}" for kind in ("chunk", "manifest") for what in ("open", "data", "fsync", "rename")),
        *(f"{kind}.{what}" for kind in ("chunk", "manifest") for what in ("delete", "delete_fsync", "rename_fsync")),
        *("chunk.mkdir", "chunk.mkdir_fsync", "piece.delete", "piece.delete_fsync"),
    }
    copy = tmp_path / "copy"
    for kill in kills:
        shutil.copytree(tmp_path / "world", copy)
        assert forks.run(copy, kill) == failpoints.EXIT_CODE, kill
        storage = Storage.open(str(copy))
        assert newest_hash(storage) == expected, kill
        assert [problem for problem in verify(storage) if problem.harmful] == [], kill
        assert [event for event in merge(str(copy)) if event.kind in ("error", "broken", "wanted")] == [], kill
        assert newest_hash(storage) == expected, kill
        assert storage.pieces() == after, kill
        assert verify(storage) == [] and storage.list_unfinished() == [], kill
        shutil.rmtree(copy)


def test_a_reader_touches_nothing_and_may_be_killed_anywhere(world: World, forks: Forks, tmp_path: Path) -> None:
    world.update()
    world.save()
    cuts = list(world.graph().cuts)
    fold(world.storage, world.graph(), cuts[0], cuts[-1])
    world.lose(world.graph().restore_plan()[0].pieces[-1], how="flip")  # so that it also has to go around
    before = {path: path.read_bytes() for path in (tmp_path / "world").rglob("*") if path.is_file()}
    with failpoints.recording() as passed:
        model, report = world.restore_rows()
        verify(world.storage)
    assert passed == []
    assert model == world.model and len(report.broken) == 1
    chunks = sum(len(piece.chunks) for piece in world.graph().pieces.values() if piece.name in report.pieces)
    for count in range(1, chunks + 1):
        assert forks.run(tmp_path / "world", str(count)) == failpoints.EXIT_CODE
        assert world.restore_rows()[0] == world.model
    assert forks.run(tmp_path / "world", str(chunks + 99)) == 0
    assert {path: path.read_bytes() for path in (tmp_path / "world").rglob("*") if path.is_file()} == before


if __name__ == "__main__":
    serve()
