"""Rows as files: one chunk is a safetensors file of a few tables' rows, maybe in fewer bits, maybe compressed.

A chunk says nothing about itself that its manifest does not say too, and a reader believes neither alone: size and
checksum of the stored bytes come first, then every tensor's name, type and shape, then that ids rise and exist. Rows
are not copied on the way: an encoded chunk is a list of views of them, and decoded rows are views of the file. With
bits 32, rows come back bit by bit, NaN included. With 8 or 4 bits (Check-N-Run, NSDI 2022, section 5.2: asymmetric, a
scale and an offset per row) a value comes back within half a step of its row, and a row that is not finite is refused.
The dense parameters (table "dense") are always stored whole: they are small, and a model does not survive less.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from regrow import _kernels
from regrow.checkpoint.manifest import ChunkInfo, Encoding, Refused, Stored, TableInfo
from regrow.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from typing_extensions import Buffer  # in the standard library from 3.12 on; needed for checking types alone

    from regrow.checkpoint.direct import Bytes
    from regrow.checkpoint.storage import Storage

CHUNK_BYTES = 16 << 20  # Too small: requests cost more than bytes. Too large: memory, and a lost transfer is repeated.
ZSTD_LEVEL = 1  # Floats hardly compress; higher levels take longer and gain a percent.
HEADER_BYTES_MAX = 16 << 20  # of a chunk with very many tables; bounds what a compressed file may grow to
DENSE = "dense"  # the table of dense parameters
BUFFERS = "buffers"  # ... and of averages, as in regrow.nn.dense: a row has some of several layers, of any size
# Tables that are no weights: of an optimizer in the workers (as in regrow.nn.dense), and how far servers were (as in
# regrow.nn.coded). For those who train on, and nobody else.
WEIGHTLESS = ("dense_state", "regrow_marks")
QUANTIZE_FLOATS = 1 << 16  # Rows are quantised in blocks that stay in the cache.

_DTYPES = {
    f"{kind}{8 * size}": np.dtype(f"<{kind.lower()}{size}")
    for kind, size in itertools.product("FIU", (1, 2, 4, 8))
    if f"{kind}{size}" != "F1"
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.uint32]


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one table: ids that rise, the weights, and the optimizer's state by name. Arrays, not copies."""

    ids: Ids
    weight: Floats
    states: dict[str, Floats]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.weight.nbytes + sum(state.nbytes for state in self.states.values())

    @property
    def row_bytes(self) -> int:
        return 4 + 4 * sum(int(values.shape[1]) for _, values in self.parts())

    def part(self, start: int, stop: int) -> Rows:
        """A view of some of the rows."""
        states = {name: state[start:stop] for name, state in self.states.items()}
        return Rows(self.ids[start:stop], self.weight[start:stop], states)

    def choose(self, mask: npt.NDArray[np.bool_]) -> Rows:
        """A copy of some of them; all, as they are, if it is all."""
        if mask.all():
            return self
        return Rows(self.ids[mask], self.weight[mask], {name: state[mask] for name, state in self.states.items()})

    def parts(self) -> Iterator[tuple[str, Floats]]:
        """Everything but the ids, by the name of its tensor."""
        yield "weight", self.weight
        yield from self.states.items()


Chunk = dict[str, Rows]  # by table
Parts = dict[str, list[Rows]]  # by table, rows one part after the other


def concatenate(rows: list[Rows]) -> Rows:
    """One after the other; ids must go on rising."""
    if len(rows) == 1:
        return rows[0]
    states = {name: np.concatenate([part.states[name] for part in rows]) for name in rows[0].states}
    return Rows(np.concatenate([part.ids for part in rows]), np.concatenate([part.weight for part in rows]), states)


