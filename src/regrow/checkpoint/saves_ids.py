"""Which rows are in which chunk of a save: the file `ids.safetensors`, written beside the chunks.

Whoever loads a save must know at once which rows it has, before any of them: a row that is in no save has its initial
value and may be served, and of a row in several only the newest value may be. To read the ids of each chunk alone would
do, but their checksum is that of the whole chunk: a flipped bit would make a row look untouched. So ids are stored once
more, with a checksum of their own, in whichever form is smaller: as they are, or as bits from the first to the last.
Beside them are checksums of bundles of rows, where somebody gave them (saves_pieces.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from regrow import _kernels
from regrow.checkpoint.chunks import Chunk, Ids, Rows, pack_tensors, unpack_tensors
from regrow.checkpoint.manifest import ChunkInfo, Refused
from regrow.checkpoint.saves import IDS, IdsInfo, SaveManifest
from regrow.errors import CheckpointError

# Of a table's seen rows that are looked at at once. Too small: slow. Too large: memory, eight times as much.
SEEN_BYTES = 1 << 20

_COUNTS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(
    axis=1, dtype=np.uint8
)  # of bits in a byte

# Which bit of a byte is its first, second, ... that is set.
_NTH_BITS = np.argsort(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 0, axis=1, kind="stable"
)

Bits = npt.NDArray[np.uint8]
BundleSums = dict[str, npt.NDArray[np.uint32]]


class RowSet:
    """Some rows of a table: ids that rise, or bits from a row on whose number is a multiple of eight. Most of what is
    asked of a million rows is then done a byte, eight rows, at a time."""

    __slots__ = ("_before", "_count", "bits", "first", "ids")

    def __init__(self, *, ids: Ids | None = None, bits: Bits | None = None, first: int = 0) -> None:
        assert (ids is None) != (bits is None)
        assert first % 8 == 0
        self.ids, self.bits, self.first = ids, bits, first
        self._count = -1
        self._before: npt.NDArray[np.int64] | None = None  # of bits: how many are before each byte

    @classmethod
    def of(cls, ids: Ids) -> RowSet:
        """In the smaller form of ids that rise."""
        first, last = (int(ids[0]) // 8, int(ids[-1]) // 8) if len(ids) else (0, 0)
        if last - first + 5 >= ids.nbytes:
            return cls(ids=ids)
        flags = np.zeros(8 * (last - first + 1), np.bool_)
        flags[ids - np.uint32(8 * first)] = True
        return cls(bits=np.packbits(flags, bitorder="little"), first=8 * first)

    def __len__(self) -> int:
        if self._count < 0:
            self._count = len(self.ids) if self.ids is not None else int(_COUNTS[self.bits].sum(dtype=np.int64))
        return self._count

    def list_ids(self) -> Ids:
        """Rising."""
        if self.ids is not None:
            return self.ids
        assert self.bits is not None
        return _list_bits(self.bits, self.first)

    def rank(self, ids: Ids) -> npt.NDArray[np.int64]:
        """How many of its rows come before each of these, all of which are in it."""
        if self.ids is not None:
            return np.searchsorted(self.ids, ids)
        assert self.bits is not None
        places = ids - np.uint32(self.first)
        below = self.bits[places >> 3] & ((np.uint8(1) << (places & 7).astype(np.uint8)) - np.uint8(1))
        ranks: npt.NDArray[np.int64] = self._count_before()[places >> 3] + _COUNTS[below]
        return ranks

    def list_at(self, ranks: npt.NDArray[np.int64]) -> Ids:
        """The rows before which there are so many, each less than there are."""
        if self.ids is not None:
            return self.ids[ranks]
        assert self.bits is not None
        before = self._count_before()
        places = np.searchsorted(before, ranks, side="right") - 1
        bits = _NTH_BITS[self.bits[places], ranks - before[places]]
        ids: Ids = (self.first + 8 * places + bits).astype(np.uint32)
        return ids

    def _count_before(self) -> npt.NDArray[np.int64]:
        if self._before is None:
            self._before = np.concatenate(([0], np.cumsum(_COUNTS[self.bits], dtype=np.int64)))
        return self._before

    def find(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of these are in it."""
        if self.ids is not None:
            if not len(self.ids):
                return np.zeros(len(ids), np.bool_)
            found: npt.NDArray[np.bool_] = (
                self.ids[np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)] == ids
            )
            return found
        assert self.bits is not None
        inside = (ids >= self.first) & (ids < self.first + 8 * len(self.bits))
        places = np.where(inside, ids - np.uint32(self.first), np.uint32(0))
        return inside & _test_bits(self.bits, places)


