"""What the models of the package are made of: networks whose first values follow from a seed alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn


def make_linear(inputs: int, outputs: int, generator: torch.Generator) -> nn.Linear:
    """A layer with values from this generator; torch's global one is the user's."""
    # Made without values: they are drawn below.
    layer = nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        layer.weight.normal_(0.0, math.sqrt(2.0 / (inputs + outputs)), generator=generator)
        layer.bias.normal_(0.0, math.sqrt(1.0 / outputs), generator=generator)
    return layer


def make_network(inputs: int, widths: Sequence[int], generator: torch.Generator, *, relu_last: bool) -> nn.Sequential:
    """Layers of these widths, with ReLU between them and, if asked for, behind the last."""
    layers: list[nn.Module] = []
    for position, outputs in enumerate(widths):
        layers.append(make_linear(inputs, outputs, generator))
        if relu_last or position < len(widths) - 1:
            layers.append(nn.ReLU(inplace=True))
        inputs = outputs
    return nn.Sequential(*layers)


def check_inputs(dense: torch.Tensor, embeddings: torch.Tensor, *, tables: int, width: int) -> None:
    """ValueError unless there is a vector of every table for every sample."""
    wanted = (dense.shape[0], tables * width)
    if embeddings.shape != wanted:
        raise ValueError(
            f"embeddings are {list(embeddings.shape)}, but {dense.shape[0]} samples of {tables} "
            f"tables of width {width} need {list(wanted)}"
        )
