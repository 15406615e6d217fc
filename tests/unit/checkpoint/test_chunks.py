"""Goal: rows come back as they were, or within the promised error, or the file is refused.

Method: random rows of several tables go through every encoding and number of bits; NaN, infinities and other odd bits
are among the exact ones. Files are damaged everywhere in small ones, and well-made files that say something else than
the manifest are tried one rule at a time. `split` is compared with the rows that went in.
"""

from __future__ import annotations

import builtins
import itertools
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from regrow.checkpoint import chunks
from regrow.checkpoint.chunks import Chunk, Rows, decode_chunk, dequantize, describe, encode_chunk, quantize, split
from regrow.checkpoint.manifest import SUFFIXES, ChunkInfo, Cut, Encoding, Manifest, TableInfo
from regrow.core.names import cut_id
from regrow.errors import CheckpointError, UserError

SHAPES = {
    "a": (5000, 16, {"momentum1": 16, "exp_avg_sq": 1}),
    "a/b": (300, 7, {}),
    "ünï": (2**32 - 1, 1, {"momentum1": 1}),
}
TABLES = tuple(
    TableInfo(name=name, rows=rows, dim=dim, states=tuple(states.items()), init_bound=0.1, index=index)
    for index, (name, (rows, dim, states)) in enumerate(SHAPES.items())
)


def make(count: int, *, seed: int = 1) -> Chunk:
    generator = np.random.default_rng(seed)
    made: Chunk = {}
    for name, (rows, dim, states) in SHAPES.items():
        ids = np.sort(generator.choice(min(rows, 10**6), min(count, rows), replace=False)).astype(np.uint32)
        weight = generator.standard_normal((len(ids), dim), np.float32)
        made[name] = Rows(
            ids, weight, {part: generator.random((len(ids), width), np.float32) for part, width in states.items()}
        )
    return made


def store_chunk(chunk: Chunk, *, encoding: Encoding = "raw", bits: int = 32) -> tuple[bytes, ChunkInfo, Manifest]:
    buffers = encode_chunk(chunk, encoding=encoding, bits=bits)
    info = describe(buffers, f"s0of1-00000{SUFFIXES[encoding]}", chunk, shard="s0of1")
    data = b"".join(buffers)
    target = Cut(id=cut_id(1, 1), step=1, marks=(), created=0.0, job={}, extra={})
    return (
        data,
        info,
        Manifest(
            source=None, target=target, tables=TABLES, seed=1, chunks=(info,), encoding=encoding, bits=bits, made_by=""
        ),
    )


def equal(left: Chunk, right: Chunk) -> bool:
    """Bit by bit, so that NaN equals itself."""
    return list(left) == list(right) and all(
        left[name].ids.tobytes() == right[name].ids.tobytes()
        and [(part, values.tobytes(), values.shape) for part, values in left[name].parts()]
        == [(part, values.tobytes(), values.shape) for part, values in right[name].parts()]
        for name in left
    )


def refusal(data: bytes, tables: Any, info: ChunkInfo) -> str:
    with pytest.raises(CheckpointError) as caught:
        decode_chunk(data, tables, info)
    assert info.name in caught.value.message
    return caught.value.message


def describe_again(data: bytes, info: ChunkInfo, **changes: Any) -> ChunkInfo:
    """The manifest's words about another file, whose size and checksum are right."""
    again = describe([memoryview(data)], info.name, {}, shard=info.shard)
    return msgspec.structs.replace(info, bytes=again.bytes, crc32c=again.crc32c, **changes)


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_exact_there_and_back(encoding: Encoding, count: int) -> None:
    chunk = make(count)
    if count:
        odd = np.array([0x7FC00001, 0xFF800000, 0x7F800000, 0x80000000, 1, 0xFFFFFFFF, 0x7F7FFFFF], np.uint32)
        chunk["a/b"].weight[0] = odd.view(np.float32)
    data, info, manifest = store_chunk(chunk, encoding=encoding)
    for tables in (manifest, TABLES):
        again = decode_chunk(data, tables, info)
        assert equal(again, chunk)
        assert all(values.flags.writeable for rows in again.values() for _, values in rows.parts())
    assert info.rows == {name: len(rows) for name, rows in chunk.items()}


