"""Goal: a script that trains with a job trains the model that plain PyTorch would train, however it uses the parts;
what cannot work is said where it happens; and a worker that takes another's place goes on at its own batch.

Method: tiny click models on servers inside this process, against `nn.EmbeddingBag` and `torch.optim` with the same
first values and batches. Several workers share a cluster through seats made here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from click_models import (
    BATCH,
    CASES,
    DIM,
    ROWS,
    SGD,
    Clicks,
    Model,
    SharedSeat,
    join_cluster,
    loss_of,
    make_batches,
    make_job,
    make_table,
    step_plainly,
    train,
    train_plainly,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

import regrow
from regrow import metrics as regrow_metrics
from regrow.errors import RegrowError, UserError
from regrow.nn.declaring import check_names
from regrow.nn.job import Job
from regrow.nn.seat import AloneSeat, ClusterSeat

# -- against plain PyTorch --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_it_trains_what_plain_torch_trains(case: str) -> None:
    tables, features, options = CASES[case]
    job, model = make_job(*tables, **options)
    plain, optimizer = train_plainly(job, model, features, **options)
    batches = make_batches(12)
    expected = [step_plainly(plain, optimizer, batch) for batch in batches]
    assert train(job, model, batches) == pytest.approx(expected, abs=1e-5)
    for name, weights in plain.collections[0].tables.items():
        assert torch.allclose(job.read_weights(name), weights, atol=1e-5)
    job.refresh()
    mine = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, value in [*plain.named_parameters(), *plain.named_buffers()]:
        if "tables" not in name and value.is_floating_point():
            assert torch.allclose(mine[name], value, atol=1e-5), name


def test_clipping_is_of_all_gradients_together() -> None:
    job, model = make_job()
    plain, optimizer = train_plainly(job, model, CASES["sums"][1])
    for batch in job.loop(batches := make_batches(5)):
        job.step(loss_of(model, batch), clip_norm=0.05)
    for batch in batches:
        step_plainly(plain, optimizer, batch, clip=0.05)
    assert torch.allclose(job.read_weights("t_item"), plain.collections[0].tables["t_item"], atol=1e-5)


def test_two_collections_share_a_step() -> None:
    job = Job(AloneSeat(seed=3))
    users = job.embedding_bag_collection([make_table("t_user", "user")], optimizer=SGD)
    items = job.embedding_bag_collection([make_table("t_item", "item")], optimizer=SGD)
    model = job.dense(Model(users, items), SGD)
    one, alike = make_job()
    batches = make_batches(6)
    assert train(job, model, batches) == train(one, alike, batches)
    assert torch.equal(job.read_weights("t_item"), one.read_weights("t_item"))


def test_the_parts_of_a_step_by_themselves() -> None:
    """backward, an optimizer of one's own for what stays here, and commit."""
    job, model = make_job()
    own = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([own], lr=0.1)
    for batch in job.loop(make_batches(4)):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch.features) + own, batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        job.commit()
    assert own.item() != 0.0
    assert job.progress.step == 4


# -- what is counted --------------------------------------------------------------------------------------


def test_a_loop_for_each_epoch_is_the_same_as_one_for_all() -> None:
    loader = DataLoader(range(12), batch_size=4, shuffle=True, collate_fn=lambda ids: make_batches(1, seed=sum(ids))[0])
    weights = []
    for loops, epochs in ((1, 3), (3, 1)):
        job, model = make_job()
        for _ in range(loops):
            train(job, model, loader, epochs=epochs)
        weights.append(job.read_weights("t_user"))
    assert torch.equal(*weights)


def test_steps_are_counted_over_all_loops() -> None:
    job, model = make_job()
    counted = []
    for _ in range(2):
        for batch in job.loop(make_batches(4), accumulate=2):
            counted.append(job.steps)
            job.step(loss_of(model, batch))
            counted.append(job.steps)
    assert counted == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]


def test_a_synchronous_step_under_way_cannot_be_settled() -> None:
    job = Job(AloneSeat(seed=3, mode="sync"))
    model = job.dense(
        Model(job.embedding_bag_collection([make_table("t_user", "user")], optimizer=SGD), width=DIM), SGD
    )
    for batch in job.loop(make_batches(4)):
        if job.steps == 2:
            with pytest.raises(UserError, match=r"settle\(\) in the middle of step 3"):
                job.settle()
        job.step(loss_of(model, batch))
        job.settle()
    assert job.steps == 4


def test_a_batch_that_is_left_out_counts() -> None:
    job, model = make_job()
    for index, batch in enumerate(job.loop(make_batches(4))):
        loss = loss_of(model, batch)
        if index == 1:
            loss.backward()
            job.skip()
        else:
            job.step(loss)
    assert job.progress.step == 4
    same, model = make_job()
    three = make_batches(4)
    del three[1]
    train(same, model, three)
    assert torch.equal(job.read_weights("t_user"), same.read_weights("t_user")), "with SGD nothing moves by itself"


