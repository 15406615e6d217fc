"""The DLRM against a slow, obvious one: same values, same gradients, on odd sizes."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regrow.nn.dlrm import DLRM, Interaction, _interaction_indices
from regrow.nn.presets import MODELS


def interaction_twin(bottom: Tensor, embeddings: Tensor) -> Tensor:
    """One dot product at a time."""
    dim = bottom.shape[1]
    vectors = [bottom, *embeddings.split(dim, dim=1)]
    products = [(vectors[i] * vectors[j]).sum(dim=1) for i in range(len(vectors)) for j in range(i)]
    return torch.cat([bottom, torch.stack(products, dim=1)], dim=1)


@pytest.mark.parametrize(("batch", "tables", "dim"), [(1, 1, 1), (3, 2, 5), (7, 26, 16), (2, 9, 33)])
def test_interaction_equals_its_twin(batch: int, tables: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    bottom = torch.randn(batch, dim, generator=generator, dtype=torch.float64, requires_grad=True)
    embeddings = torch.randn(batch, tables * dim, generator=generator, dtype=torch.float64, requires_grad=True)
    indices = _interaction_indices(vectors=tables + 1, dim=dim)
    fast = Interaction.apply(bottom, embeddings, *indices)
    slow = interaction_twin(bottom, embeddings)
    torch.testing.assert_close(fast, slow)
    upstream = torch.randn(fast.shape, generator=generator, dtype=torch.float64)
    for got, wanted in zip(
        torch.autograd.grad(fast, [bottom, embeddings], upstream),
        torch.autograd.grad(slow, [bottom, embeddings], upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)
        assert got.is_contiguous()


def test_whole_model_gradients_numerically() -> None:
    model = DLRM(dim=3, bottom=[4, 3], top=[5, 1], tables=2, dense_features=2, seed=3).double()
    generator = torch.Generator().manual_seed(1)
    dense = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    embeddings = torch.randn(4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda values: model(dense, values), [embeddings])


def test_two_forwards_before_a_backward_do_not_disturb_each_other() -> None:
    model = DLRM(dim=4, bottom=[4], top=[3, 1], tables=3, dense_features=2)
    inputs = [(torch.randn(5, 2), torch.randn(5, 12, requires_grad=True)) for _ in range(2)]
    together = torch.autograd.grad(sum(model(*pair).sum() for pair in inputs), [e for _, e in inputs])
    for (dense, embeddings), gradient in zip(inputs, together, strict=True):
        alone = torch.autograd.grad(model(dense, embeddings).sum(), embeddings)[0]
        torch.testing.assert_close(gradient, alone)


@pytest.mark.parametrize("name", [name for name, config in MODELS.items() if config.kind == "dlrm"])
def test_presets_build_and_run(name: str) -> None:
    config = MODELS[name]
    model = DLRM.from_config(config)
    logits = model(torch.zeros(3, 13), torch.zeros(3, 26 * config.dim))
    assert logits.shape == (3,)
    assert [m.out_features for m in model.bottom if isinstance(m, torch.nn.Linear)] == list(config.bottom)
    assert [m.out_features for m in model.top if isinstance(m, torch.nn.Linear)] == list(config.top)
    assert model.top[0].in_features == config.dim + 27 * 26 // 2


def test_initial_values_follow_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = DLRM.from_config(MODELS["kaggle"], seed=7).state_dict()
    torch.manual_seed(2)
    before = torch.random.get_rng_state()
    again = DLRM.from_config(MODELS["kaggle"], seed=7).state_dict()
    assert torch.equal(before, torch.random.get_rng_state()), "the global generator is the user's"
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = DLRM.from_config(MODELS["kaggle"], seed=8).state_dict()
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_initial_values_have_the_published_spread() -> None:
    state = DLRM.from_config(MODELS["mlperf"]).state_dict()
    assert state["top.2.weight"].std().item() == pytest.approx(math.sqrt(2 / 2048), rel=0.01)
    assert state["top.2.bias"].std().item() == pytest.approx(math.sqrt(1 / 1024), rel=0.1)


def test_state_holds_parameters_only() -> None:
    names = DLRM.from_config(MODELS["tiny"]).state_dict().keys()
    assert sorted(names) == [
        f"{part}.{layer}.{kind}" for part in ("bottom", "top") for layer in (0, 2) for kind in ("bias", "weight")
    ]


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match="must end with the embedding width 8"):
        DLRM(dim=8, bottom=[16], top=[1])
    with pytest.raises(ValueError, match="must end with 1"):
        DLRM(dim=8, bottom=[8], top=[2])
    model = DLRM.from_config(MODELS["tiny"])
    with pytest.raises(ValueError, match=r"need \[3, 208\]"):
        model(torch.zeros(3, 13), torch.zeros(3, 207))
    with pytest.raises(ValueError, match="must end with dim"):
        replace(MODELS["tiny"], dim=9)
    with pytest.raises(ValueError, match="the logit"):
        replace(MODELS["tiny"], top=(8,))


def test_presets_can_be_read_without_torch() -> None:
    code = "import sys, regrow.nn.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
