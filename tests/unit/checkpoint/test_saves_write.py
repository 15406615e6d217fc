"""Goal: what a server saved by itself is found again by its successor, row by row, and never anything else.

Method: a server that is a dictionary updates, saves, is killed, replaced, and comes back when it is not wanted any
more, by random choices, while storage fails wherever it can. Each successor must find what its predecessor had made
durable. Processes are killed at every failpoint of a save.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from save_worlds import OWNER, SHARD, Server, chain_names, find, load, make_server, make_writer, name, write_save
from worlds import TABLES, Model

from regrow.checkpoint import failpoints, saves_write
from regrow.checkpoint.manifest import MANIFEST
from regrow.checkpoint.saves import Owner, SaveManifest
from regrow.checkpoint.saves_write import delete_run, list_owners, read_saves
from regrow.checkpoint.storage import Storage
from regrow.core.names import save_name
from regrow.errors import CheckpointError, StorageError


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return Storage.open(str(tmp_path / "x") if request.param == "local" else f"memory://{tmp_path}/x")


# -- successors and those who only seemed dead -----------------------------------------------------------


def claim(storage: Storage, incarnation: int, random: np.random.Generator, model: Model) -> Server:
    server = Server(storage, random, incarnation, model)
    server.writer.claim(find_marks=lambda: (0,))
    return server


def test_a_successor_claims_what_it_finds(storage: Storage) -> None:
    first = make_server(storage)
    first.update(30)
    first.save()
    second = claim(storage, 1, first.random, first.durable)
    chain = second.writer.chain
    assert chain is not None and chain_names(chain) == [name(1, 1), name(0, 1)]
    assert (chain.head.marks, chain.head.updates, chain.head.chunks) == ((30,), 30, ())
    assert second.writer.choose_kind()[0] is False
    first.update(9)
    first.save(full=False)
    first.update(9)
    first.save(full=True)  # it would delete all that is older
    second.update(4)
    second.save()
    assert load(storage, find(storage)) == second.model
    second.save(full=True)
    assert [save.save for save in read_saves(storage, OWNER).manifests] == [name(1, 3)]


def test_nobody_builds_on_a_save_that_was_given_up(storage: Storage) -> None:
    """A cut may come first when a save exists already. It is what the server was then; what follows leaves it out."""
    writer = make_writer(storage)
    model = {
        (table.name, row): np.full(sum(table.widths), row, np.float32).tobytes() for table in TABLES for row in range(3)
    }
    write_save(writer, model, model, full=True)
    keys = sorted(model)
    write_save(writer, model, keys[:2], full=False, accepted=False)
    assert chain_names(find(storage)) == [name(0, 2), name(0, 1)]
    write_save(writer, model, keys[2:4], full=False)
    assert chain_names(find(storage)) == [name(0, 3), name(0, 1)]
    write_save(writer, model, model, full=True, accepted=False)
    write_save(writer, model, keys[:1], full=False)
    assert chain_names(find(storage)) == [name(0, 5), name(0, 3), name(0, 1)], (
        "a full that nobody wants deletes nothing"
    )


def test_a_successor_without_a_save_to_go_on_from(storage: Storage) -> None:
    second = claim(storage, 1, np.random.default_rng(0), {})
    assert second.writer.chain is not None and chain_names(second.writer.chain) == [name(1, 1)]
    assert second.writer.choose_kind() == (True, "there is no full yet")
    late = make_server(storage)
    late.update(5)
    late.save()
    assert load(storage, find(storage)) == {}
    second.update(5)
    second.save()
    assert load(storage, find(storage)) == second.model


def test_who_writes_while_it_is_claimed_is_claimed_with_that(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look and the claim the predecessor writes a full, and deletes what the claim names."""
    first = make_server(storage)
    first.update(30)
    first.save()
    writes = iter([True, False])
    really = Storage.write_last

    def write_last(self: Storage, directory: str, manifest: bytes) -> None:
        if directory.endswith(name(1, 1)) and next(writes):
            first.update(10)
            first.save(full=True)
        really(self, directory, manifest)

    monkeypatch.setattr(Storage, "write_last", write_last)
    second = claim(storage, 1, first.random, first.durable)
    assert second.writer.chain is not None
    assert chain_names(second.writer.chain) == [name(1, 2), name(0, 2)]
    assert load(storage, find(storage)) == first.durable


