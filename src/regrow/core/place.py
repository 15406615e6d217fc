"""A place in the view, as the coordinator sees it: who is in it, and when it was last heard of.

Facts and times only. What follows from them (who is doubted, who counts as dead, what is lost) is the coordinator's to
say, and so is what time it is.
"""

from __future__ import annotations

import dataclasses

from regrow.core.identity import Identity
from regrow.core.messages import Member, Ready, Unanswered
from regrow.core.states import MEMBER, Life, MemberState

STEADY_SECONDS = 5.0  # A longer silence than this may be why it owes others an answer: they wait anew.


@dataclasses.dataclass(slots=True)
class Place:
    """One server of the view: who is in it, and how it is. Its life is `states.MEMBER`."""

    member: Member | None = None
    life: Life[MemberState] = dataclasses.field(default_factory=lambda: Life(MEMBER))
    heard: float | None = None  # when it last said something
    closed: float | None = None  # when its connection closed
    has_news: bool = False  # one of the two was since the last tick
    doubted: float | None = None  # since when it is waited for, although it seems dead: its loss would be one of rows
    condemned: bool = False  # ... and no longer
    answered: int = 0  # the last of the coordinator's questions that it has answered
    brought: int = 0  # what it has said of its way back, and
    brought_at: float | None = None  # when that was last more than before; None: it is not on one
    unanswered: Unanswered | None = None  # whom it cannot reach, as it says
    steady_since: float = 0.0  # since when it was heard again and again, without a long silence
    reason: str = ""  # why it counts as dead
    ready: Ready | None = None

    @property
    def is_dead(self) -> bool:
        return self.life.state is MemberState.DEAD

    @property
    def is_down(self) -> bool:
        """Does not count towards tolerance."""
        return self.is_dead or (self.member is not None and self.member.recovering)

    @property
    def means_silence(self) -> bool:
        """Whether it means something if nothing is heard: it has its rows in memory, and beats."""
        return self.life.state in (MemberState.SERVING, MemberState.RETURNING)

    def is_filled_by(self, peer: Identity) -> bool:
        return self.member is not None and self.member.identity == peer

    def fill(self, member: Member, cause: str, now: float | None) -> None:
        """Somebody is in this place from now on."""
        if not self.is_filled_by(member.identity):
            self.answered = 0
        self.member = member
        self.life.move(cause)
        self.heard, self.closed, self.has_news, self.doubted, self.condemned = now, None, True, None, False
        self.brought, self.brought_at = 0, None
        self.unanswered, self.steady_since = None, now or 0.0

    def die(self, reason: str) -> None:
        self.life.move("died")
        self.reason, self.ready, self.heard, self.closed, self.doubted = reason, None, None, None, None
        self.unanswered = None

    def hear(self, now: float) -> None:
        """It said something."""
        if not self.is_steady(now):
            self.steady_since = now
        self.heard, self.closed, self.has_news = now, None, True

    def is_steady(self, now: float) -> bool:
        """Whether it was heard a moment ago."""
        return self.heard is not None and now <= self.heard + STEADY_SECONDS

    def lose(self, now: float) -> None:
        """Its connection closed."""
        self.closed, self.has_news = now, True

    def catch_up(self, before: float, now: float) -> None:
        """What happened since the tick before counts from this one. Time is known by ticks only: if they are rare, what
        has just happened would seem to be as old as the last of them."""
        if self.has_news:
            self.heard = now if self.heard == before else self.heard
            self.closed = now if self.closed == before else self.closed
            self.has_news = False

    def skip(self, seconds: float, now: float) -> None:
        """This time does not count against it."""
        self.heard = None if self.heard is None else min(now, self.heard + seconds)
        self.closed = None if self.closed is None else min(now, self.closed + seconds)
        self.doubted = None if self.doubted is None else self.doubted + seconds
        self.brought_at = None if self.brought_at is None else self.brought_at + seconds

    def note_progress(self, brought: int, now: float) -> None:
        """Of its way back, if it is on one."""
        if self.life.state is not MemberState.RETURNING:
            self.brought_at = None
        elif self.brought_at is None or brought > self.brought:
            self.brought, self.brought_at = brought, now
