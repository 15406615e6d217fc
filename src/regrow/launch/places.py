"""What a lead and its places say to each other: `regrow lead`, and `regrow serve` on every host.

    lead  -> place      run this process; pass it a command; end, stop or go on with it; leave
    place -> lead       here I am; what the process says; it is gone

A place runs one process at a time, an ordinary child (`launch/child.py`) behind pipes, and passes on what is said both
ways. Every process has a number, given by the lead: what is about another one comes too late, and is dropped. The token
never travels: a place has its own, from its file, and puts it into what its process is assigned.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from regrow.core.identity import Identity
from regrow.launch.orders import AnyCommand, Assignment

LEAD = Identity(role="lead", id=0)
PLACE_ROLES = ("coordinator", "server", "worker", "standby")
PLACES_MAX = 1 << 16  # of a role
COUNTED_FROM = 1_735_689_600  # the first second of 2025

Signal = Literal["terminate", "kill", "pause", "resume"]


class Saying(msgspec.Struct, frozen=True, kw_only=True, tag_field="say", omit_defaults=True):
    """Either way."""


class Run(Saying, frozen=True, kw_only=True, tag="run"):
    """Start this process. Whatever ran here before is ended."""

    number: int
    assignment: Assignment


class Pass(Saying, frozen=True, kw_only=True, tag="pass"):
    """Tell it this."""

    number: int
    command: AnyCommand


class Send(Saying, frozen=True, kw_only=True, tag="signal"):
    number: int
    signal: Signal


class Leave(Saying, frozen=True, kw_only=True, tag="leave"):
    """The run is over; how it went is known at the lead."""


class Arrived(Saying, frozen=True, kw_only=True, tag="arrived"):
    """A place is here, for this; where its host is reached, and where logs are."""

    role: str
    id: int
    host: str
    logs: str


class Passed(Saying, frozen=True, kw_only=True, tag="passed"):
    """What the process said."""

    number: int
    line: str


class Gone(Saying, frozen=True, kw_only=True, tag="gone"):
    """The process has ended; everything it said came before this."""

    number: int
    code: int
    cpu_seconds: float
    peak_rss_bytes: int
    last_words: str | None = None


ToPlace = Run | Pass | Send | Leave
ToLead = Arrived | Passed | Gone

_encoder = msgspec.json.Encoder()
_to_place: msgspec.json.Decoder[ToPlace] = msgspec.json.Decoder(ToPlace)
_to_lead: msgspec.json.Decoder[ToLead] = msgspec.json.Decoder(ToLead)


def number_start() -> int:
    """An incarnation for somebody who was started by others, larger than any before: tenths of seconds, in 32 bits."""
    return int(10 * (time.time() - COUNTED_FROM)) & 0xFFFFFFFF


def encode_saying(saying: Saying) -> bytes:
    return _encoder.encode(saying)


def parse_to_place(line: bytes) -> ToPlace:
    """ValueError for what is none."""
    return _to_place.decode(line)


def parse_to_lead(line: bytes) -> ToLead:
    """ValueError for what is none."""
    return _to_lead.decode(line)


def identify_place(role: str, id: int, incarnation: int) -> Identity:
    """Of one who keeps a place. A place that is started again is somebody else, with a larger incarnation."""
    return Identity(role="place", id=PLACE_ROLES.index(role) * PLACES_MAX + id, incarnation=incarnation)
