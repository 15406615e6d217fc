"""Goal: a checkpointer and a publisher watch one torch model without noticing each other. The pieces of each hold
exactly the rows that changed since its own last cut, whatever failed in between; a replica has the model's weights to
the bit.

Method: a model is trained by batches whose rows are known; both take cuts at random steps, and random ones fail, at
a failpoint. What each piece must hold is kept as sets of rows beside it. Replicas are real.
"""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch_models import RULES, Model, assert_same, state, train

import regrow
from regrow.checkpoint import failpoints
from regrow.checkpoint.chunks import read_chunk
from regrow.checkpoint.export import export
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.merge import fold
from regrow.checkpoint.publications import ask_for_full, read_latest
from regrow.checkpoint.storage import Storage
from regrow.checkpoint.torch.checkpointer import DeltaCheckpointer
from regrow.checkpoint.torch.publisher import Publisher
from regrow.errors import CheckpointError, ConfigError
from regrow.serving import Replica

TABLES = ("users.weight", "items.weight")
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's Adagrad, about itself
LATEST_IS_THE_SECOND_FILE = "chunk.rename:2:full"  # of a small publication: its chunk is the first


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.checkpoint.storage.WAIT_SECONDS", 0.0)


def make(seed: int = 0, rule: str = "adagrad") -> tuple[Model, list[torch.optim.Optimizer]]:
    model = Model(seed=seed)
    return model, RULES[rule][2](model)


def rows_of(model: Model, step: int) -> dict[str, set[int]]:
    """What the batch of a step updates, as torch_models draws it."""
    draw = torch.Generator().manual_seed(1000 + step)
    users = torch.randint(0, len(model.users.weight), (3, 2), generator=draw)
    items = torch.randint(0, len(model.items.weight), (3, 1), generator=draw)
    return {"users.weight": set(users.reshape(-1).tolist()), "items.weight": set(items.reshape(-1).tolist())}


def read_rows(storage: Storage, cut: str) -> dict[str, set[int]]:
    """Rows in the piece that leads to a cut."""
    (piece,) = [each for each in storage.manifests()[0] if each.target.id == cut]
    found: dict[str, set[int]] = {table: set() for table in TABLES}
    for info in piece.chunks:
        for name, rows in read_chunk(storage, piece, info).items():
            if name != "dense":
                found[name] |= {int(each) for each in rows.ids}
    return found


def assert_follows(replica: Replica, model: Model, cut: str) -> None:
    """The replica has the cut, and that is the model as it is."""
    assert replica.refresh()
    assert replica.cut == cut
    _, found = replica.lookup_many({name: np.arange(rows) for name, (rows, _) in replica.tables.items()})
    for name in TABLES:
        assert torch.equal(torch.from_numpy(found[name]), dict(model.named_parameters())[name].detach().float())
    kept = model.state_dict()
    dense = replica.read_dense()
    assert dense.keys() == kept.keys() - set(TABLES)
    assert all(torch.equal(values, kept[name]) for name, values in dense.items())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rule", ["adagrad", "sparse adam, adam"])
def test_two_tenants_of_one_model_at_random_intervals(rule: str, seed: int, tmp_path: Path) -> None:
    random = np.random.default_rng(seed)
    model, optimizers = make(rule=rule)
    urls = {"checkpoint": str(tmp_path / "ckpt"), "publication": str(tmp_path / "live")}
    checkpointer = DeltaCheckpointer(model, urls["checkpoint"], optimizers=optimizers, every=None, full_every=1000)
    publisher = Publisher(model, urls["publication"], every=None, full_every=1000)
    assert publisher._state is checkpointer._state
    everything = {name: set(range(len(dict(model.named_parameters())[name]))) for name in TABLES}
    waiting = {kind: everything for kind in urls}
    cuts: dict[str, dict[str, object]] = {}
    failed = 0
    publisher.publish()
    with Replica(urls["publication"], follow=False, wait_seconds=0.0, directory=tmp_path) as replica, publisher:
        waiting["publication"] = {name: set() for name in TABLES}
        for step in range(40):
            train(model, optimizers, step)
            new = rows_of(model, step)
            waiting = {kind: {name: found[name] | new[name] for name in TABLES} for kind, found in waiting.items()}
            for kind, writer in (("checkpoint", checkpointer), ("publication", publisher)):
                writer._step += 1
                if random.random() > 0.4:
                    continue
                points = ["chunk.rename:1:full", "manifest.rename:1:full"]
                points += [LATEST_IS_THE_SECOND_FILE] if kind == "publication" else []
                if random.random() < 0.3:
                    with failpoints.arm_inside(str(random.choice(points))), pytest.raises(CheckpointError):
                        writer.save()
                    failed += 1
                    continue
                cut = writer.save()
                assert read_rows(Storage.open(urls[kind]), cut) == waiting[kind]
                waiting[kind] = {name: set() for name in TABLES}
                if kind == "checkpoint":
                    cuts[cut] = state(model, optimizers)
                else:
                    assert_follows(replica, model, cut)
    checkpointer.close()
    assert failed > 2
    assert len(cuts) > 5
    for cut, expected in cuts.items():
        other, others = make(seed=5, rule=rule)
        DeltaCheckpointer.restore(other, urls["checkpoint"], at=cut, optimizers=others)
        assert_same(state(other, others), expected)


