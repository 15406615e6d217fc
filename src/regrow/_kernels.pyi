"""What runs per row, in C++ (cpp/). Arrays in, arrays out; the GIL is released while the loops run.

Arrays are anything that offers DLPack or the buffer protocol (NumPy, torch on the CPU), C-contiguous and of
exactly the dtype named here: nothing is converted or copied. A wrong dtype, shape or value raises ValueError,
an id, slot or table that does not exist IndexError, both before anything has been changed. Every function has
a slow twin in `regrow.core.twins`; those of captures and of readers of data are in tests/unit/store and
tests/unit/data.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

# NumPy arrays or torch tensors; the dtype is in the name.
_F32 = Any
_F64 = Any
_I32 = Any
_I64 = Any
_U32 = Any
_U64 = Any
_U8 = Any

def simd_level() -> Literal["avx512", "avx2", "portable"]:
    """The instruction set the kernels use now."""

def set_simd(level: str) -> None:
    """Chooses one of `simd_levels`. All give the same bits; tests and benchmarks compare them."""

def simd_levels() -> list[str]:
    """The instruction sets that this CPU and build have, the best first."""

def get_threads() -> int: ...
def set_threads(n: int) -> None:
    """Sets how many threads, the caller included, share the loops over rows. Results stay the same."""

def tune_malloc(one_heap: bool = False) -> None:
    """Lets the process keep its large buffers from step to step. For the main of a process.

    `one_heap`: also those of threads that end. For processes whose threads do not allocate all the time.
    """

def crc32c(data: Buffer | npt.NDArray[Any], seed: int = 0) -> int:
    """CRC-32C of a buffer; the seed is the checksum of what came before it."""

def crc32c_blocks(data: Buffer | npt.NDArray[Any], block_bytes: int) -> npt.NDArray[np.uint32]:
    """CRC-32C of each block of a buffer; the last may be shorter."""

def read_ranges(
    fd: int, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], gap: int = 0
) -> npt.NDArray[np.uint8]:
    """Parts of a file, one after the other, by one call; those at most `gap` bytes apart are read at once. Fewer bytes
    if the file ends before."""

def shard_bytes(rows: int, dim: int, k: int, r: int, rings: int, servers: int, optimizer: str) -> int:
    """Memory one table takes on each server, with its parities if r > 0."""

def sum_pushes(
    dims: _I32, parts: Sequence[tuple[_I32, _U32, _F32]]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
    """Sums pushes (counts, slots, grads) row by row, in the order of the list.

    Rows appear in the order of their first occurrence in their table.
    """

def has_repeated_slots(counts: _I32, slots: _U32) -> bool:
    """Whether some slot is named twice within its table."""

def newest_rows(lists: Sequence[_U32]) -> npt.NDArray[np.uint64]:
    """Where the rows of several lists of numbers are, each number once, rising: `list << 32 | position`.

    Of a number that is in several lists the place in the last of them.
    """

def gather_rows(lists: Sequence[_U32 | _F32], places: _U64, out: _U32 | _F32) -> None:
    """out[i] = the row at places[i] of the lists, which have rows like those of `out`."""

def gf_xor(target: _F32, source: _F32, coefficient: int) -> None:
    """target ^= coefficient * source, in GF(2^8) on raw bytes."""

def take_places(
    todo: _U8, first: _I64, floats: _I64, place: int, bytes_max: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32], int]:
    """(counts, blocks, next place): the next blocks whose byte is set, until their records are `bytes_max` or more.

    Their bytes are cleared. Blocks of table t have the places first[t] to first[t + 1].
    """

def mark_places(flags: _U8, first: _I64, counts: _I32, blocks: _U32) -> None:
    """Sets the bytes of these blocks."""

def has_any_bit(words: _U64, bits: _U32) -> bool:
    """Whether any of these bits is set."""

def find_nonzero(records: _F32, floats: int) -> npt.NDArray[np.uint8]:
    """For each record: 1 if any of its bits is set."""

def xor_matching(slots_sorted: _U32, records: _F32, floats: int, slots: _U32, deltas: _F32, coefficient: int) -> int:
    """records[i] ^= coefficient * deltas[j] wherever slots_sorted[i] == slots[j]; returns how many j matched.

    `slots_sorted` is strictly rising; rows are `floats` long.
    """

class Shard:
    """The rows of one server: per table an arena of records [weights | optimizer state], and parities of others' rows.

    `counts` says how many of `slots` belong to table 0, table 1, ...; rows of floats follow the same order.
    `coding_groups` are pairs (distance, r), see `group` in the methods; without them no table has parities.
    Whole records, of `record_floats` floats, are raw bits. A relative value is value ^ initial value.
    """

    def __init__(
        self,
        servers: int,
        server: int,
        rings: int = 1,
        coding_groups: Sequence[tuple[int, int]] = ...,
        recovering: bool = False,
    ) -> None:
        """With `recovering`, no row is there (and no memory touched) until it was filled in, put or loaded."""

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
    @property
    def redundancy_bytes(self) -> int:
        """The part of memory_bytes that parities and their bits take."""

    def record_floats(self, table: int) -> int: ...
    def slots(self, table: int) -> int:
        """Slots of a table on this server, holes in the last block included."""

    def gather(self, counts: _I32, slots: _U32, out: _F32) -> None:
        """Copies weights of rows to `out`."""

    def update(self, counts: _I32, slots: _U32, grads: _F32, step: int, rates: Sequence[float] = ()) -> None:
        """Runs each table's optimizer on rows, and marks them touched. A table's slots must be distinct. `rates`: each
        table's learning rate for this call; none: the one it was made with."""

    def assign_untouched(self, counts: _I32, slots: _U32, weights: _F32) -> None:
        """Sets the weights of those rows that were never touched, and marks them touched."""

    def read_records(self, table: int, first_slot: int, count: int, out: _F32) -> None: ...
    def write_records(self, table: int, first_slot: int, count: int, src: _F32) -> None:
        """Overwrites whole records, and marks them touched."""

    def touched(self, table: int) -> npt.NDArray[np.uint64]:
        """A copy of the bitmap: bit s % 64 of word s // 64 is set once slot s was touched."""

    def add_tenant(self) -> int:
        """Keeps track of changed rows for one more who captures them; every touched row is dirty to a new one.

        At most 4; ValueError beyond. This and the next seven methods count as changing rows: one thread calls them
        and update.
        """

    def dirty_rows(self, tenant: int) -> int:
        """Rows that changed since the tenant's last capture. Looks at every word of the bitmaps."""

    def begin_capture(self, tenant: int, full: bool) -> None:
        """Captures the tenant's dirty rows, or all touched ones if `full`, as they are now; they are then clean to it.

        ValueError while another capture is under way or rows are missing.
        """

    def capture_chunk(
        self, bytes_max: int, aside_first: bool = False
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]:
        """(counts, words) of captured rows not taken yet, as they were at begin_capture, in the form of a chunk.

        At most `bytes_max` bytes, but at least one row; no rows once all were taken. By table and slot, and so from
        call to call; with `aside_first` only within the call: rows that are kept aside go first.
        Words are, table after table: the ids of its rows, rising; the bits of their weights, [rows, dim]; those of
        each part of the optimizer's state. Slots that no row has are taken and left out: then words are longer.
        """

    def find_slots(self, table: int, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
        """The slots of those of these rows that live here, as a bitmap."""

    def choose_captured(self, rows: int) -> bool:
        """Goes on finding out which rows the capture has, for about so many rows. False: it is known."""

    def prepare_chunk(self, bytes_max: int, aside_first: bool, slice_bytes: int) -> bool:
        """Begins the next chunk, or goes on with it, for about slice_bytes. False: it is ready."""

    def capture_left(self) -> int:
        """Captured rows that were not taken yet; 0 without a capture."""

    def capture_side_bytes(self) -> int:
        """Bytes of the records kept aside, because they changed before they were taken.

        They are given back when all that are aside in the same sixteenth (or so) of the table were taken.
        """

    def end_capture(self, durable: bool) -> None:
        """Not durable: what was captured is dirty again. Durable: ValueError unless every row was taken."""

    def set_priority(self, tenant: int, kind: str, tables: Sequence[int], share: float, seed: int, period: int) -> None:
        """Lets captures of a tenant take at most a share of the rows of these tables; `kind` says which go first."""

    def note_updates(self, counts: _I32, slots: _U32) -> None:
        """Counts one worker's push for each of these rows. A table's slots must be distinct."""

    def updates_noted(self) -> int: ...
    def set_updates_noted(self, total: int) -> None: ...
    def updates_uncaptured(self, tenant: int) -> int:
        """Updates that neither the tenant's last capture has, nor a durable one before it."""

    def capture_skipped(self) -> int:
        """Rows that the last begin_capture left dirty."""

    def updates_skipped(self) -> int:
        """Updates of these rows up to that capture's instant."""

    def count_bytes(self) -> int:
        """Of priority_bytes, those of exact counts."""

    def priority_bytes(self) -> int: ...
    def load_rows(self, table: int, ids: _U32, parts: Sequence[_F32], clean_to: int | None = None) -> int:
        """Gives those rows that live on this server these values, and says how many there are.

        `parts` are weights, [rows, dim], and each part of the optimizer's state. Each row at most once. ValueError
        while the table's rows are coming back from parities. Where know_touched said of a table without parities that
        rows are to come, only missing rows are set, and are not dirty to tenant `clean_to`.
        """

    def blocks(self, table: int) -> int:
        """Blocks of k slots; slot b * k + j is member j of block b."""

    def pending_rows(self, group: int) -> int:
        """Rows of a coding group that changed since it was last flushed."""

    def pending_bytes(self) -> int:
        """Bytes of the records saved for all groups."""

    def take_flush(
        self, group: int, keep: bool = False
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32], npt.NDArray[np.float32]]:
        """(counts, slots, deltas) of the pending rows: published ^ present value, which becomes published.

        Within a table, rows are in no particular order. With `keep` nothing changes.
        """

    def published(self, counts: _I32, slots: _U32, out: _F32) -> None:
        """Relative published values: what parities stand for after the flushes taken so far."""

    def next_touched(
        self, table: int, group: int, block_first: int, rows_max: int
    ) -> tuple[npt.NDArray[np.uint32], int]:
        """Touched slots of a group from a block on, and the block to go on from; blocks(table) at the end."""

    def parity_apply(self, source: int, counts: _I32, slots: _U32, deltas: _F32) -> None:
        """Adds deltas of a server's rows to the parities here, and marks the rows touched.

        This server must hold a parity of every one of them.
        """

    def parity_add(self, q: int, counts: _I32, blocks: _U32, records: _F32) -> None:
        """records ^= raw parities."""

    def parity_read(self, q: int, counts: _I32, blocks: _U32, out: _F32) -> None:
        """Copies raw parities."""

    def parity_members(self, table: int, q: int, member: int) -> npt.NDArray[np.uint64]:
        """A bit per block: whether this data member, of the stripes whose parity q is here, was ever touched.

        This is the memory itself, not to be written.
        """

    def parity_touched(self, source: int, group: int, table: int) -> npt.NDArray[np.uint64]:
        """The same for the rows of a group of a server."""

    def parity_void(self, table: int, q: int) -> None:
        """Makes parities q of a table zeros again, of members that were never touched."""

    def know_touched(self, group: int, table: int, words: _U64) -> None:
        """Says which absent rows were touched (missing until put) and which were not (blank: filled in on demand).

        Rows that are there already stay as they are. The group behind the coding groups has the tables without
        parities: a bit per slot, and touched rows are missing until loaded.
        """

    def prepare(self, counts: _I32, slots: _U32) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]:
        """Fills in blank rows, returns (counts, slots) of those that cannot be: missing, or not known about."""

    def put(self, counts: _I32, slots: _U32, relatives: _F32) -> int:
        """Sets missing rows to their relative values, skips all others; returns how many it set."""

    def missing_rows(self, group: int | None = None) -> int:
        """Absent rows, of one group or of all, that are not blank, those not known about included."""

    def blank_rows(self) -> int: ...
    def fill(self, rows_max: int) -> int:
        """Fills in up to so many blank rows; returns how many, 0 when none are left."""

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

    def expanded_floats(self, feature: int) -> int:
        """Floats in the vectors of a feature whose table is expanded: one vector for each id."""

    def expand(self, feature: int, rows: _F32, out: _F32) -> None:
        """Writes the row of each of the feature's ids, in their order."""

    def collapse(self, feature: int, grad: _F32, grads: _F32) -> None:
        """Gives every row of the feature the sum of its vectors' gradients. Features of one table in their order."""

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
        expanded: Sequence[bool] | None = None,
        feature_tables: Sequence[int],
        static_tables: Sequence[int],
        servers: int,
        rings: int = 1,
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

