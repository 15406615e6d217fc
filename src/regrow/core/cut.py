"""A cut, at a server: the instant at which its rows are captured, so that those of all servers fit together.

Theory of operation. A checkpoint of many servers is only worth something if it is a state that existed: all of it after
the same pushes. Nobody can stop all servers at one moment, so the moment is named in pushes instead. The coordinator
(`cuts.py`) asks every server how far it is (`CutAsk`, `CutMarks`), takes the most of all answers as the marks, and
tells everybody (`CutAt`): capture your rows when you have applied exactly these. Each server gets there by itself.

Synchronously the marks are a step that is still to come, and every server passes it: nobody waits. Asynchronously a
server may be asked while pushes are on their way, and must not run past the marks that it does not know yet: from the
question to the answer it holds all pushes back, and after that those beyond the marks, until it has all up to them.
That is one exchange of messages. A worker that died with a push sent to some servers only would hold everybody for
ever, so the hold ends by itself (`HOLD_SECONDS_MAX`), and the cut with it.

Capturing itself copies nothing: the store notes what belongs to the instant, and sets a row aside when it changes
before it was stored. So training goes on while the driver stores what was captured (`Save`, then `Saved`). What is set
aside is looked at with every change, not when the driver comes for more: a storage that hangs never does.

A store that keeps checkpoints in its own files (`Batched`) has nothing to hand over: at the instant it counts its
*epoch* up, rows of before are on its disk after a while, and then the server says so like any other.

Cuts are made for two: checkpoints, and publications, the weights for those who answer look-ups. To a server they differ
in whose dirty bits are captured, and in who stores what was captured; who comes when is the coordinator's matter
(`turns.py`), and there is one cut at a time, of either.

What breaks without the rules:
- If a server said so before its rows are on the disk, or let go of the older epoch before all servers have the newer, a
  crash of all would find no checkpoint that everybody has. It lets go with `CutEnd{durable}` (`commit_epoch`).
- If the capture of one tenant made rows clean to the other, the other's next delta would lack them. Each has its bits.
- If a server forgot that rows changed when it has stored them, a checkpoint that fails elsewhere would take them along,
  and the next delta would lack them. It forgets when it is told that the checkpoint exists (`CutEnd{durable}`).
- If an answer about an older cut counted for the newest, parts of two instants would be mixed. Everything is numbered,
  and a newer question ends what was before.
- If a coordinator that died kept pushes held, nobody would train. A new coordinator, and the clock, both end the hold.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import msgspec
import numpy as np

from regrow.core.checks import check_marks
from regrow.core.effects import Send
from regrow.core.identity import Identity
from regrow.core.messages import CutAsk, CutAt, CutBegun, CutEnd, CutMarks, CutSaved
from regrow.core.names import is_piece_name
from regrow.core.states import CUT, CutState, Life
from regrow.store.interface import CapturedRows, PagedRows

CUT_SECONDS_MAX = 2.0  # Asynchronous: pushes are held back for so long at most, say because a worker died.
HOLD_SECONDS_MAX = 2 * CUT_SECONDS_MAX  # The same at a server, which may hear nothing more of it.
# Of the rows' dirty bits: those who have cuts made. (1 is a server's own saves, `recall.SAVES_TENANT`.)
TENANT = 0  # checkpoints
PUBLICATION_TENANT = 2  # weights for those who answer look-ups
TENANTS = (TENANT, PUBLICATION_TENANT)
# Of records set aside because they changed before they were stored. Above it the cut is given up: training has the
# memory. Too small: a storage that is a bit slow never gets a checkpoint.
ASIDE_BYTES_MAX = 1 << 30

# A store without space says so; if its checkpoint is not whole so long after it was to be, it is given up. Too small:
# one that is about to be whole, and would free some, is lost. Too large: the next one comes later.
FULL_SECONDS_MAX = 5.0

Applied = Sequence[Sequence[int]]  # by group of rows: the last push of each worker, or the last step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """Effect of a server: its rows are captured; store them as part of this piece, then say `Saved`."""

    number: int
    piece: str
    tenant: int = TENANT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unsave:
    """Effect of a server: whatever is being stored of this cut is void."""

    number: int
    tenant: int = TENANT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Event at a server: all captured rows are stored in these chunks (JSON), or why not."""

    number: int
    chunks: str = ""
    error: str = ""