def test_rows_are_not_copied() -> None:
    chunk = make(100)
    parts = [each for rows in chunk.values() for each in (rows.ids, *(values for _, values in rows.parts()))]
    header, *buffers = encode_chunk(chunk)
    assert len(buffers) == len(parts)
    assert all(any(np.shares_memory(np.asarray(buffer), part) for part in parts) for buffer in buffers)
    file = bytearray(b"".join([header, *buffers]))
    _, info, manifest = store_chunk(chunk)
    for rows in decode_chunk(file, manifest, info).values():
        assert all(np.shares_memory(values, np.frombuffer(file, np.uint8)) for _, values in rows.parts())


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({}, "missing"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "cannot be"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "cannot be"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-4, 4]}, "cannot be"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "cannot be"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}, ">= 0"),
        ({"dtype": "F1", "shape": [4], "data_offsets": [0, 4]}, "cannot be"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "4 bytes belong to no tensor"),
        ({"dtype": "F32", "shape": [1] * 100, "data_offsets": [0, 4]}, "not a safetensors file"),
        ({"dtype": "F32", "shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]}, "not a safetensors file"),
    ],
)
def test_headers_that_cannot_be(entry: dict[str, Any], reason: str) -> None:
    text = msgspec.json.encode({"x": entry})
    file = len(text).to_bytes(8, "little") + text + bytes(8)
    _, info, manifest = store_chunk(make(2))
    message = refusal(file, manifest, describe_again(file, info))
    assert "not a safetensors file" in message
    assert reason in message


def test_tensors_that_are_not_aligned() -> None:
    """Another writer need not pad its header."""
    chunk = make(5)
    data, info, manifest = store_chunk(chunk)
    length = int.from_bytes(data[:8], "little")
    file = bytearray((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    again = decode_chunk(file, manifest, describe_again(bytes(file), info))
    assert equal(again, chunk)
    assert all(values.flags.aligned for rows in again.values() for _, values in rows.parts())


def test_no_tables_at_all() -> None:
    data, info, manifest = store_chunk({})
    assert decode_chunk(data, manifest, info) == {}


def test_views_that_are_not_contiguous() -> None:
    wide = make(100)["a"]
    part = Rows(wide.ids[::2], wide.weight[::2], {name: state[::2] for name, state in wide.states.items()})
    data, info, manifest = store_chunk({"a": part})
    assert equal(decode_chunk(data, manifest, info), {"a": part})


@pytest.mark.parametrize("bits", [32, 8])
def test_the_library_would_write_the_same_but_for_the_order(bits: int) -> None:
    data = b"".join(encode_chunk(make(33), bits=bits))
    tensors = safetensors.numpy.load(data)
    twin = safetensors.numpy.save(tensors)
    assert len(twin) == len(data)
    assert {name: (t.dtype, t.tobytes()) for name, t in safetensors.numpy.load(twin).items()} == {
        name: (t.dtype, t.tobytes()) for name, t in tensors.items()
    }
    header_bytes = int.from_bytes(data[:8], "little")
    for name, entry in msgspec.json.decode(data[8 : 8 + header_bytes]).items():
        assert (8 + header_bytes + entry["data_offsets"][0]) % tensors[name].itemsize == 0, "not aligned"


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_damage_is_found_everywhere(encoding: Encoding) -> None:
    data, info, manifest = store_chunk(make(2), encoding=encoding)
    for length in [*range(0, len(data), 7), len(data) - 1]:
        assert "the manifest says" in refusal(data[:length], manifest, info)
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        assert "checksum" in refusal(bytes(flipped), manifest, info)


def test_damage_behind_a_right_checksum_never_gets_through_as_other_shapes() -> None:
    """Whatever the bytes are, there are rows of the promised shape or there is a CheckpointError."""
    for encoding in ("raw", "zstd"):
        data, info, manifest = store_chunk(make(2), encoding=encoding)
        for position in range(len(data)):
            flipped = bytearray(data)
            flipped[position] ^= 1 << position % 8
            try:
                again = decode_chunk(bytes(flipped), manifest, describe_again(bytes(flipped), info))
            except CheckpointError:
                continue
            shapes = {name: rows.weight.shape for name, rows in again.items()}
            assert shapes == {"a": (2, 16), "a/b": (2, 7), "ünï": (2, 1)}


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("a/b/ids", np.array([1, 1], np.uint32), "do not rise"),
        ("a/b/ids", np.array([2, 1], np.uint32), "do not rise"),
        ("a/b/ids", np.array([1, 300], np.uint32), "the table has 300 rows"),
        ("a/b/ids", np.array([1, 2, 3], np.uint32), "should be uint32 [2]"),
        ("a/b/ids", np.array([1, 2], np.int32), "should be uint32 [2]"),
        ("a/b/weight", np.zeros((2, 8), np.float32), "should be float32 [2, 7]"),
        ("a/b/weight", np.zeros((2, 7), np.float64), "should be float32 [2, 7]"),
        ("a/b/weight", np.zeros(14, np.float32), "should be float32 [2, 7]"),
        ("a/b/weight", np.zeros((2, 7), np.uint8), "should be float32 [2, 7]"),
        ("a/b/weight", None, "is not in it"),
        ("a/momentum1", None, "is not in it"),
        ("a/momentum2", np.zeros((2, 1), np.float32), "says nothing"),
    ],
)
def test_a_file_that_is_not_what_the_manifest_says(name: str, tensor: npt.NDArray[Any] | None, reason: str) -> None:
    data, info, manifest = store_chunk(make(2))
    tensors = safetensors.numpy.load(data)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    other = safetensors.numpy.save(tensors)
    assert reason in refusal(other, manifest, describe_again(other, info))