# -- what cannot work is said -----------------------------------------------------------------------------


def test_a_batch_without_a_step() -> None:
    job, _ = make_job()
    with pytest.raises(UserError, match=r"step 1 was left without job\.step"):
        for _ in job.loop(make_batches(2)):
            pass


def test_a_step_without_a_batch() -> None:
    job, _ = make_job()
    with pytest.raises(UserError, match="no batch to step"):
        job.commit()


def test_a_model_that_is_called_with_something_else() -> None:
    job, model = make_job()
    other = make_batches(1, seed=9)[0]
    with pytest.raises(UserError, match=r"outside job\.loop"):
        model(other.features)
    with pytest.raises(UserError, match="not those of the batch"):
        for _ in job.loop(make_batches(1)):
            model(other.features)


def test_a_copy_of_the_features_is_as_good() -> None:
    job, model = make_job()
    for batch in job.loop(make_batches(1)):
        f = batch.features
        copy = regrow.KeyedJaggedTensor(f.keys(), f.values().clone(), f.lengths().clone())
        job.step(nn.functional.binary_cross_entropy_with_logits(model(copy), batch.labels))
    assert job.progress.step == 1


def test_what_comes_too_late() -> None:
    job, model = make_job()
    train(job, model, make_batches(1))
    with pytest.raises(UserError, match="a collection comes after the first step"):
        job.embedding_bag_collection([make_table("t_new", "user")])
    with pytest.raises(UserError, match="a module comes after"):
        job.dense(nn.Linear(1, 1))


def test_batches_without_features() -> None:
    job, _ = make_job()
    with pytest.raises(UserError, match="no features were found in a batch of type Tensor"):
        next(iter(job.loop([torch.zeros(3)])))
    job, _ = make_job()
    with pytest.raises(KeyError, match="no feature 'item'"):
        next(iter(job.loop(make_batches(1, names=("user",)))))


def test_features_that_are_said() -> None:
    job, model = make_job()
    hidden = [{"x": {1: batch}} for batch in make_batches(2)]
    for batch in job.loop(hidden, features=lambda batch: [batch["x"][1].features]):
        job.step(loss_of(model, batch["x"][1]))
    assert job.progress.step == 2


def test_ids_that_are_none() -> None:
    job, _ = make_job()
    (batch,) = make_batches(1)
    with pytest.raises(TypeError, match="whole numbers"):
        wrong = regrow.KeyedJaggedTensor(["user", "item"], batch.features.values().float(), batch.features.lengths())
        next(iter(job.loop([Clicks(wrong, batch.labels)])))


@pytest.mark.parametrize("wrong", [ROWS, -1])
@pytest.mark.parametrize("judging", [False, True])
def test_ids_that_no_row_has_are_told_with_their_feature(wrong: int, judging: bool) -> None:
    job, model = make_job()
    features = regrow.KeyedJaggedTensor(["user", "item"], torch.tensor([3, 5, wrong]), torch.tensor([1, 0, 1, 1]))
    batch = Clicks(features, torch.zeros(2))
    with pytest.raises(UserError, match=f"feature 'item', table 't_item', position 1: id {wrong} is out of range"):
        job.evaluate(model, [batch]) if judging else train(job, model, [batch])


def test_a_loss_that_is_none() -> None:
    job, model = make_job()
    with pytest.raises(RegrowError, match="became nan at step 1"):
        for batch in job.loop(make_batches(1)):
            job.step(loss_of(model, batch) * float("nan"))


def test_tables_of_one_name() -> None:
    job = Job(AloneSeat())
    job.embedding_bag_collection([make_table("t", "user")])
    with pytest.raises(ValueError, match="two tables are named 't'"):
        job.embedding_bag_collection([make_table("t", "item")])


def test_nothing_to_train() -> None:
    with pytest.raises(UserError, match="nothing to train"):
        Job(AloneSeat()).settle()


# -- judging ----------------------------------------------------------------------------------------------


def test_it_is_judged_by_what_the_servers_have() -> None:
    job, model = make_job()
    train(job, model, make_batches(6))
    tests = make_batches(3, seed=8)
    found = job.evaluate(model, tests)
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(batch.features) for batch in tests])
    labels = torch.cat([batch.labels for batch in tests])
    assert found["auc"] == pytest.approx(regrow.metrics.auc(labels.numpy(), logits.numpy()))
    expected = nn.functional.binary_cross_entropy_with_logits(logits, labels).item()
    assert found["logloss"] == pytest.approx(expected, rel=1e-5)


