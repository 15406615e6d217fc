"""What TorchRec or torch offers and our collection does not do, refused by name: what is ignored trains another model
than the one that was written down, and nobody notices."""

from __future__ import annotations

import dataclasses
import functools
import gc
import math
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from regrow.config import TrainConfig
from regrow.errors import UserError
from regrow.runtime.hosts import NODE

POOLINGS = ("SUM", "MEAN")
DATA_TYPE = "FP32"
EXACT_BITS = 32
# Fields of a table that mean something here; of any other, only the default is taken.
TABLE_FIELDS = frozenset(
    {"num_embeddings", "embedding_dim", "name", "feature_names", "pooling", "data_type", "init_fn"}
)


def check_table(config: Any) -> None:
    """A table as our `EmbeddingBagConfig` or TorchRec's describes it."""
    pooling = getattr(config, "pooling", POOLINGS[0])  # a table of sequences has none
    pooling = getattr(pooling, "value", pooling)
    if pooling not in POOLINGS:
        raise UserError(
            f"table {config.name!r}: pooling = {pooling} is not supported", hint=f"it is {' or '.join(POOLINGS)}"
        )
    data_type = getattr(config, "data_type", DATA_TYPE)
    if getattr(data_type, "value", data_type) != DATA_TYPE:
        name = getattr(data_type, "value", data_type)
        raise UserError(f"table {config.name!r}: data_type = {name} is not supported", hint=f"rows are {DATA_TYPE}")
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        made = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        if field.name in TABLE_FIELDS or value is made or value == made:
            continue
        raise UserError(f"table {config.name!r}: {field.name} is not supported", hint="leave it out")


def check_sums(tables: Sequence[Any]) -> None:
    """Of a collection that weighs: a mean of weighted rows has two meanings."""
    for config in tables:
        if getattr(config.pooling, "value", config.pooling) != "SUM":
            raise UserError(f"table {config.name!r}: a weighted collection sums", hint="pooling=PoolingType.SUM")


def find_init(config: Any) -> Callable[[Tensor], Any] | None:
    """What gives a table its first values, if it is not what servers do by themselves."""
    init: Callable[[Tensor], Any] | None = getattr(config, "init_fn", None)
    # TorchRec fills in what was left out.
    return None if init is None or _is_usual_init(init, rows=config.num_embeddings) else init


def _is_usual_init(value: Any, *, rows: int) -> bool:
    bound = (1.0 / max(1, rows)) ** 0.5
    if not isinstance(value, functools.partial) or value.func is not torch.nn.init.uniform_:
        return False
    given = dict(value.keywords)
    return (
        value.args == ()
        and given.keys() == {"a", "b"}
        and math.isclose(given["a"], -bound)
        and math.isclose(given["b"], bound)
    )


def check_features(values: Tensor, lengths: Tensor) -> None:
    """The parts of a batch are whole numbers."""
    for name, tensor in (("ids", values), ("lengths", lengths)):
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
            raise TypeError(f"{name} are whole numbers, not {tensor.dtype}: convert them before, with .long()")


def check_unweighted(features: Any) -> None:
    """Weights that would be left out."""
    if getattr(features, "weights_or_none", lambda: None)() is not None:
        raise UserError(
            "the features have weights, and this collection does not weigh",
            hint="one that is made with is_weighted=True does; or leave the weights out",
        )


def check_weighted(features: Any) -> None:
    """Weights that are missing."""
    if getattr(features, "weights_or_none", lambda: None)() is None:
        raise UserError(
            "the collection weighs, and the features have no weights",
            hint="KeyedJaggedTensor(keys, values, lengths, weights)",
        )


def refuse_scaler() -> None:
    """Servers get gradients as backward finds them, before a `GradScaler` can divide by its scale."""
    module = sys.modules.get("torch.amp.grad_scaler")
    kind = getattr(module, "GradScaler", None)
    if kind is None:
        return
    for thing in gc.get_objects():
        # `_scale` is a tensor once something was scaled. `type`, not isinstance: some objects answer for their class.
        if issubclass(type(thing), kind) and thing.is_enabled() and thing._scale is not None:
            raise UserError(
                "a GradScaler is in use: servers would get the scaled gradient, and apply it as it is",
                hint="train with torch.autocast(dtype=torch.bfloat16), which needs no GradScaler",
            )


