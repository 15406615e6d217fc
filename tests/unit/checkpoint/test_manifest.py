"""Goal: a manifest is believed as a whole or refused with its name: torn, flipped, of another format, or impossible.

Method: one manifest with everything in it goes through the file and back. Then every truncation and every single
flipped bit of a small one is tried, and each rule is broken once, behind a right checksum.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from regrow import _kernels
from regrow.checkpoint.manifest import ChunkInfo, Cut, Manifest, TableInfo, chunk_name, decode, encode
from regrow.core.names import cut_id, is_piece_name, parse_piece_name, piece_name
from regrow.errors import CheckpointError

OLD, NEW = cut_id(100, "a"), cut_id(200, "a")
TABLE = TableInfo(name="ads/clicks", rows=1000, dim=8, states=(("momentum1", 1),), init_bound=0.125, index=3)
CHUNK = ChunkInfo(name="s0of2-00000.safetensors", bytes=4096, crc32c=2**32 - 1, rows={"ads/clicks": 7}, shard="s0of2")


def cut(**changes: Any) -> Cut:
    plain = {"job": {"seed": 1}, "extra": {"α": [1, None]}}
    values = {"id": NEW, "step": 200, "marks": (199, 200), "created": 1.5, **plain}
    return Cut(**{**values, **changes})


def manifest(**changes: Any) -> Manifest:
    values = {
        "source": OLD,
        "target": cut(),
        "tables": (TABLE,),
        "seed": 5,
        "chunks": (CHUNK, msgspec.structs.replace(CHUNK, name="s1of2-00000.safetensors", shard="s1of2")),
        "folded": (piece_name(None, OLD),),
        "made_by": "a test",
    }
    return Manifest(**{**values, **changes})


def seal(body: bytes) -> bytes:
    """A file whose checksum is right, whatever is in it."""
    return b'{"crc32c":"%08x","manifest":' % _kernels.crc32c(body) + body + b"}\n"


def refusal(data: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        decode(data, "there/manifest.json")
    assert caught.value.message.startswith("there/manifest.json: ")
    return caught.value.message.removeprefix("there/manifest.json: ")


def test_names() -> None:
    assert OLD.startswith("0000000100-")
    assert cut_id(100, "a") == OLD != cut_id(100, "b")
    assert sorted([cut_id(10, 0), cut_id(9, 0), cut_id(11, 0)]) == [cut_id(9, 0), cut_id(10, 0), cut_id(11, 0)]
    for source in (None, OLD):
        assert parse_piece_name(piece_name(source, NEW)) == (source, NEW)
    assert chunk_name("s2of4", 7, "zstd") == "s2of4-00007.safetensors.zst"
    for step in (-1, 10**10):
        with pytest.raises(CheckpointError, match="cannot be part of a name"):
            cut_id(step, 0)


@pytest.mark.parametrize(
    "name", ["", "x", NEW, f"{NEW}.", f"{NEW}.fulll", f"{NEW}.{OLD}.tmp", f"../{NEW}.full", f"{NEW}.full\n"]
)
def test_other_names_are_not_pieces(name: str) -> None:
    assert not is_piece_name(name)
    with pytest.raises(CheckpointError, match="not the name of a piece"):
        parse_piece_name(name)


def test_there_and_back() -> None:
    for each in (manifest(), manifest(source=None, chunks=(), tables=(), folded=())):
        data = encode(each)
        assert decode(data, "there") == each
        assert msgspec.json.decode(data)["manifest"]["format"] == 1  # it is plain JSON to everybody else
    assert manifest().name == f"{NEW}.{OLD}"
    assert manifest().bytes == 8192
    assert manifest().rows == 14
    assert [manifest(bits=bits).exact for bits in (32, 8, 4)] == [True, False, False]


def test_every_truncation_and_every_flipped_bit_is_refused() -> None:
    data = encode(manifest(folded=(), tables=(), chunks=()))
    for length in range(len(data)):
        refusal(data[:length])
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            refusal(bytes(flipped))
    refusal(data + b"\n")
    refusal(data + data)
    refusal(b"")
    refusal(bytes(len(data)))


def test_another_format_is_named() -> None:
    body = b'{"format":2,"whatever":{"it":"has"}}'
    assert refusal(seal(body)) == "format 2 is not known; this Regrow reads format 1"


def test_what_is_not_a_manifest_behind_a_right_checksum() -> None:
    assert "cannot be read" in refusal(seal(b"[]"))
    assert "cannot be read" in refusal(seal(b'{"format":1}'))
    assert "cannot be read" in refusal(seal(b'{"format":"1"}'))
    assert "cannot be read" in refusal(seal(b"[" * 100_000))
    assert "cannot be read" in refusal(seal(b"\xff"))


def chunk(**changes: Any) -> dict[str, Any]:
    return {"chunks": (msgspec.structs.replace(CHUNK, **changes),)}


def table(**changes: Any) -> dict[str, Any]:
    return {"tables": (msgspec.structs.replace(TABLE, **changes),)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"source": NEW}, "from a cut to itself"),
        ({"source": "x"}, "not a cut"),
        ({"target": cut(id="0000000200-zzzzzz")}, "not the id of a cut"),
        ({"target": cut(step=201)}, "says it is of step 201"),
        ({"target": cut(marks=(-1,))}, "negative mark"),
        ({"folded": ("x",)}, "which is not a piece"),
        ({"tables": (TABLE, TABLE)}, "same name or index"),
        (table(dim=0), "cannot be"),
        (table(rows=2**32), "cannot be"),
        (table(states=(("weight", 1),)), "same name"),
        (table(states=(("a/b", 1),)), "cannot be"),
        (table(states=(("a", 0),)), "cannot be"),
        ({"chunks": (CHUNK, CHUNK)}, "same name"),
        (chunk(name="../s0of2-00000.safetensors"), "not named"),
        (chunk(name="manifest.json"), "not named"),
        (chunk(name="s0of2-00000.safetensors.zst"), "not named"),
        (chunk(shard="a/b"), "shard"),
        (chunk(bytes=-1), "cannot be"),
        (chunk(crc32c=2**32), "cannot be"),
        (chunk(rows={"other": 1}), "not one of the tables"),
        (chunk(rows={"ads/clicks": 1001}), "has 1001 rows"),
    ],
)
def test_each_rule_on_both_sides(changes: dict[str, Any], reason: str) -> None:
    wrong = manifest(**changes)
    with pytest.raises(CheckpointError, match="this cannot be a manifest") as caught:
        encode(wrong)
    assert reason in caught.value.message
    assert reason in refusal(seal(msgspec.json.encode(wrong)))


@pytest.mark.parametrize("value", [math.nan, [math.inf], {"a": {"b": -math.inf}}, {1: 2}, object(), b"x"])
def test_what_json_would_change_is_refused(value: Any) -> None:
    for field in ("job", "extra"):
        with pytest.raises(CheckpointError, match="this cannot be a manifest"):
            encode(manifest(target=cut(**{field: {"x": value}})))
    with pytest.raises(CheckpointError, match="init_bound is nan"):
        encode(manifest(tables=(msgspec.structs.replace(TABLE, init_bound=math.nan),)))
