"""A cut: one instant at which the rows of all servers fit together, so that they can be stored as one checkpoint.

The coordinator asks (`CutAsk`), every server says what it has applied (`CutMarks`), the coordinator names the marks at
which all shall cut (`CutAt`), and each server captures its rows when it has applied exactly those. Asynchronously,
pushes beyond them are held back until then: one exchange of messages. Synchronously the marks are a step that is still
to come, and nobody waits. What was captured is stored while training goes on (`CutSaved`), then the coordinator writes
the manifest and tells everybody (`CutEnd`).

The rules to keep: a server forgets that rows changed only when it is told that they are stored; anything that goes
wrong (a death, a storage that fails, a cut that comes too late) ends the attempt, and the next one has all rows again.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from regrow.core.effects import Log, Notice, Send
from regrow.core.link import Identity
from regrow.core.messages import CutAsk, CutAt, CutBegun, CutEnd, CutMarks, CutSaved

STEPS_AHEAD = 4  # Synchronous: how far ahead a cut is named. Too few: it comes too late and is named again.
STEPS_AHEAD_MAX = 256
CUT_SECONDS_MAX = 2.0  # Asynchronous: pushes are held back for so long at most, say because a worker died.
HOLD_SECONDS_MAX = 2 * CUT_SECONDS_MAX  # The same at a server, which may hear nothing more of it.
WHOLE_SECONDS = 1.0  # After a server was found to be on its way back: when to ask again.
GIVEN_UP_MAX = 100  # Pieces to be removed, remembered; a storage that is gone must not make this grow.
TENANT = 0  # of the rows' dirty bits: the checkpointer

Applied = Sequence[Sequence[int]]


# --- What drivers do, and tell -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Effect of a server: its rows are captured; store them as part of this piece, then say `Saved`."""

    number: int
    piece: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unsave:
    """Effect of a server: whatever is being stored of this cut is void."""

    number: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Event at a server: all captured rows are stored in these chunks (JSON), or why not."""

    number: int
    chunks: str = ""
    error: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteManifest:
    """Effect of the coordinator: every server has stored its part; write the manifest, then say `ManifestWritten`."""

    number: int
    source: str | None
    target: str
    marks: tuple[int, ...]
    chunks: tuple[str, ...]  # by server
    discard: tuple[str, ...]  # pieces that were given up, and that nobody writes to any more


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ManifestWritten:
    """Event at the coordinator: the checkpoint exists, or why not. `full_wanted`: the next one must stand alone."""

    number: int
    error: str = ""
    full_wanted: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CutNow:
    """Event at the coordinator: somebody asks for a cut. `still`: nobody trains, nothing will change any more."""

    full: bool = False
    still: bool = False


# --- A server ------------------------------------------------------------------------------------------------


class CaptureStore(Protocol):
    """What a cut needs of the store."""

    def begin_capture(self, tenant: int, full: bool) -> None: ...
    def end_capture(self, durable: bool) -> None: ...


class CutSide:
    """One server's part: at most one cut at a time. `applied` has, by group of rows, the last push of each worker."""

    def __init__(self, *, store: CaptureStore, is_sync: bool) -> None:
        self.number = 0  # of the newest cut heard of
        self.captures = 0
        self._store = store
        self._is_sync = is_sync
        self._asked = False  # asynchronous: everything is held back until the marks are known
        self._at: tuple[Identity, CutAt] | None = None  # the marks are known
        self._capturing = False
        self._held_since: float | None = None
        self.pausing = False  # nothing is applied before the cut is over

    def tick(self, now: float) -> bool:
        """Whether pushes were held back for too long, and are not any more: a coordinator may be stopped."""
        if not self._asked and (self._at is None or self._is_sync):
            self._held_since = None
            return False
        if self._held_since is None:
            self._held_since = now
        if now - self._held_since <= HOLD_SECONDS_MAX:
            return False
        self._asked, self._at, self._held_since = False, None, None
        return True

    def holds(self, worker: int, seq: int) -> bool:
        """Whether this push must not be applied yet."""
        if self.pausing or self._is_sync:
            return self.pausing
        return self._asked or (self._at is not None and seq > self._at[1].marks[worker])

    def on_ask(self, source: Identity, ask: CutAsk, applied: Applied, *, whole: bool) -> list[Send | Unsave]:
        """Where this server is. Whatever was under way before is over: there is one cut at a time."""
        if ask.number <= self.number:
            return []
        void = self.give_up()
        self.number = ask.number
        if not whole:
            sorry = CutMarks(number=ask.number, marks=(), error="a server is still coming back")
            return [*void, Send(target=source, message=sorry)]
        self._asked = not self._is_sync
        marks = tuple(max(each) for each in zip(*applied, strict=True))
        return [*void, Send(target=source, message=CutMarks(number=ask.number, marks=marks))]

    def on_at(self, source: Identity, at: CutAt, applied: Applied) -> list[Send | Save]:
        if at.number != self.number or self._at is not None or self._capturing:
            return []
        if any(len(at.marks) != len(marks) for marks in applied):
            raise ValueError(f"a cut at {len(at.marks)} marks, this server has {len(applied[0])}")
        self._asked = False
        if any(have > wanted for marks in applied for have, wanted in zip(marks, at.marks, strict=True)):
            return [Send(target=source, message=CutBegun(number=at.number, late=True))]
        self._at = (source, at)
        return self.reached(applied)

    def reached(self, applied: Applied) -> list[Send | Save]:
        """More was applied: is this the instant?"""
        if self._at is None or any(tuple(marks) != self._at[1].marks for marks in applied):
            return []
        (source, at), self._at = self._at, None
        self._store.begin_capture(TENANT, at.full)
        self._capturing = True
        self.pausing = at.pause
        self.captures += 1
        return [Send(target=source, message=CutBegun(number=at.number)), Save(number=at.number, piece=at.piece)]

    def on_saved(self, target: Identity, saved: Saved) -> list[Send]:
        """What was captured is stored, or cannot be."""
        if saved.number != self.number or not self._capturing:
            return []
        chunks = np.frombuffer(saved.chunks.encode(), np.uint8)
        message = CutSaved(number=saved.number, error=saved.error[:4000], chunks=chunks)
        return [Send(target=target, message=message)]

    def on_end(self, end: CutEnd) -> list[Unsave]:
        """The cut is over. Unless what was captured is stored, it counts as changed again."""
        if end.number != self.number:
            return []
        if end.durable and self._capturing:
            self._store.end_capture(True)
            self._capturing = self.pausing = False
        return self.give_up()

    def give_up(self) -> list[Unsave]:
        """Nobody will hear of this cut again."""
        self._asked, self._at, self.pausing = False, None, False
        if not self._capturing:
            return []
        self._capturing = False
        self._store.end_capture(False)
        return [Unsave(number=self.number)]


