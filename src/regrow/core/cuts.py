"""Cuts, at the coordinator: when there is one, of what, and how it ended.

An attempt goes through `states.ATTEMPT`: every server says how far it is, the marks are named, all capture, all store,
the manifest is written. (`cut.py` has a server's part, and why it is done like that.) At most one attempt is under way.
There is a `Cuts` for each who wants cuts, checkpoints and publications; `turns.py` says whose turn it is.

The rules to keep: a checkpoint exists when its manifest does, and not before; anything that goes wrong (a death, a
storage that fails, marks that came too late) ends the attempt, and the next one has all rows again; a wish for a cut is
kept until it is fulfilled, whatever happens to the attempts that were made for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from regrow.core.checks import check_marks
from regrow.core.cut import CUT_SECONDS_MAX, PUBLICATION_TENANT, TENANT
from regrow.core.effects import Log, Notice, Send
from regrow.core.identity import Identity
from regrow.core.messages import CutAsk, CutAt, CutBegun, CutEnd, CutMarks, CutSaved
from regrow.core.names import STEP_MAX, cut_id, piece_name
from regrow.core.states import ATTEMPT, AttemptState, Life

STEPS_AHEAD = 4  # Synchronous: how far ahead a cut is named. Too few: it comes too late and is named again.
STEPS_AHEAD_MAX = 256
WHOLE_SECONDS = 1.0  # After a server was found to be on its way back: when to ask again.
# An attempt that takes longer is given up: a server that does not say how storing went, a manifest that is not written.
# Half as long as what is unfinished may lie about (`retention.UNFINISHED_SECONDS`), so that nobody can have deleted any
# of it when the manifest is written. Too small: a full that takes long is never made. Too large: a run whose storage
# hangs in a way that nobody noticed makes no checkpoints for so long.
ATTEMPT_SECONDS_MAX = 43200.0
# A publication is put off for saves that servers make by themselves; after so long they are ended for it. Too small:
# rows that partial recovery goes back to are older. Too large: so are those that look-ups get.
YIELD_SECONDS_MAX = 30.0
NAMES = {TENANT: "checkpoint", PUBLICATION_TENANT: "publication"}  # of notices
TERM = 1 << 32  # Cuts are numbered from term times this: a coordinator's successor counts above it.
GIVEN_UP_MAX = 100  # Pieces to be removed, remembered; a storage that is gone must not make this grow.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteManifest:
    """Effect of the coordinator: every server has stored its part; write the manifest, then say `ManifestWritten`."""

    number: int
    source: str | None
    target: str
    marks: tuple[int, ...]
    chunks: tuple[str, ...]  # by server
    discard: tuple[str, ...]  # pieces that were given up, and that nobody writes to any more
    tenant: int = TENANT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ManifestWritten:
    """Event at the coordinator: the checkpoint exists, or why not. `full_wanted`: the next one must stand alone."""

    number: int
    error: str = ""
    full_wanted: bool = False
    tenant: int = TENANT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CutNow:
    """Event at the coordinator: somebody asks for a cut. `still`: nobody trains, nothing will change any more."""

    full: bool = False
    still: bool = False
    tenant: int = TENANT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CutPlan:
    """When to cut, and what is stored. At most one of the two intervals is set; without any, only when asked."""

    every_seconds: float | None = None
    every_steps: int | None = None
    full_every: int = 1  # every so many cuts one stands alone; 1: all do
    pause: bool = False  # nobody trains while rows are stored: what others do, to compare with
    # The interval is counted from the instant of a cut, not from when it is stored; what takes longer than that has as
    # long a rest as it took.
    from_instant: bool = False


@dataclasses.dataclass(slots=True)
class Numbers:
    """Of attempts, rising."""

    last: int

    def take(self) -> int:
        self.last += 1
        return self.last


@dataclasses.dataclass(slots=True)
class Attempt:
    """A cut under way. Its life is `states.ATTEMPT`."""

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
    life: Life[AttemptState] = dataclasses.field(default_factory=lambda: Life(ATTEMPT))

    @property
    def piece(self) -> str:
        """What is stored of it, by its two ends."""
        return piece_name(self.source, self.target)


Effect = Send | Log | WriteManifest | Notice


class Cuts:
    """The coordinator's part: when there is a cut, of what, and how it ended."""

    def __init__(
        self,
        plan: CutPlan,
        *,
        is_sync: bool,
        marks: int,
        term: int,
        salt: str,
        head: str | None = None,
        goes_back: bool = False,
        tenant: int = TENANT,
        numbers: Numbers | None = None,
    ) -> None:
        """`marks`: how many say where a server is. `goes_back`: the rows of a server that was replaced may be older
        than in the last cut, or as they were made, which no delta can say: the next one stands alone. `numbers`: of
        attempts, shared by all who make cuts of the same servers."""
        self.tenant = tenant
        self.plan = plan
        self.head = head  # the cut that the next delta starts from,
        self.head_marks: tuple[int, ...] | None = None  # and where it was made
        self.stood_at: int | None = None  # the step that nobody trains beyond, if the cut named last is of an end
        self.count = 0
        self.failed = 0
        self._is_sync = is_sync
        self._marks = marks
        self._numbers = numbers or Numbers(term * TERM)
        self._salt = salt
        self._goes_back = goes_back
        self._gone_back = False  # since the last cut
        self._peers: dict[int, Identity] = {}
        self._attempt: Attempt | None = None
        self._since_full = 0
        self._full_wanted = True  # the first one stands alone
        self._wanted: CutNow | None = None
        self._given_up: list[str] = []
        self._quiet_until = 0.0
        self._yields_until: float | None = None  # since it is put off for what goes first
        self._ahead = STEPS_AHEAD
        self._step = 0
        self._due_step = plan.every_steps or 0
        self._due_at: float | None = None
        self._due_since: float | None = None  # that it was, and could begin
        self._now = 0.0

    def want(self, now: CutNow) -> list[Effect]:
        """Somebody asks for a cut. One that waits for a step that will not come is given up for it."""
        void = self.free_steps() if now.still else []
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
        self._gone_back |= self._goes_back and before != {}
        self._full_wanted |= self._gone_back
        return self._abandon("a server died", before) if self._attempt is not None else []

    @property
    def is_underway(self) -> bool:
        return self._attempt is not None

    @property
    def waits_since(self) -> float | None:
        """Since when a cut is due that could be under way; None: none is."""
        return self._due_since

    @property
    def wants_still(self) -> bool:
        return self._wanted is not None and self._wanted.still

    def give_way(self, reason: str) -> list[Effect]:
        """Somebody else has waited too long: what is under way is given up, and comes again in its time."""
        return self._abandon(reason, self._peers)

    def free_steps(self) -> list[Effect]:
        """Nobody trains any more: what waits for a step that will not come is given up, and is wanted again."""
        attempt = self._attempt
        if attempt is None or attempt.begun:
            return []
        return self._abandon("", self._peers, again=True)

    def tick(self, now: float, *, may_begin: bool = True) -> list[Effect]:
        self._now = now
        if self._due_at is None and self.plan.every_seconds is not None:
            self._due_at = now + self.plan.every_seconds
        attempt = self._attempt
        if attempt is None:
            if not self._peers or now < self._quiet_until or not self._due():
                self._due_since = None
                return []
            self._due_since = now if self._due_since is None else self._due_since
            return self._begin() if may_begin else []
        if now - attempt.began > ATTEMPT_SECONDS_MAX:
            return self._abandon(f"it was not stored within {ATTEMPT_SECONDS_MAX:.0f} s", self._peers)
        # A step may take its time. Pushes that are held back must not.
        waits = attempt.life.state is AttemptState.CUTTING and not self._is_sync
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
        number, self._due_since = self._numbers.take(), None
        wanted, self._wanted = self._wanted, None
        full = self._full_wanted or self._since_full + 1 >= self.plan.full_every or (wanted is not None and wanted.full)
        still = wanted is not None and wanted.still
        self._attempt = Attempt(number=number, full=full, wanted=wanted, still=still, began=self._now)
        ask = CutAsk(number=number, yields=self._yields(still))
        return [Send(target=peer, message=ask) for peer in self._peers.values()]

    def _yields(self, still: bool) -> bool:
        """Whether saves of single servers go first: not for ever, and not when they do not matter any more."""
        if self.tenant == TENANT or still:
            return False
        if self._yields_until is None:
            self._yields_until = self._now + YIELD_SECONDS_MAX
        return self._now < self._yields_until

    def on_marks(self, server: int, message: CutMarks) -> list[Effect]:
        attempt = self._of(server, message.number)
        if attempt is None or attempt.life.state is not AttemptState.ASKING:
            return []
        if message.error:
            return self._put_off(attempt)
        check_marks(message.marks, self._marks, most=STEP_MAX - STEPS_AHEAD_MAX - (self.plan.every_steps or 0))
        attempt.marks[server] = message.marks
        if len(attempt.marks) < len(self._peers):
            return []
        most = tuple(max(each) for each in zip(*attempt.marks.values(), strict=True))
        attempt.at = self._step_ahead(most[0], attempt) if self._is_sync else most
        attempt.at_since = self._now
        self.stood_at = max(attempt.at) if attempt.still else None
        attempt.life.move("all told their marks")
        if attempt.still and attempt.at == self.head_marks and not self._gone_back:
            attempt.life.move("nothing new")
            return self._end(attempt, durable=False)  # it was made already
        attempt.source = None if attempt.full else self.head
        attempt.target = cut_id(min(attempt.at), f"{self._salt}/{attempt.number}")
        self._yields_until = None
        at = CutAt(
            number=attempt.number,
            marks=attempt.at,
            piece=attempt.piece,
            full=attempt.full,
            pause=self.plan.pause,
            tenant=self.tenant,
        )
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
        if attempt is None or attempt.life.state is not AttemptState.CUTTING:
            return []
        if message.late:
            self._ahead = min(2 * self._ahead, STEPS_AHEAD_MAX)
            return self._abandon("", self._peers, again=True)
        attempt.begun.add(server)
        attempt.begun_seconds = self._now - attempt.began
        if len(attempt.begun) < len(self._peers):
            return []
        attempt.life.move("all have captured")
        values = {"status": "begun", "cut": attempt.target, "kind": "full" if attempt.full else "delta"}
        return [Notice(name=NAMES[self.tenant], values=values)]

    def on_saved(self, server: int, message: CutSaved) -> list[Effect]:
        attempt = self._of(server, message.number)
        if attempt is None or server not in attempt.begun or attempt.life.state is AttemptState.WRITING:
            return []
        if message.error:
            return self._abandon(f"S{server}: {message.error}", self._peers)
        attempt.chunks[server] = message.chunks.tobytes().decode()
        if len(attempt.chunks) < len(self._peers):
            return []
        assert attempt.at is not None
        attempt.life.move("all have stored")
        chunks = tuple(attempt.chunks[each] for each in sorted(attempt.chunks))
        write = WriteManifest(
            number=attempt.number,
            source=attempt.source,
            target=attempt.target,
            marks=attempt.at,
            chunks=chunks,
            discard=tuple(self._given_up),
            tenant=self.tenant,
        )
        self._given_up.clear()
        return [write]

    def on_manifest_written(self, written: ManifestWritten) -> list[Effect]:
        attempt = self._attempt
        self._full_wanted |= written.full_wanted
        if attempt is None or attempt.number != written.number:
            return []  # it may exist, but nobody starts from it
        if written.error:
            return self._abandon(written.error, self._peers)
        attempt.life.move("manifest written")
        self.head, self.head_marks = attempt.target, attempt.at
        self.count += 1
        self._full_wanted = written.full_wanted
        self._gone_back = False
        self._since_full = 0 if attempt.full else self._since_full + 1
        self._plan_next(attempt)
        return [Log(text=f"{NAMES[self.tenant]} {attempt.target}"), *self._end(attempt, durable=True)]

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
        return [*ends, Notice(name=NAMES[self.tenant], values=values)]

    def _plan_next(self, attempt: Attempt) -> None:
        every, took = self.plan.every_seconds, self._now - attempt.began
        if every is not None:
            self._due_at = self._now + every
        if every is not None and self.plan.from_instant:
            self._due_at = self._now + (took if took > every else every - took)
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
        if attempt.target and attempt.life.state is not AttemptState.WRITING:  # else it may exist by now
            self._given_up = [*self._given_up, attempt.piece][-GIVEN_UP_MAX:]
        attempt.life.move("given up")
        end = CutEnd(number=attempt.number, durable=False)
        effects: list[Effect] = [Send(target=peer, message=end) for peer in told.values()]
        if again and self._wanted is None:
            self._wanted = CutNow(full=attempt.full, still=attempt.still)
        if again:
            return effects
        self.failed += 1
        self._plan_next(attempt)
        name = NAMES[self.tenant]
        values = {"status": "failed", "reason": reason, "failed": self.failed, "still": attempt.still}
        return [*effects, Log(text=f"no {name}: {reason}"), Notice(name=name, values=values)]
