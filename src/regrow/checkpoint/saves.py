"""Saves of one server: what one is, and which of them make up the newest state of that server. Nothing here touches
storage; saves_write.py and saves_load.py do.

A cut is one instant of all servers. A save is a server's own: its rows as they were when its time came, and how far it
was then (`marks`). It is worth something where only the server that died goes back, and it is never a consistent state
of the whole model: so saves have a directory, a kind and names of their own, and no reader of cuts looks there.

    URL/saves/<run>.<start>/<shard>/<incarnation>-<number>/<chunk>...
                                                           ids.safetensors    which rows are in which chunk
                                                           manifest.json      written last

A save is full (all rows that were ever touched) or holds rows that changed since others; then it names its `parent`.
From the newest save along parents to a full is a *chain*. The newest value of each row in it is what its server loads.

The rules to keep. A successor's first act is a *claim*: a save without rows whose parent is what it found. From then on
the newest incarnation's saves are the chain, and what a predecessor that only seemed dead still writes is in no chain.
A save whose manifest cannot be read at the end of a chain is passed over: it may be a write that was cut short, and
marks say how old the rest is. In the middle of one it is an error, for its rows are in no other place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import msgspec

from regrow.checkpoint.manifest import (
    MANIFEST,
    ChunkInfo,
    Encoding,
    Refused,
    TableInfo,
    chunks_invalid_reason,
    unwrap,
    wrap,
)
from regrow.core.names import is_cut_id, is_save_name, is_word, save_name, saves_directory
from regrow.errors import CheckpointError

SAVE_FORMAT = 1
IDS = "ids.safetensors"
# Saves after a full before there is another full. Too small: fulls all the time. Too large: a reload opens many files.
SAVES_SINCE_FULL_MAX = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Owner:
    """Whose saves: of one shard, in one start of one run. A run that falls back to a cut begins again, and what was
    saved before must not be mixed with what comes after."""

    run: str
    start: int
    shard: str

    @property
    def directory(self) -> str:
        return saves_directory(self.run, self.start, self.shard)


class IdsInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The file that says which rows are in which chunk: its size and CRC-32C."""

    bytes: int
    crc32c: int


class SaveManifest(msgspec.Struct, frozen=True, kw_only=True):
    """One save. `updates`: how many updates of single rows by pushes are in the state that was saved, as the server
    counts them; `updates_skipped`: those of rows that had changed and were left out. `created` is for people. `base`:
    the cut from which the run went on; rows in no save are there."""

    format: int = SAVE_FORMAT
    kind: Literal["save"]
    run: str
    start: int
    shard: str
    server: int
    incarnation: int
    number: int
    parent: str | None
    full: bool
    marks: tuple[int, ...]
    updates: int
    updates_skipped: int
    created: float
    tables: tuple[TableInfo, ...]
    seed: int
    chunks: tuple[ChunkInfo, ...]
    ids: IdsInfo | None
    base: str | None
    encoding: Encoding = "raw"
    bits: Literal[32, 8, 4] = 32
    made_by: str

    @property
    def owner(self) -> Owner:
        return Owner(run=self.run, start=self.start, shard=self.shard)

    @property
    def save(self) -> str:
        """Its name among those of its owner."""
        return save_name(self.incarnation, self.number)

    @property
    def name(self) -> str:
        """The directory."""
        return f"{self.owner.directory}/{self.save}"

    @property
    def bytes(self) -> int:
        return sum(chunk.bytes for chunk in self.chunks) + (0 if self.ids is None else self.ids.bytes)

    @property
    def others(self) -> tuple[str, ...]:
        return () if self.ids is None else (IDS,)

    @property
    def rows(self) -> int:
        return sum(sum(chunk.rows.values()) for chunk in self.chunks)

    def invalid_reason(self) -> str | None:
        """Says what is wrong, or None."""
        return _save_invalid_reason(self)


_DECODER = msgspec.json.Decoder(SaveManifest)


def encode_save(manifest: SaveManifest) -> bytes:
    """The file. A manifest that `decode_save` would refuse is refused here already."""
    if reason := manifest.invalid_reason():
        raise CheckpointError(f"this cannot be the manifest of a save: {reason}")
    return wrap(msgspec.json.encode(manifest))


def decode_save(data: bytes, directory: str) -> SaveManifest:
    """The manifest in the file of that directory, or CheckpointError naming it."""
    try:
        manifest = unwrap(data, _DECODER, known=SAVE_FORMAT)
        reason = manifest.invalid_reason()
        if reason is None and manifest.name != directory:
            reason = f"is the manifest of {manifest.name}"
    except Refused as error:
        reason = str(error)
    if reason is not None:
        raise CheckpointError(f"{directory}/{MANIFEST}: {reason}", hint="this save cannot be used") from None
    return manifest


