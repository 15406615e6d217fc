"""A model in training that is a plain dictionary, and its checkpoints.

What each cut should be is kept beside what is on storage, so that a test can compare the two, whatever it did to files.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable

import numpy as np
import pytest

from regrow.checkpoint.chunks import Chunk, Rows, split, write_chunk
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.load import LoadReport, restore
from regrow.checkpoint.manifest import Cut, Manifest, TableInfo, chunk_name, shard_name
from regrow.checkpoint.storage import Storage
from regrow.core.names import cut_id, piece_name
from regrow.errors import CheckpointError

TABLES = (
    TableInfo(name="user", rows=60, dim=3, states=(("momentum1", 1),), init_bound=0.1, index=0),
    TableInfo(name="item", rows=25, dim=2, states=(), init_bound=0.1, index=1),
    TableInfo(name="place", rows=7, dim=1, states=(("momentum1", 1), ("exp_avg_sq", 1)), init_bound=0.1, index=2),
)
Model = dict[tuple[str, int], bytes]  # (table, row) -> the bytes of its record


def record(rows: Rows, index: int) -> bytes:
    return b"".join(part[index].tobytes() for _, part in rows.parts())


def digest(model: Model) -> str:
    return hashlib.sha256(repr(sorted(model.items())).encode()).hexdigest()


class World:
    """A model in training, its checkpoints, and what each cut should be."""

    def __init__(self, url: str, *, seed: int = 0, shards: int = 2, chunk_bytes: int = 200) -> None:
        self.storage = Storage.open(url)
        self.random = np.random.default_rng(seed)
        self.shards, self.chunk_bytes = shards, chunk_bytes
        self.model: Model = {}
        self.changed: set[tuple[str, int]] = set()
        self.cut: str | None = None
        self.step, self.now = 0, 1000.0
        self.history: dict[str, Model] = {}
        self.damaged: set[str] = set()
        self.shuffled = False  # chunks of a shard that are not in the order of their ids
        self._salts = itertools.count()

    def update(self, count: int = 12) -> None:
        for _ in range(count):
            table = TABLES[self.random.integers(len(TABLES))]
            key = table.name, int(self.random.integers(table.rows))
            width = sum(table.widths)
            self.model[key] = self.random.standard_normal(width).astype(np.float32).tobytes()
            self.changed.add(key)
        self.step += 1

    def rows(self, table: TableInfo, ids: Iterable[int]) -> Rows:
        chosen = sorted(ids)
        width = sum(table.widths)
        records = b"".join(self.model[table.name, row] for row in chosen)
        values = np.frombuffer(records, np.float32).reshape(len(chosen), width)
        states, at = {}, table.dim
        for name, floats in table.states:
            states[name] = values[:, at : at + floats]
            at += floats
        return Rows(np.array(chosen, np.uint32), values[:, : table.dim], states)

    def save(self, *, full: bool = False, bits: int = 32, encoding: str = "raw") -> Manifest:
        """A cut, and the piece that leads to it."""
        full = full or self.cut is None
        self.now += 60.0
        target = Cut(
            id=cut_id(self.step, next(self._salts)), step=self.step, marks=(), created=self.now, job={}, extra={}
        )
        source = None if full else self.cut
        keys = self.model.keys() if full else self.changed
        infos = []
        for shard in range(self.shards):
            label = shard_name(shard, self.shards, "by number")
            for number, chunk in enumerate(self.chunks(keys, shard)):
                name = chunk_name(label, number, encoding)  # type: ignore[arg-type]
                infos.append(
                    write_chunk(
                        self.storage,
                        piece_name(source, target.id),
                        name,
                        chunk,
                        encoding=encoding,  # type: ignore[arg-type]
                        bits=bits,
                        shard=label,
                    )
                )
        manifest = Manifest(
            source=source,
            target=target,
            tables=TABLES,
            seed=1,
            chunks=tuple(infos),
            encoding=encoding,  # type: ignore[arg-type]
            bits=bits,  # type: ignore[arg-type]
            made_by="test",
        )
        self.storage.write_manifest(manifest)
        self.history[target.id] = dict(self.model)
        self.cut, self.changed = target.id, set()
        return manifest

    def chunks(self, keys: Iterable[tuple[str, int]], shard: int) -> list[Chunk]:
        own = [key for key in keys if key[1] % self.shards == shard]
        parts = [{table.name: self.rows(table, [row for name, row in own if name == table.name])} for table in TABLES]
        found = list(split(parts, self.chunk_bytes))
        return found[::-1] if self.shuffled else found

    def go_back(self, cut: str) -> None:
        self.model, self.changed, self.cut = dict(self.history[cut]), set(), cut
        self.step = int(cut[:10])

    def graph(self) -> Graph:
        return Graph(self.storage.manifests()[0])

    def restore_rows(self, cut: str | None = None, **options: object) -> tuple[Model, LoadReport]:
        model: Model = {}

        def apply(piece: Manifest, chunk: Chunk) -> None:
            for table, rows in chunk.items():
                for index, row in enumerate(rows.ids):
                    model[table, int(row)] = record(rows, index)

        plan, _ = self.graph().restore_plan(cut)
        return model, restore(self.storage, plan, apply, **options)  # type: ignore[arg-type]

    def lose(self, piece: Manifest, *, how: str = "lose") -> None:
        """A chunk of a piece goes missing, is cut short, or has a bit flipped."""
        info = piece.chunks[self.random.integers(len(piece.chunks))]
        path = f"{piece.name}/{info.name}"
        if how == "lose":
            self.storage.delete(path)
        else:
            data = bytearray(self.storage.read(path))
            if how == "flip":
                data[self.random.integers(len(data))] ^= 1 << int(self.random.integers(8))
            self.storage.write(path, bytes(data if how == "flip" else data[:-1]))
        self.damaged.add(piece.name)

    def reachable(self) -> set[str]:
        """The cuts that must be restorable, by following undamaged pieces until nothing new is found."""
        found: set[str | None] = {None}
        pieces = [piece for piece in self.storage.manifests()[0] if piece.name not in self.damaged]
        while new := {p.target.id for p in pieces if p.source in found} - found:
            found |= new
        return {cut for cut in found if cut is not None}

    def check(self) -> None:
        reachable = self.reachable()
        for cut in self.graph().cuts:
            if cut in reachable:
                assert self.restore_rows(cut)[0] == self.history[cut], cut
            else:
                with pytest.raises(CheckpointError):
                    self.restore_rows(cut)
