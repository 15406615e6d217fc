"""What a planted bug is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Bug:
    """What is patched: `patch(original)` makes the wrong method out of the right one."""

    what: str
    owner: Any
    method: str
    patch: Callable[[Any], Any]
    profiles: tuple[str, ...]
    caught_by: tuple[str, ...]  # the invariants that see it; found by any other, the plant or the checks are wrong
