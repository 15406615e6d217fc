"""Goal: two runs that differ are told apart at the first step that does, with the first cause in it; two that do not
are not. Method: jobs in this process, with digests in files, one of them spoiled in one place.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regrow
from regrow.config import TrainConfig
from regrow.errors import ConfigError, RegrowError
from regrow.launch import repeat
from regrow.nn.job import Job
from regrow.nn.seat import AloneSeat

Spoil = Callable[[int, Tensor], Tensor]


class Quiet(AloneSeat):
    def report(self, progress: Any, client: Any) -> None: ...


def train(run: Path, *, spoil: Spoil = lambda step, loss: loss, shift: int = 0, seed: int = 1, first: int = 0) -> None:
    seat = Quiet(seed=seed)
    seat.digests = run / "steps" / "worker-0.jsonl"
    job = Job(seat)
    bags = [regrow.EmbeddingBagConfig(num_embeddings=30, embedding_dim=4, name="bag", feature_names=["a"])]
    rows = [regrow.EmbeddingConfig(num_embeddings=30, embedding_dim=4, name="row", feature_names=["b"])]
    model = nn.ModuleDict(
        {"bag": job.embedding_bag_collection(bags), "row": job.embedding_collection(rows), "net": nn.Linear(8, 1)}
    )
    job.dense(model)
    batches = [make_batch(n + (shift if n == 5 else 0)) for n in range(8)]
    for batch in job.loop(batches[first:]):
        bag, row = model["bag"](batch).values(), model["row"](batch)["b"].values()
        loss = model["net"](torch.cat([bag, row], 1)).square().mean()
        job.step(spoil(job._step, loss))


def make_batch(n: int) -> regrow.KeyedJaggedTensor:
    return regrow.KeyedJaggedTensor(["a", "b"], torch.arange(8) + n, torch.ones(8, dtype=torch.int32))


def part(first: Path, second: Path) -> str:
    with pytest.raises(RegrowError) as error:
        repeat.compare(first, second)
    return error.value.message


def test_runs_that_are_the_same(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b")
    repeat.compare(tmp_path / "a", tmp_path / "b")
    lines = repeat.read_steps(tmp_path / "a")["0"]
    assert sorted(lines) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert set(lines[1]["grads"]) == {"bag", "row", "dense"}
    for kind in ("rows", "grads"):
        assert len({str(line[kind]) for line in lines.values()}) == 8, "every step is another"


def test_a_step_that_is_done_again_counts_once(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b")
    path = tmp_path / "b" / "steps" / "worker-0.jsonl"
    whole = path.read_text()
    path.write_text('{"step": 8, "batch": "other"}\n{"step": 1, "ba')
    train(tmp_path / "b")
    repeat.compare(tmp_path / "a", tmp_path / "b")
    assert path.read_text().endswith(whole)


def test_where_they_part(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "loss", spoil=lambda step, loss: loss * (1.5 if step >= 4 else 1))
    assert "part at step 4, in worker 0: the loss differs" in part(tmp_path / "a", tmp_path / "loss")
    train(tmp_path / "data", shift=3)
    assert "part at step 6, in worker 0: the ids of the batch differ" in part(tmp_path / "a", tmp_path / "data")
    train(tmp_path / "seed", seed=2)
    assert "part at step 1, in worker 0: the rows of table 'bag' differ" in part(tmp_path / "a", tmp_path / "seed")
    train(tmp_path / "short", first=1)
    assert "part at step 1, in worker 0: the ids" in part(tmp_path / "a", tmp_path / "short")
    assert "digests of workers 0 in" in part(tmp_path / "a", tmp_path / "nothing")


def test_a_run_that_is_longer(tmp_path: Path) -> None:
    train(tmp_path / "a")
    train(tmp_path / "b")
    path = tmp_path / "b" / "steps" / "worker-0.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert "part at step 8, in worker 0: only one of them made it" in part(tmp_path / "a", tmp_path / "b")


def test_gradients_that_differ_name_their_table(tmp_path: Path) -> None:
    """The loss is the same, what flows back is not."""

    def spoil(step: int, loss: Tensor) -> Tensor:
        return loss.detach() + 2 * (loss - loss.detach()) if step == 3 else loss

    train(tmp_path / "a")
    train(tmp_path / "b", spoil=spoil)
    assert "part at step 3, in worker 0: the gradients of table 'bag' differ" in part(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"mode": "async"}, "mode"),
        ({"mode": "sync", "protection": "full", "ckpt": "x"}, "protection"),
        ({"mode": "sync", "store": "tiered", "store_dir": "x"}, "store"),
    ],
)
def test_what_cannot_be_compared_is_refused_before(options: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError) as error:
        repeat.check(TrainConfig(**options))
    assert error.value.option == option


def test_models_that_differ_though_steps_do_not(tmp_path: Path) -> None:
    def make(config: TrainConfig) -> dict[str, Any]:
        assert config.step_digests and config.out is not None
        train(Path(config.out))
        return {"model_sha256": config.out, "steps": 8}

    with pytest.raises(RegrowError, match="all steps are the same, but the models are not"):
        repeat.run_twice(TrainConfig(mode="sync", out=str(tmp_path)), make)