def test_garbage_behind_a_right_checksum() -> None:
    _, info, manifest = store_chunk(make(2))
    for garbage in (b"", b"x", bytes(8), bytes(100), b"\xff" * 100):
        assert "not a safetensors file" in refusal(garbage, manifest, describe_again(garbage, info))
        packed = msgspec.structs.replace(describe_again(garbage, info), name="s0of1-00000.safetensors.zst")
        refusal(garbage, TABLES, packed)


def test_a_small_file_cannot_become_a_huge_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import zstandard

    monkeypatch.setattr(chunks, "HEADER_BYTES_MAX", 1000)
    _, info, manifest = store_chunk(make(2), encoding="zstd")
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    assert "uncompressed" in refusal(bomb, manifest, describe_again(bomb, info))


@pytest.mark.parametrize("bits", [8, 4])
def test_fewer_bits(bits: int) -> None:
    chunk = make(1000)
    data, info, manifest = store_chunk(chunk, bits=bits)
    for tables in (manifest, TABLES):
        again = decode_chunk(data, tables, info)
        for name, rows in chunk.items():
            assert np.array_equal(again[name].ids, rows.ids)
            for (part, values), (_, close) in zip(rows.parts(), again[name].parts(), strict=True):
                if values.shape[1] == 1:  # scale and offset would be larger than the value
                    assert np.array_equal(close, values), part
                else:
                    half_step = np.ptp(values, axis=1, keepdims=True) / ((1 << bits) - 1) / 2
                    assert (np.abs(close - values) <= half_step * 1.0001 + 1e-6).all(), part
    wide, _ = quantize(np.zeros((1000, 64), np.float32), bits)
    assert wide.nbytes == 1000 * 64 * bits // 8
    exact = store_chunk(chunk)[2]
    assert "should be float32" in refusal(data, exact, info)  # the manifest's bits must be the file's


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("width", [2, 3, 16, 33])
@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-3, 1.0, 1e20, 3.3e38])
def test_the_worst_error_is_half_a_step(bits: int, width: int, magnitude: float) -> None:
    """At every size of number a 32-bit float has: subnormal, and so large that the range of a row is no float."""
    generator = np.random.default_rng(7)
    values = (generator.uniform(-1, 1, (500, width)) * magnitude).astype(np.float32)
    values[::5] = np.abs(values[::5])
    values[::7] = values[::7, :1]  # rows of one value
    codes, ranges = quantize(values, bits)
    again = dequantize(codes, ranges, bits, width)
    assert again.dtype == np.float32
    exact = values.astype(np.float64)
    bound = np.ptp(exact, axis=1, keepdims=True) / ((1 << bits) - 1) / 2 * 1.0001
    rounding = np.abs(exact).max(axis=1, keepdims=True) * 2.0**-22 + (1 << bits) * 2.0**-149
    assert (np.abs(again - exact) <= bound + rounding).all()
    assert np.array_equal(again[::7], values[::7])


@pytest.mark.parametrize("bits", [8, 4])
def test_what_becomes_of_a_row_is_its_matter_alone(bits: int) -> None:
    """Not of the largest row beside it, nor of where parts and blocks end."""
    generator = np.random.default_rng(8)
    values = generator.uniform(-1, 1, (5_000, 17)).astype(np.float32)
    values[::1000] *= np.float32(3.3e38)
    values[1::1000] *= np.float32(1e-44)
    codes, ranges = quantize(values, bits)
    again = dequantize(codes, ranges, bits, 17)
    for start in range(0, 5_000, 7):
        part = slice(start, start + 7)
        codes_alone, ranges_alone = quantize(values[part], bits)
        assert codes_alone.tobytes() == codes[part].tobytes()
        assert ranges_alone.tobytes() == ranges[part].tobytes()
        assert dequantize(codes_alone, ranges_alone, bits, 17).tobytes() == again[part].tobytes()