class IdsKeeper:
    """Ids of the chunks of a save, in short form, while it is being stored."""

    def __init__(self, sum_bundles: Callable[[Rows], BundleSums] | None = None) -> None:
        """`sum_bundles` gives checksums of bundles of rows, by the name of a part, if they are to be kept."""
        self._chunks: list[dict[str, RowSet]] = []
        self._sums: list[dict[str, BundleSums]] = []
        self._sum_bundles = sum_bundles

    def add(self, chunk: Chunk) -> None:
        """The next chunk, in the order in which the manifest will have them."""
        self._chunks.append({table: _keep(RowSet.of(rows.ids)) for table, rows in chunk.items() if len(rows)})
        if (sum_bundles := self._sum_bundles) is not None:
            self._sums.append({table: sum_bundles(rows) for table, rows in chunk.items() if len(rows)})

    def encode(self) -> list[memoryview]:
        tensors: dict[str, list[npt.NDArray[np.generic]]] = {}
        for number, chunk in enumerate(self._chunks):
            for table, rows in chunk.items():
                if rows.ids is not None:
                    tensors[f"{number}/{table}/ids"] = [rows.ids]
                elif rows.bits is not None:
                    tensors[f"{number}/{table}/bits"] = [rows.bits]
                    tensors[f"{number}/{table}/first"] = [np.array([rows.first], np.uint32)]
        for number, sums in enumerate(self._sums):
            for table, parts in sums.items():
                tensors |= {f"{number}/{table}/sums/{part}": [each] for part, each in parts.items()}
        return pack_tensors(tensors)


def _keep(rows: RowSet) -> RowSet:
    """With ids of its own: those of a chunk would keep all of it in memory."""
    return rows if rows.ids is None else RowSet(ids=rows.ids.copy())


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
            self._sums: dict[tuple[int, str], BundleSums] = {}
            for name, each in self._tensors.items():
                self._keep_sums(name, each)
        except Refused as error:
            raise CheckpointError(f"{self._where}: {error}", hint="this save cannot be used") from None

    def rows_of(self, number: int, info: ChunkInfo) -> dict[str, RowSet]:
        """Of a chunk, by table. Tables without rows are left out."""
        return {table: self._find(number, table, count) for table, count in info.rows.items() if count}

    def sums_of(self, number: int, table: str) -> BundleSums:
        """Checksums of the bundles of a table's rows in a chunk, by part; none if the save was made without."""
        return self._sums.get((number, table), {})

    def _keep_sums(self, name: str, each: npt.NDArray[Any]) -> None:
        """`name` as `IdsKeeper` gives it: 7/table/sums/weight."""
        rest, _, part = name.rpartition("/")
        if rest.endswith("/sums"):
            number, _, table = rest.removesuffix("/sums").partition("/")
            self._sums.setdefault((int(number), table), {})[part] = each

    def _find(self, number: int, table: str, count: int) -> RowSet:
        ids, bits, first = (self._tensors.get(f"{number}/{table}/{name}") for name in ("ids", "bits", "first"))
        rows, last = RowSet(ids=np.empty(0, np.uint32)), -1
        if ids is not None and ids.dtype == np.uint32 and ids.ndim == 1 and len(ids):
            if bool((ids[1:] > ids[:-1]).all()):
                rows, last = RowSet(ids=ids), int(ids[-1])
        elif bits is not None and bits.dtype == np.uint8 and bits.ndim == 1 and len(bits) and _is_byte(first):
            rows = RowSet(bits=bits, first=int(first[0]))
            last = rows.first + 8 * (len(bits) - 1) + int(bits[-1]).bit_length() - 1
        if len(rows) != count or last >= self._rows[table]:
            problem = f"ids of {count} rows of {table!r} in chunk {number} are not there, or are not ids"
            raise CheckpointError(f"{self._where}: {problem}", hint="this save cannot be used")
        return rows


def _is_byte(first: npt.NDArray[Any] | None) -> TypeGuard[npt.NDArray[np.uint32]]:
    """Whether bits can begin there."""
    return first is not None and first.dtype == np.uint32 and first.shape == (1,) and first[0] % 8 == 0


class SeenRows:
    """Which rows of a table were met: a bit for each."""

    def __init__(self, rows: int) -> None:
        self._bits = np.zeros(-(-rows // 8), np.uint8)

    def take_new(self, rows: RowSet) -> RowSet:
        """Those that were not met before; from now on they were."""
        if rows.bits is not None:
            seen = self._bits[rows.first // 8 : rows.first // 8 + len(rows.bits)]
            new = rows.bits & ~seen
            seen |= rows.bits
            return RowSet(bits=new, first=rows.first)
        assert rows.ids is not None
        ids: Ids = rows.ids[~_test_bits(self._bits, rows.ids)]
        if len(ids):
            places = ids >> 3
            starts = np.flatnonzero(np.concatenate(([True], places[1:] != places[:-1])))
            bits = np.left_shift(np.uint8(1), (ids & 7).astype(np.uint8))
            self._bits[places[starts]] |= np.bitwise_or.reduceat(bits, starts)
        return RowSet(ids=ids)

    def list_all(self) -> Ids:
        """All that were met, rising."""
        starts = range(0, len(self._bits), SEEN_BYTES)
        found = [_list_bits(self._bits[start : start + SEEN_BYTES], 8 * start) for start in starts]
        return np.concatenate(found) if found else np.empty(0, np.uint32)


def _list_bits(bits: Bits, first: int) -> Ids:
    if (bits == 255).all():  # as of a table that was trained for long
        return np.arange(first, first + 8 * len(bits), dtype=np.uint32)
    ids: Ids = np.flatnonzero(np.unpackbits(bits, bitorder="little").view(np.bool_)).astype(np.uint32)
    ids += np.uint32(first)
    return ids


def _test_bits(bits: Bits, ids: Ids) -> npt.NDArray[np.bool_]:
    found: Bits = (bits[ids >> 3] >> (ids & 7).astype(np.uint8)) & 1
    return found.view(np.bool_)
