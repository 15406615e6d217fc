"""Goal: what the tracker hands over is exactly what changed, whatever the optimizers, and nothing is forgotten before
it is durable.

Method: random updates and fates of hand-overs are compared with plain sets; small models of every kind of optimizer are
trained, and the rows stored are compared with the rows that differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_models import ROWS, RULES, Model, tables, train

from regrow.checkpoint.chunks import split
from regrow.checkpoint.storage import Storage
from regrow.checkpoint.torch.checkpointer import DeltaCheckpointer
from regrow.checkpoint.torch.tracker import TENANTS_MAX, Handover, Tracker
from regrow.errors import CheckpointError


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The warning about rules that change all rows has its own test. The other one is torch's, about its Adagrad."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "checkpoints: all rows")
        warnings.filterwarnings("ignore", "Sparse invariant checks")
        yield


# ---- the tracker alone


def test_hand_over_has_each_updated_row_once_in_order() -> None:
    tracker, weight = Tracker(), torch.arange(20.0).reshape(10, 2)
    tracker.track("t", torch.tensor([7, 3, 7]), {"weight": weight, "sum": weight[:, 0] * 10})
    tracker.track("t", torch.tensor([[3], [0]]))
    ((name, (ids, states)),) = tracker.compact().rows().items()
    assert (name, ids.tolist()) == ("t", [0, 3, 7])
    assert states["weight"].tolist() == [[0, 1], [6, 7], [14, 15]]
    assert states["sum"].tolist() == [0, 60, 140]


def test_copies_stay_as_they_were() -> None:
    tracker, weight = Tracker(), torch.zeros(4, 2)
    tracker.track("t", torch.tensor([1]), {"weight": weight})
    for full in (False, True):
        handover = tracker.compact(full=full)
        (chunk,) = handover.chunks()
        copy = handover.rows()["t"][1]["weight"]
        weight += 1
        assert (chunk["t"].weight == copy.numpy()).all()
        assert (copy != weight[: len(copy)]).all()
        handover.durable()


def test_views_are_of_the_tensors_where_these_are_all_taken() -> None:
    """Parts that are joined by nobody, so that a table of any size takes no memory to write."""
    tracker, weight, half = Tracker(), torch.rand(1000, 8), torch.rand(1000).half()
    tracker.track("t", torch.tensor([1, 5]), {"weight": weight, "sum": half})
    handover = tracker.compact()
    some = next(handover.chunks(views=True))["t"]
    assert np.array_equal(some.weight, weight[[1, 5]].numpy())
    handover.again()
    parts = list(tracker.compact(full=True).chunks(chunk_bytes=9000, views=True))
    assert len(parts) > 1
    assert all(np.shares_memory(part["t"].weight, weight.numpy()) for part in parts)
    assert all(np.shares_memory(chunk["t"].weight, weight.numpy()) for chunk in split(parts, 9000))
    assert np.array_equal(np.concatenate([part["t"].states["sum"] for part in parts])[:, 0], half.float().numpy())


@pytest.mark.parametrize("seed", range(60))
def test_each_tenant_gets_what_changed_since_its_own_cut(seed: int) -> None:
    """Tenants come, go, make cuts at their own times, and lose some of them; sets say what each must be given."""
    random, tracker, weight = np.random.default_rng(seed), Tracker(), torch.zeros(40, 2)
    tracker.track("t", torch.empty(0, dtype=torch.int64), {"weight": weight})
    waiting: dict[int, set[int]] = {0: set()}
    under_way: dict[int, tuple[Handover, set[int]]] = {}
    for _ in range(120):
        tenant = int(random.choice(list(waiting)))
        match int(random.integers(8)):
            case 0 if len(waiting) < TENANTS_MAX:
                waiting[tracker.add_tenant()] = set(range(40))
            case 1 if len(waiting) > 1 and random.random() < 0.3:
                tracker.remove_tenant(tenant)
                del waiting[tenant]
                if tenant in under_way:
                    under_way.pop(tenant)[0].again()  # too late, and harmless
            case 2 if random.random() < 0.1:
                tracker.track("t", None)
                waiting = {each: set(range(40)) for each in waiting}
            case 3 | 4 if tenant in under_way:
                handover, rows = under_way.pop(tenant)
                if random.random() < 0.5:
                    handover.durable()
                else:
                    handover.again()
                    waiting[tenant] |= rows
            case 3 | 4:
                assert tracker.pending("t", tenant=tenant) == len(waiting[tenant])
                handover = tracker.compact(tenant=tenant)
                given = handover.rows()["t"][0].tolist() if "t" in handover.ids else []
                assert given == sorted(waiting[tenant])
                under_way[tenant] = handover, waiting[tenant]
                waiting[tenant] = set()
            case _:
                ids = random.integers(40, size=int(random.integers(1, 6)))
                tracker.track("t", torch.from_numpy(ids))
                for rows in waiting.values():
                    rows.update(ids.tolist())


def test_tenants_are_few_and_known() -> None:
    tracker = Tracker()
    tracker.track("t", torch.tensor([1]), {"weight": torch.zeros(4, 2)})
    assert [tracker.add_tenant() for _ in range(TENANTS_MAX - 1)] == [1, 2, 3]
    with pytest.raises(CheckpointError, match="at most 4 tenants"):
        tracker.add_tenant()
    tracker.remove_tenant(2)
    with pytest.raises(CheckpointError, match="no tenant 2"):
        tracker.compact(tenant=2)
    assert tracker.add_tenant() == 2


def test_a_table_that_comes_later_waits_for_every_tenant() -> None:
    tracker = Tracker()
    second = tracker.add_tenant()
    tracker.track("t", torch.tensor([1, 3]), {"weight": torch.zeros(4, 2)})
    for tenant in (0, second):
        assert tracker.compact(tenant=tenant).rows()["t"][0].tolist() == [1, 3]


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_forgotten_before_it_is_durable(seed: int) -> None:
    """Random updates and fates of hand-overs, compared with two sets."""
    draw = np.random.default_rng(seed)
    tracker, weight, waiting = Tracker(), torch.zeros(30, 1), set[int]()
    tracker.track("t", torch.empty(0, dtype=torch.int64), {"weight": weight})
    for _ in range(60):
        ids = draw.integers(0, 30, draw.integers(0, 6))
        everything = draw.random() < 0.03
        tracker.track("t", None if everything else torch.from_numpy(ids))
        waiting |= set(range(30)) if everything else set(ids.tolist())
        if draw.random() < 0.4:
            full = draw.random() < 0.2
            handover = tracker.compact(full=full)
            handed = {int(i) for ids, _ in handover.rows().values() for i in ids}
            assert handed == (set(range(30)) if full else waiting)
            taken, waiting = waiting, set()
            meanwhile = draw.integers(0, 30, 2)
            tracker.track("t", torch.from_numpy(meanwhile))
            waiting |= set(meanwhile.tolist())
            if draw.random() < 0.5:
                handover.durable()
            else:
                handover.again()
                waiting |= taken
            handover.again()  # said too late: nothing happens
        assert tracker.pending("t") == len(waiting)


def test_one_hand_over_at_a_time() -> None:
    tracker = Tracker()
    tracker.compact()
    with pytest.raises(CheckpointError, match="neither durable nor given back"):
        tracker.compact()


@pytest.mark.parametrize("wrong", [-1, 10])
def test_rows_that_do_not_exist_are_refused(wrong: int) -> None:
    tracker = Tracker()
    tracker.track("t", torch.tensor([9]), {"weight": torch.zeros(10, 2)})
    with pytest.raises(CheckpointError, match=f"'t' has 10 rows, and {wrong} is said"):
        tracker.track("t", torch.tensor([3, wrong]))
    with pytest.raises(CheckpointError, match="'new' is not known"):
        tracker.track("new", torch.tensor([3]))
    with pytest.raises(CheckpointError, match=r"its 'sum' is \[9\]"):
        tracker.track("t", torch.tensor([3]), {"weight": torch.zeros(10, 2), "sum": torch.zeros(9)})


def test_parts_of_a_table_are_cut_and_numbered() -> None:
    tracker, weight = Tracker(), torch.arange(10.0).reshape(10, 1)
    tracker.track("t", torch.tensor([2, 5, 9]), {"weight": weight})
    parts = list(tracker.compact().chunks({"t": 100}, chunk_bytes=16))
    assert [part["t"].ids.tolist() for part in parts] == [[102, 105], [109]]
    assert [part["t"].weight.tolist() for part in parts] == [[[2], [5]], [[9]]]


# ---- what optimizers do


@pytest.mark.parametrize("rule", RULES)
def test_tracked_rows_are_those_that_changed(rule: str, tmp_path: Path) -> None:
    sparse, all_rows, make = RULES[rule]
    model = Model(sparse=sparse)
    optimizers = make(model)
    with DeltaCheckpointer(model, str(tmp_path), optimizers=optimizers, every=None) as checkpointer:
        train(model, optimizers, 0)
        checkpointer.save()
        before = [weight.detach().clone() for weight in tables(model)]
        train(model, optimizers, 1)
        train(model, optimizers, 2)
        checkpointer.save()
        (delta,) = [m for m in Storage.open(str(tmp_path)).manifests()[0] if m.source is not None]
        for name, old, new in zip(("users.weight", "items.weight"), before, tables(model), strict=True):
            stored = sum(info.rows.get(name, 0) for info in delta.chunks)
            changed = int((old != new).any(dim=1).sum())
            assert stored == (len(new) if all_rows else changed)
            assert changed > 2


def test_rows_that_are_only_looked_up_are_not_tracked(tmp_path: Path) -> None:
    model = Model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    checkpointer = DeltaCheckpointer(model, str(tmp_path), optimizers=optimizers, every=None)
    model(torch.tensor([[1, 2]]), torch.tensor([[3]]))
    model(torch.tensor([[1, 2]]), torch.tensor([[3]])).sum().backward()
    assert checkpointer._tracker.pending("users.weight") == 0
    optimizers[0].step()
    assert checkpointer._tracker.pending("users.weight") == 2
    checkpointer.close()
    train(model, optimizers, 1)
    assert checkpointer._tracker.pending("users.weight") == 2


def test_gradients_made_in_a_closure_count(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = DeltaCheckpointer(model, str(tmp_path), optimizers=[optimizer], every=None)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.tensor([[1, 2]]), torch.tensor([[3]])).sum()
        loss.backward()
        return loss.item()

    optimizer.step(closure)
    assert checkpointer._tracker.pending("users.weight") == 2
    assert checkpointer._tracker.pending("items.weight") == 1
    checkpointer.close()


def test_a_change_behind_the_optimizers_back_makes_all_rows_dirty(tmp_path: Path) -> None:
    model = Model()
    optimizers = [torch.optim.Adagrad(model.parameters())]
    checkpointer = DeltaCheckpointer(model, str(tmp_path), optimizers=optimizers, every=None)
    checkpointer.save()
    with torch.no_grad():
        model.users.weight[7] = 5.0
    with pytest.warns(UserWarning, match=r"'users.weight' count as updated.*changed outside"):
        checkpointer.save()
    other = Model(seed=1)
    DeltaCheckpointer.restore(other, str(tmp_path))
    assert torch.equal(other.users.weight, model.users.weight)
    checkpointer.close()


def test_rules_that_change_all_rows_are_told_once(tmp_path: Path) -> None:
    model = Model()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
    with (
        DeltaCheckpointer(model, str(tmp_path), optimizers=optimizers, every=None),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        train(model, optimizers, 0)
        train(model, optimizers, 1)
    assert [str(each.message).split(":")[2] for each in told] == [
        " SGD with momentum changes rows that have no gradient",
        " SGD with momentum changes rows that have no gradient",  # once for each table
    ]


def test_an_optimizer_of_ones_own_may_be_declared(tmp_path: Path) -> None:
    class Own(torch.optim.SGD):
        pass

    for row_local, expected in [((), ROWS), ((Own,), 6)]:
        model = Model()
        own = Own(model.parameters(), lr=0.1)
        with DeltaCheckpointer(model, str(tmp_path), optimizers=[own], every=None, row_local=row_local) as checkpointer:
            train(model, [own], 0)
            assert checkpointer._tracker.pending("users.weight") == expected
