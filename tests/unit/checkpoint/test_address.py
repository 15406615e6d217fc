"""Goal: a cut behind an @ is told from an @ that belongs to a URL or a directory, the same for every command.

Method: a table of texts, and a directory whose name has an @ in it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from regrow.checkpoint.address import split_cut, whole_url
from regrow.errors import UserError

CUT = "0000000010-aaaaaa"


@pytest.mark.parametrize(
    ("text", "url", "cut"),
    [
        ("", "", None),
        ("runs/a", "runs/a", None),
        ("s3://bucket/run", "s3://bucket/run", None),
        # every way to name a cut
        (f"runs/a@{CUT}", "runs/a", CUT),
        ("runs/a@0000000010", "runs/a", "0000000010"),
        ("runs/a@10", "runs/a", "10"),
        ("runs/a@latest", "runs/a", "latest"),
        ("s3://bucket/run@10", "s3://bucket/run", "10"),
        # of the store that was named before
        ("@10", "", "10"),
        # a typo is a cut that is not there, and is answered with those that are
        ("runs/a@latst", "runs/a", "latst"),
        # an @ of the URL
        ("sftp://user@host/run", "sftp://user@host/run", None),
        ("s3://user@host/run", "s3://user@host/run", None),
        ("sftp://cafe@beef/run", "sftp://cafe@beef/run", None),
        ("sftp://user@host/run@10", "sftp://user@host/run", "10"),
        ("sftp://user@host", "sftp://user@host", None),
        ("s3://bucket@latest", "s3://bucket", "latest"),
        (f"memory://run@{CUT}", "memory://run", CUT),
        # of a directory on the way
        ("me@home/a@b/c", "me@home/a@b/c", None),
        ("me@home/a@b/c@10", "me@home/a@b/c", "10"),
    ],
)
def test_split_cut(text: str, url: str, cut: str | None) -> None:
    assert split_cut(text) == (url, cut)


def test_a_directory_that_is_there_is_no_cut(tmp_path: Path) -> None:
    there = tmp_path / "run@10"
    assert split_cut(str(there)) == (str(tmp_path / "run"), "10")
    there.mkdir()
    for text in (str(there), f"file://{there}"):
        assert split_cut(text) == (text, None)
        assert split_cut(f"{text}@7") == (text, "7")


@pytest.mark.parametrize("text", ["@", "runs/a@", "s3://bucket@", "sftp://user@host/run@"])
def test_a_cut_has_to_follow(text: str) -> None:
    with pytest.raises(UserError, match="a cut has to follow the @") as caught:
        split_cut(text)
    assert caught.value.hint == f"its id, its step or latest: {text}latest"


def test_some_commands_are_about_all_cuts() -> None:
    assert whole_url("sftp://me@host/run", "regrow ckpt ls") == "sftp://me@host/run"
    with pytest.raises(UserError, match="is about all cuts and takes a URL without @7") as caught:
        whole_url("runs/a@7", "regrow ckpt ls")
    assert caught.value.hint == "regrow ckpt ls runs/a"
