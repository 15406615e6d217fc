"""What runs per row, in C++ (cpp/). Arrays in, arrays out; the GIL is released while the loops run.

Arrays are anything that offers DLPack or the buffer protocol (NumPy, torch on the CPU), C-contiguous and of
exactly the dtype named here: nothing is converted or copied. A wrong dtype, shape or value raises ValueError,
an id, slot or table that does not exist IndexError, both before anything has been changed. Every function has
a slow twin in `regrow.core.twins`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

# NumPy arrays or torch tensors; the dtype is in the name.
_F32 = Any
_I32 = Any
_I64 = Any
_U32 = Any
_U8 = Any

def simd_level() -> Literal["avx2", "portable"]:
    """The instruction set the kernels use now."""

def set_simd(level: str) -> None:
    """Chooses "avx2" or "portable". Both give the same bits; tests and benchmarks compare them."""

def get_threads() -> int: ...
def set_threads(n: int) -> None:
    """Sets how many threads, the caller included, share the loops over rows. Results stay the same."""

def tune_malloc() -> None:
    """Lets the process keep its large buffers from step to step. For the main of a process."""

def crc32c(data: Buffer | npt.NDArray[Any], seed: int = 0) -> int:
    """CRC-32C of a buffer; the seed is the checksum of what came before it."""

def shard_bytes(rows: int, dim: int, k: int, r: int, groups: int, servers: int, optimizer: str) -> int:
    """Memory one table takes on each server."""

def merge_pushes(
    dims: _I32, parts: Sequence[tuple[_I32, _U32, _F32]]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Sums pushes (counts, slots, grads) row by row, in the order of the list.

    Rows appear in the order of their first occurrence in their table.
    """

class Shard:
    """The rows of one server: per table an arena of records [weights | optimizer state].

    `counts` says how many of `slots` belong to table 0, table 1, ...; rows of floats follow the same order.
    """

    def __init__(self, servers: int, server: int, groups: int = 1) -> None: ...
    def add_table(
        self,
        *,
        rows: int,
        dim: int,
        k: int = 1,
        r: int = 0,
        optimizer: str,
        learning_rate: float,
        eps: float = 1e-8,
        beta1: float = 0.9,
        beta2: float = 0.999,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        seed: int,
        init_bound: float,
        table: int,
    ) -> int:
        """Takes memory for this server's part of a table, fills in initial values, returns its position.

        `table` is the table's number in the job. MemoryError if the system has no room.
        """

    @property
    def table_count(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    def record_floats(self, table: int) -> int: ...
    def slots(self, table: int) -> int:
        """Slots of a table on this server, holes in the last block included."""

    def gather(self, counts: _I32, slots: _U32, out: _F32) -> None:
        """Copies weights of rows to `out`."""

    def update(self, counts: _I32, slots: _U32, grads: _F32, step: int) -> None:
        """Runs each table's optimizer on rows, and marks them touched. A table's slots must be distinct."""

    def assign_untouched(self, counts: _I32, slots: _U32, weights: _F32) -> None:
        """Sets the weights of those rows that were never touched, and marks them touched."""

    def read_records(self, table: int, first_slot: int, count: int, out: _F32) -> None: ...
    def write_records(self, table: int, first_slot: int, count: int, src: _F32) -> None:
        """Overwrites whole records. Touched bits stay as they are."""

    def touched(self, table: int) -> npt.NDArray[np.uint64]:
        """A copy of the bitmap: bit s % 64 of word s // 64 is set once slot s was touched."""

class Plan:
    """Where the rows of one batch are; the pull and the push of the batch share it.

    Server s's slots are slots[row_start[s]:row_start[s + 1]] and its floats are those from float_start[s] to
    float_start[s + 1]; within a server, tables follow each other, and within a table, rows are in the order
    of their first occurrence. Arrays are read-only views.
    """

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """Rows per server and table, [servers, tables]."""

    @property
    def slots(self) -> npt.NDArray[np.uint32]: ...
    @property
    def row_start(self) -> npt.NDArray[np.int64]: ...
    @property
    def float_start(self) -> npt.NDArray[np.int64]: ...
    @property
    def lookups(self) -> int: ...
    @property
    def distinct(self) -> int:
        """Distinct rows that were looked up; those of static tables are not counted."""

    @property
    def floats(self) -> int:
        """Floats in all rows of the plan, static tables included."""

    def pool(self, rows: _F32, out: _F32) -> None:
        """Writes the sum (or mean) of each bag's rows to its place in out[B, W]; an empty bag gives 0."""

    def unpool(self, grad: _F32, grads: _F32) -> None:
        """Gives every looked-up row the sum of its bags' gradients, in lookup order. Skips static rows."""

    def static_get(self, table: int, rows: _F32, out: _F32) -> None:
        """Copies all rows of a static table, in row order, out of the rows of the batch."""

    def static_put(self, table: int, src: _F32, grads: _F32) -> None:
        """Copies all rows of a static table, in row order, into the gradients of the batch."""

class Router:
    """A worker's side of a batch: distinct rows, their servers, pooling.

    The first six lists have one entry per table. Feature f looks up in table feature_tables[f]; several
    features may share a table. All rows of static tables are in every plan.
    """

    def __init__(
        self,
        *,
        rows: Sequence[int],
        dims: Sequence[int],
        k: Sequence[int],
        r: Sequence[int],
        table_index: Sequence[int],
        mean_pooling: Sequence[bool],
        feature_tables: Sequence[int],
        static_tables: Sequence[int],
        servers: int,
        groups: int = 1,
    ) -> None: ...
    def plan(self, values: _I64, lengths: _I32 | None, batch: int) -> Plan:
        """Plans a batch of feature-major ids; `lengths` is per (feature, sample), None: one id per bag."""

def parse_criteo(
    text: _U8,
    *,
    lines_max: int,
    final: bool,
    skip_bad: bool,
    rows: _I64,
    dense: _F32,
    ids: _I64,
    labels: _F32,
) -> tuple[int, int, int, tuple[int, int, str] | None]:
    """Parses Criteo lines: (lines, samples, bytes, (line, field, reason) of the first bad one)."""

def skip_lines(text: _U8, *, lines_max: int, final: bool) -> tuple[int, int]:
    """(lines, bytes) of up to lines_max lines."""
