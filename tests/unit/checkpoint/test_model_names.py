"""Goal: tensors are found again by the names that a model had, and a model that has others at the same places is told.

Method: names are written and read; tables that are cut are compared with what was put into them.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from regrow.checkpoint import chunks, model_names
from regrow.checkpoint.manifest import Cut, Manifest, TableInfo
from regrow.checkpoint.model_names import ModelNames
from regrow.core.job import OptimizerSpec
from regrow.errors import UserError
from regrow.nn.dense import FlatTable

SHAPES = (("top.weight", (2, 3)), ("top.bias", (2,)), ("scale", ()))


def make_cut(job: dict[str, Any], text: str | None) -> Cut:
    return Cut(id="0000000001-aaaaaa", step=1, marks=(1,), created=0.0, job=job, extra=model_names.note(text))


def test_a_cut_says_what_its_parameters_are_called() -> None:
    names = ModelNames(tables={"t": "rows.t.weight"}, dense=SHAPES)
    text = model_names.encode(names)
    assert model_names.find(make_cut({}, text)) == names
    assert model_names.find(make_cut({}, None)) == ModelNames(), "it is older than names"
    assert model_names.find(make_cut({"framework": "torch"}, "mine")) == ModelNames(), "the extra is somebody else's"
    many = tuple((f"layers.{number}.weight", (1, 1)) for number in range(4000))
    assert model_names.encode(ModelNames(dense=many)) is None, "too many to be passed on"


def test_tensors_are_cut_as_the_table_was_made() -> None:
    tensors = [(name, torch.randn(shape)) for name, shape in SHAPES]
    table = FlatTable(tensors, name="dense", optimizer=OptimizerSpec(kind="sgd", learning_rate=0.0))
    assert table.shapes == SHAPES
    rows = {"dense": table.values.reshape(table.spec.rows, table.spec.dim)}
    found = model_names.cut_tensors(ModelNames(dense=table.shapes), rows)
    assert list(found) == [name for name, _ in SHAPES]
    assert all(found[name].equal(tensor) for name, tensor in tensors)
    with pytest.raises(UserError, match=r"'top\.weight' .* does not fit"):
        model_names.cut_tensors(ModelNames(dense=SHAPES), {"dense": np.zeros((1, 4), np.float32)})


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (SHAPES, None),
        ((("renamed.weight", (2, 3)), *SHAPES[1:]), None),
        ((("top.weight", (3, 2)), *SHAPES[1:]), r"'top.weight' is \[3, 2\], .*'top.weight' \[2, 3\]"),
        (SHAPES[:2], r"'scale' \[\] is only in the checkpoint"),
        ((*SHAPES, ("more", (7,))), r"'more' \[7\] is only in the model"),
    ],
)
def test_what_is_at_another_place_is_said(now: model_names.Shapes, says: str | None) -> None:
    found = model_names.find_difference(SHAPES, now)
    if says is None:
        assert found is None
    else:
        assert found is not None and re.fullmatch(says, found), found


@pytest.mark.parametrize("before", [False, True])
def test_averages_are_stored_whole_in_few_bits(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of theirs has those of several layers, of any size: one range for all would lose the small ones. Where an
    older Regrow has stored them in few bits, they are read as that."""
    info = TableInfo(name=chunks.BUFFERS, rows=1, dim=512, states=(), init_bound=0.0, index=0)
    values = np.geomspace(1e-6, 1e3, 512, dtype=np.float32).reshape(1, 512)
    with monkeypatch.context() as patch:
        if before:
            patch.setattr(chunks, "BUFFERS", "none")
        parts = chunks.encode_chunk({info.name: chunks.Rows(np.zeros(1, np.uint32), values, {})}, bits=8)
    data = b"".join(parts)
    described = chunks.describe(
        parts, "c.safetensors", {info.name: chunks.Rows(np.zeros(1, np.uint32), values, {})}, shard="all"
    )
    manifest = Manifest(
        source=None,
        target=make_cut({}, None),
        tables=(info,),
        seed=0,
        chunks=(described,),
        bits=8,
        made_by="",
    )
    found = chunks.decode_chunk(data, manifest, described)[info.name].weight
    assert (found.tobytes() == values.tobytes()) == (not before)
    assert np.allclose(found, values, atol=4.0)