class SampleParser:
    """Columns to samples, as a schema says; `field` is the number of a column."""

    def __init__(self, *, fields: int, delimiter: str = ",", threshold: float | None = None) -> None: ...
    def set_label(self, field: int) -> None: ...
    def set_dense(self, field: int, *, index: int, missing: float, log1p: bool) -> None: ...
    def set_ids(
        self,
        field: int,
        *,
        index: int,
        kind: str,
        values: int,
        rows: int,
        missing: int,
        separator: str | None = None,
        words: Sequence[bytes] = (),
    ) -> None: ...
    def parse(
        self, text: _U8, *, skip_bad: bool, dense: _F32, labels: _F32
    ) -> tuple[int, int, _I64, _I32 | None, tuple[int, int, str] | None]:
        """Samples of whole lines: (lines, samples, ids, lengths, (line, column, reason) of the first bad one)."""
    def take_labels(
        self, field: int, values: _F64, valid: _U8 | None, labels: _F32, bad: _U8
    ) -> tuple[int, int, str] | None:
        """Labels from an array; marks bad lines, returns the first."""
    def take_dense(
        self, field: int, values: _F64, valid: _U8 | None, dense: _F32, bad: _U8
    ) -> tuple[int, int, str] | None:
        """A dense feature from an array; marks bad lines, returns the first."""
    def take_texts(
        self, field: int, offsets: _I64, text: _U8, valid: _U8 | None, bags: _I64 | None, bad: _U8
    ) -> tuple[_I64, _I32, tuple[int, int, str] | None]:
        """(ids, lengths, first bad line) of texts; those of a bag are bags[i]..bags[i + 1]."""
    def take_wholes(
        self, field: int, values: _I64, valid: _U8 | None, bags: _I64 | None, bad: _U8
    ) -> tuple[_I64, _I32, tuple[int, int, str] | None]:
        """(ids, lengths, first bad line) of whole numbers."""

