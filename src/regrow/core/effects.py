"""What a state machine asks its driver to do, and the events all of them share.

Effects are run in the order given. Each machine adds its own, next to its own events.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from regrow.core.identity import Identity
from regrow.core.messages import Message
from regrow.errors import Refusal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Event: a link to `peer` is open."""

    peer: Identity


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """Event: a message arrived on the link from `source`."""

    source: Identity
    message: Message


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Event: the link to `peer` is gone."""

    peer: Identity
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Event: time has passed; `now` is in seconds and only its differences mean anything."""

    now: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """Event at the coordinator: the process of `peer` is known to be gone (somebody saw it end)."""

    peer: Identity


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Effect: this message, to this peer, in order."""

    target: Identity
    message: Message


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Effect: tell the peer why, then close its link for good. Others are served on."""

    target: Identity
    reason: str
    kind: Refusal = Refusal.FOR_GOOD


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Effect: one line of the story."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """Effect: open a link to `peer`, which listens at `address`; keep trying until it is forgotten."""

    peer: Identity
    address: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Effect: this incarnation is over: drop its link and whatever is queued for it, never accept it again."""

    peer: Identity


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Effect: this process must end; it was replaced, or cannot go on."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replace:
    """Effect of the coordinator: `peer` counts as dead; end what is left of it and start its successor."""

    peer: Identity
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Condemn:
    """Effect of the coordinator: `peer` was waited for as long as the user said; end it, whatever is lost with it."""

    peer: Identity
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Effect: something worth showing, by name, with plain values."""

    name: str
    values: dict[str, Any]
