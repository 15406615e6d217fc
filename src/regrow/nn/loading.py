"""The weights of a checkpoint in a plain torch model, for inference: `regrow.load(url, model)`. No server is needed.

Tables have their names in the checkpoint; a model has them under `embedding_bags.<table>.weight` (TorchRec's
EmbeddingBagCollection), `embeddings.<table>.weight`, or wherever `tables` says (an `nn.EmbeddingBag`). Dense parameters
find their places by the names that they had in the module that was given to `job.dense`. Where the model has others, or
the cut has none, it is their order: any module will do that has the same parameters beside its tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regrow.checkpoint import address
from regrow.checkpoint.columns import join_tables, view_ranges
from regrow.checkpoint.export import fill_initial
from regrow.checkpoint.listing import read_listing
from regrow.checkpoint.load import restore
from regrow.checkpoint.model_names import ModelNames, cut_tensors
from regrow.checkpoint.model_names import find as find_names
from regrow.core.job import OptimizerSpec
from regrow.errors import UserError
from regrow.nn.coded import MARKS
from regrow.nn.dense import BUFFERS_NAME, STATE_NAME, TABLE_NAME, FlatTable, list_buffers


def load(url: str, model: nn.Module | None = None, *, tables: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """Reads a checkpoint (URL, or URL@CUT) and gives the weights of its tables by their names. With `model` they are
    put into it, and the dense parameters too; `tables` says where a table goes that is not called as TorchRec calls it:
    {"t_user": "user.weight"}."""
    found, names = _read(url)
    flats = {name: found.pop(name) for name in (TABLE_NAME, BUFFERS_NAME) if name in found}
    for name in (MARKS, STATE_NAME):  # for those who train on
        found.pop(name, None)
    if model is not None:
        state, places = model.state_dict(), _find_places(found, model, tables or {})
        for name, place in places.items():
            if tuple(state[place].shape) != tuple(found[name].shape):
                raise UserError(
                    f"{place} is {list(state[place].shape)}, table {name} of the checkpoint {list(found[name].shape)}"
                )
        rows = {place: found[name] for name, place in places.items()}
        model.load_state_dict(rows | _name_dense(flats, model, set(rows), names), strict=False)
    return found


def _read(url: str) -> tuple[dict[str, Tensor], ModelNames]:
    where, wish = address.split_cut(url)
    listing = read_listing(where)
    plan = listing.graph.restore_plan(listing.find_cut(wish).id)[0]
    last = plan.pieces[-1]
    wholes = join_tables(last.tables)
    found = {name: np.zeros((whole.rows, whole.dim), np.float32) for name, whole in wholes.items()}
    stored = view_ranges(wholes.values(), found)
    for table in last.tables:
        if table.init_bound:
            for _ in fill_initial(stored[table.name], table, seed=last.seed):
                pass

    def apply(_: Any, chunk: Any) -> None:
        for name, rows in chunk.items():
            stored[name][rows.ids] = rows.weight

    restore(listing.storage, plan, apply)
    return {name: torch.from_numpy(values) for name, values in found.items()}, find_names(last.target)


def _find_places(found: Mapping[str, Tensor], model: nn.Module, tables: Mapping[str, str]) -> dict[str, str]:
    """Where in the model each table goes."""
    keys = list(model.state_dict())
    if strange := [name for name in tables if name not in found]:
        raise UserError(f"the checkpoint has no table {strange[0]!r}", hint=f"it has {', '.join(found)}")
    places: dict[str, str] = {}
    for name in found:
        ends = (f"embedding_bags.{name}.weight", f"embeddings.{name}.weight")
        places[name] = tables.get(name) or next((k for k in keys if f".{k}".endswith(tuple(f".{e}" for e in ends))), "")
        if places[name] not in keys:
            raise UserError(
                f"the model has no place for table {name!r}"
                + (f": {places[name]!r} is none of its parameters" if places[name] else ""),
                hint=f'regrow.load(url, model, tables={{"{name}": "NAME"}}) says which of its parameters it is',
            )
    return places


def _name_dense(flats: Mapping[str, Tensor], model: nn.Module, taken: set[str], names: ModelNames) -> dict[str, Tensor]:
    parts: dict[str, list[tuple[str, Tensor]]] = {
        TABLE_NAME: [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.numel() and n not in taken],
        BUFFERS_NAME: list_buffers(model),
    }
    values: dict[str, Tensor] = {}
    for name, stored in flats.items():
        shapes = {label: tuple(tensor.shape) for label, tensor in parts[name]}
        if shapes and shapes == dict(names.find_shapes(name)):
            values |= cut_tensors(names, {name: stored.numpy()})
            continue
        layout = FlatTable(parts[name], name=name, optimizer=OptimizerSpec(kind="sgd", learning_rate=0.0))
        if layout.spec.rows != len(stored):
            raise UserError(
                f"the model has {sum(t.numel() for _, t in parts[name])} {name} values, which need {layout.spec.rows} "
                f"rows of a table; the checkpoint has {len(stored)}",
                hint="it must be the module that was given to job.dense, with other tables perhaps",
            )
        values |= dict(zip([n for n, _ in parts[name]], layout.cut(stored.reshape(-1)), strict=True))
    return values