class TieredShard:
    """The rows of one server, some of them on disk: as `Shard`, where the names are the same. See docs/tiered.md."""

    def __init__(
        self,
        tables: Sequence[dict[str, int | float | str]],
        *,
        servers: int,
        server: int,
        rings: int,
        directory: str,
        io: str,
        threads: int,
        wipe: bool,
        fingerprint: int,
        cache_bytes: int,
        bytes_max: int,
        policy: str,
        patience: int,
        at_epoch: int | None,
    ) -> None: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def fetch_fd(self) -> int: ...
    @property
    def io_description(self) -> str:
        """How it reads and writes, and why so."""

    @property
    def is_mapped(self) -> bool:
        """Rows are copied from where the files are mapped: reads take no time."""

    def slots(self, table: int) -> int: ...
    def blocks(self, table: int) -> int: ...
    def record_floats(self, table: int) -> int: ...
    def gather(self, counts: _I32, slots: _U32, out: _F32) -> None: ...
    def update(self, counts: _I32, slots: _U32, grads: _F32, step: int, rates: Sequence[float] = ()) -> None: ...
    def assign_untouched(self, counts: _I32, slots: _U32, weights: _F32) -> None: ...
    def read_records(self, table: int, first_slot: int, count: int, out: _F32) -> None: ...
    def write_records(self, table: int, first_slot: int, count: int, src: _F32) -> None: ...
    def load_rows(self, table: int, ids: _U32, parts: Sequence[_F32], clean_to: int | None = None) -> int: ...
    def touched(self, table: int) -> npt.NDArray[np.uint64]: ...
    def add_tenant(self) -> int: ...
    def dirty_rows(self, tenant: int) -> int: ...
    def begin_capture(self, tenant: int, full: bool) -> None: ...
    def capture_chunk(
        self, bytes_max: int, aside_first: bool = False
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]: ...
    def capture_left(self) -> int: ...
    def capture_side_bytes(self) -> int: ...
    def end_capture(self, durable: bool) -> None: ...
    def check_tenant(self, tenant: int) -> None:
        """IndexError if there is no such tenant."""

    def note_updates(self, counts: _I32, slots: _U32) -> None: ...
    def updates_noted(self) -> int: ...
    def set_updates_noted(self, total: int) -> None: ...
    def updates_uncaptured(self, tenant: int) -> int: ...
    def fetch(self, counts: _I32, slots: _U32) -> int: ...
    def poll_fetched(self) -> list[int]: ...
    def release(self, ticket: int) -> None: ...
    def upkeep(self) -> bool: ...
    def begin_epoch(self) -> int: ...
    def poll_complete(self) -> int: ...
    def hasten(self, epoch: int, seconds_left: float) -> None: ...
    def commit_epoch(self, epoch: int) -> None: ...
    def tier_report(self) -> dict[str, int | float]: ...

def run_tier_model(seed: int, crashes: int, bug: str = "none") -> tuple[dict[str, int], str]:
    """Runs a tiered store against dictionaries, with crashes: (counts, what was wrong or nothing)."""
