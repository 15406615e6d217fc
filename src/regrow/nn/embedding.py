"""Embedding tables that live on servers, behind the interface of TorchRec's `EmbeddingBagCollection`.

`EmbeddingBagCollection` is a module without weights of its own: forward pulls the rows of the batch, backward pushes
their summed gradients, and the servers run the optimizer. Rows change by backward alone, so there is no optimizer step
to call for them: every backward is an update. `eval()`, `requires_grad_(False)` and `torch.no_grad()` leave rows as
they are. The features may be our `KeyedJaggedTensor` or TorchRec's own. What is not supported is refused by name
(refusals.py); what differs from TorchRec is in docs/models.md.
"""

from __future__ import annotations

import atexit
import dataclasses
import enum
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from regrow.core.job import JobSpec, Mode, OptimizerSpec, TableSpec
from regrow.errors import RegrowError, UserError
from regrow.nn import refusals
from regrow.nn.coded import make_marks_table, make_protection, protect
from regrow.nn.jagged import pool_weighted
from regrow.nn.optimizer import Optimizers, choose_optimizers
from regrow.nn.rates import check_rate
from regrow.nn.routing import explain_id, make_router
from regrow.nn.weights import give_weights, make_first
from regrow.protection import ErasureCode, Partial
from regrow.runtime.client import Client, Ticket

READ_CHUNK_BYTES = 16 << 20


class PoolingType(enum.Enum):
    SUM = "SUM"
    MEAN = "MEAN"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingBagConfig:
    """One table, as in TorchRec. Initial weights are uniform within sqrt(1 / num_embeddings)."""

    num_embeddings: int
    embedding_dim: int
    name: str
    feature_names: Sequence[str]
    pooling: PoolingType = PoolingType.SUM
    data_type: Any = refusals.DATA_TYPE  # or TorchRec's DataType.FP32; no other
    init_fn: Callable[[Tensor], Any] | None = None  # fills [num_embeddings, embedding_dim]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingConfig:
    """One table whose rows are not pooled, as in TorchRec."""

    num_embeddings: int
    embedding_dim: int
    name: str
    feature_names: Sequence[str]
    data_type: Any = refusals.DATA_TYPE
    init_fn: Callable[[Tensor], Any] | None = None


class KeyedTensor:
    """Pooled embeddings of several features side by side: [batch, sum of widths]."""

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        self._keys = list(keys)
        self._lengths = list(length_per_key)
        self._values = values

    def keys(self) -> list[str]:
        return self._keys

    def length_per_key(self) -> list[int]:
        return self._lengths

    def offset_per_key(self) -> list[int]:
        """Where each feature's columns begin, and where the last one's end."""
        return list(itertools.accumulate(self._lengths, initial=0))

    def key_dim(self) -> int:
        """The dimension in which features are side by side."""
        return 1

    def values(self) -> Tensor:
        return self._values

    def device(self) -> torch.device:
        return self._values.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedTensor:
        return KeyedTensor(self._keys, self._lengths, self._values.to(device, non_blocking=non_blocking))

    def __getitem__(self, key: str) -> Tensor:
        start = sum(self._lengths[: self._keys.index(key)])
        return self._values[:, start : start + self._lengths[self._keys.index(key)]]

    def to_dict(self) -> dict[str, Tensor]:
        return dict(zip(self._keys, self._values.split(self._lengths, dim=1), strict=True))

    def __repr__(self) -> str:
        return f"KeyedTensor({dict(zip(self._keys, self._lengths, strict=True))})"


class Features(Protocol):
    """What forward takes: ours, or TorchRec's KeyedJaggedTensor."""

    def keys(self) -> Any: ...
    def values(self) -> Any: ...
    def lengths(self) -> Any: ...


class Cluster(Protocol):
    """Servers to put tables on; see `regrow.LocalCluster` and `regrow.InProcessCluster`."""

    server_count: int

    def client(self, job: JobSpec, *, worker: int = 0) -> Client: ...


