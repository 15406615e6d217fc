"""Two ranks train a sharded TorchRec model and checkpoint it: `python torchrec_ranks.py STORE URL OUT HOW`.

HOW is "rows", or one of COLUMNS.

Not a test by itself; test_torchrec.py runs it and looks at what it leaves: OUT/rank<r>.pt, a list with what
each rank held at each cut. The parent imports TorchRec once and forks, because importing takes seconds.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchrec
    from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import (
        column_wise,
        construct_module_sharding_plan,
        data_parallel,
        row_wise,
        table_wise,
    )
    from torchrec.distributed.types import ShardingPlan, ShardingType

from regrow.checkpoint import failpoints, storage
from regrow.checkpoint.torch.checkpointer import DeltaCheckpointer
from regrow.errors import CheckpointError

CPU = torch.device("cpu")
ROWS = {"a": 21, "b": 30, "c": 5, "s": 40}
DIM = 8
STEPS = 6


class Model(nn.Module):
    """Pooled tables a (two features), b, c; a sequence table s; a dense layer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        features = {"a": ["fa", "fa2"], "b": ["fb"], "c": ["fc"]}
        bags = [
            EmbeddingBagConfig(num_embeddings=ROWS[t], embedding_dim=DIM, name=t, feature_names=names)
            for t, names in features.items()
        ]
        self.bags = EmbeddingBagCollection(tables=bags, device=CPU)
        sequence = EmbeddingConfig(num_embeddings=ROWS["s"], embedding_dim=DIM, name="s", feature_names=["fs"])
        self.sequence = torchrec.EmbeddingCollection(tables=[sequence], device=CPU)
        self.over = nn.Linear(4 * DIM, 1)

    def forward(self, bags: Any, sequence: Any) -> Tensor:
        pooled = self.over(self.bags(bags).values()).sum()
        loss: Tensor = pooled + self.sequence(sequence)["fs"].values().square().sum()
        return loss


def fuse(model: Model, rule: str = "rowwise") -> None:
    """An optimizer in backward for every table but c."""
    kinds: dict[str, tuple[Any, dict[str, float]]] = {
        "rowwise": (torchrec.optim.RowWiseAdagrad, {"lr": 0.1}),
        "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
        "adam": (torch.optim.Adam, {"lr": 0.1}),  # its fused form needs a GPU
        "sgd": (torch.optim.SGD, {"lr": 0.1}),
    }
    kind, options = kinds[rule]
    fused = [p for name, p in model.named_parameters() if "embedding" in name and ".c." not in name]
    apply_optimizer_in_backward(kind, fused, options)


def grid(param: Any, local_size: int, world_size: int, device_type: str, sharder: Any) -> Any:
    """By rows over the ranks of a host, and by columns over hosts: one host twice. TorchRec's own `grid_shard` makes no
    ranges under 128 columns."""
    kind = ShardingType.GRID_SHARD
    found = sharding_plan._get_parameter_size_offsets(param, kind, local_size, world_size, col_wise_shard_dim=DIM // 2)
    placed = [(size, offset, index % local_size) for index, (size, offset) in enumerate(found)]
    return sharding_plan._get_parameter_sharding(param, kind.value, placed, local_size, device_type, sharder)


# How tables are divided by columns: of a ranks, of b and s.
COLUMNS: dict[str, Callable[[int], dict[str, Any]]] = {
    "column_wise": lambda last: {
        "a": column_wise(ranks=[last, 0]),
        "b": column_wise(ranks=[last, last]),
        "s": column_wise(ranks=[0, last]),
    },
    "grid": lambda last: {"a": grid, "s": column_wise(ranks=[last])},
}


def shard(model: Model, world: int, **how: Any) -> Any:
    """a by rows, b and s whole on the last rank, c on all; or as is said."""
    last = table_wise(rank=world - 1)
    options = {"local_size": world, "world_size": world, "device_type": "cpu"}
    tables = {"a": row_wise(), "b": last, "c": data_parallel(), "s": last, **how}
    sequence = {"s": tables.pop("s")}
    plan = {
        "bags": construct_module_sharding_plan(model.bags, per_param_sharding=tables, **options),
        "sequence": construct_module_sharding_plan(
            model.sequence, per_param_sharding=sequence, sharder=EmbeddingCollectionSharder(), **options
        ),
    }
    return DistributedModelParallel(
        model,
        device=CPU,
        plan=ShardingPlan(plan=plan),
        sharders=[EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()],
    )


def batch(step: int, rank: int) -> tuple[Any, Any]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 3, (4 * 3,), generator=draw)
    counts = lengths.reshape(4, 3).sum(dim=1).tolist()
    tables = ["a", "a", "b", "c"]
    ids = [torch.randint(0, ROWS[t], (n,), generator=draw) for t, n in zip(tables, counts, strict=True)]
    bags = KeyedJaggedTensor(["fa", "fa2", "fb", "fc"], torch.cat(ids), lengths=lengths)
    values = torch.randint(0, ROWS["s"], (4,), generator=draw)
    return bags, KeyedJaggedTensor(["fs"], values, lengths=torch.tensor([1, 2, 1]))