@pytest.mark.parametrize("bits", [32, 8, 4])
@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_a_chunk_in_parts_is_the_same_file(bits: int, encoding: Any) -> None:
    chunk = make(40)
    bounds = ((0, 1), (1, 1), (1, 33), (33, 40))
    parts = {table: [rows.part(start, stop) for start, stop in bounds] for table, rows in chunk.items()}
    whole, joined = (b"".join(encode_chunk(each, encoding=encoding, bits=bits)) for each in (chunk, parts))
    assert whole == joined
    assert describe([memoryview(whole)], "x", chunk, shard="s") == describe([memoryview(whole)], "x", parts, shard="s")
    falling = {table: [rows.part(5, 9), rows.part(8, 9)] for table, rows in chunk.items()}
    with pytest.raises(AssertionError, match="do not rise"):
        encode_chunk(falling)


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("part", ["weight", "momentum1"])
def test_what_is_not_finite_needs_32_bits(strange: float, part: str) -> None:
    chunk = make(10)
    dict(chunk["a"].parts())[part][7, 3] = strange
    assert equal(decode_chunk(*(store_chunk(chunk)[i] for i in (0, 2, 1))), chunk)
    for bits in (8, 4):
        with pytest.raises(CheckpointError, match=rf"a/{part}: row {chunk['a'].ids[7]} is not finite") as caught:
            encode_chunk(chunk, bits=bits)
        assert "32 bits" in str(caught.value)


def test_huge_but_finite_is_not_strange() -> None:
    """A row whose sum overflows is looked at again."""
    chunk = make(10)
    chunk["a"].weight[3] = np.finfo(np.float32).max
    data, info, manifest = store_chunk(chunk, bits=8)
    assert np.array_equal(decode_chunk(data, manifest, info)["a"].weight[3], chunk["a"].weight[3])


@pytest.mark.parametrize("bad", [[np.nan, 0], [-1, 0], [1, np.inf]])
def test_a_scale_that_cannot_be(bad: list[float]) -> None:
    data, info, manifest = store_chunk(make(2), bits=8)
    tensors = safetensors.numpy.load(data)
    tensors["a/weight.range"][1] = bad
    other = safetensors.numpy.save(tensors)
    assert "cannot be" in refusal(other, manifest, describe_again(other, info))


def test_without_the_zstd_library(monkeypatch: pytest.MonkeyPatch) -> None:
    really = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "zstandard":
            raise ImportError(name)
        return really(name, *args, **kwargs)

    data, info, manifest = store_chunk(make(1), encoding="zstd")
    monkeypatch.setattr(builtins, "__import__", absent)
    for use in (lambda: encode_chunk(make(1), encoding="zstd"), lambda: decode_chunk(data, manifest, info)):
        with pytest.raises(UserError, match=r"pip install 'regrow\[zstd\]'"):
            use()


@pytest.mark.parametrize("chunk_bytes", [1, 100, 5000, 10**6])
@pytest.mark.parametrize("pieces", [1, 3])
def test_split(chunk_bytes: int, pieces: int) -> None:
    """All rows in order, no chunk too large unless it is a single row, none much too small."""
    whole = make(400)
    parts: list[Chunk] = []
    for name, rows in whole.items():
        cuts = [len(rows) * i // pieces for i in range(pieces + 1)]
        parts += [{name: rows.part(start, stop)} for start, stop in itertools.pairwise(cuts)]
    parts.insert(1, {"a": whole["a"].part(0, 0)})
    made = list(split(parts, chunk_bytes))
    joined = {name: chunks.concatenate([chunk[name] for chunk in made if name in chunk]) for name in whole}
    assert equal(joined, whole)
    sizes = [sum(rows.nbytes for rows in chunk.values()) for chunk in made]
    row_bytes_max = 4 + 16 * 4 + 16 * 4 + 4
    for chunk, size in zip(made, sizes, strict=True):
        assert size <= chunk_bytes or sum(map(len, chunk.values())) == 1
    least = chunk_bytes if pieces == 1 else chunk_bytes // 2  # half full, it does not copy rows to be full
    assert all(size > least - row_bytes_max for size in sizes[:-1])


def test_split_begins_a_chunk_where_ids_fall() -> None:
    rows = make(50)["a"]
    made = list(split([{"a": rows}, {"a": rows}], 10**6))
    assert [list(chunk) for chunk in made] == [["a"], ["a"]]
    assert all(equal(chunk, {"a": rows}) for chunk in made)
    assert list(split([])) == []


def test_split_does_not_copy() -> None:
    rows = make(400)["a"]
    for chunk in split([{"a": rows}], 5000):
        assert np.shares_memory(chunk["a"].weight, rows.weight)
