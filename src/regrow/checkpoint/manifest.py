"""What a piece is: the cuts it leads between, its tables, and its chunks with their checksums.

A piece exists when its manifest does, so the manifest is written last and must be believed or refused as a whole. The
file is one JSON object with the checksum of its inside in front; every byte outside of that is fixed, and one that
differs anywhere is refused. What the checksum cannot know (a newer format, a chunk name that leaves the directory) is
checked after it. Nothing here touches storage. Names of cuts and pieces are in core/names.py, those of chunks here.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Collection
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from regrow import _kernels
from regrow.core.job import DIM_MAX, ROWS_PER_TABLE_MAX, TABLES_MAX
from regrow.core.names import cut_step, is_cut_id, is_piece_name, piece_name
from regrow.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"

Encoding = Literal["raw", "zstd"]
T = TypeVar("T")
SUFFIXES: dict[str, str] = {"raw": ".safetensors", "zstd": ".safetensors.zst"}

_PREFIX = re.compile(rb'\A\{"crc32c":"([0-9a-f]{8})","manifest":')
_SUFFIX = b"}\n"
_SHARD = re.compile(r"[A-Za-z0-9_-]{1,64}")
_CHUNK_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}-\d{5,9}(\.safetensors(?:\.zst)?)", re.ASCII)


class Columns(msgspec.Struct, frozen=True, kw_only=True):
    """Where the floats of a record belong that holds some columns of a table: from `first` on, of `dim` in each row of
    the table `of`, which is the one that people know. See columns.py."""

    of: str
    first: int
    dim: int


class TableInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A table as its rows are stored. Untouched rows are computed: from the seed, `index` and `init_bound`. `columns`:
    if it holds only some of them."""

    name: str
    rows: int
    dim: int
    states: tuple[tuple[str, int], ...]
    init_bound: float | None
    index: int
    columns: Columns | None = None

    @property
    def widths(self) -> tuple[int, ...]:
        """Floats of a row: of its weights, then of each state."""
        return self.dim, *(width for _, width in self.states)

    @property
    def row_bytes(self) -> int:
        """Of a row and its id, in 32 bits."""
        return 4 + 4 * sum(self.widths)


class ChunkInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a piece: its size and CRC-32C as stored, and how many rows of which table are in it.

    `shard` is who wrote it, by `shard_name`, or "all". Shards of one layout have no row in common, whatever piece they
    are of: the layout has a new name whenever rows may have moved between them."""

    name: str
    bytes: int
    crc32c: int
    rows: dict[str, int]
    shard: str


class Stored(Protocol):
    """Whatever has chunks: a piece, or a save of one server. `name` is the directory they are in."""

    @property
    def name(self) -> str: ...
    @property
    def tables(self) -> tuple[TableInfo, ...]: ...
    @property
    def chunks(self) -> tuple[ChunkInfo, ...]: ...
    @property
    def encoding(self) -> Encoding: ...
    @property
    def bits(self) -> Literal[32, 8, 4]: ...
    @property
    def bytes(self) -> int: ...
    @property
    def others(self) -> tuple[str, ...]:
        """Files that belong there and are neither chunks nor the manifest."""


Turn = tuple[int, int, int]  # start of the run, term of the coordinator, number of the cut


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """Where a cut stands among all others: see order.py. `seen`: older runs, and their newest turns."""

    run: str
    turn: Turn
    seen: dict[str, Turn] = {}


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """A state of training at one consistent instant. `marks` are the last pushes applied, per worker. `created` is what
    a clock said, for people. `line` says which cut is older; cuts from before there were lines have none. A publication
    has weights only, for look-ups: nobody can train on from it."""

    id: str
    step: int
    marks: tuple[int, ...]
    created: float
    job: dict[str, Any]
    extra: dict[str, Any]
    line: Line | None = None
    kind: Literal["checkpoint", "publication"] = "checkpoint"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that lead from the cut `source` (None: from nothing) to `target`. `folded`: pieces it was made of."""

    format: int = FORMAT
    source: str | None
    target: Cut
    tables: tuple[TableInfo, ...]
    seed: int
    chunks: tuple[ChunkInfo, ...]
    encoding: Encoding = "raw"
    bits: Literal[32, 8, 4] = 32
    folded: tuple[str, ...] = ()
    made_by: str

    @property
    def name(self) -> str:
        return piece_name(self.source, self.target.id)

    @property
    def bytes(self) -> int:
        return sum(chunk.bytes for chunk in self.chunks)

    @property
    def rows(self) -> int:
        return sum(sum(chunk.rows.values()) for chunk in self.chunks)

    @property
    def others(self) -> tuple[str, ...]:
        return ()

    @property
    def exact(self) -> bool:
        """Whether rows come back bit by bit. Not if they were stored in fewer bits."""
        return self.bits == 32

    def invalid_reason(self) -> str | None:
        """Says what is wrong, or None."""
        return _manifest_invalid_reason(self)


