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


def read_bundles(
    storage: Storage, stored: Stored, info: ChunkInfo, table: TableInfo, *, rows: RowSet, sums: Sums, bundles: Bundles
) -> Rows:
    """All rows of these bundles of a table; `rows` are those of the chunk. CheckpointError if one is damaged."""
    bundle_rows, count = count_bundle_rows(table.dim), len(rows)
    index = (bundles[:, None] * bundle_rows + np.arange(bundle_rows)).ravel()
    index = index[index < count]
    found: dict[str, npt.NDArray[np.float32]] = {}
    for part, width in (("weight", table.dim), *table.states):
        start = _find_start(stored, info, f"{table.name}/{part}")
        ends = np.minimum((bundles + 1) * bundle_rows, count) * (4 * width)
        data = read_parts(
            storage, f"{stored.name}/{info.name}", start + bundles * (4 * width * bundle_rows), start + ends
        )
        _check_sums(
            data, 4 * width * bundle_rows, bundles, sums.get(part), f"{stored.name}/{info.name}: {table.name}/{part}"
        )
        found[part] = data.view(np.float32).reshape(len(index), width)
    weight = found.pop("weight")
    return Rows(rows.list_ids()[index], weight, found)


def read_parts(storage: Storage, path: str, starts: Bundles, ends: Bundles) -> npt.NDArray[np.uint8]:
    """Parts of a file, rising, one after the other; those that are near to each other are read at once."""
    first = np.flatnonzero(np.concatenate(([True], starts[1:] - ends[:-1] > GAP_BYTES)))
    last = np.append(first[1:], len(starts)) - 1
    ranges = list(zip(starts[first].tolist(), ends[last].tolist(), strict=True))
    found = storage.read_ranges(path, ranges)
    data = np.empty(int((ends - starts).sum()), np.uint8)
    at = 0
    for (begin, until), piece, low, high in zip(ranges, found, first.tolist(), last.tolist(), strict=True):
        if len(piece) != until - begin:
            raise CheckpointError(f"{path} is missing, or not whole", hint="this save cannot be used")
        read = np.frombuffer(piece, np.uint8)
        for start, end in zip(starts[low : high + 1].tolist(), ends[low : high + 1].tolist(), strict=True):
            data[at : at + end - start] = read[start - begin : end - begin]
            at += end - start
    return data


def _check_sums(
    data: npt.NDArray[np.uint8], bundle_bytes: int, bundles: Bundles, sums: npt.NDArray[np.uint32] | None, where: str
) -> None:
    if sums is None or not len(bundles) or int(bundles[-1]) >= len(sums):
        raise CheckpointError(f"{where}: there are no checksums of its bundles", hint="this save cannot be used")
    if not np.array_equal(_kernels.crc32c_blocks(data, bundle_bytes), sums[bundles]):
        raise CheckpointError(f"{where}: damaged (checksum of a bundle)", hint="this save cannot be used")


def _find_start(stored: Stored, info: ChunkInfo, wanted: str) -> int:
    """Where a tensor begins in a chunk that is stored as it is: behind the header, all in the order of their names."""
    sizes: dict[str, int] = {}
    for table in stored.tables:
        if (count := info.rows.get(table.name)) is None:
            continue
        for part, width in (("ids", 1), ("weight", table.dim), *table.states):
            sizes[f"{table.name}/{part}"] = 4 * width * count
    start = info.bytes - sum(sizes.values())
    for name in sorted(sizes):
        if name == wanted:
            return start
        start += sizes[name]
    raise AssertionError(f"{info.name} has no {wanted}")
