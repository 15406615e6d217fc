"""Tables of a replica: memory-mapped files of weights, whole sets of which are exchanged at once.

A *side* is all tables of one version. Its files have no name any more when they are mapped, so a replica that is killed
leaves nothing behind, and its successor can find nothing that is half written. Pages that nobody looks up need no
memory: they are on the disk.

The rule to keep: nobody writes to a side that may be read, but where rows are exchanged one by one
(`consistent=False`).
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from regrow.checkpoint.chunks import Chunk
from regrow.checkpoint.columns import Whole, join_tables, view_ranges
from regrow.checkpoint.export import fill_initial
from regrow.checkpoint.manifest import Manifest, TableInfo
from regrow.errors import CheckpointError, UserError
from regrow.units import size_text

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.uint32]
Changed = dict[str, list[Ids]]  # by table: rows that were written


class Side:
    """All tables of one version. `readers` is guarded by the lock of whoever owns it."""

    def __init__(self, infos: tuple[TableInfo, ...], directory: Path, *, seed: int) -> None:
        self.infos = infos
        self.seed = seed
        wholes = join_tables(infos)
        self.tables = {name: map_table(whole, directory) for name, whole in wholes.items()}
        self._rows = view_ranges(wholes.values(), self.tables)  # by the table's name on storage
        self.readers = 0

    def fits(self, infos: tuple[TableInfo, ...], seed: int) -> bool:
        return (self.infos, self.seed) == (infos, seed)

    def check(self, table: str, ids: Any) -> Any:
        """Numbers of rows of a table, fit to index it; UserError says what is wrong."""
        values = self.tables.get(table)
        if values is None:
            raise UserError(f"there is no table {table!r}", hint=f"known are: {', '.join(self.tables)}")
        found = np.asarray(ids)
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            raise UserError(f"ids of table {table!r} are {found.dtype} {found.shape}", hint="a list of whole numbers")
        if found.size and not 0 <= int(found.min()) <= int(found.max()) < len(values):
            wrong = next(int(each) for each in found if not 0 <= each < len(values))
            raise UserError(f"there is no row {wrong} in table {table!r}, which has {len(values)}")
        return found.astype(np.intp, copy=False)

    def fill(self) -> None:
        """What rows are that no piece holds."""
        for info in self.infos:
            values = self._rows[info.name]
            if not info.init_bound:
                values[...] = 0.0
                continue
            for _ in fill_initial(values, info, seed=self.seed):
                pass

    def write(self, chunk: Chunk, changed: Changed) -> None:
        """Rows of a chunk. `changed` has their numbers before any of them is written."""
        for name, rows in chunk.items():
            if name in self._rows:
                changed.setdefault(name, []).append(rows.ids)
                self._rows[name][rows.ids] = rows.weight

    def copy_rows(self, other: Side, changed: Changed) -> None:
        for name, parts in changed.items():
            for ids in parts:
                self._rows[name][ids] = other._rows[name][ids]

    def copy_all(self, other: Side) -> None:
        for name, values in other.tables.items():
            self.tables[name][...] = values


def map_table(table: Whole, directory: Path) -> Floats:
    """Zeros in a file that has its space already: writing through a map to a full disk would end the process."""
    size = table.rows * table.dim * 4
    try:
        with tempfile.TemporaryFile(dir=directory, prefix="regrow-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return np.memmap(file, np.float32, "r+", shape=(table.rows, table.dim)).view(np.ndarray)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.ENOENT):
            raise
        hint = f"table {table.name!r} takes {size_text(size)}; name a directory on another disk"
        raise UserError(f"cannot write to {directory}: {error.strerror}", hint=hint) from None


def check_whole(full: Manifest, infos: Iterable[TableInfo]) -> None:
    """Rows without an initial value must all be stored. They are: but zeros would go unnoticed."""
    for table in infos:
        stored = sum(info.rows.get(table.name, 0) for info in full.chunks)
        if table.init_bound is None and stored != table.rows:
            raise CheckpointError(f"{full.name} has {stored} of the {table.rows} rows of {table.name!r}")
