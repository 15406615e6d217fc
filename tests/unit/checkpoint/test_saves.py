"""Goal: names, manifests and chains of saves: what cannot be is refused, and the newest state has the right ones.

Method: manifests by hand; every byte of one is changed.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from save_worlds import OWNER, chain_names, name, save_of
from worlds import TABLES

from regrow.checkpoint import saves
from regrow.checkpoint.manifest import MANIFEST
from regrow.checkpoint.saves import Chain, IdsInfo, decode_save, encode_save, find_chain, need_full
from regrow.core import names
from regrow.core.names import is_save_name, is_save_path, parse_saves_run, save_name, saves_directory
from regrow.errors import CheckpointError

# -- names and manifests ---------------------------------------------------------------------------------


def test_names() -> None:
    assert save_name(3, 17) == "0000000003-0000000017"
    assert is_save_name(save_name(0, 1)) and not any(map(is_save_name, ("", "1-2", "0000000003-", "manifest.json")))
    assert saves_directory("1f", 2, "s0of1") == "saves/1f.2/s0of1"
    assert saves_directory("1f", 2) == "saves/1f.2"
    assert parse_saves_run("1f.2") == ("1f", 2)
    assert [parse_saves_run(text) for text in ("1f", "1f.", ".2", "a/b.1", "1f.x")] == [None] * 5
    assert is_save_path(f"{OWNER.directory}/{save_name(0, 1)}")
    assert not any(map(is_save_path, ("", OWNER.directory, f"x/{save_name(0, 1)}", f"saves/../s/{save_name(0, 1)}")))
    for wrong in (("a/b", 0, "s"), ("..", 0, "s"), ("a", -1, "s"), ("a", 0, "s/t"), ("", 0, "s")):
        with pytest.raises(CheckpointError, match="cannot be the name of a directory"):
            saves_directory(*wrong)
    with pytest.raises(CheckpointError, match="cannot be part of a name"):
        save_name(0, 10**names.SAVE_DIGITS)


def test_a_manifest_comes_back_and_one_that_differs_in_any_byte_is_refused() -> None:
    made = save_of(1, 2, parent=name(0, 7), size=10)
    data = encode_save(made)
    assert decode_save(data, made.name) == made
    for at in range(len(data)):
        with pytest.raises(CheckpointError, match=made.name):
            decode_save(bytes([*data[:at], data[at] ^ 1, *data[at + 1 :]]), made.name)
    for size in range(len(data)):
        with pytest.raises(CheckpointError, match=made.name):
            decode_save(data[:size], made.name)
    with pytest.raises(CheckpointError, match="is the manifest of"):
        decode_save(data, f"{OWNER.directory}/{name(1, 3)}")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"format": 2}, "format 2"),
        ({"run": "a/b"}, "cannot be"),
        ({"marks": (1, -1)}, "negative"),
        ({"updates": -1}, "negative"),
        ({"parent": name(1, 2)}, "is not a save before"),
        ({"parent": "x"}, "is not a save before"),
        ({"full": True}, "full and has a parent"),
        ({"base": "x"}, "is not a cut"),
        ({"created": float("inf")}, "created at"),
        ({"ids": None}, "where their ids are"),
        ({"ids": IdsInfo(bytes=-1, crc32c=0)}, "bytes of ids"),
        ({"shard": "s1of2"}, "a chunk of"),
    ],
)
def test_manifests_that_cannot_be(fields: dict[str, Any], words: str) -> None:
    made = msgspec.structs.replace(save_of(1, 2, parent=name(0, 7), size=10), **fields)
    with pytest.raises(CheckpointError, match=words):
        encode_save(made)


# -- chains ----------------------------------------------------------------------------------------------


FULL, DELTA = save_of(0, 1, full=True), save_of(0, 2, parent=name(0, 1))
CLAIM = save_of(1, 1, parent=name(0, 2))


def test_the_newest_save_back_to_a_full() -> None:
    older = save_of(0, 0, full=True)
    assert find_chain([], OWNER) is None
    assert find_chain([save_of(0, 1, full=True, shard="s1of2")], OWNER) is None
    assert chain_names(find_chain([DELTA, older, FULL], OWNER)) == [name(0, 2), name(0, 1)]
    again = save_of(0, 3, full=True)
    assert chain_names(find_chain([DELTA, again, FULL], OWNER)) == [name(0, 3)]


def test_what_a_predecessor_writes_after_a_claim_is_in_no_chain() -> None:
    late = [save_of(0, 3, parent=name(0, 2)), save_of(0, 4, full=True)]
    assert chain_names(find_chain([FULL, DELTA, CLAIM, *late], OWNER)) == [name(1, 1), name(0, 2), name(0, 1)]
    further = save_of(2, 1, parent=name(1, 1))
    assert chain_names(find_chain([FULL, DELTA, CLAIM, *late, further], OWNER))[:2] == [name(2, 1), name(1, 1)]


def test_a_link_that_is_not_there_is_named() -> None:
    with pytest.raises(CheckpointError, match=f"{name(0, 1)}/{MANIFEST} is not there, and {name(0, 2)} follows it"):
        find_chain([DELTA, CLAIM], OWNER)
    with pytest.raises(CheckpointError, match=f"{name(0, 1)}/{MANIFEST} cannot be read"):
        find_chain([DELTA, CLAIM], OWNER, broken={name(0, 1): "damaged"})
    with pytest.raises(CheckpointError, match="there is no other save"):
        find_chain([], OWNER, broken=[name(0, 1)])
    other = save_of(0, 1, full=True, tables=TABLES[:1])
    with pytest.raises(CheckpointError, match="has other tables"):
        find_chain([other, DELTA], OWNER)


def test_one_that_was_cut_short_is_passed_over() -> None:
    chain = find_chain([FULL, DELTA], OWNER, broken=[name(0, 3), name(1, 1)])
    assert chain == Chain((DELTA, FULL), (name(0, 3), name(1, 1)))


def test_below_a_chain_without_a_full_is_the_cut_that_the_run_went_on_from() -> None:
    cut = "0000000007-abcdef"
    claim = save_of(1, 1, base=cut)
    assert Chain((claim,)).base == cut
    assert Chain((save_of(0, 1, full=True, base=cut),)).base is None


def test_when_a_save_has_to_be_a_full() -> None:
    full = save_of(0, 1, full=True, size=100)
    small = save_of(0, 2, parent=name(0, 1), size=40)
    assert need_full(None) == (True, "it is the first")
    assert need_full(Chain((CLAIM,))) == (True, "there is no full yet")
    assert need_full(Chain((full,)))[0] is False
    assert need_full(Chain((small, small, full))) == (False, "2 saves, 80 bytes since a full of 100")
    assert need_full(Chain((small, small, small, full))) == (
        True,
        "120 bytes since the last full are more than its 100",
    )
    many = Chain((*[CLAIM] * saves.SAVES_SINCE_FULL_MAX, full))
    assert need_full(many) == (True, "64 saves since the last full are enough")
    assert need_full(Chain(many.saves[1:]))[0] is False
