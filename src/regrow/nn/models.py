"""From a model's shape to the model: those of the package, and classes of anybody else (`--model module:Class`).

All of them map (dense features [B, n], embeddings [B, tables * row_floats]) to logits [B]; where rows live is not their
business. A class of one's own is made with the shape and the seed, `Class(config, seed=...)`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from regrow.errors import UserError
from regrow.nn.dcn import DCN
from regrow.nn.deepfm import DeepFM
from regrow.nn.dlrm import DLRM
from regrow.nn.presets import ModelConfig, find_class
from regrow.nn.two_tower import TwoTower

_MAKERS: dict[str, Callable[..., nn.Module]] = {
    "dlrm": DLRM.from_config,
    "dcn": DCN,
    "deepfm": DeepFM,
    "two_tower": TwoTower,
}


def make_model(config: ModelConfig, *, seed: int) -> nn.Module:
    """The model of this shape. UserError if it is somebody's own and cannot be made."""
    if config.kind in _MAKERS:
        return _MAKERS[config.kind](config, seed=seed)
    try:
        model = find_class(config.kind)(config, seed=seed)
    except TypeError as error:
        raise UserError(
            f"{config.kind} cannot be made: {error}",
            hint="it is called as Class(config, seed=...), a ModelConfig first",
        ) from None
    if not isinstance(model, nn.Module):
        raise UserError(f"{config.kind} gives a {type(model).__name__}, not a torch.nn.Module")
    return model
