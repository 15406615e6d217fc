"""Goal: every model of the package computes what its publication says, begins with values of its seed alone, and counts
its own parameters; a class of somebody's own is made, or refused with the reason.

Method: each model against its formula, written out pair by pair in float64.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from regrow.config import TrainConfig
from regrow.errors import ConfigError, UserError
from regrow.nn.dcn import DCN
from regrow.nn.deepfm import DeepFM
from regrow.nn.models import make_model
from regrow.nn.presets import MODELS, ModelConfig, load
from regrow.nn.two_tower import TwoTower

SHAPE = {"name": "small", "dim": 3, "tables": 4, "dense_features": 2, "rows_max": 10}


def make_inputs(config: ModelConfig) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    dense = torch.randn(5, config.dense_features, generator=draw, dtype=torch.float64)
    return dense, torch.randn(5, config.tables * config.row_floats, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("name", list(MODELS))
def test_presets_build_and_run(name: str) -> None:
    config = MODELS[name]
    model = make_model(config, seed=1)
    logits = model(torch.zeros(3, 13), torch.zeros(3, 26 * config.row_floats))
    assert logits.shape == (3,)
    assert config.count_dense() == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["dcn", "deepfm", "two-tower"])
def test_initial_values_follow_the_seed_alone(name: str) -> None:
    torch.manual_seed(1)
    first = make_model(MODELS[name], seed=7).state_dict()
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    again = make_model(MODELS[name], seed=7).state_dict()
    assert torch.equal(before, torch.random.get_rng_state()), "the global generator is the user's"
    assert all(torch.equal(first[key], again[key]) for key in first)
    other = make_model(MODELS[name], seed=8).state_dict()
    assert not any(torch.equal(first[key], other[key]) for key in first)


def test_a_cross_layer_multiplies_the_input_with_a_map_of_what_came_before() -> None:
    config = ModelConfig(kind="dcn", bottom=(4,), top=(1,), cross_layers=2, **SHAPE)
    model = DCN(config, seed=3).double()
    dense, embeddings = make_inputs(config)
    inputs = torch.cat([dense, embeddings], 1)
    crossed = inputs
    for cross in model.crosses:
        assert isinstance(cross, nn.Linear)
        crossed = inputs * (crossed @ cross.weight.T + cross.bias) + crossed
    wanted = model.top(torch.cat([crossed, model.deep(inputs)], 1))[:, 0]
    torch.testing.assert_close(model(dense, embeddings), wanted)


def test_a_factorization_machine_sums_all_pairs() -> None:
    config = ModelConfig(kind="deepfm", bottom=(3,), top=(4, 1), **SHAPE)
    model = DeepFM(config, seed=3).double()
    dense, embeddings = make_inputs(config)
    rows = embeddings.view(5, 4, 4)
    vectors = [model.bottom(dense), *(rows[:, table, :3] for table in range(4))]
    pairs = sum((one * other).sum(1) for one, other in itertools.combinations(vectors, 2))
    alone = rows[:, :, 3].sum(1) + model.linear(dense)[:, 0]
    torch.testing.assert_close(model(dense, embeddings), alone + pairs + model.top(torch.cat(vectors, 1))[:, 0])


def test_towers_read_features_of_their_own_alone() -> None:
    config = ModelConfig(kind="two_tower", bottom=(4, 2), top=(5, 2), query_tables=1, **SHAPE)
    model = TwoTower(config, seed=3).double()
    dense, embeddings = make_inputs(config)
    query = model.query(torch.cat([dense, embeddings[:, :3]], 1))
    item = model.item(embeddings[:, 3:])
    torch.testing.assert_close(model(dense, embeddings), (query * item).sum(1) / 2**0.5)


@pytest.mark.parametrize("kind", ["dcn", "deepfm", "two_tower"])
def test_gradients_numerically(kind: str) -> None:
    top = (4, 3) if kind == "two_tower" else (4, 1)
    config = ModelConfig(kind=kind, bottom=(4, 3), top=top, query_tables=2, **SHAPE)
    model = make_model(config, seed=2).double()
    dense, embeddings = make_inputs(config)
    assert torch.autograd.gradcheck(lambda values: model(dense, values), [embeddings.requires_grad_()])
    with pytest.raises(ValueError, match=r"embeddings are \[5, 7\]"):
        model(dense, torch.zeros(5, 7))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kind": "fm"}, "kind 'fm' must be dlrm, dcn, deepfm, two_tower or module:Class"),
        ({"kind": "two_tower"}, "end differently"),
        ({"kind": "two_tower", "top": (3,), "query_tables": 4}, "a tower is empty"),
        ({"kind": "dcn", "cross_layers": 0}, "needs a cross layer"),
        ({"kind": "deepfm", "bottom": (5,)}, "must end with dim 3"),
    ],
)
def test_wrong_shapes_are_named(changes: dict[str, object], text: str) -> None:
    good = ModelConfig(bottom=(3,), top=(1,), **SHAPE)
    with pytest.raises(ValueError, match=text):
        dataclasses.replace(good, **changes)


def test_a_class_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("my_net.py").write_text(
        "from torch import nn\n"
        "class Sum(nn.Module):\n"
        "    def __init__(self, config, *, seed):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(config.tables * config.dim, 1)\n"
        "    def forward(self, dense, embeddings):\n"
        "        return self.layer(embeddings)[:, 0]\n"
        "def wrong(config):\n"
        "    return 3\n"
    )
    config = TrainConfig(model="my_net:Sum", steps=1)
    assert (config.model_name, config.load_model().dim) == ("Sum", 16)
    assert make_model(config.load_model(), seed=1)(torch.zeros(2, 13), torch.zeros(2, 416)).shape == (2,)
    Path("shape.toml").write_text('kind = "my_net:Sum"\ndim = 4\nbottom = [4]\ntop = [1]\n')
    assert (load("shape.toml").kind, load("shape.toml").dim) == ("my_net:Sum", 4)
    with pytest.raises(UserError, match="my_net has no class Gone"):
        make_model(load("my_net:Gone"), seed=1)
    with pytest.raises(UserError, match="cannot import nowhere"):
        make_model(load("nowhere:Net"), seed=1)
    with pytest.raises(UserError, match="cannot be made"):
        make_model(load("my_net:wrong"), seed=1)
    with pytest.raises(ConfigError, match=r"a FILE\.toml or module:Class"):
        TrainConfig(model="wide", steps=1)