def test_judging_leaves_the_mode() -> None:
    job, model = make_job()
    job.evaluate(model, make_batches(1))
    assert model.training


# -- several workers, and successors ----------------------------------------------------------------------


def step_together(pairs: list[tuple[Job, nn.Module]], batches: list[Clicks], steps: int | None = None) -> None:
    """One step of each worker after the other: all push before any pulls the next."""
    loops: list[Iterator[Any]] = [job.loop(batches) for job, _ in pairs]
    for _ in range(steps or 99):
        hands = [next(loop, None) for loop in loops]
        if all(hand is None for hand in hands):
            return
        for (job, model), batch in zip(pairs, hands, strict=True):
            if batch is not None:
                job.step(loss_of(model, batch))


def test_workers_deal_the_batches() -> None:
    cluster = regrow.InProcessCluster(servers=2)
    pairs = [join_cluster(cluster, worker=worker, workers=2) for worker in range(2)]
    step_together(pairs, make_batches(7))
    assert [job.progress.step for job, _ in pairs] == [4, 3]
    assert torch.equal(pairs[0][0].read_weights("t_user"), pairs[1][0].read_weights("t_user"))


@pytest.mark.parametrize("died_after", [0, 1, 2, 5])
def test_a_successor_goes_on_at_its_own_batch(died_after: int) -> None:
    whole, model = make_job()
    batches = make_batches(5)
    train(whole, model, batches)
    cluster = regrow.InProcessCluster(servers=1)
    first, model = join_cluster(cluster, worker=0, workers=1, seed=3)
    for count, batch in enumerate(first.loop(batches), start=1):
        if count > died_after:
            break
        first.step(loss_of(model, batch))
    cluster.tick()
    second, model = join_cluster(cluster, worker=0, workers=1, seed=3)
    assert len(train(second, model, batches)) == 5 - died_after
    assert second.done == died_after
    assert second.progress.samples == 5 * BATCH
    assert torch.equal(second.read_weights("t_user"), whole.read_weights("t_user"))