def _save_invalid_reason(save: SaveManifest) -> str | None:
    if save.format != SAVE_FORMAT:
        return f"format {save.format} is not known; this Regrow writes format {SAVE_FORMAT}"
    if not is_word(save.run) or not is_word(save.shard) or save.start < 0 or save.server < 0:
        return f"run {save.run!r}, start {save.start}, shard {save.shard!r}, server {save.server} cannot be"
    if min(save.incarnation, save.number, save.updates, save.updates_skipped, *save.marks) < 0:
        return "it has a negative number"
    if not is_save_name(save.save):
        return f"save {save.number} of incarnation {save.incarnation} cannot be"
    if save.parent is not None and (not is_save_name(save.parent) or save.parent >= save.save):
        return f"{save.parent!r} is not a save before {save.save}"
    if save.full and save.parent is not None:
        return "it is full and has a parent"
    if save.base is not None and not is_cut_id(save.base):
        return f"base {save.base!r} is not a cut"
    if not math.isfinite(save.created):
        return f"it was created at {save.created}"
    if (save.ids is None) != (not save.chunks):
        return "it has chunks and does not say where their ids are, or the other way round"
    if save.ids is not None and (save.ids.bytes < 0 or not 0 <= save.ids.crc32c < 2**32):
        return f"{save.ids.bytes} bytes of ids with checksum {save.ids.crc32c} cannot be"
    if strange := [chunk.shard for chunk in save.chunks if chunk.shard != save.shard]:
        return f"it has a chunk of {strange[0]!r}"
    return chunks_invalid_reason(save)


# -- chains ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """Saves, newest first, each the parent of the one before it. `passed_over`: newer ones that cannot be read."""

    saves: tuple[SaveManifest, ...]
    passed_over: tuple[str, ...] = ()

    @property
    def head(self) -> SaveManifest:
        return self.saves[0]

    @property
    def base(self) -> str | None:
        """The cut that has the rows which no save has. None: there are none, or these have their initial values."""
        return None if self.saves[-1].full else self.saves[-1].base

    @property
    def bytes(self) -> int:
        return sum(save.bytes for save in self.saves)

    @property
    def rows(self) -> int:
        return sum(save.rows for save in self.saves)


def find_chain(
    manifests: Iterable[SaveManifest], owner: Owner, *, broken: Mapping[str, str] | Collection[str] = ()
) -> Chain | None:
    """From the newest save of the newest incarnation back to a full, or to one without a parent; None: there is none.

    `broken`: names of saves whose manifests are there and cannot be read. CheckpointError if one of them, or one that
    is missing, is in the middle; or if there is nothing else.
    """
    own = {save.save: save for save in manifests if save.owner == owner}
    where = owner.directory
    if not own:
        if broken:
            raise CheckpointError(f"{where}/{max(broken)}/{MANIFEST} cannot be read, and there is no other save")
        return None
    saves = [own[max(own)]]
    while not saves[-1].full and (parent := saves[-1].parent) is not None:
        if parent not in own:
            what = "cannot be read" if parent in broken else "is not there"
            raise CheckpointError(
                f"{where}/{parent}/{MANIFEST} {what}, and {saves[-1].save} follows it",
                hint="rows of this server that only that save has are lost; a checkpoint of all servers has older ones",
            )
        saves.append(own[parent])
        if (saves[-1].tables, saves[-1].seed) != (saves[0].tables, saves[0].seed):
            raise CheckpointError(f"{where}/{parent} has other tables than {saves[0].save}")
    return Chain(tuple(saves), tuple(sorted(name for name in broken if name > saves[0].save)))


def need_full(chain: Chain | None) -> tuple[bool, str]:
    """(whether the next save has to be a full, why (not)). So a reload reads at most about twice the rows, and so many
    files. A claim holds nothing and counts as one save."""
    if chain is None:
        return True, "it is the first"
    full = chain.saves[-1]
    if not full.full:
        return True, "there is no full yet"
    since = chain.saves[:-1]
    size = sum(save.bytes for save in since)
    if size > full.bytes:
        return True, f"{size:,} bytes since the last full are more than its {full.bytes:,}"
    if len(since) >= SAVES_SINCE_FULL_MAX:
        return True, f"{len(since)} saves since the last full are enough"
    return False, f"{len(since)} saves, {size:,} bytes since a full of {full.bytes:,}"