@pytest.mark.parametrize("point", ["chunk.rename:1:full", "manifest.rename:1:full", LATEST_IS_THE_SECOND_FILE])
def test_what_failed_is_told_and_is_in_the_next_publication(point: str, tmp_path: Path) -> None:
    model, optimizers = make()
    with Publisher(model, str(tmp_path), optimizers=optimizers, every=1) as publisher:
        publisher.publish()
        replica = Replica(str(tmp_path), follow=False, directory=tmp_path)
        before = read_latest(publisher._storage)
        train(model, optimizers, 1)
        with failpoints.arm_inside(point):
            publisher.step()
            with contextlib.suppress(CheckpointError):
                publisher.wait()
        assert read_latest(publisher._storage) == before
        replica._looked_at = -1e9  # it looks at all manifests, and may find one that no latest.json names
        replica.refresh()
        train(model, optimizers, 2)
        cut = publisher.publish()
        assert read_rows(publisher._storage, cut) == {
            name: rows_of(model, 1)[name] | rows_of(model, 2)[name] for name in TABLES
        }
        assert_follows(replica, model, cut)


def test_training_is_told_of_a_publication_that_failed(tmp_path: Path) -> None:
    with Publisher(Model(), str(tmp_path), every=1) as publisher:
        with failpoints.arm_inside("chunk.rename:1:full"):
            publisher.step()
            assert publisher._thread is not None
            publisher._thread.join()
        with pytest.warns(UserWarning, match="publications: a cut was not written"):
            publisher.step()


@pytest.mark.parametrize("first_to_leave", ["checkpointer", "publisher"])
def test_the_last_one_takes_the_hooks_away(first_to_leave: str, tmp_path: Path) -> None:
    model, optimizers = make()
    checkpointer = DeltaCheckpointer(model, str(tmp_path / "ckpt"), optimizers=optimizers, every=None)
    publisher = Publisher(model, str(tmp_path / "live"), optimizers=optimizers, every=None)
    hooks = len(optimizers[0]._optimizer_step_post_hooks)
    assert hooks == 1
    first, last = checkpointer, publisher
    if first_to_leave == "publisher":
        first, last = publisher, checkpointer
    last.save()
    first.close()
    train(model, optimizers, 1)
    assert last._tracker.pending("users.weight", tenant=last._seat.tenant) == len(rows_of(model, 1)["users.weight"])
    last.save()
    last.close()
    assert not optimizers[0]._optimizer_step_post_hooks
    with Publisher(model, str(tmp_path / "again"), optimizers=optimizers) as again:  # the model can be watched anew
        assert again._tracker is not last._tracker


def test_other_optimizers_than_those_that_are_watched_are_refused(tmp_path: Path) -> None:
    model, optimizers = make()
    told = pytest.raises(CheckpointError, match=r"with the optimizers \[\]; these are \['Adagrad'\]")
    with Publisher(model, str(tmp_path / "live")), told:
        DeltaCheckpointer(model, str(tmp_path / "ckpt"), optimizers=optimizers)
    DeltaCheckpointer(model, str(tmp_path / "ckpt"), optimizers=optimizers).close()


