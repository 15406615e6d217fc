"""A run in small for tests of replicas: real stores of two servers, the real saver's chunks and writer's manifests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from regrow.checkpoint.chunks import write_chunk
from regrow.checkpoint.manifest import ChunkInfo, chunk_name
from regrow.checkpoint.manifests import ManifestWriter
from regrow.checkpoint.publications import PublicationWriter
from regrow.checkpoint.storage import Storage
from regrow.core.cut import PUBLICATION_TENANT, TENANT
from regrow.core.cuts import TERM, WriteManifest
from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.core.names import cut_id, piece_name
from regrow.runtime.checkpoint import chunk_of, shard_of
from regrow.store.memory import MemoryStore

ADAGRAD, SGD = (OptimizerSpec(kind=kind, learning_rate=0.1) for kind in ("adagrad", "sgd"))
JOB = JobSpec(
    tables=(
        TableSpec(name="user", rows=50, dim=4, optimizer=ADAGRAD, init_bound=0.1),
        TableSpec(name="dense", rows=6, dim=8, optimizer=SGD, init_bound=0.5),
    ),
    servers=2,
    workers=1,
)


@dataclasses.dataclass
class Run:
    """Rows of all servers, and who stores them for whom."""

    url: str
    job: JobSpec = JOB
    name: str = "run"
    starts: int = 0
    bits: int = 32
    ckpt: str | None = None

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(7)
        self.step = 0
        self.number = 0
        self.term = 0
        self.stores = [MemoryStore(self.job, server) for server in range(self.job.servers)]
        for store in self.stores:
            while store.add_tenant() < PUBLICATION_TENANT:
                pass
        self.heads: dict[int, str | None] = {TENANT: None, PUBLICATION_TENANT: None}

    def train(self, rows: int = 5) -> None:
        self.step += 1
        for store in self.stores:
            counts = np.array([rows, 2], np.int32)
            slots = [np.sort(self.rng.choice(store.slots(t), n, replace=False)) for t, n in enumerate(counts)]
            grads = self.rng.normal(size=rows * 4 + 2 * 8).astype(np.float32)
            store.update(counts, np.concatenate(slots).astype(np.uint32), grads, self.step)

    def rows(self, table: str) -> Any:
        """What the servers have, by the numbers of rows: read independently of any capture."""
        index = [spec.name for spec in self.job.tables].index(table)
        spec = self.job.tables[index]
        found = np.empty((spec.rows, spec.dim), np.float32)
        for store in self.stores:
            records = np.empty((store.slots(index), store.record_floats(index)), np.float32)
            store.read_records(index, 0, store.slots(index), records)
            for row in range(spec.rows):
                words = store.find_slots(index, np.array([row], np.uint32))
                hit = [64 * w + b for w, word in enumerate(words.tolist()) for b in range(64) if word >> b & 1]
                if hit:
                    found[row] = records[hit[0], : spec.dim]
        return found

    def begin(self, tenant: int, *, full: bool = False) -> WriteManifest:
        """All servers capture and store; nobody has been told."""
        self.number += 1
        number = self.term * TERM + self.number
        source = None if full else self.heads[tenant]
        target = cut_id(self.step, f"{self.name}/{self.starts}/{number}")
        storage = Storage.open(self.url if tenant == PUBLICATION_TENANT else self.ckpt or self.url)
        piece, parts = piece_name(source, target), []
        for server, store in enumerate(self.stores):
            store.begin_capture(tenant, source is None)
            infos: list[ChunkInfo] = []
            while store.capture_left():
                rows = store.capture_chunk(400)
                chunk = chunk_of(self.job, rows, weights_only=tenant == PUBLICATION_TENANT)
                shard = shard_of(self.job, server)
                name = chunk_name(shard, len(infos))
                if chunk:
                    infos.append(write_chunk(storage, piece, name, chunk, bits=self.bits, shard=shard))
            parts.append(msgspec.json.encode(infos).decode())
        return WriteManifest(
            number=number,
            source=source,
            target=target,
            marks=(self.step,),
            chunks=tuple(parts),
            discard=(),
            tenant=tenant,
        )

    def end(self, write: WriteManifest, *, durable: bool = True) -> str:
        """The manifest is written, or the cut given up."""
        if durable:
            written = self.writer(write.tenant).write(self.job, write)
            assert not written.error, written.error
            self.heads[write.tenant] = write.target
        for store in self.stores:
            store.end_capture(durable)
        return write.target

    def writer(self, tenant: int) -> ManifestWriter:
        common: dict[str, Any] = {
            "run": self.name,
            "starts": self.starts,
            "extra": {},
            "encoding": "raw",
            "bits": self.bits,
            "made_by": "a test",
        }
        if tenant == PUBLICATION_TENANT:
            return PublicationWriter(url=self.url, **common)
        assert self.ckpt is not None
        return ManifestWriter(url=self.ckpt, **common)

    def publish(self, *, full: bool = False) -> str:
        return self.end(self.begin(PUBLICATION_TENANT, full=full))


def make_run(path: Path, **values: Any) -> Run:
    return Run(url=str(path / "published"), ckpt=str(path / "checkpoints"), **values)
