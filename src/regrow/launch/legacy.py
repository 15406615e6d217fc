"""A launcher follows one that died: what is kept for it, who is in office then, and which numbers it may give.

    launcher --memo--> all places            what is decided: whose place, from where, which failures so far
    child    --reports--> its place          the last of each kind is kept there (`Ledger`)
    successor: asks all places, takes the newest memo, and of each role and number the highest incarnation (`settle`)

A place that cannot be asked may hold an incarnation that nobody else remembers: a spare that was promoted a moment ago,
on the node that was lost together with the launcher. So the numbers of launchers do not touch: each has a block of its
own (`number_block`), and needs to remember nothing to give none twice. Launchers are numbered by whoever starts them.

Pure: values in, values out. Who asks, over what, is in `launch/ray_posts.py`; how a run goes on in
`launch/takeover.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from regrow.core.identity import Identity
from regrow.launch.orders import Assignment
from regrow.launch.reports import Evaluated

# Incarnations that one launcher may give to one place. Too small: a place whose processes die for weeks ends the run.
# Too large: numbers that nobody can read in the name of a log.
NUMBERS_PER_LAUNCHER = 10_000
LINE_BYTES_MAX = 1 << 18  # a longer report is not kept; none but a script's words for a checkpoint is ever so long
# News of the moment: a successor needs none of it.
FLEETING = frozenset(("answer", "said", "merge", "stopped", "tallied", "concluded", "loading", "recalling"))
# What is about somebody else is kept for each of these.
ABOUT = ("peer", "server")


def number_block(launcher: int) -> range:
    """The incarnations that this launcher may give. The first one's begin with 0."""
    return range(launcher * NUMBERS_PER_LAUNCHER, (launcher + 1) * NUMBERS_PER_LAUNCHER)


# -- what is kept --------------------------------------------------------------------------------------------


class _Report(msgspec.Struct):
    event: str
    peer: Any = None
    server: Any = None


class _Command(msgspec.Struct):
    do: str


_reports = msgspec.json.Decoder(_Report)
_commands = msgspec.json.Decoder(_Command)


def _parse(line: bytes) -> _Report | None:
    """None: a library printed it."""
    try:
        return _reports.decode(line)
    except ValueError:
        return None


class Ledger:
    """What one process said and was told, as far as a successor of the launcher needs it."""

    def __init__(self) -> None:
        self.said: dict[str, bytes] = {}  # the last line of each kind, in the order of these
        self.told: set[str] = set()
        self.pending = b""  # a line of which the end has not come

    def begin(self) -> None:
        """It is somebody else from now on: what a spare said is of no interest."""
        self.said.clear()
        self.told.clear()

    def note_said(self, chunk: bytes) -> list[str | None]:
        """The kind of each line that is whole by now; None for one that is no report."""
        kinds: list[str | None] = []
        *lines, self.pending = (self.pending + chunk).split(b"\n")
        for line in lines:
            report = _parse(line)
            kinds.append(None if report is None else report.event)
            if report is not None and report.event not in FLEETING and len(line) <= LINE_BYTES_MAX:
                about = [str(value) for name in ABOUT if (value := getattr(report, name)) is not None]
                key = " ".join([report.event, *about])
                self.said.pop(key, None)  # the newest is the last
                self.said[key] = line
        if len(self.pending) > LINE_BYTES_MAX:
            self.pending = b""
        return kinds

    def note_told(self, data: bytes) -> None:
        for line in data.split(b"\n"):
            try:
                command = _commands.decode(line)
            except ValueError:
                continue  # an assignment
            self.told.add(command.do)
            if command.do == "conclude":  # it does not wait there any more
                self.said.pop("ready to judge", None)


class Memo(msgspec.Struct, frozen=True, kw_only=True):
    """What a launcher leaves in every place, each time that it has changed. The token is kept beside it."""

    run: str
    directory: str
    started_at: float  # seconds since 1970
    phase: str
    template: Assignment  # what every process of this attempt is told, but for who it is
    office: tuple[Identity, ...]
    start: dict[str, Any] | None  # the checkpoint that this attempt began with,
    asked: dict[str, Any] | None  # and the one that the user asked for
    restores: list[dict[str, Any]]
    cuts_dead: list[str]
    checkpoints: dict[str, Any]
    failures: list[dict[str, Any]]
    evaluated: Evaluated | None = None
    not_saved: tuple[str, str | None] | None = None


_memos = msgspec.json.Decoder(Memo)


def encode_memo(memo: Memo) -> bytes:
    return msgspec.json.encode(memo)


def parse_memo(data: bytes) -> Memo:
    """ValueError for what is none."""
    return _memos.decode(data)


# -- who is in office ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """`office`: of every place, the newest that is known of, dead or alive. `lost`: of these, who did not answer.
    `zombies` answer, and another has their place."""

    office: tuple[Identity, ...]
    spares: tuple[Identity, ...]
    lost: tuple[Identity, ...]
    zombies: tuple[Identity, ...]

    def __str__(self) -> str:
        here = len(self.office) - len(self.lost)
        words = [f"{here} of {len(self.office)} processes answer"]
        words += [f"{len(self.spares)} spare{'s' if len(self.spares) > 1 else ''} too"] if self.spares else []
        return ", ".join(words)


def settle(
    found: Iterable[Identity],
    *,
    places: Sequence[tuple[str, int]],
    remembered: Iterable[Identity],
    spare_roles: Iterable[str],
) -> Settled:
    """Who is in office, of those that answered (`found`) and those that the dead launcher wrote down."""
    here = list(found)
    newest: dict[tuple[str, int], Identity] = {}
    for who in (*remembered, *here):
        place = (who.role, who.id)
        if place not in newest or who.incarnation > newest[place].incarnation:
            newest[place] = who
    office = tuple(newest.get(place) or Identity(role=place[0], id=place[1]) for place in places)
    spares = tuple(who for who in here if who.role in spare_roles)
    return Settled(
        office=office,
        spares=spares,
        lost=tuple(who for who in office if who not in here),
        zombies=tuple(who for who in here if who not in office and who not in spares),
    )