# --- The coordinator -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CutPlan:
    """When to cut, and what is stored. At most one of the two intervals is set; without any, only when asked."""

    every_seconds: float | None = None
    every_steps: int | None = None
    full_every: int = 1  # every so many cuts one stands alone; 1: all do
    pause: bool = False  # nobody trains while rows are stored: what others do, to compare with


@dataclasses.dataclass(slots=True)
class Attempt:
    """A cut under way: asked -> at (the marks are named) -> begun everywhere -> saved everywhere -> published."""

    number: int
    full: bool
    wanted: CutNow | None  # somebody asked for it
    still: bool  # nobody trains: all servers are where they will stay
    began: float
    marks: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    at: tuple[int, ...] | None = None
    at_since: float = 0.0
    source: str | None = None
    target: str = ""
    begun: set[int] = dataclasses.field(default_factory=set)
    begun_seconds: float = 0.0
    chunks: dict[int, str] = dataclasses.field(default_factory=dict)
    publishing: bool = False


Effect = Send | Log | WriteManifest | Notice


class Cuts:
    """The coordinator's part: when there is a cut, of what, and how it ended."""

    def __init__(self, plan: CutPlan, *, is_sync: bool, term: int, salt: str, head: str | None = None) -> None:
        self.plan = plan
        self.head = head  # the cut that the next delta starts from,
        self.head_marks: tuple[int, ...] | None = None  # and where it was made
        self.count = 0
        self.failed = 0
        self._is_sync = is_sync
        self._number = term << 32
        self._salt = salt
        self._peers: dict[int, Identity] = {}
        self._attempt: Attempt | None = None
        self._since_full = 0
        self._full_wanted = True  # the first one stands alone
        self._wanted: CutNow | None = None
        self._given_up: list[str] = []
        self._quiet_until = 0.0
        self._ahead = STEPS_AHEAD
        self._step = 0
        self._due_step = plan.every_steps or 0
        self._due_at: float | None = None
        self._now = 0.0

    def want(self, now: CutNow) -> list[Effect]:
        """Somebody asks for a cut. One that waits for a step that will not come is given up for it."""
        void: list[Effect] = []
        if now.still and self._attempt is not None and not self._attempt.begun:
            void = self._abandon("", self._peers, again=True)
        self._wanted = now
        return void

    def on_step(self, step: int) -> None:
        """Some server has come so far."""
        self._step = max(step, self._step)

    def know(self, peers: dict[int, Identity] | None) -> list[Effect]:
        """Who the servers are; None while one of them is not whole. What was under way with others is over."""
        if peers == self._peers:
            return []
        before, self._peers = self._peers, peers or {}
        return self._abandon("a server died", before) if self._attempt is not None else []

    def tick(self, now: float) -> list[Effect]:
        self._now = now
        if self._due_at is None and self.plan.every_seconds is not None:
            self._due_at = now + self.plan.every_seconds
        attempt = self._attempt
        if attempt is None:
            return self._begin() if self._peers and now >= self._quiet_until and self._due() else []
        # A step may take its time. Pushes that are held back must not.
        waits = attempt.at is not None and not self._is_sync and len(attempt.begun) < len(self._peers)
        if waits and now - attempt.at_since > CUT_SECONDS_MAX:
            return self._abandon("a worker was not heard of", self._peers)
        return []

    def _due(self) -> bool:
        if self._wanted is not None:
            return True
        if self.plan.every_steps is not None:
            return self._step >= self._due_step - (self._ahead if self._is_sync else 0)
        return self._due_at is not None and self._now >= self._due_at

    def _begin(self) -> list[Effect]:
        self._number += 1
        wanted, self._wanted = self._wanted, None
        full = self._full_wanted or self._since_full + 1 >= self.plan.full_every or (wanted is not None and wanted.full)
        still = wanted is not None and wanted.still
        self._attempt = Attempt(number=self._number, full=full, wanted=wanted, still=still, began=self._now)
        return [Send(target=peer, message=CutAsk(number=self._number)) for peer in self._peers.values()]

    def on_marks(self, server: int, message: CutMarks) -> list[Effect]:
        attempt = self._of(server, message.number)
        if attempt is None or attempt.at is not None:
            return []
        if message.error:
            return self._put_off(attempt)
        attempt.marks[server] = message.marks
        if len(attempt.marks) < len(self._peers):
            return []
        most = tuple(max(each) for each in zip(*attempt.marks.values(), strict=True))
        attempt.at = self._step_ahead(most[0], attempt) if self._is_sync else most
        attempt.at_since = self._now
        if attempt.still and attempt.at == self.head_marks:
            return self._end(attempt, durable=False)  # it was made already
        attempt.source = None if attempt.full else self.head
        attempt.target = cut_name(min(attempt.at), f"{self._salt}/{attempt.number}")
        piece = f"{attempt.target}.{attempt.source or 'full'}"
        at = CutAt(number=attempt.number, marks=attempt.at, piece=piece, full=attempt.full, pause=self.plan.pause)
        return [Send(target=peer, message=at) for peer in self._peers.values()]

    def _step_ahead(self, step: int, attempt: Attempt) -> tuple[int, ...]:
        """Synchronous: a step that no server has made yet, and that is asked for if steps are."""
        if attempt.still:
            return (step,)
        every = self.plan.every_steps
        if every is None:
            return (step + self._ahead,)
        late = self._ahead - STEPS_AHEAD  # the next multiple, or a later one after that has come too late
        return ((step + late) // every * every + every,)

    def on_begun(self, server: int, message: CutBegun) -> list[Effect]:
        attempt = self._of(server, message.number)
        if attempt is None:
            return []
        if message.late:
            self._ahead = min(2 * self._ahead, STEPS_AHEAD_MAX)
            return self._abandon("", self._peers, again=True)
        attempt.begun.add(server)
        attempt.begun_seconds = self._now - attempt.began
        if len(attempt.begun) < len(self._peers):
            return []
        values = {"status": "begun", "cut": attempt.target, "kind": "full" if attempt.full else "delta"}
        return [Notice(name="checkpoint", values=values)]

    def on_saved(self, server: int, message: CutSaved) -> list[Effect]:
        attempt = self._of(server, message.number)
        if attempt is None or attempt.publishing:
            return []
        if message.error:
            return self._abandon(f"S{server}: {message.error}", self._peers)
        attempt.chunks[server] = message.chunks.tobytes().decode()
        if len(attempt.chunks) < len(self._peers):
            return []
        assert attempt.at is not None
        attempt.publishing = True
        chunks = tuple(attempt.chunks[each] for each in sorted(attempt.chunks))
        publish = WriteManifest(
            number=attempt.number,
            source=attempt.source,
            target=attempt.target,
            marks=attempt.at,
            chunks=chunks,
            discard=tuple(self._given_up),
        )
        self._given_up.clear()
        return [publish]

    def on_manifest_written(self, published: ManifestWritten) -> list[Effect]:
        attempt = self._attempt
        self._full_wanted |= published.full_wanted
        if attempt is None or attempt.number != published.number:
            return []  # it may exist, but nobody starts from it
        if published.error:
            return self._abandon(published.error, self._peers)
        self.head, self.head_marks = attempt.target, attempt.at
        self.count += 1
        self._full_wanted = published.full_wanted
        self._since_full = 0 if attempt.full else self._since_full + 1
        self._plan_next()
        return [Log(text=f"checkpoint {attempt.target}"), *self._end(attempt, durable=True)]

    def _end(self, attempt: Attempt, *, durable: bool) -> list[Effect]:
        """Well: what was wanted is stored."""
        self._attempt = None
        values: dict[str, Any] = {"status": "saved", "cut": self.head, "still": attempt.still, "count": self.count}
        if durable:
            values["kind"] = "full" if attempt.full else "delta"
            values["seconds"] = round(self._now - attempt.began, 3)
            values["cut_seconds"] = round(attempt.begun_seconds, 3)
        end = CutEnd(number=attempt.number, durable=durable)
        ends: list[Effect] = [Send(target=peer, message=end) for peer in self._peers.values()]
        return [*ends, Notice(name="checkpoint", values=values)]

    def _plan_next(self) -> None:
        if self.plan.every_seconds is not None:
            self._due_at = self._now + self.plan.every_seconds
        if self.plan.every_steps is not None:
            self._due_step = (self._step // self.plan.every_steps + 1) * self.plan.every_steps

    def _of(self, server: int, number: int) -> Attempt | None:
        """The cut under way, if this is about it."""
        attempt = self._attempt
        return attempt if attempt is not None and attempt.number == number and server in self._peers else None

    def _put_off(self, attempt: Attempt) -> list[Effect]:
        """Not now, and nothing went wrong: a server is still loading, or not quite back."""
        wanted = self._wanted
        effects = self._abandon("", self._peers, again=True)
        self._wanted = wanted or attempt.wanted
        self._quiet_until = self._now + WHOLE_SECONDS
        return effects

    def _abandon(self, reason: str, told: Mapping[int, Identity], *, again: bool = False) -> list[Effect]:
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        if attempt.target and not attempt.publishing:  # else it may exist by now
            self._given_up = [*self._given_up, f"{attempt.target}.{attempt.source or 'full'}"][-GIVEN_UP_MAX:]
        end = CutEnd(number=attempt.number, durable=False)
        effects: list[Effect] = [Send(target=peer, message=end) for peer in told.values()]
        if again and self._wanted is None:
            self._wanted = CutNow(full=attempt.full, still=attempt.still)
        if again:
            return effects
        self.failed += 1
        self._plan_next()
        values = {"status": "failed", "reason": reason, "failed": self.failed, "still": attempt.still}
        return [*effects, Log(text=f"no checkpoint: {reason}"), Notice(name="checkpoint", values=values)]


def cut_name(step: int, salt: str) -> str:
    """A name that sorts by step, and differs for every cut of every run."""
    return f"{step:010d}-{hashlib.sha256(salt.encode()).hexdigest()[:6]}"