def split(parts: Iterable[Chunk], chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Cuts rows into chunks of at most `chunk_bytes` (or of one row) and fills up small ones with the next tables.

    Parts of a table may follow each other; where ids do not rise from one to the next, a new chunk begins. Rows are
    copied only where small parts are joined: a chunk that is half full does without.
    """
    assert chunk_bytes > 0
    waiting: dict[str, list[Rows]] = {}
    waiting_bytes = 0
    for part in parts:
        for table, rows in part.items():
            start = 0
            while start < len(rows):
                room = (chunk_bytes - waiting_bytes) // rows.row_bytes
                falls = table in waiting and waiting[table][-1].ids[-1] >= rows.ids[start]
                copies = table in waiting and 2 * waiting_bytes >= chunk_bytes
                if waiting and (room < 1 or falls or copies):
                    yield {name: concatenate(found) for name, found in waiting.items()}
                    waiting, waiting_bytes = {}, 0
                    continue
                taken = rows.part(start, start + max(room, 1))
                waiting.setdefault(table, []).append(taken)
                waiting_bytes += taken.nbytes
                start += len(taken)
    if waiting:
        yield {name: concatenate(found) for name, found in waiting.items()}


def write_chunk(
    storage: Storage,
    piece: str,
    name: str,
    chunk: Chunk | Parts,
    *,
    encoding: Encoding = "raw",
    bits: int = 32,
    shard: str,
) -> ChunkInfo:
    """Encodes and stores a chunk; once this returns it survives a crash."""
    data = encode_chunk(chunk, encoding=encoding, bits=bits)
    info = describe(data, name, chunk, shard=shard)
    storage.write(f"{piece}/{name}", data)
    return info


def read_chunk(storage: Storage, manifest: Stored, info: ChunkInfo, *, into: Bytes | None = None) -> Chunk:
    """With `into`, rows are in that memory, if they can be."""
    path = f"{manifest.name}/{info.name}"
    return decode_chunk(storage.read(path) if into is None else storage.read(path, into=into), manifest, info)


def describe(data: Sequence[memoryview], name: str, chunk: Chunk | Parts, *, shard: str) -> ChunkInfo:
    """What the manifest will say about an encoded chunk."""
    rows = {table: sum(map(len, parts)) for table, parts in _in_parts(chunk).items()}
    crc32c = 0
    for buffer in data:
        crc32c = _kernels.crc32c(buffer, crc32c)
    size = sum(buffer.nbytes for buffer in data)
    return ChunkInfo(name=name, bytes=size, crc32c=crc32c, rows=rows, shard=shard)


def encode_chunk(chunk: Chunk | Parts, *, encoding: Encoding = "raw", bits: int = 32) -> list[memoryview]:
    """The bytes of the file, one buffer after the other: views of the rows where these are contiguous."""
    assert bits in (32, 8, 4), bits
    tensors: dict[str, list[npt.NDArray[Any]]] = {}
    for table, parts in _in_parts(chunk).items():
        last = -1
        for rows in parts:
            assert rows.ids.dtype == np.uint32 and rows.ids.ndim == 1, f"{table}: ids are {rows.ids.dtype}"
            assert _is_rising(rows.ids) and (not len(rows) or rows.ids[0] > last), f"{table}: ids do not rise"
            last = int(rows.ids[-1]) if len(rows) else last
            tensors.setdefault(f"{table}/ids", []).append(np.ascontiguousarray(rows.ids))
            for name, values in rows.parts():
                for suffix, tensor in _encode_rows(table, name, rows, values, bits):
                    tensors.setdefault(f"{table}/{name}{suffix}", []).append(tensor)
    data = pack_tensors(tensors)
    if encoding == "raw":
        return data
    compressor = load_zstd().ZstdCompressor(level=ZSTD_LEVEL).compressobj(size=sum(buffer.nbytes for buffer in data))
    return [memoryview(part) for part in [*map(compressor.compress, data), compressor.flush()]]


def _in_parts(chunk: Chunk | Parts) -> Parts:
    return {table: [rows] if isinstance(rows, Rows) else rows for table, rows in chunk.items()}


def _encode_rows(
    table: str, name: str, rows: Rows, values: Floats, bits: int
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """The tensors that a part of some rows becomes, by what follows its name."""
    assert values.dtype == np.float32 and values.ndim == 2, f"{table}/{name}: {values.dtype} {values.shape}"
    assert len(values) == len(rows), f"{table}/{name}: {len(values)} rows for {len(rows)} ids"
    if table in (DENSE, BUFFERS) or not _is_quantized(values.shape[1], bits):
        yield "", np.ascontiguousarray(values)
        return
    if strange := _strange_rows(values):
        raise CheckpointError(
            f"{table}/{name}: row {rows.ids[strange[0]]} is not finite and cannot be stored in {bits} bits",
            hint="store rows with 32 bits, which keeps such values as they are; and look at the training",
        )
    codes, ranges = quantize(values, bits)
    yield "", codes
    yield ".range", ranges


def decode_chunk(data: Buffer, tables: Stored | Iterable[TableInfo], info: ChunkInfo) -> Chunk:
    """The rows in a file, or CheckpointError naming it. With a manifest, its bits must be those of the file too.

    Rows are views of `data` if it may be written to, or else of a copy.
    """
    where, bits = info.name, [32, 8, 4]
    if not isinstance(tables, Iterable):
        where, bits, tables = f"{tables.name}/{info.name}", [tables.bits], tables.tables
    infos = {table.name: table for table in tables}
    try:
        file = memoryview(data)
        if file.nbytes != info.bytes:
            raise Refused(f"{file.nbytes} bytes, the manifest says {info.bytes}")
        if _kernels.crc32c(file) != info.crc32c:
            raise Refused("damaged (checksum)")
        if info.name.endswith(".zst"):
            file = _decompress(file, infos, info)
        tensors = unpack_tensors(memoryview(bytearray(file)) if file.readonly else file)
        chunk = {name: _rows(tensors, infos[name], count, bits) for name, count in info.rows.items()}
        if tensors:
            raise Refused(f"it also has {sorted(tensors)[0]!r}, about which the manifest says nothing")
    except Refused as error:
        raise CheckpointError(f"{where}: {error}", hint="this piece cannot be used") from None
    return chunk


def quantize(values: Floats, bits: int) -> tuple[npt.NDArray[np.uint8], Floats]:
    """Codes of 8 bits, or pairs of 4 (the even column is the low half), and (scale, offset) of each row.

    A value comes back within scale / 2 and a rounding or two of 32-bit floats. Rows of one value come back exactly.
    All values must be finite.
    """
    levels = (1 << bits) - 1
    rows, width = values.shape
    codes = np.empty((rows, width), np.uint8)
    ranges = np.empty((rows, 2), np.float32)
    step = max(QUANTIZE_FLOATS // width, 1)
    for start in range(0, rows, step):
        block = values[start : start + step]
        low, high = block.min(axis=1), block.max(axis=1)
        scale = ((high.astype(np.float64) - low) / levels).astype(np.float32)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            inverse = np.where(scale > 0, 1 / scale.astype(np.float64), 0)
            scaled = (block - low[:, None]) * inverse.astype(np.float32)[:, None]
            # 64 bits for rows that overflow 32 on the way; for no others: what becomes of a row is its matter alone.
            extreme = ~np.isfinite(inverse.astype(np.float32)) | ~np.isfinite(high - low)
        if extreme.any():
            scaled[extreme] = (block[extreme].astype(np.float64) - low[extreme, None]) * inverse[extreme, None]
        codes[start : start + step] = np.clip(np.rint(scaled, out=scaled), 0, levels, out=scaled)
        ranges[start : start + step, 0] = scale
        ranges[start : start + step, 1] = low
    if bits == 8:
        return codes, ranges
    packed = codes[:, 0::2].copy()
    packed[:, : width // 2] |= codes[:, 1::2] << 4
    return packed, ranges


def dequantize(codes: npt.NDArray[np.uint8], ranges: Floats, bits: int, width: int) -> Floats:
    """The values that `quantize` made these codes of, nearly."""
    if bits == 4:
        unpacked = np.empty((len(codes), width), np.uint8)
        unpacked[:, 0::2] = codes & 15
        unpacked[:, 1::2] = codes[:, : width // 2] >> 4
        codes = unpacked
    scale, low = ranges[:, :1], ranges[:, 1:]
    values: Floats = codes.astype(np.float32)
    with np.errstate(over="ignore"):
        values *= scale
        values += low
        extreme = ~np.isfinite(scale * np.float32((1 << bits) - 1) + np.abs(low))[:, 0]
    if extreme.any():
        most = float(np.finfo(np.float32).max)
        values[extreme] = np.clip(codes[extreme] * scale[extreme].astype(np.float64) + low[extreme], -most, most)
    return values


def _is_quantized(width: int, bits: int) -> bool:
    """Whether a part of this width is stored in fewer bits: not where scale and offset would take more than it saves,
    as for a state of one float per row."""
    return bits < 32 and -(-width * bits // 8) + 8 < width * 4


def _strange_rows(values: Floats) -> list[int]:
    """Rows with a NaN or an infinity."""
    with np.errstate(over="ignore", invalid="ignore"):
        suspects = np.flatnonzero(~np.isfinite(np.add.reduce(values, axis=1)))  # a sum may also overflow
    return [int(row) for row in suspects if not np.isfinite(values[row]).all()]


def _is_rising(ids: Ids) -> bool:
    return bool((ids[1:] > ids[:-1]).all())


def pack_tensors(tensors: dict[str, list[npt.NDArray[Any]]]) -> list[memoryview]:
    """A safetensors file: the length of a header, the header in JSON, then the tensors, widest types first so that
    all are aligned, each in one or more parts. The library's own `save` and `load` copy rows, into fresh memory each
    time; it reads what is written here, and a test compares the two."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0]))
    header: dict[str, Any] = {}
    end = 0
    for name, parts in ordered:
        start, end = end, end + sum(part.nbytes for part in parts)
        shape = (sum(map(len, parts)), *parts[0].shape[1:])
        header[name] = {"dtype": _DTYPE_NAMES[parts[0].dtype], "shape": shape, "data_offsets": (start, end)}
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    # An empty array has no bytes to cast.
    buffers = [part.data.cast("B") for _, parts in ordered for part in parts if part.size]
    return [memoryview(struct.pack("<Q", len(text)) + text), *buffers]


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """Of a tensor, in the header."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[int, int]


def unpack_tensors(file: memoryview) -> dict[str, npt.NDArray[Any]]:
    """Views of the tensors, which must fill the file without a gap."""
    length = int.from_bytes(file[:8], "little")
    if file.nbytes < 8 or length > min(HEADER_BYTES_MAX, file.nbytes - 8):
        raise Refused("not a safetensors file: its header does not end in it")
    try:
        header = msgspec.json.decode(file[8 : 8 + length], type=dict[str, _Entry])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"not a safetensors file: {error}") from None
    tensors: dict[str, npt.NDArray[Any]] = {}
    end = 8 + length
    for name, entry in sorted(header.items(), key=lambda item: item[1].data_offsets):
        dtype = _DTYPES.get(entry.dtype)
        count = math.prod(entry.shape)
        start, stop = (8 + length + offset for offset in entry.data_offsets)
        if dtype is None or start != end or stop - start != count * dtype.itemsize or stop > file.nbytes:
            raise Refused(f"not a safetensors file: {name!r} cannot be {entry.dtype} {list(entry.shape)}")
        try:
            tensor = np.frombuffer(file[start:stop], dtype).reshape(entry.shape)
        except ValueError as error:  # more axes than an array may have
            raise Refused(f"not a safetensors file: {error}") from None
        tensors[name] = tensor if tensor.flags.aligned else tensor.copy()
        end = stop
    if end != file.nbytes:
        raise Refused(f"not a safetensors file: {file.nbytes - end} bytes belong to no tensor")
    return tensors


def _rows(tensors: dict[str, npt.NDArray[Any]], table: TableInfo, count: int, bits: list[int]) -> Rows:
    """Takes a table's tensors out of `tensors` and checks everything there is to check."""
    ids = _take(tensors, f"{table.name}/ids", np.uint32, [(count,)])
    if count and not _is_rising(ids):
        raise Refused(f"{table.name}/ids do not rise")
    if count and ids[-1] >= table.rows:
        raise Refused(f"{table.name}/ids has {ids[-1]}, the table has {table.rows} rows")
    bits = {DENSE: [32], BUFFERS: [32, *bits]}.get(table.name, bits)  # averages were stored in fewer before
    weight = _part(tensors, f"{table.name}/weight", (count, table.dim), bits)
    states = {name: _part(tensors, f"{table.name}/{name}", (count, width), bits) for name, width in table.states}
    return Rows(ids, weight, states)


def _part(tensors: dict[str, npt.NDArray[Any]], name: str, shape: tuple[int, int], bits: list[int]) -> Floats:
    count, width = shape
    narrow = {-(-width * few // 8): few for few in bits if _is_quantized(width, few)}  # by bytes of a row's codes
    stored = tensors.get(name)
    if not narrow or (32 in bits and stored is not None and stored.dtype == np.float32):
        return _take(tensors, name, np.float32, [shape])
    codes = _take(tensors, name, np.uint8, [(count, width_bytes) for width_bytes in narrow])
    ranges = _take(tensors, f"{name}.range", np.float32, [(count, 2)])
    if not np.isfinite(ranges).all() or (ranges[:, 0] < 0).any():
        raise Refused(f"{name}.range has a scale or an offset that cannot be")
    return dequantize(codes, ranges, narrow[codes.shape[1]], width)


def _take(
    tensors: dict[str, npt.NDArray[Any]], name: str, dtype: type[np.generic], shapes: list[tuple[int, ...]]
) -> npt.NDArray[Any]:
    tensor = tensors.pop(name, None)
    if tensor is None:
        raise Refused(f"{name!r} is not in it")
    if tensor.dtype != dtype or tensor.shape not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise Refused(
            f"{name!r} is {tensor.dtype} {list(tensor.shape)}, it should be {np.dtype(dtype)} {expected}",
        )
    return tensor


def load_zstd() -> Any:
    try:
        import zstandard
    except ImportError:
        raise UserError(
            "chunks compressed with zstd need the zstandard library, which is not installed",
            hint="pip install 'regrow[zstd]'",
        ) from None
    return zstandard


def _decompress(data: memoryview, tables: dict[str, TableInfo], info: ChunkInfo) -> memoryview:
    zstandard = load_zstd()
    most = HEADER_BYTES_MAX
    for name, count in info.rows.items():
        # Quantised parts have a scale and an offset of each row, too.
        most += count * (tables[name].row_bytes + 8 * len(tables[name].widths))
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= most:
            raise Refused(f"would be {size} bytes uncompressed, its rows take at most {most}")
        return memoryview(zstandard.ZstdDecompressor().decompress(data))
    except zstandard.ZstdError as error:
        raise Refused(f"not a zstd file: {error}") from None