def refuse_half() -> None:
    """float16 needs a scaler, and gradients of rows without one vanish."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if any(torch.get_autocast_dtype(kind) == torch.float16 for kind in kinds):
        raise UserError(
            "torch.autocast with float16 is not supported: it needs a GradScaler, whose scale would reach the rows",
            hint="torch.autocast(dtype=torch.bfloat16) needs none",
        )


_given: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # parameters that servers update, by id


def watch_parameters(named: Sequence[tuple[str, Tensor]]) -> None:
    """Servers have these. What an optimizer of the script makes of them is gone with the next pull, and where it clears
    their gradients before `job.commit`, nothing is trained."""
    if not _given:
        register_optimizer_step_pre_hook(_refuse_step)
    _given.update({id(tensor): (weakref.ref(tensor), name) for name, tensor in named})


def _refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            ref, name = _given.get(id(parameter), (None, ""))
            if ref is not None and ref() is parameter:
                raise UserError(
                    f"{type(optimizer).__name__}.step() would update {name!r}, which the servers have and update",
                    hint='leave it out, job.step(loss) does it; or job.dense(model, sync="ddp", optimizer=...)',
                )


UNPUSHED = (
    "the rows of the batch before have not been pushed: in synchronous mode a step is one forward and its backward, "
    "and the next forward would wait for it for ever"
)
UNPUSHED_HINT = "call backward() first; for looking only, use eval() or torch.no_grad(); join micro-batches into one"
COPIED = "an EmbeddingBagCollection cannot be copied or pickled: its rows are on servers, which it is connected to"
COPIED_HINT = "copy its state_dict(), or make another collection with the same tables on a cluster of its own"
COPIED_JOB = (
    "a collection of a job cannot be copied or pickled: its rows are on servers, and a copy would change with them"
)
COPIED_JOB_HINT = "copy the model's state_dict(), or the modules beside the collection"


def check_dense(module: nn.Module, sync: str) -> None:
    """What cannot be given to the servers, or not so."""
    if sync not in ("servers", "ddp"):
        raise UserError(f"job.dense: sync = {sync!r}", hint='"servers", or leave it out; "ddp": in the workers')
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise UserError(
            "job.dense: the module is in DistributedDataParallel already",
            hint="give the module itself: the job brings the workers together",
        )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.UninitializedParameter):
            raise UserError(
                f"job.dense: the parameter {name!r} has no shape yet", hint="call the lazy module once before job.dense"
            )


def check_optimizer(optimizer: Any, sync: str, refusal: str | None) -> None:
    """Servers have update rules of their own; workers, those of torch."""
    if sync == "servers" and callable(optimizer):
        raise UserError(
            "job.dense: servers cannot run an optimizer of torch",
            hint='optimizer=OptimizerSpec(kind="adam", learning_rate=0.001), or sync="ddp"',
        )
    if sync == "ddp" and refusal is not None:
        raise UserError(f'job.dense(sync="ddp"): {refusal}', hint="leave it out: then they are on the servers")
    if sync == "ddp" and not callable(optimizer):
        raise UserError(
            'job.dense(sync="ddp") needs an optimizer of torch',
            hint="optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.001)",
        )


def find_ddp_refusal(config: TrainConfig, *, listen: str) -> str | None:
    """Why workers of such a run cannot keep dense parameters themselves."""
    if config.mode != "sync":
        return (
            "it needs --mode sync. Asynchronously workers make no step together, and a successor pushes rows again "
            "that others have long stepped behind"
        )
    if config.cluster != "local" or listen.startswith(NODE):
        return "it is for workers on one machine"
    if config.saves_own or config.saves_epochs:
        return f"it does not go with --protect {config.protection}: servers go back alone, or to a step of their own"
    if config.saves and config.ckpt_bits != EXACT_BITS:
        return "it does not go with --ckpt-bits: the optimizer's state would not come back as it was"
    return None
