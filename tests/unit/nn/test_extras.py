"""Goal: what a script keeps comes back as it was, and what cannot be kept is refused where it stands."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import regrow
from regrow.errors import UserError
from regrow.nn.extras import EXTRA_BYTES_MAX, decode_extra, encode_extra

TENSORS = [
    torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    torch.tensor(2.5, dtype=torch.bfloat16),
    torch.zeros(0, 3, dtype=torch.int64),
    torch.tensor([True, False]),
]


def test_it_comes_back_as_it_was() -> None:
    kept = {"best": 0.75, "names": ["a", None, True], "n": 3, "text": "ü", "deep": {"x": [1, {"y": 2}]}}
    assert decode_extra(encode_extra(kept)) == kept
    assert decode_extra(None) is None
    assert math.isnan(decode_extra(encode_extra(math.nan)))
    for tensor, back in zip(TENSORS, decode_extra(encode_extra(TENSORS)), strict=True):
        assert back.dtype == tensor.dtype and torch.equal(back, tensor)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"a": [1, torch.nn.Linear(1, 1)]}, r"extra\['a'\]\[1\] is a Linear"),
        ({"a": {1: 2}}, r"extra\['a'\]: the key 1 cannot be kept"),
        ({"tensor of": 1}, "the key 'tensor of' cannot be kept"),
        ("x" * EXTRA_BYTES_MAX, f"{EXTRA_BYTES_MAX} at most are kept"),
    ],
)
def test_what_cannot_be_kept(extra: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        encode_extra(extra)


def test_a_run_without_checkpoints_says_so() -> None:
    job = regrow.join()
    assert not job.saves and job.extra is None
    with pytest.raises(UserError, match=r"job.save: this run makes no checkpoints"):
        job.save({"a": 1})