def dense_optimizer(model: Any) -> Any:
    """In TorchRec's wrapper, as its examples have it."""
    rest = {name: p for name, p in model.named_parameters() if "over" in name or ".c." in name}
    return torchrec.optim.keyed.KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adagrad(parameters, lr=0.05))


def train(model: Any, optimizer: Any, step: int, rank: int) -> None:
    optimizer.zero_grad()
    model(*batch(step, rank)).backward()
    optimizer.step()


def look_up(model: Any, step: int, rank: int) -> None:
    """Rows that are read and not trained, with and without a graph."""
    with torch.no_grad():
        model(*batch(50 + step, rank))
    model(*batch(70 + step, rank))


def copy_state(checkpointer_state: Any) -> dict[str, Any]:
    """What this rank has: table -> (first row, tensors), and the dense tensors."""
    found: dict[str, Any] = {
        table.name: (table.first, {name: value.detach().clone() for name, value in table.states().items()})
        for table in checkpointer_state.fused.tables
    }
    found["dense"] = {name: value.detach().clone() for name, value in checkpointer_state.dense.tensors.items()}
    found["scalars"] = {table.name: table.scalars() for table in checkpointer_state.fused.tables}
    return found


def fail(checkpointer: DeltaCheckpointer, rank: int) -> str:
    """The second rank cannot write; both must hear of it, and neither may forget its rows."""
    storage.WAIT_SECONDS = 0.0
    try:
        with failpoints.arm_inside("chunk.rename:1:raise", times=9) if rank == 1 else contextlib.nullcontext():
            checkpointer.save()
    except CheckpointError as error:
        return str(error)
    return "it did not fail"


def main(rank: int, store: str, url: str, out: str, how: str) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    division = COLUMNS[how](1) if how in COLUMNS else {}
    model = Model()
    fuse(model)
    sharded = shard(model, 2, **division)
    optimizer = dense_optimizer(sharded)
    cuts = []
    with DeltaCheckpointer(sharded, url, optimizers=[optimizer], every=None, full_every=3) as checkpointer:
        for step in range(1, STEPS + 1):
            train(sharded, optimizer, step, rank)
            look_up(sharded, step, rank)
            checkpointer.step()
            if step == STEPS - 1:
                failure = fail(checkpointer, rank)
            cuts.append((checkpointer.save(extra={"position": step}), copy_state(checkpointer._state)))
    again = Model(seed=7)
    fuse(again)
    again_sharded = shard(again, 2, **division)
    again_optimizer = dense_optimizer(again_sharded)
    restored = DeltaCheckpointer.restore(again_sharded, url, at=cuts[3][0], optimizers=[again_optimizer])
    with DeltaCheckpointer(again_sharded, url, optimizers=[again_optimizer], every=1, resume=restored) as checkpointer:
        back = copy_state(checkpointer._state)
        for step in range(restored.step + 1, STEPS + 1):
            train(again_sharded, again_optimizer, step, rank)
            look_up(again_sharded, step, rank)
            checkpointer.step()
        checkpointer.wait()
        final = copy_state(checkpointer._state)
    torch.save(
        {"cuts": cuts, "back": back, "final": final, "step": restored.step, "failure": failure}, f"{out}/rank{rank}.pt"
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    child = os.fork()
    main(0 if child else 1, *sys.argv[1:])
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) if child else 0)
