"""Some rows of a chunk of a save, without the rest of it.

A worker that waits for a few rows needs them from nearly every chunk, and to read all chunks first is to read all there
is. A chunk's own checksum is that of the whole file, so beside the ids of a chunk (saves_ids.py) there is a checksum of
each *bundle* of rows, of weights and of each state apart: some kilobytes that can be read, checked and used alone.
Where in the file they are follows from what the manifest says: tensors are stored in the order of their names, rows in
the order of their ids.

Only of rows stored as they are (32 bits, not compressed), and from files near by: a request to a store of objects takes
longer than a chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from regrow import _kernels
from regrow.checkpoint.chunks import Ids, Rows
from regrow.checkpoint.manifest import ChunkInfo, Stored, TableInfo
from regrow.checkpoint.saves_ids import RowSet
from regrow.checkpoint.storage import Storage
from regrow.errors import CheckpointError

# Of weights in a bundle. Too small: checksums take room and time. Too large: so much is read for each row.
BUNDLE_BYTES = 4096
# Parts of a file that are nearer to each other are read at once.
GAP_BYTES = 16384
# Of the bundles of a chunk: if more are wanted, all of it is read.
BUNDLES_SHARE_MAX = 0.25

Sums = dict[str, npt.NDArray[np.uint32]]  # by part: weight, and the states
Bundles = npt.NDArray[np.int64]


def count_bundle_rows(dim: int) -> int:
    """Rows in a bundle; the same in each part."""
    return max(1, BUNDLE_BYTES // (4 * dim))


def sum_bundles(rows: Rows) -> Sums:
    """Checksums of the bundles of rows, as they will be stored."""
    bundle_rows = count_bundle_rows(rows.weight.shape[1])
    return {
        name: _kernels.crc32c_blocks(np.ascontiguousarray(values), 4 * values.shape[1] * bundle_rows)
        for name, values in rows.parts()
        if values.shape[1]
    }


def find_bundles(rows: RowSet, ids: Ids, *, dim: int) -> Bundles:
    """The bundles of a chunk that have these rows, all of which it has."""
    bundles: Bundles = np.unique(rows.rank(ids) // count_bundle_rows(dim))
    return bundles


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """Bundles of one table in a chunk. `rows` are all that the chunk has of it, `sums` those of all its bundles."""

    table: TableInfo
    rows: RowSet
    sums: Sums
    bundles: Bundles


def read_bundles(storage: Storage, stored: Stored, info: ChunkInfo, wishes: Sequence[Wish]) -> list[Rows]:
    """All rows of these bundles, by one call of the storage. CheckpointError if one is damaged."""
    path = f"{stored.name}/{info.name}"
    begins = _find_starts(stored, info)
    starts: list[Bundles] = []
    ends: list[Bundles] = []
    for wish in wishes:
        bundle_rows = count_bundle_rows(wish.table.dim)
        after = np.minimum((wish.bundles + 1) * bundle_rows, len(wish.rows))
        for part, width in _list_parts(wish.table):
            begin = begins[f"{wish.table.name}/{part}"]
            starts.append(begin + 4 * width * bundle_rows * wish.bundles)
            ends.append(begin + 4 * width * after)
    data = storage.read_ranges(path, np.concatenate(starts), np.concatenate(ends), GAP_BYTES)
    sizes = [int((end - start).sum()) for start, end in zip(starts, ends, strict=True)]
    if len(data) != sum(sizes):
        raise CheckpointError(f"{path} is missing, or not whole", hint="this save cannot be used")
    pieces = iter(np.split(data, np.cumsum(sizes)[:-1]))
    return [_unpack(wish, pieces, path) for wish in wishes]


def _unpack(wish: Wish, pieces: Iterator[npt.NDArray[np.uint8]], path: str) -> Rows:
    """The rows of a wish from what was read, as much as that is of it. Checked."""
    bundle_rows = count_bundle_rows(wish.table.dim)
    places = (wish.bundles[:, None] * bundle_rows + np.arange(bundle_rows)).ravel()
    places = places[places < len(wish.rows)]
    found: dict[str, npt.NDArray[np.float32]] = {}
    for part, width in _list_parts(wish.table):
        data = next(pieces)
        where = f"{path}: {wish.table.name}/{part}"
        _check_sums(data, 4 * width * bundle_rows, wish.bundles, wish.sums.get(part), where)
        found[part] = data.view(np.float32).reshape(len(places), width)
    weight = found.pop("weight")
    return Rows(wish.rows.list_at(places), weight, found)


def _list_parts(table: TableInfo) -> tuple[tuple[str, int], ...]:
    return ("weight", table.dim), *table.states


def _check_sums(
    data: npt.NDArray[np.uint8], bundle_bytes: int, bundles: Bundles, sums: npt.NDArray[np.uint32] | None, where: str
) -> None:
    if sums is None or not len(bundles) or int(bundles[-1]) >= len(sums):
        raise CheckpointError(f"{where}: there are no checksums of its bundles", hint="this save cannot be used")
    if not np.array_equal(_kernels.crc32c_blocks(data, bundle_bytes), sums[bundles]):
        raise CheckpointError(f"{where}: damaged (checksum of a bundle)", hint="this save cannot be used")


def _find_starts(stored: Stored, info: ChunkInfo) -> dict[str, int]:
    """Where tensors begin in a chunk that is stored as it is: behind the header, all in the order of their names."""
    sizes: dict[str, int] = {}
    for table in stored.tables:
        if (count := info.rows.get(table.name)) is None:
            continue
        for part, width in (("ids", 1), *_list_parts(table)):
            sizes[f"{table.name}/{part}"] = 4 * width * count
    start = info.bytes - sum(sizes.values())
    starts: dict[str, int] = {}
    for name in sorted(sizes):
        starts[name] = start
        start += sizes[name]
    return starts
