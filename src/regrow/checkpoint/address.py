"""`URL@CUT`, as people name a checkpoint: in `regrow ckpt ...`, in `--resume` and in `at=`.

The cut behind the @ is its id, the beginning of one, its step, or `latest`; which cut is meant is for
`lineage.Graph.choose` to say, once the manifests were read. Here only the two are told apart. The rule: what follows
the last @ is a cut, unless there is a slash in it (sftp://me@host/run), unless it is the host of a URL that ends there
(sftp://me@host), and unless the whole is a directory that is there (run@home).
"""

from __future__ import annotations

import re
from pathlib import Path

from regrow.checkpoint.bounded import ask
from regrow.errors import UserError

LATEST = "latest"

_SCHEME = re.compile(r"\A[A-Za-z][A-Za-z0-9+.-]*://")
_LOCAL = re.compile(r"\A(file|local)://")
_CUT_LIKE = re.compile(rf"[0-9a-f-]+|{LATEST}")


def split_cut(text: str) -> tuple[str, str | None]:
    """(URL, cut); None: none was named. UserError for an @ with nothing behind it."""
    url, at, cut = text.rpartition("@")
    if not at or "/" in cut or _is_host(url, cut) or _is_directory(text):
        return text, None
    if not cut:
        raise UserError(f"{text}: a cut has to follow the @", hint=f"its id, its step or {LATEST}: {url}@{LATEST}")
    return url, cut


def whole_url(text: str, command: str) -> str:
    """For commands that are about all cuts."""
    url, cut = split_cut(text)
    if cut is not None:
        raise UserError(f"`{command}` is about all cuts and takes a URL without @{cut}", hint=f"{command} {url}")
    return url


def local_path(url: str) -> Path:
    """Of a URL that is a directory of this machine."""
    return Path(_LOCAL.sub("", url)).expanduser()


def _is_host(url: str, cut: str) -> bool:
    """Whether the @ stands where a URL names its user. A bucket has no user: s3://bucket@latest is a cut, and so is
    whatever looks like one."""
    scheme = _SCHEME.match(url)
    return scheme is not None and "/" not in url[scheme.end() :] and bool(cut) and not _CUT_LIKE.fullmatch(cut)


def _is_directory(text: str) -> bool:
    is_local = _SCHEME.match(text) is None or _LOCAL.match(text) is not None
    return is_local and ask(f"look at {text}", local_path(text).is_dir)
