"""What a state machine asks its driver to do, and the events all of them share.

Effects are run in the order given. Each machine adds its own, next to its own events.
"""

from __future__ import annotations

from typing import Any

import msgspec

from regrow.core.identity import Identity
from regrow.core.messages import Message
from regrow.errors import Refusal


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """Event: a link to `peer` is open."""

    peer: Identity


class Delivered(msgspec.Struct, frozen=True, kw_only=True):
    """Event: a message arrived on the link from `source`."""

    source: Identity
    message: Message


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """Event: the link to `peer` is gone."""

    peer: Identity
    reason: str


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Event: time has passed; `now` is in seconds and only its differences mean anything."""

    now: float


class Died(msgspec.Struct, frozen=True, kw_only=True):
    """Event at the coordinator: the process of `peer` is known to be gone (somebody saw it end)."""

    peer: Identity


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: this message, to this peer, in order."""

    target: Identity
    message: Message


class Refuse(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: tell the peer why, then close its link for good. Others are served on."""

    target: Identity
    reason: str
    kind: Refusal = Refusal.FOR_GOOD


class Log(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: one line of the story."""

    text: str


class Dial(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: open a link to `peer`, which listens at `address`; keep trying until it is forgotten."""

    peer: Identity
    address: str


class Forget(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: this incarnation is over: drop its link and whatever is queued for it, never accept it again."""

    peer: Identity


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: this process must end; it was replaced, or cannot go on."""

    reason: str


class Replace(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of the coordinator: `peer` counts as dead; end what is left of it and start its successor."""

    peer: Identity
    reason: str


class Condemn(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of the coordinator: `peer` was waited for as long as the user said; end it, whatever is lost with it."""

    peer: Identity
    reason: str


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: something worth showing, by name, with plain values."""

    name: str
    values: dict[str, Any]