def test_a_run_that_resumes_beside_a_publisher_stores_what_changed_since(tmp_path: Path) -> None:
    """And the publisher, which was there when everything was overwritten, publishes all of it."""
    url, live = str(tmp_path / "ckpt"), str(tmp_path / "live")
    model, optimizers = make()
    with DeltaCheckpointer(model, url, optimizers=optimizers, every=None) as checkpointer:
        train(model, optimizers, 1)
        checkpointer.save()
    other, others = make(seed=9)
    with Publisher(other, live, optimizers=others) as publisher:
        publisher.publish()
        replica = Replica(live, follow=False, directory=tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resume = DeltaCheckpointer.restore(other, url, optimizers=others)
            checkpointer = DeltaCheckpointer(other, url, optimizers=others, every=None, resume=resume)
            publisher._step += 1
            assert_follows(replica, model, publisher.publish())
        train(other, others, 2)
        checkpointer._step += 1
        cut = checkpointer.save()
        assert read_rows(checkpointer._storage, cut) == rows_of(other, 2)
        checkpointer.close()


@pytest.mark.parametrize("bits", [8, 4])
def test_fewer_bits_are_near_and_the_dense_part_is_exact(bits: int, tmp_path: Path) -> None:
    model, optimizers = make()
    with Publisher(model, str(tmp_path), optimizers=optimizers, bits=bits) as publisher:  # type: ignore[arg-type]
        train(model, optimizers, 1)
        publisher.publish()
        replica = Replica(str(tmp_path), follow=False, directory=tmp_path)
        found, exact = replica.lookup("items.weight", [3, 4, 5]), model.items.weight.detach()[3:6].numpy()
        step = (exact.max(axis=1) - exact.min(axis=1)) / (2**bits - 1)
        assert (np.abs(found - exact) <= 0.51 * step[:, None]).all()
        assert torch.equal(replica.read_dense()["over.weight"], model.over.weight)
        with torch.no_grad():
            model.over.weight[0, 0] = float("nan")
        publisher._step += 1
        publisher.publish()
        assert replica.refresh()
        assert replica.read_dense()["over.weight"].isnan().sum() == 1


def test_a_replica_that_misses_a_piece_gets_a_full(tmp_path: Path) -> None:
    model, optimizers = make()
    with Publisher(model, str(tmp_path), optimizers=optimizers, every=1) as publisher:
        storage, kinds = publisher._storage, []
        for step in range(4):
            train(model, optimizers, step)
            publisher.step()
            publisher.wait()
            if step == 0:
                ask_for_full(storage, why="a test", cut="x", now=0.0)
            (piece,) = [each for each in storage.manifests()[0] if each.target.id == publisher.newest]
            kinds.append(piece.source is None)
        assert kinds == [True, False, True, False]  # heard of with the second


def test_publications_are_merged_exported_and_not_trained_on(tmp_path: Path) -> None:
    url = str(tmp_path / "live")
    model, optimizers = make()
    with Publisher(model, url, optimizers=optimizers, every=1) as publisher:
        for step in range(3):
            train(model, optimizers, step)
            publisher.step()
            publisher.wait()
        storage, cut = publisher._storage, publisher.newest
        assert cut is not None
    fold(storage, Graph(storage.manifests()[0]), None, cut)
    replica = Replica(url, follow=False, directory=tmp_path)
    assert (replica.cut, replica.step) == (cut, 3)
    assert torch.equal(torch.from_numpy(replica.read_table("users.weight")), model.users.weight.detach())
    done = export(storage, cut, tmp_path / "model.safetensors")
    assert_same(safetensors.torch.load_file(done.path), dict(model.state_dict()))
    with pytest.raises(CheckpointError, match="published for look-ups"):
        DeltaCheckpointer.restore(Model(), url)
    assert json.loads((tmp_path / "live" / "latest.json").read_bytes())["manifest"]["cut"] == cut


def test_narrow_floats_are_looked_up_as_they_are(tmp_path: Path) -> None:
    model = Model(sparse=False, dtype=torch.bfloat16)
    with regrow.Publisher(model, str(tmp_path)) as publisher:
        cut = publisher.publish()
    replica = Replica(str(tmp_path), follow=False, directory=tmp_path)
    assert replica.cut == cut
    assert torch.equal(torch.from_numpy(replica.read_table("users.weight")), model.users.weight.detach().float())


def test_bits_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be 32, 8 or 4"):
        Publisher(Model(), str(tmp_path), bits=16)  # type: ignore[arg-type]
