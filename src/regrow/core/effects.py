"""What a state machine asks its driver to do, and the three events all of them share.

Effects are run in the order given. Each machine adds its own, next to its own events.
"""

from __future__ import annotations

import dataclasses

from regrow.core.link import Identity
from regrow.core.messages import Message


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
class Send:
    """Effect: this message, to this peer, in order."""

    target: Identity
    message: Message


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Effect: tell the peer why, then close its link. Others are served on."""

    target: Identity
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """Effect: one line of the story."""

    text: str