def test_several_loops_are_one_run() -> None:
    batches = make_batches(6)
    whole, model = make_job()
    train(whole, model, batches)
    cluster = regrow.InProcessCluster(servers=1)
    first, model = join_cluster(cluster, worker=0, workers=1, seed=3)
    train(first, model, batches[:4])
    cluster.tick()
    second, model = join_cluster(cluster, worker=0, workers=1, seed=3)
    assert train(second, model, batches[:4]) == [], "all of the first loop was done before"
    assert len(train(second, model, batches[4:])) == 2
    assert torch.equal(second.read_weights("t_user"), whole.read_weights("t_user"))


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_successor_in_the_second_loop_passes_over_the_first(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has an end of its own: synchronously nothing of it is left to commit."""
    monkeypatch.setattr(SharedSeat, "protection", regrow.ErasureCode(k=1, r=1))  # whoever dies is replaced
    batches = make_batches(8)
    whole, model = make_job()
    train(whole, model, batches)
    cluster = regrow.InProcessCluster(servers=2)
    first, model = join_cluster(cluster, worker=0, workers=1, seed=3, mode=mode)
    train(first, model, batches[:4])
    for count, batch in enumerate(first.loop(batches[4:]), start=1):
        first.step(loss_of(model, batch))
        if count == 3:
            break
    cluster.tick()
    second, model = join_cluster(cluster, worker=0, workers=1, seed=3, mode=mode)
    assert train(second, model, batches[:4]) == [], "all of the first loop was done before"
    assert len(train(second, model, batches[4:])) == 8 - second.done
    assert torch.equal(second.read_weights("t_user"), whole.read_weights("t_user"))


def test_a_loop_that_is_left_may_be_held() -> None:
    """As `tqdm` and names do: it ends when it is let go, long after the next has begun."""
    batches = make_batches(6)
    whole, model = make_job()
    train(whole, model, batches)
    job, model = make_job()
    held = job.loop(batches)
    for count, batch in enumerate(held):
        if count == 3:
            break
        job.step(loss_of(model, batch))
    for count, batch in enumerate(job.loop(batches[3:])):
        if count == 1:
            held.close()  # type: ignore[attr-defined]
        job.step(loss_of(model, batch))
    assert job.progress.step == 6
    assert torch.equal(job.read_weights("t_user"), whole.read_weights("t_user"))


def test_a_loop_within_a_loop_is_explained() -> None:
    job, model = make_job()
    outer = job.loop(make_batches(3))
    job.step(loss_of(model, next(outer)))
    next(job.loop(make_batches(3)))
    with pytest.raises(UserError, match=r"another job\.loop began"):
        next(outer)


def test_a_loop_may_be_cut_short() -> None:
    job, model = make_job()
    assert len(train(job, model, make_batches(6), steps=2)) == 2
    assert len(train(job, model, make_batches(6), epochs=2, steps=9)) == 9
    assert job.progress.step == 11


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_loop_that_is_left_goes_on_in_the_next(mode: Any) -> None:
    job = Job(AloneSeat(seed=3, mode=mode))
    model = job.dense(Model(job.embedding_bag_collection(CASES["sums"][0], optimizer=SGD)), SGD)
    batches = make_batches(6)
    for index, batch in enumerate(job.loop(batches)):
        if index == 2:
            break
        job.step(loss_of(model, batch))
    assert len(train(job, model, batches[2:])) == 4
    assert job.progress.step == 6
    same, model = make_job()
    train(same, model, batches)
    assert torch.equal(job.read_weights("t_user"), same.read_weights("t_user"))


def test_state_goes_out_and_comes_back() -> None:
    job, model = make_job()
    train(job, model, make_batches(4))
    job.refresh()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    assert set(state) == {
        "collections.0.embedding_bags.t_user.weight",
        "collections.0.embedding_bags.t_item.weight",
        "top.weight",
        "top.bias",
    }
    other, fresh = make_job()
    other.settle()
    fresh.load_state_dict(state)
    assert torch.equal(other.read_weights("t_user"), job.read_weights("t_user"))


# -- loading weights --------------------------------------------------------------------------------------


def make_state(seed: int) -> dict[str, Tensor]:
    """Of the model of `make_job`."""
    g = torch.Generator().manual_seed(seed)
    _, model = make_job()
    return {key: torch.randn(value.shape, generator=g) for key, value in model.state_dict().items()}


def check_state(job: Job, model: nn.Module, wanted: dict[str, Tensor]) -> None:
    job.refresh()
    for key, value in model.state_dict().items():
        assert torch.equal(value, wanted[key]), key


@pytest.mark.parametrize("begun", [False, True])
def test_weights_that_are_loaded_are_what_training_begins_with(begun: bool) -> None:
    """Rows and dense parameters, before the servers are met and after."""
    wanted = make_state(5)
    job, model = make_job()
    if begun:
        train(job, model, make_batches(2))
    model.load_state_dict(wanted)
    check_state(job, model, wanted)
    plain_job, plain = make_job()
    plain.load_state_dict(wanted)
    assert train(job, model, make_batches(3, seed=1)) == train(plain_job, plain, make_batches(3, seed=1))


def test_whoever_takes_anothers_place_does_not_undo_what_was_trained_by_loading_again() -> None:
    cluster = regrow.InProcessCluster(servers=3)
    wanted = make_state(5)

    def make() -> tuple[Job, nn.Module]:
        job = Job(ClusterSeat(cluster, seed=3))
        tables = (make_table("t_user", "user"), make_table("t_item", "item"))
        model = job.dense(Model(job.embedding_bag_collection(tables, optimizer=SGD)), SGD)
        model.load_state_dict(wanted)
        return job, model

    job, model = make()
    train(job, model, make_batches(4))
    job.refresh()
    trained = {key: value.clone() for key, value in model.state_dict().items()}
    assert not torch.equal(trained["top.weight"], wanted["top.weight"])
    successor, its_model = make()
    assert successor.client.pushes == 4
    check_state(successor, its_model, trained)


class Share:
    """As torchmetrics has them: an `nn.Module` that is told of probabilities and whole labels."""

    def __init__(self) -> None:
        self.right = self.count = -1

    def reset(self) -> None:
        self.right = self.count = 0

    def update(self, preds: Tensor, target: Tensor) -> None:
        assert target.dtype == torch.int64
        assert float(preds.min()) >= 0 and float(preds.max()) <= 1
        self.right += int(((preds > 0.5).long() == target).sum())
        self.count += len(target)

    def compute(self) -> Tensor:
        return torch.tensor(self.right / self.count)


def test_an_option_that_names_a_table_which_is_not_there() -> None:
    job, _ = make_job()
    tables = job.spec.tables
    check_names([table.name for table in tables], tables, option="--priority-tables")
    with pytest.raises(UserError, match="--priority-tables: the script has no table 'u'"):
        check_names([tables[0].name, "u"], tables, option="--priority-tables")


def test_metrics_of_torchmetrics_are_taken() -> None:
    job, model = make_job()
    train(job, model, make_batches(2))
    batches = make_batches(3, seed=9)
    found = job.evaluate(model, batches, metrics=[Share(), regrow_metrics.AUC()])
    assert set(found) == {"Share", "auc"}
    with torch.no_grad():
        model.eval()
        logits = torch.cat([model(batch.features) for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    assert found["Share"] == pytest.approx(float(((logits > 0) == (labels > 0)).float().mean()))
    with pytest.raises(UserError, match="a str is no metric"):
        job.evaluate(model, batches, metrics=["auc"])
