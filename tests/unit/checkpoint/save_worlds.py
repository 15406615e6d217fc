"""One server's rows as a plain dictionary, its saves, and what each of its lives should find again.

What is loaded is compared with what this keeps: it knows of values and of who followed whom, and of no chain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from worlds import TABLES, Model, record

from regrow.checkpoint.chunks import Chunk, Rows, split, write_chunk
from regrow.checkpoint.manifest import ChunkInfo, TableInfo, chunk_name
from regrow.checkpoint.saves import Chain, IdsInfo, Owner, SaveManifest, find_chain
from regrow.checkpoint.saves_ids import IdsKeeper
from regrow.checkpoint.saves_load import Base, SavedRows
from regrow.checkpoint.saves_write import SaveWriter, read_saves
from regrow.checkpoint.storage import Storage
from regrow.core.names import save_name

SHARD = "s0of1"
OWNER = Owner(run="run", start=0, shard=SHARD)
ORDER = [table.name for table in TABLES]


def make_writer(storage: Storage, incarnation: int = 0, *, owner: Owner = OWNER, **options: Any) -> SaveWriter:
    return SaveWriter(
        storage=storage,
        owner=owner,
        server=0,
        incarnation=incarnation,
        tables=TABLES,
        seed=1,
        clock=lambda: 1000.0,
        **options,
    )


def make_rows(table: TableInfo, values: dict[int, bytes]) -> Rows:
    ids = sorted(values)
    floats = np.frombuffer(b"".join(values[row] for row in ids), np.float32).reshape(len(ids), sum(table.widths))
    parts = np.split(floats, np.cumsum(table.widths)[:-1], axis=1)
    states = {name: part for (name, _), part in zip(table.states, parts[1:], strict=True)}
    return Rows(np.array(ids, np.uint32), parts[0], states)


def make_chunks(model: Model, keys: Iterable[tuple[str, int]], chunk_bytes: int = 200) -> list[Chunk]:
    wanted = set(keys)
    parts = [
        {table.name: make_rows(table, {row: model[name, row] for name, row in wanted if name == table.name})}
        for table in TABLES
    ]
    return list(split(parts, chunk_bytes))


def write_save(
    writer: SaveWriter,
    model: Model,
    keys: Collection[tuple[str, int]],
    *,
    full: bool,
    marks: tuple[int, ...] = (0,),
    updates: int = 0,
    accepted: bool = True,
) -> SaveManifest:
    """All of it, as a server does it; what a storage raises is raised. `accepted`: the server still wants it then."""
    directory = writer.begin()
    keeper = IdsKeeper()
    infos = []
    shard = writer.owner.shard
    for number, chunk in enumerate(make_chunks(model, keys)):
        name = chunk_name(shard, number, writer.encoding)
        infos.append(
            write_chunk(writer.storage, directory, name, chunk, encoding=writer.encoding, bits=writer.bits, shard=shard)
        )
        keeper.add(chunk)
    save = writer.write(infos, keeper.encode(), full=full, marks=marks, updates=updates)
    if accepted:
        writer.accept(save)
        writer.clear_away(save)
    return save


def find(storage: Storage, owner: Owner = OWNER) -> Chain | None:
    found = read_saves(storage, owner)
    return find_chain(found.manifests, owner, broken=found.broken)


def load(storage: Storage, chain: Chain | None, *, base: Base | None = None, **options: Any) -> Model:
    """Every row once, and those that were said to be there."""
    rows = SavedRows(storage, chain, base=base)
    model = collect(rows, **options)
    assert {(table, int(row)) for table, ids in rows.ids().items() for row in ids} == set(model)
    return model


def collect(rows: SavedRows, part_bytes: int = 100, **options: Any) -> Model:
    model: Model = {}
    for part in rows.rows_newest_first(part_bytes, **options):
        for table, found in part.items():
            for index, row in enumerate(found.ids):
                assert (table, int(row)) not in model, "each row comes once"
                model[table, int(row)] = record(found, index)
    return model


class Server:
    """One life of a server: rows that change, and what of them is durable."""

    def __init__(self, storage: Storage, random: np.random.Generator, incarnation: int, model: Model) -> None:
        self.writer = make_writer(storage, incarnation)
        self.storage, self.random = storage, random
        self.model, self.durable = dict(model), dict(model)
        self.changed: set[tuple[str, int]] = set()
        self.pushes = 0

    def update(self, count: int) -> None:
        for _ in range(count):
            table = TABLES[int(self.random.integers(len(TABLES)))]
            key = table.name, int(self.random.integers(table.rows))
            self.model[key] = self.random.standard_normal(sum(table.widths)).astype(np.float32).tobytes()
            self.changed.add(key)
            self.pushes += 1

    def save(self, *, share: float = 1.0, full: bool | None = None) -> SaveManifest:
        """All changed rows, or a share of them as a priority would pick them. `durable` is what it then holds, also
        where it raises: for whoever finds that it exists all the same."""
        full = self.writer.choose_kind()[0] if full is None else full
        keys = set(self.model) if full else {key for key in sorted(self.changed) if self.random.random() < share}
        values = {key: self.model[key] for key in keys}
        self.next_durable = values if full else {**self.durable, **values}
        made = write_save(self.writer, self.model, keys, full=full, marks=(self.pushes,), updates=self.pushes)
        self.durable = self.next_durable
        self.changed -= keys
        return made


def make_server(storage: Storage, *, seed: int = 0) -> Server:
    return Server(storage, np.random.default_rng(seed), 0, {})


def save_of(incarnation: int, number: int, *, parent: str | None = None, size: int = 0, **fields: Any) -> SaveManifest:
    """A manifest by hand; with a size, it has a chunk."""
    chunk = ChunkInfo(name=f"{SHARD}-00000.safetensors", bytes=size, crc32c=0, rows={"user": 1}, shard=SHARD)
    values: dict[str, Any] = {
        **{"kind": "save", "run": "run", "start": 0, "shard": SHARD, "server": 0, "full": False, "marks": (1, 2)},
        **{"updates": 5, "updates_skipped": 0, "created": 0.0, "tables": TABLES, "seed": 1, "base": None},
        **{
            "made_by": "a test",
            "chunks": (chunk,) if size else (),
            "ids": IdsInfo(bytes=0, crc32c=0) if size else None,
        },
        **{"incarnation": incarnation, "number": number, "parent": parent},
    }
    return SaveManifest(**{**values, **fields})


def name(incarnation: int, number: int) -> str:
    return save_name(incarnation, number)


def chain_names(chain: Chain | None) -> list[str]:
    assert chain is not None
    return [save.save for save in chain.saves]