class EpochPart(msgspec.Struct, frozen=True, kw_only=True):
    """A server's part of such a checkpoint, in `CutSaved` and the manifest: which epoch of its files it is."""

    epoch: int


class CutSide:
    """One server's part: at most one cut at a time. Its life is `states.CUT`."""

    def __init__(
        self, *, store: CapturedRows, holds_pushes: bool, epochs: PagedRows | None = None, flush_seconds: float = 0.0
    ) -> None:
        """`holds_pushes`: asynchronously a cut needs that; synchronously it names a step that all will pass.
        `epochs`: the store, where checkpoints stay in its files; they are to be written within `flush_seconds`."""
        self.life = Life(CUT)
        self.number = 0  # of the newest cut heard of
        self.captures = 0
        self._store = store
        self._holds_pushes = holds_pushes
        self._at: CutAt | None = None  # of the cut that is awaited or captured
        self._coordinator: Identity | None = None  # who wants it
        self._held_since: float | None = None
        self._files = epochs
        self._epochs: PagedRows | None = None  # the same, while the cut that is captured stays there
        self._flush_seconds = flush_seconds
        self._epoch = 0  # of the cut that is captured
        self._epoch_until: float | None = None  # when it is to be on disk
        self._epoch_told = False
        self._full_since: float | None = None  # the store says that it has no space
        self._is_hopeless = False  # the epoch will never be on disk

    @property
    def is_pausing(self) -> bool:
        """Nothing is applied before the cut is over: what was captured is being stored, and the plan wants a pause."""
        return self.life.state is CutState.CAPTURED and self._at is not None and self._at.pause

    def tick(self, now: float) -> bool:
        """Whether pushes were held back for too long, and are not any more: a coordinator may be stopped."""
        if not self._holds_pushes or self.life.state not in (CutState.ASKED, CutState.AWAITING):
            self._held_since = None
            return False
        if self._held_since is None:
            self._held_since = now
        if now - self._held_since <= HOLD_SECONDS_MAX:
            return False
        self.life.move("held too long")
        self._held_since = None
        return True

    def holds(self, worker: int, seq: int) -> bool:
        """Whether this push must not be applied yet."""
        state = self.life.state
        if state is CutState.IDLE:
            return False
        if state is CutState.CAPTURED:
            return self.is_pausing
        if state is CutState.ASKED:
            return self._holds_pushes
        assert self._at is not None
        return self._holds_pushes and seq > self._at.marks[worker]

    def on_ask(
        self, source: Identity, ask: CutAsk, applied: Applied, *, whole: bool, busy: bool = False
    ) -> list[Send | Unsave]:
        """Where this server is. Whatever was under way before is over: there is one cut at a time. `busy`: it has
        something to store that goes first."""
        if ask.number <= self.number:
            return []
        void = self.give_up()
        self.number = ask.number
        if not whole or busy:
            why = "a server stores a save of its own" if whole else "a server is still coming back"
            sorry = CutMarks(number=ask.number, marks=(), error=why)
            return [*void, Send(target=source, message=sorry)]
        self.life.move("asked")
        marks = tuple(max(each) for each in zip(*applied, strict=True))
        return [*void, Send(target=source, message=CutMarks(number=ask.number, marks=marks))]

    def on_at(self, source: Identity, at: CutAt, applied: Applied) -> list[Send | Save]:
        if at.number != self.number or self.life.state in (CutState.AWAITING, CutState.CAPTURED):
            return []
        check_marks(at.marks, len(applied[0]))
        if at.tenant not in TENANTS:
            raise ValueError(f"nobody has cuts made as tenant {at.tenant}")
        if not is_piece_name(at.piece):
            raise ValueError(f"{at.piece[:80]!r} is not the name of a piece")
        late = [Send(target=source, message=CutBegun(number=at.number, late=True))]
        if self.life.state is CutState.IDLE:
            return [*late]  # pushes were held for too long, and went on
        if any(have > wanted for marks in applied for have, wanted in zip(marks, at.marks, strict=True)):
            self.life.move("too late")
            return [*late]
        self.life.move("marks named")
        self._coordinator, self._at = source, at
        return self.check_marks(applied)

    def check_marks(self, applied: Applied) -> list[Send | Save]:
        """More was applied: is this the instant?"""
        if self.life.state is not CutState.AWAITING:
            return []
        at, target = self._at, self._coordinator
        assert at is not None and target is not None
        if any(tuple(marks) != at.marks for marks in applied):
            return []
        self.captures += 1
        self._epochs = self._files if at.tenant == TENANT else None
        if self._epochs is not None:
            self._epoch, self._epoch_until, self._epoch_told = self._epochs.begin_epoch(), None, False
            self._full_since, self._is_hopeless = None, False
            self.life.move("marks reached")
            return [Send(target=target, message=CutBegun(number=at.number)), *self.check_complete()]
        self._store.begin_capture(at.tenant, at.full)
        self.life.move("marks reached")
        save = Save(number=at.number, piece=at.piece, tenant=at.tenant)
        return [Send(target=target, message=CutBegun(number=at.number)), save]

    def check_complete(self) -> list[Send]:
        """The disk has more than before: all rows of the epoch? Then the server's part is stored."""
        if self._epochs is None or self._epoch_told or self.life.state is not CutState.CAPTURED:
            return []
        is_complete = self._epochs.poll_complete() >= self._epoch
        if not is_complete and not self._is_hopeless:
            return []
        error = "" if is_complete else "there is no space left for the files of rows"
        self._epoch_told = True
        target = self._coordinator
        assert target is not None
        chunks = np.frombuffer(b"" if error else msgspec.json.encode(EpochPart(epoch=self._epoch)), np.uint8)
        return [Send(target=target, message=CutSaved(number=self.number, error=error, chunks=chunks))]

    def hasten(self, now: float) -> None:
        """Tells the store how much time is left for the rows of an epoch."""
        if self._epochs is None or self._epoch_told or self.life.state is not CutState.CAPTURED:
            return
        if self._epoch_until is None:
            self._epoch_until = now + self._flush_seconds
        self._epochs.hasten(self._epoch, max(0.0, self._epoch_until - now))
        report = self._epochs.tier_report()
        if report.get("full") and self._full_since is None:
            self._full_since = now  # for this epoch: a store tries again and again, and is full in between
        until = None if self._full_since is None else max(self._full_since, self._epoch_until) + FULL_SECONDS_MAX
        is_full = until is not None and now > until
        self._is_hopeless = is_full or report.get("epoch_spoiled", 0) >= self._epoch

    def check_aside(self) -> list[Send | Unsave]:
        """Rows have changed: what had to be set aside for the cut must not take the memory of training."""
        if self.life.state is not CutState.CAPTURED or self._epochs is not None:
            return []
        aside_bytes = self._store.capture_side_bytes()
        if aside_bytes <= ASIDE_BYTES_MAX:
            return []
        target = self._coordinator
        assert target is not None
        error = f"storage is too slow: {aside_bytes >> 20} MiB of rows changed meanwhile"
        none = np.zeros(0, np.uint8)
        return [*self.give_up(), Send(target=target, message=CutSaved(number=self.number, error=error, chunks=none))]

    def on_saved(self, target: Identity, saved: Saved) -> list[Send]:
        """What was captured is stored, or cannot be."""
        if saved.number != self.number or self.life.state is not CutState.CAPTURED:
            return []
        chunks = np.frombuffer(saved.chunks.encode(), np.uint8)
        message = CutSaved(number=saved.number, error=saved.error[:4000], chunks=chunks)
        return [Send(target=target, message=message)]

    def on_end(self, end: CutEnd) -> list[Unsave]:
        """The cut is over. Unless what was captured is stored, it counts as changed again."""
        if end.number != self.number:
            return []
        if end.durable and self.life.state is CutState.CAPTURED:
            if self._epochs is not None:
                self._epochs.commit_epoch(self._epoch)
            else:
                self._store.end_capture(True)
            self.life.move("over")
        return self.give_up()

    def give_up(self) -> list[Unsave]:
        """Nobody will hear of this cut again."""
        captured = self.life.state is CutState.CAPTURED
        if self.life.state is not CutState.IDLE:
            self.life.move("over")
        if not captured or self._epochs is not None:  # an epoch that nobody commits is followed by the next
            return []
        self._store.end_capture(False)
        assert self._at is not None
        return [Unsave(number=self.number, tenant=self._at.tenant)]