def shard_name(number: int, count: int, division: object) -> str:
    """Who writes a chunk. `division` is all that decides which rows each of them has; one alone has all."""
    layout = f"-{zlib.crc32(repr(division).encode()):08x}" if count > 1 else ""
    return f"s{number}of{count}{layout}"


def layout(shard: str) -> str:
    """Equal for shards that have divided the rows in the same way."""
    return shard.rpartition("of")[2]


def are_apart(shards: Collection[str]) -> bool:
    """Whether no row can be in chunks of two of these shards. Without a division in their names, nobody knows."""
    layouts = {layout(shard) for shard in shards}
    return len(shards) == 1 or (len(layouts) == 1 and "-" in layouts.pop())


def chunk_name(shard: str, number: int, encoding: Encoding = "raw") -> str:
    return f"{shard}-{number:05d}{SUFFIXES[encoding]}"


def encode(manifest: Manifest) -> bytes:
    """The file. A manifest that `decode` would refuse is refused here already."""
    if reason := manifest.invalid_reason() or _json_invalid_reason([manifest.target.job, manifest.target.extra]):
        raise CheckpointError(f"this cannot be a manifest: {reason}")
    return wrap(msgspec.json.encode(manifest))


def wrap(body: bytes) -> bytes:
    """The file of which this is the inside."""
    return b'{"crc32c":"%08x","manifest":' % _kernels.crc32c(body) + body + _SUFFIX


def decode(data: bytes, where: str) -> Manifest:
    """The manifest in a file, or CheckpointError naming `where` it came from."""
    try:
        manifest = unwrap(data, _DECODER, known=FORMAT)
        reason = manifest.invalid_reason()
    except Refused as error:
        reason = str(error)
    if reason is not None:
        hint = "this piece cannot be used; another that leads to the same cut can"
        raise CheckpointError(f"{where}: {reason}", hint=hint) from None
    return manifest


def unwrap(data: bytes, decoder: msgspec.json.Decoder[T], *, known: int) -> T:
    """What is inside a file of the format `known`. `Refused` says why it cannot be told."""
    try:
        return decoder.decode(_check_body(data, known))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"cannot be read: {error}") from None


class Refused(Exception):
    """Why a file is not what it should be, for whoever knows its name."""


class _Format(msgspec.Struct):
    format: int


_DECODER = msgspec.json.Decoder(Manifest)
_FORMAT_DECODER = msgspec.json.Decoder(_Format)


def _check_body(data: bytes, known: int) -> memoryview:
    """The inside, once its checksum and format were looked at: a newer manifest may have any fields."""
    prefix = _PREFIX.match(data)
    if prefix is None or len(data) < prefix.end() + len(_SUFFIX) or not data.endswith(_SUFFIX):
        raise Refused("damaged or not a manifest (its ends are not there)" if data else "empty")
    body = memoryview(data)[prefix.end() : -len(_SUFFIX)]
    if b"%08x" % _kernels.crc32c(body) != prefix[1]:
        raise Refused("damaged (checksum)")
    number = _FORMAT_DECODER.decode(body).format
    if number != known:
        raise Refused(f"format {number} is not known; this Regrow reads format {known}")
    return body


def _manifest_invalid_reason(manifest: Manifest) -> str | None:
    if manifest.format != FORMAT:
        return f"format {manifest.format} is not known; this Regrow writes format {FORMAT}"
    if reason := _cut_invalid_reason(manifest.target):
        return reason
    if manifest.source is not None and not is_cut_id(manifest.source):
        return f"source {manifest.source!r} is not a cut"
    if manifest.source == manifest.target.id:
        return "it leads from a cut to itself"
    for name in manifest.folded:
        if not is_piece_name(name):
            return f"it was folded from {name!r}, which is not a piece"
    return chunks_invalid_reason(manifest)


