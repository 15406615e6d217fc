"""Cuts and pieces that exist as manifests only, for what reads nothing else."""

from __future__ import annotations

import itertools

from regrow.checkpoint.manifest import ChunkInfo, Cut, Line, Manifest, TableInfo
from regrow.core.names import cut_id, piece_name

TABLES = (TableInfo(name="t", rows=10, dim=1, states=(), init_bound=None, index=0),)


def cut(step: int, salt: str = "", *, created: float | None = None, line: Line | None = None) -> Cut:
    at = created if created is not None else step * 60.0
    return Cut(id=cut_id(step, salt), step=step, marks=(), created=at, job={}, extra={}, line=line)


def piece(source: Cut | None, target: Cut, size: int = 10, *, folded: int = 0, bits: int = 32) -> Manifest:
    chunk = ChunkInfo(name="s0of1-00000.safetensors", bytes=size, crc32c=0, rows={"t": 1}, shard="s0of1")
    return Manifest(
        source=source.id if source else None,
        target=target,
        tables=TABLES,
        seed=0,
        chunks=(chunk,) if size else (),
        bits=bits,  # type: ignore[arg-type]
        folded=tuple(piece_name(None, cut_id(index, "")) for index in range(folded)),
        made_by="test",
    )


def chain(count: int, *, full: int = 100, delta: int = 10) -> tuple[list[Cut], list[Manifest]]:
    cuts = [cut(step) for step in range(1, count + 1)]
    deltas = [piece(a, b, delta) for a, b in itertools.pairwise(cuts)]
    return cuts, [piece(None, cuts[0], full), *deltas]