class EmbeddingBagCollection(nn.Module):
    """Drop-in for TorchRec's EmbeddingBagCollection, with its rows on the servers of `cluster`.

    `protection` keeps rows when a server dies; left out, it is the cluster's own. `is_weighted`: every row is
    multiplied with the weight of its id.
    """

    rows_are_on_servers = True  # what is made for modules that hold their weights looks for this

    def __init__(
        self,
        *,
        tables: Sequence[EmbeddingBagConfig],
        cluster: Cluster,
        optimizer: Optimizers | None = None,
        protection: ErasureCode | Partial | None = None,
        seed: int = 0,
        mode: Mode = "async",
        worker: int = 0,
        workers: int = 1,
        is_weighted: bool = False,
    ) -> None:
        super().__init__()
        self._configs = list(tables)
        for config in self._configs:
            refusals.check_table(config)
        if is_weighted:
            refusals.check_sums(self._configs)
        self._is_weighted = is_weighted
        optimizer = optimizer or OptimizerSpec(kind="rowwise_adagrad", learning_rate=0.01)
        rules = choose_optimizers(optimizer, [config.name for config in self._configs])
        code = protection or getattr(cluster, "protection", None)
        if code is not None:
            code.check(servers=cluster.server_count, mode=mode)
        coded = tuple(protect(spec, code) for spec in map(make_table_spec, self._configs, rules))
        if isinstance(code, Partial):
            coded += (protect(make_marks_table(cluster.server_count), code, dense=True),)
        self.job = JobSpec(
            tables=coded,
            servers=cluster.server_count,
            workers=workers,
            mode=mode,
            seed=seed,
            protection=make_protection(code),
        )
        if reason := self.job.invalid_reason():
            raise ValueError(reason)
        self._features = [name for config in self._configs for name in config.feature_names]
        self._owner = [index for index, config in enumerate(self._configs) for _ in config.feature_names]
        self._names = name_lookups(self._features, [self._configs[index].name for index in self._owner])
        self._widths = [self._configs[index].embedding_dim for index in self._owner]
        self._router = make_router(
            self.job,
            feature_tables=self._owner,
            static_tables=[],
            mean_pooling=[getattr(config.pooling, "value", config.pooling) == "MEAN" for config in self._configs]
            + [False] * (len(coded) - len(self._configs)),
            expanded=[is_weighted] * len(self._configs) + [False] * (len(coded) - len(self._configs)),
        )
        self._client = cluster.client(self.job, worker=worker)
        for config in self._configs:
            if (first := make_first(config)) is not None:
                give_weights(self._client, self.job, config.name, first)
        self._step = 0
        self._rates: list[float] = []  # of each table, once they are not those that were declared
        self._prefetched: dict[int, tuple[Features, _Batch]] = {}
        self._unpushed: _Batch | None = None  # of the last forward, in synchronous mode
        # Autograd calls backward only where something that was passed in needs a gradient. A parameter, though it is
        # empty: so `requires_grad_(False)` of a model around this one freezes the rows too.
        self.anchor = nn.Parameter(torch.zeros(0))

    @property
    def client(self) -> Client:
        return self._client

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    @property
    def device(self) -> torch.device:
        """Where the model around it is. Pooled rows are put where the features are."""
        return self.anchor.device

    def is_weighted(self) -> bool:
        return self._is_weighted

    def set_learning_rate(self, rate: float, table: str | None = None) -> None:
        """Of all tables, or of one: from the next backward on, of this worker. In synchronous mode all workers must set
        the same before the same step."""
        names = [config.name for config in self._configs]
        if table is not None and table not in names:
            raise UserError(f"the collection has no table {table!r}", hint=f"it has {', '.join(names)}")
        check_rate(rate)
        rates = self._rates or [spec.optimizer.learning_rate for spec in self.job.tables]
        for index, name in enumerate(names):
            if table in (None, name):
                rates[index] = float(rate)
        self._rates[:] = rates

    def prefetch(self, features: Features) -> None:
        """Asks for the rows of a batch that will be passed to forward later, so that they are there by then."""
        if self.job.mode == "sync":
            raise RegrowError("rows cannot be asked for ahead in synchronous mode: a pull commits the step before it")
        self._prefetched[id(features)] = (features, self._ask(features))

    @torch.compiler.disable  # rows come over sockets: a compiled model is interrupted here, and goes on behind
    def forward(self, features: Features) -> KeyedTensor:
        refusals.refuse_half()
        prefetched = self._prefetched.pop(id(features), None)
        batch = prefetched[1] if prefetched is not None else self._ask(features)
        device, anchor = features.values().device, self.anchor if batch.trains else None
        if self._is_weighted:
            rows = _ExpandedLookup.apply(anchor, batch, tuple(self._widths))
            named = [(name, each.to(device)) for name, each in zip(self._features, rows, strict=True)]
            return KeyedTensor(self._names, self._widths, pool_weighted(features, named))
        return KeyedTensor(self._names, self._widths, _Lookup.apply(anchor, batch).to(device))

    def __deepcopy__(self, memo: Any) -> Any:
        raise RegrowError(refusals.COPIED, hint=refusals.COPIED_HINT)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RegrowError(refusals.COPIED, hint=refusals.COPIED_HINT)

    @property
    def is_trained(self) -> bool:
        """Whether a forward now would be followed by an update of its rows."""
        return self.training and self.anchor.requires_grad and torch.is_grad_enabled()

    def drain(self) -> None:
        """Waits until every push so far is durable. In synchronous mode it commits the last step, so every worker
        must call it (or go on to the next step)."""
        self._check_pushed()
        if self.job.mode == "sync" and self._step:
            nothing = self._router.plan(np.zeros(0, np.int64), None, 0)
            self._client.pull(nothing, step=self._step + 1).wait()
        self._client.drain()

    def _ask(self, features: Features) -> _Batch:
        values, lengths, size = self._arrays(features)
        try:
            plan = self._router.plan(values, lengths, size)
        except IndexError as error:
            tables = [self._configs[index].name for index in self._owner]
            raise explain_id(error, self._features, tables) from None
        shape, trains = (size, sum(self._widths)), self.is_trained
        if not trains:
            return self._make_batch(self._client.pull(plan, step=0), shape, trains=False)
        self._check_pushed()
        self._step += 1
        batch = self._make_batch(self._client.pull(plan, step=self._step), shape, trains=True)
        self._unpushed = batch if batch.once else None
        return batch

    def _make_batch(self, ticket: Ticket, shape: tuple[int, int], *, trains: bool) -> _Batch:
        batch = _Batch(
            client=self._client,
            ticket=ticket,
            shape=shape,
            trains=trains,
            once=trains and self.job.mode == "sync",
            rates=self._rates,
        )
        _BATCHES.add(batch)
        return batch

    def _check_pushed(self) -> None:
        """In synchronous mode: nothing commits a step whose push never came."""
        if self._unpushed is not None and not self._unpushed.pushes:
            raise RegrowError(refusals.UNPUSHED, hint=refusals.UNPUSHED_HINT)

    def _arrays(self, features: Features) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
        """Ids and lengths of our features in our order; the batch may carry others besides."""
        keys = list(features.keys())
        missing = [name for name in self._features if name not in keys]
        if missing:
            raise KeyError(f"the batch has no feature {missing[0]!r}; it has {keys}")
        refusals.check_features(features.values(), features.lengths())
        check = refusals.check_weighted if self._is_weighted else refusals.check_unweighted
        check(features)
        values = features.values().detach().cpu().to(torch.int64).contiguous().numpy()
        lengths = features.lengths().detach().cpu().to(torch.int32).contiguous().numpy()
        size = lengths.size // len(keys)
        if int(lengths.sum(dtype=np.int64)) != values.size:
            raise ValueError(f"the lengths add up to {int(lengths.sum())}, but there are {values.size} ids")
        if keys == self._features:
            return values, lengths, size
        per_key = lengths.reshape(len(keys), size)
        ends = np.cumsum(per_key.sum(axis=1, dtype=np.int64))
        order = [keys.index(name) for name in self._features]
        chosen = [values[ends[index] - per_key[index].sum() : ends[index]] for index in order]
        return np.concatenate(chosen), np.ascontiguousarray(per_key[order]).reshape(-1), size

    # --- State, with TorchRec's names ---

    def weight(self, name: str) -> Tensor:
        """A table's weights, read from the servers."""
        return self._columns(self._index(name), 0, self._configs[self._index(name)].embedding_dim)

    def optimizer_state(self) -> dict[str, Tensor]:
        """`TABLE.momentum1` and so on, read from the servers."""
        state = {}
        for index, table in enumerate(self.job.tables):
            start = table.dim
            for part, floats in table.optimizer.state_parts(table.dim):
                values = self._columns(index, start, start + floats)
                state[f"{table.name}.{part}"] = values[:, 0] if floats == 1 else values
                start += floats
        return state

    def load_optimizer_state(self, state: Mapping[str, Tensor]) -> None:
        """What `optimizer_state` has given. After `load_state_dict`, with which the state begins anew."""
        places: dict[str, tuple[int, int, int]] = {}
        for index, table in enumerate(self.job.tables):
            start = table.dim
            for part, floats in table.optimizer.state_parts(table.dim):
                places[f"{table.name}.{part}"] = index, start, floats
                start += floats
        if odd := sorted(places.keys() ^ state.keys()):
            where = "is not in the state" if odd[0] in places else "is none of this collection's optimizers"
            raise UserError(f"{odd[0]} {where}", hint=f"there is {', '.join(places) or 'none'}")
        for name, (index, _, floats) in places.items():
            if state[name].numel() != self.job.tables[index].rows * floats:
                shape = [self.job.tables[index].rows, *([floats] if floats > 1 else [])]
                raise UserError(f"{name} is {list(state[name].shape)}, the table's is {shape}")
        self.drain()
        for index in range(len(self.job.tables)):
            mine = [(state[name], start, floats) for name, (at, start, floats) in places.items() if at == index]
            for first, count in self._chunks(index) if mine else ():
                records = np.array(self._client.records(index, first, count), np.float32)
                for values, start, floats in mine:
                    rows = values.detach().cpu().reshape(-1, floats)[first : first + count]
                    records[:, start : start + floats] = rows.numpy()
                self._client.write_records(index, first, records)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for config in self._configs:
            destination[f"{prefix}embedding_bags.{config.name}.weight"] = self.weight(config.name)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        load_tables(
            self._configs,
            f"{prefix}embedding_bags.",
            state_dict,
            prefix,
            args,
            lambda name, weight: self._write(self._index(name), weight),
        )

    def _index(self, name: str) -> int:
        for index, config in enumerate(self._configs):
            if config.name == name:
                return index
        raise KeyError(f"no table is named {name!r}")

    def _chunks(self, index: int) -> Iterator[tuple[int, int]]:
        table = self.job.tables[index]
        size = max(1, READ_CHUNK_BYTES // (4 * table.record_floats))
        for first in range(0, table.rows, size):
            yield first, min(size, table.rows - first)

    def _columns(self, index: int, start: int, stop: int) -> Tensor:
        self.drain()
        out = np.empty((self.job.tables[index].rows, stop - start), np.float32)
        for first, count in self._chunks(index):
            out[first : first + count] = self._client.records(index, first, count)[:, start:stop]
        return torch.from_numpy(out)

    def _write(self, index: int, weight: Tensor) -> None:
        """Replaces a table's weights and resets its optimizer state."""
        table = self.job.tables[index]
        self.drain()
        for first, count in self._chunks(index):
            records = np.zeros((count, table.record_floats), np.float32)
            records[:, : table.dim] = weight[first : first + count].detach().cpu().numpy()
            self._client.write_records(index, first, records)


@dataclasses.dataclass(slots=True, weakref_slot=True, eq=False)
class _Batch:
    client: Client
    ticket: Ticket
    shape: tuple[int, int]
    trains: bool
    once: bool = False  # a synchronous step has one push
    pushes: int = 0
    rates: list[float] = dataclasses.field(default_factory=list)  # as they are when it is pushed; none: as declared


_BATCHES: weakref.WeakSet[_Batch] = weakref.WeakSet()


def _let_go() -> None:
    """A tensor that is still there when the interpreter ends never lets go of what its autograd function holds: plans
    and servers of this process would be told as leaked. So what it holds is taken out before."""
    for batch in list(_BATCHES):
        del batch.ticket, batch.client


atexit.register(_let_go)


class _Lookup(torch.autograd.Function):
    """Forward pools pulled rows; backward sums gradients by row and pushes them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor | None, batch: _Batch) -> Tensor:
        ctx.batch = batch
        plan: Any = batch.ticket.plan
        pooled = torch.empty(batch.shape)
        plan.pool(batch.ticket.wait(), pooled.numpy())
        return pooled

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[None, None]:
        (grad,) = outputs
        batch: _Batch = ctx.batch
        plan: Any = batch.ticket.plan
        grads = np.empty(plan.floats, np.float32)
        plan.unpool(_as_array(grad), grads)
        _push(batch, grads)
        return None, None


class _ExpandedLookup(torch.autograd.Function):
    """Forward gives the row of every id, for each feature; backward sums gradients by row and pushes them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor | None, batch: _Batch, widths: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.batch = batch
        plan: Any = batch.ticket.plan
        rows = batch.ticket.wait()
        found = [torch.empty(plan.expanded_floats(feature) // width, width) for feature, width in enumerate(widths)]
        for feature, each in enumerate(found):
            plan.expand(feature, rows, each.numpy())
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[None, None, None]:
        batch: _Batch = ctx.batch
        plan: Any = batch.ticket.plan
        grads = np.empty(plan.floats, np.float32)
        for feature, grad in enumerate(outputs):
            plan.collapse(feature, _as_array(grad), grads)
        _push(batch, grads)
        return None, None, None


def _as_array(grad: Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = grad.detach().cpu().to(torch.float32).contiguous().numpy()
    return found


def _push(batch: _Batch, grads: np.ndarray[Any, Any]) -> None:
    if batch.once and batch.pushes:
        raise RegrowError(
            "backward went through this batch twice: in synchronous mode a step has one push",
            hint="add the losses and call backward() once",
        )
    if not batch.client.pushes:  # the first of all: later ones need not look
        refusals.refuse_scaler()
    batch.client.push(batch.ticket, grads, tuple(batch.rates))
    batch.pushes += 1


def load_tables(
    configs: Sequence[EmbeddingBagConfig | EmbeddingConfig],
    front: str,
    state_dict: Any,
    prefix: str,
    args: tuple[Any, ...],
    write: Callable[[str, Tensor], None],
) -> None:
    """Torch's `_load_from_state_dict` for tables that are on servers: `front` is in front of their names, `args` is the
    rest of what torch gives."""
    missing_keys, unexpected_keys, error_msgs = args[2], args[3], args[4]
    wanted = {f"{front}{config.name}.weight": config for config in configs}
    unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in wanted]
    for key, config in wanted.items():
        if key not in state_dict:
            missing_keys.append(key)
            continue
        shape = (config.num_embeddings, config.embedding_dim)
        if tuple(state_dict[key].shape) != shape:
            error_msgs.append(f"{key} is {tuple(state_dict[key].shape)}, the table is {shape}")
            continue
        write(config.name, state_dict[key])


def name_lookups(features: Sequence[str], tables: Sequence[str]) -> list[str]:
    """What is looked up, as TorchRec names it: a feature; `feature@table`, if that is in several tables."""
    pairs = list(zip(features, tables, strict=True))
    if again := next((pair for pair in pairs if pairs.count(pair) > 1), None):
        raise ValueError(f"feature {again[0]!r} is named twice in table {again[1]!r}")
    return [f"{name}@{table}" if features.count(name) > 1 else name for name, table in pairs]


def make_table_spec(config: EmbeddingBagConfig | EmbeddingConfig, optimizer: OptimizerSpec) -> TableSpec:
    """The table of a configuration, as servers know it."""
    return TableSpec(
        name=config.name,
        rows=config.num_embeddings,
        dim=config.embedding_dim,
        init_bound=(1.0 / max(1, config.num_embeddings)) ** 0.5,
        optimizer=optimizer,
    )