def chunks_invalid_reason(manifest: Stored) -> str | None:
    """What is wrong with tables and chunks, or None."""
    if len(manifest.tables) > TABLES_MAX:
        return f"{len(manifest.tables)} tables are more than {TABLES_MAX}"
    tables = {table.name: table for table in manifest.tables}
    if len(tables) != len(manifest.tables) or len({table.index for table in manifest.tables}) != len(tables):
        return "two tables have the same name or index"
    for table in manifest.tables:
        if reason := _table_invalid_reason(table):
            return f"table {table.name!r}: {reason}"
    if reason := _columns_invalid_reason(manifest.tables):
        return reason
    if len({chunk.name for chunk in manifest.chunks}) != len(manifest.chunks):
        return "two chunks have the same name"
    for chunk in manifest.chunks:
        if reason := _chunk_invalid_reason(chunk, tables, SUFFIXES[manifest.encoding]):
            return f"chunk {chunk.name!r}: {reason}"
    return None


def _cut_invalid_reason(cut: Cut) -> str | None:
    if not is_cut_id(cut.id):
        return f"{cut.id!r} is not the id of a cut"
    if cut_step(cut.id) != cut.step:
        return f"cut {cut.id} says it is of step {cut.step}"
    if not math.isfinite(cut.created):
        return f"cut {cut.id} was created at {cut.created}"
    if any(mark < 0 for mark in cut.marks):
        return f"cut {cut.id} has a negative mark"
    if cut.line is not None and not all((cut.line.run, *cut.line.seen)):
        return f"cut {cut.id} is of a run without a name"
    return None


def _table_invalid_reason(table: TableInfo) -> str | None:
    if not 1 <= table.rows < ROWS_PER_TABLE_MAX or not 1 <= table.dim <= DIM_MAX or table.index < 0:
        return f"{table.rows} rows of {table.dim} floats, index {table.index}, cannot be"
    if table.init_bound is not None and not math.isfinite(table.init_bound):
        return f"init_bound is {table.init_bound}"
    names = [name for name, _ in table.states]
    if len(set(names)) != len(names) or {"ids", "weight"} & set(names):
        return "two of its parts have the same name"
    for name, width in table.states:
        if not name or "/" in name or "." in name or not 1 <= width <= DIM_MAX:
            return f"state {name!r} of {width} floats cannot be"
    return None


def _columns_invalid_reason(tables: tuple[TableInfo, ...]) -> str | None:
    """Column ranges of a table lie side by side, and are all there."""
    ends: dict[str, tuple[int, int, int]] = {}  # table -> its columns so far, in all, rows
    divided = [(table, table.columns) for table in tables if table.columns is not None]
    for table, columns in sorted(divided, key=lambda pair: (pair[1].of, pair[1].first)):
        end, *shape = ends.get(columns.of, (0, columns.dim, table.rows))
        if columns.first != end or shape != [columns.dim, table.rows] or not 1 <= columns.dim <= DIM_MAX:
            return f"table {table.name!r} cannot be columns {columns.first} and on of {columns.of!r}"
        ends[columns.of] = end + table.dim, columns.dim, table.rows
    for name, (end, dim, _) in ends.items():
        if end != dim or any(table.name == name for table in tables):
            return f"{end} columns of table {name!r} are there, it has {dim}"
    return None


def _chunk_invalid_reason(chunk: ChunkInfo, tables: dict[str, TableInfo], suffix: str) -> str | None:
    # Names become paths: nothing may lead out of the piece's directory, nor to its manifest.
    match = _CHUNK_NAME.fullmatch(chunk.name)
    if match is None or match[1] != suffix:
        return f"it is not named <shard>-<number>{suffix}"
    if _SHARD.fullmatch(chunk.shard) is None:
        return f"shard {chunk.shard!r} cannot be"
    if chunk.bytes < 0 or not 0 <= chunk.crc32c < 2**32:
        return f"{chunk.bytes} bytes with checksum {chunk.crc32c} cannot be"
    for name, rows in chunk.rows.items():
        if name not in tables:
            return f"it has rows of {name!r}, which is not one of the tables"
        if not 0 <= rows <= tables[name].rows:
            return f"it has {rows} rows of {name!r}, which has {tables[name].rows}"
    return None


def _json_invalid_reason(value: Any) -> str | None:
    """`job` and `extra` must come back as they went in: JSON would turn a NaN into null without a word."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} has no JSON form"
    if value is None or isinstance(value, str | int | float):
        return None
    if isinstance(value, list | tuple):
        return next(filter(None, map(_json_invalid_reason, value)), None)
    if isinstance(value, dict):
        if strange := [key for key in value if not isinstance(key, str)]:
            return f"{strange[0]!r} cannot be the name of a value"
        return next(filter(None, map(_json_invalid_reason, value.values())), None)
    return f"{type(value).__name__} has no JSON form"
