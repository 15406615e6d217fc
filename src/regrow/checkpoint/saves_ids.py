"""Which rows are in which chunk of a save: the file `ids.safetensors`, written beside the chunks.

Whoever loads a save must know at once which rows it has, before any of them: a row that is in no save has its initial
value and may be served, and of a row in several only the newest value may be. To read the ids of each chunk alone would
do, but their checksum is that of the whole chunk: a flipped bit would make a row look untouched. So ids are stored once
more, with a checksum of their own, in whichever form is smaller: as they are, or as bits from the first to the last.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from regrow import _kernels
from regrow.checkpoint.chunks import Chunk, Ids, pack_tensors, unpack_tensors
from regrow.checkpoint.manifest import ChunkInfo, Refused
from regrow.checkpoint.saves import IDS, IdsInfo, SaveManifest
from regrow.errors import CheckpointError

# Of a table's seen rows that are looked at at once. Too small: slow. Too large: memory, eight times as much.
SEEN_BYTES = 1 << 20

Short = tuple[str, npt.NDArray[np.uint32], npt.NDArray[np.generic]]  # "ids" or "bits", the first id, the array


class IdsKeeper:
    """Ids of the chunks of a save, in short form, while it is being stored."""

    def __init__(self) -> None:
        self._chunks: list[dict[str, Short]] = []

    def add(self, chunk: Chunk) -> None:
        """The next chunk, in the order in which the manifest will have them."""
        self._chunks.append({table: shorten(rows.ids) for table, rows in chunk.items() if len(rows)})

    def encode(self) -> list[memoryview]:
        tensors: dict[str, list[npt.NDArray[np.generic]]] = {}
        for number, chunk in enumerate(self._chunks):
            for table, (form, first, array) in chunk.items():
                tensors[f"{number}/{table}/{form}"] = [array]
                if form == "bits":
                    tensors[f"{number}/{table}/first"] = [first]
        return pack_tensors(tensors)


def shorten(ids: Ids) -> Short:
    """The smaller form of ids that rise."""
    first, last = int(ids[0]), int(ids[-1])
    if (last - first) // 8 + 5 >= ids.nbytes:
        return "ids", ids[:1].copy(), ids.copy()
    flags = np.zeros(last - first + 1, np.bool_)
    flags[ids - ids[0]] = True
    return "bits", ids[:1].copy(), np.packbits(flags, bitorder="little")


def describe_ids(data: Sequence[memoryview]) -> IdsInfo:
    """What the manifest says of the file."""
    crc32c = 0
    for buffer in data:
        crc32c = _kernels.crc32c(buffer, crc32c)
    return IdsInfo(bytes=sum(buffer.nbytes for buffer in data), crc32c=crc32c)


class IdsFile:
    """The ids of a save's chunks, read and checked."""

    def __init__(self, data: bytes | memoryview, save: SaveManifest) -> None:
        """CheckpointError unless the file is the one that was written."""
        assert save.ids is not None
        self._where = f"{save.name}/{IDS}"
        self._rows = {table.name: table.rows for table in save.tables}
        file = memoryview(data)
        try:
            if file.nbytes != save.ids.bytes:
                raise Refused(f"{file.nbytes} bytes, the manifest says {save.ids.bytes}")
            if _kernels.crc32c(file) != save.ids.crc32c:
                raise Refused("damaged (checksum)")
            self._tensors = unpack_tensors(file)
        except Refused as error:
            raise CheckpointError(f"{self._where}: {error}", hint="this save cannot be used") from None

    def ids_of(self, number: int, info: ChunkInfo) -> dict[str, Ids]:
        """Of a chunk, by table; rising. Tables without rows are left out."""
        return {table: self._find(number, table, count) for table, count in info.rows.items() if count}

    def _find(self, number: int, table: str, count: int) -> Ids:
        plain = self._tensors.get(f"{number}/{table}/ids")
        bits, first = (self._tensors.get(f"{number}/{table}/{name}") for name in ("bits", "first"))
        ids: Ids | None = None
        if plain is not None and plain.dtype == np.uint32 and plain.ndim == 1:
            ids = plain
        elif bits is not None and first is not None and bits.dtype == np.uint8 and bits.ndim == 1 and len(first) == 1:
            ids = (np.flatnonzero(np.unpackbits(bits, bitorder="little")) + int(first[0])).astype(np.uint32)
        if ids is None or len(ids) != count or ids[-1] >= self._rows[table] or not (ids[1:] > ids[:-1]).all():
            problem = f"ids of {count} rows of {table!r} in chunk {number} are not there, or are not ids"
            raise CheckpointError(f"{self._where}: {problem}", hint="this save cannot be used")
        return ids


class SeenRows:
    """Which rows of a table were met: a bit for each."""

    def __init__(self, rows: int) -> None:
        self._words = np.zeros(-(-rows // 8), np.uint8)

    def take_new(self, ids: Ids) -> Ids:
        """Those of the ids, which rise, that were not met before; from now on they were."""
        new: Ids = ids[(self._words[ids >> 3] >> (ids & 7).astype(np.uint8)) & 1 == 0]
        if len(new):
            words = new >> 3
            starts = np.flatnonzero(np.concatenate(([True], words[1:] != words[:-1])))
            bits = np.left_shift(np.uint8(1), (new & 7).astype(np.uint8))
            self._words[words[starts]] |= np.bitwise_or.reduceat(bits, starts)
        return new

    def list_all(self) -> Ids:
        """All that were met, rising."""
        found = [
            np.flatnonzero(np.unpackbits(self._words[start : start + SEEN_BYTES], bitorder="little")) + 8 * start
            for start in range(0, len(self._words), SEEN_BYTES)
        ]
        return np.concatenate(found).astype(np.uint32) if found else np.empty(0, np.uint32)
