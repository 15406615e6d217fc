"""Known bugs, put back on purpose."""
from __future__ import annotations
import contextlib
from collections.abc import Iterator
from typing import Any
BUGS: dict[str, Any] = {}
@contextlib.contextmanager
def plant(name: str | None) -> Iterator[None]:
    yield