def test_who_goes_on_writing_without_end(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_server(storage)
    really = Storage.write_last

    def write_last(self: Storage, directory: str, manifest: bytes) -> None:
        if "/0000000001-" in directory:
            first.save(full=True)
        really(self, directory, manifest)

    monkeypatch.setattr(Storage, "write_last", write_last)
    with pytest.raises(CheckpointError, match="an older incarnation than 1 goes on saving"):
        claim(storage, 1, first.random, {})
    assert first.writer.number == saves_write.CLAIMS_MAX


def test_who_was_replaced_claims_nothing_and_deletes_nothing(storage: Storage) -> None:
    claim(storage, 2, np.random.default_rng(0), {})
    with pytest.raises(CheckpointError, match="a newer incarnation than 1"):
        claim(storage, 1, np.random.default_rng(0), {})
    first = make_server(storage)
    first.save(full=True)
    first.save(full=True)
    assert [save.save for save in read_saves(storage, OWNER).manifests] == [name(0, 1), name(0, 2), name(2, 1)]


def test_the_first_one_has_to_be_a_full(storage: Storage) -> None:
    with pytest.raises(CheckpointError, match="the first save has to be a full"):
        write_save(make_writer(storage), {}, (), full=False)


def test_what_was_saved_before_a_fall_back_is_not_found_and_goes(storage: Storage) -> None:
    before = make_server(storage)
    before.update(10)
    before.save()
    other = make_writer(storage, owner=Owner(run="run", start=0, shard="s1of2"))
    write_save(other, {}, (), full=True)
    again = Owner(run="run", start=1, shard=SHARD)
    assert find(storage, again) is None
    write_save(make_writer(storage, owner=again), {}, (), full=True)
    assert [owner for owner in list_owners(storage) if read_saves(storage, owner).manifests] == [other.owner, again]


def test_a_run_that_is_over_goes_whole_and_alone(storage: Storage) -> None:
    keep = Owner(run="other", start=0, shard=SHARD)
    for owner in (OWNER, Owner(run="run", start=3, shard="s1of2"), keep):
        write_save(make_writer(storage, owner=owner), {}, (), full=True)
    storage.write(f"{OWNER.directory}/{name(0, 9)}/half", b"x")
    assert len(delete_run(storage, "run")) == 3
    assert list_owners(storage) == [keep]
    assert delete_run(storage, "none") == []
    assert len(delete_run(storage, "other")) == 1
    assert storage.directories("saves") == []
    with pytest.raises(CheckpointError, match="not the name of a save"):
        storage.delete_save("saves/run.0")


# -- anything may happen ---------------------------------------------------------------------------------

POINTS = [point for point in failpoints.NAMES if not point.startswith("stage.") and not point.endswith(".put")]


def live(storage: Storage, random: np.random.Generator) -> None:
    """A few lives of one server. Storage fails now and then, wherever it can; some die after that, some do not; some
    come back when they were replaced. Each life begins with what the last one's newest save holds."""
    zombies: list[Server] = []
    server = Server(storage, random, 0, {})
    found = dict(server.durable)
    for _ in range(int(random.integers(10, 40))):
        act = random.random()
        if act < 0.55:
            server.update(int(random.integers(1, 12)))
            point = f"{POINTS[int(random.integers(len(POINTS)))]}:{int(random.integers(1, 4))}:raise"
            number = server.writer.number + 1
            try:
                with failpoints.arm_inside(point if random.random() < 0.4 else f"{POINTS[0]}:1000:raise"):
                    server.save(share=float(random.choice([1.0, 0.5, 0.1])))
                found = server.durable
            except StorageError:
                directory = f"{OWNER.directory}/{save_name(server.writer.incarnation, number)}"
                if storage.has(f"{directory}/{MANIFEST}"):  # it was written, and nobody was told
                    found = server.next_durable
        elif act < 0.75:
            zombies.append(server)
            server = Server(storage, random, server.writer.incarnation + 1, found)
            chain = server.writer.claim(find_marks=lambda: (0,))
            assert load(storage, chain) == found
        elif zombies:
            zombie = zombies[int(random.integers(len(zombies)))]
            zombie.update(5)
            zombie.save(full=True if random.random() < 0.5 else None)
        chain = find(storage)
        assert load(storage, chain) == found
        assert chain is None or chain.saves[-1].full or chain.saves[-1].parent is None


@pytest.mark.parametrize("seed", range(40))
def test_what_is_loaded_is_what_was_durable(seed: int, tmp_path: Path) -> None:
    live(Storage.open(str(tmp_path), attempts=1), np.random.default_rng(seed))


def test_a_planted_bug_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was replaced deletes all the same."""

    def delete(storage: Storage, full: SaveManifest) -> list[str]:
        doomed = [f"{OWNER.directory}/{each}" for each in storage.directories(OWNER.directory) if each != full.save]
        for path in doomed:
            storage.delete_save(path)
        return doomed

    monkeypatch.setattr(saves_write, "delete_older", delete)
    with pytest.raises((AssertionError, CheckpointError)):
        for seed in range(40):
            live(Storage.open(str(tmp_path / str(seed)), attempts=1), np.random.default_rng(seed))


# -- killed at every failpoint ---------------------------------------------------------------------------


def prepare(path: Path) -> Server:
    server = Server(Storage.open(str(path)), np.random.default_rng(1), 0, {})
    server.update(20)
    server.save()
    server.update(10)
    server.save(full=False)
    server.update(10)
    return server


def save_twice(server: Server) -> list[Model]:
    """A delta, and a full that deletes what was before; what is durable before, between and after."""
    states = [server.durable]
    for full in (False, True):
        server.save(full=full)
        states.append(server.durable)
        server.update(10)
    return states


def test_killed_at_every_failpoint() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        base = Path(directory)
        server = prepare(base / "recorded")
        with failpoints.recording() as passed:
            states = save_twice(server)
        points = [f"{point}:{passed[: index + 1].count(point)}:exit" for index, point in enumerate(passed)]
        assert len(points) > 60
        (base / "points").write_text("\n".join(points))
        subprocess.run([sys.executable, __file__, str(base)], check=True)
        reached = []
        for index, point in enumerate(points):
            storage = Storage.open(str(base / str(index)))
            second = claim(storage, 1, server.random, {})
            found = load(storage, second.writer.chain)
            assert found in states, point
            reached.append(states.index(found))
            second.writer.tables = TABLES  # and it goes on: what is left does no harm
            second.model = found
            second.save(full=True)
            assert [save.save for save in read_saves(storage, OWNER).manifests] == [name(1, 2)], point
            assert storage.directories(OWNER.directory) == [name(1, 2)], point
        assert reached == sorted(reached) and set(reached) == {0, 1, 2}


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for index, point in enumerate((root / "points").read_text().split()):
        child = os.fork()
        if child == 0:
            server = prepare(root / str(index))
            failpoints.arm(point)
            save_twice(server)
            os._exit(1)  # it should not have come here
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == failpoints.EXIT_CODE, point
