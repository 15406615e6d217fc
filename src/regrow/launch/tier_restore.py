"""From checkpoints in the files of servers to an ordinary one: `regrow ckpt restore DIR --to URL`.

Every server's files are opened as they were at the checkpoint, one after the other, and its rows stored as they would
be for a full. The cut keeps its id, marks and configuration, so whoever resumes from it goes on where that run was, on
any number of servers. The files stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from regrow.checkpoint.chunks import CHUNK_BYTES
from regrow.checkpoint.epochs import EpochManifest
from regrow.checkpoint.load import verify_pieces
from regrow.checkpoint.manifest import ChunkInfo, Manifest, chunk_name
from regrow.checkpoint.manifests import table_infos
from regrow.checkpoint.staging import Stager
from regrow.checkpoint.storage import Storage
from regrow.core.names import piece_name
from regrow.errors import CheckpointError, UserError
from regrow.launch.saving import TieredRows
from regrow.launch.tiers import StoreLock, find_epochs
from regrow.runtime.checkpoint import chunk_of, shard_of
from regrow.runtime.tiers import open_tiered

CACHE_BYTES = 64 << 20  # rows are read around it

Progress = Callable[[int, int], None]  # rows done, rows in all


def restore_epochs(directory: str, target: str, *, progress: Progress) -> Manifest:
    """Writes the newest checkpoint of a directory as one full, and reads it back. UserError or CheckpointError if it
    cannot be; nothing that is there is overwritten."""
    with StoreLock(Path(directory)):
        manifest = find_epochs(directory)
        there = Storage.open(target)
        name = piece_name(None, manifest.target.id)
        if there.names(name):
            hint = "nothing is overwritten: choose another URL, or delete it"
            raise UserError(f"{target} already has {name}", hint=hint)
        full = _make_manifest(manifest, _store_rows(manifest, directory, there, name, progress))
        there.write_manifest(full)
        if problems := verify_pieces(there, [full], deep=True, progress=progress):
            raise CheckpointError(f"{target}: what was written is damaged: {problems[0]}")
        return full


def _store_rows(
    manifest: EpochManifest, directory: str, there: Storage, name: str, progress: Progress
) -> list[ChunkInfo]:
    job = manifest.job
    with Stager(there) as stager:
        for server, epoch in enumerate(manifest.epochs):
            tiers = TieredRows(directory=directory, cache_bytes=CACHE_BYTES)
            store = open_tiered(job, server, tiers, at_epoch=epoch)
            store.begin_capture(store.add_tenant(), True)
            count, rows = 0, store.capture_left()
            shard = shard_of(job, server)
            while left := store.capture_left():
                progress(server * rows + rows - left, len(manifest.epochs) * rows)
                chunk = chunk_of(job, store.capture_chunk(CHUNK_BYTES))
                if chunk:
                    stager.submit(name, chunk_name(shard, count), chunk, encoding="raw", bits=32, shard=shard)
                    count += 1
            store.end_capture(False)
            store.close()
        return stager.finish(name)


def _make_manifest(manifest: EpochManifest, chunks: list[ChunkInfo]) -> Manifest:
    return Manifest(
        source=None,
        target=manifest.target,
        tables=table_infos(manifest.job),
        seed=manifest.job.seed,
        chunks=tuple(chunks),
        made_by=manifest.made_by,
    )
