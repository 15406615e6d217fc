"""The lives of everything that has one: its states, each with a sentence, and its table of moves.

Whoever lives such a life holds a `Life` and says what has happened (`life.move("lost")`); the table says what it is
then. A cause that the table does not know in that state is a bug here, never a peer's doing: what peers say is checked
before it moves anything. The diagrams in docs/protocol.md are drawn from these tables (`make diagrams`), and the
simulator fails a run in which a forbidden move is tried.

To change a life is to change its table, and to read it here is to know all of it.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Generic, TypeVar


class ForbiddenMove(AssertionError):
    """Something happened in a state in which it cannot happen."""


class State(enum.Enum):
    """A state; its value is the sentence that explains it."""

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


S = TypeVar("S", bound=State)


@dataclasses.dataclass(frozen=True, slots=True)
class Moves(Generic[S]):
    """One table: (from, cause, to). The first state named is where a life begins, unless it says otherwise."""

    title: str
    rows: tuple[tuple[S, str, S], ...]
    by_cause: dict[tuple[S, str], S] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        table = {(source, cause): target for source, cause, target in self.rows}
        assert len(table) == len(self.rows), f"{self.title}: two moves for one cause"
        object.__setattr__(self, "by_cause", table)

    @property
    def states(self) -> type[S]:
        return type(self.rows[0][0])


class Life(Generic[S]):
    """Where somebody is in such a table. `life.state is X` asks; `life.move(cause)` moves."""

    __slots__ = ("moves", "state")

    def __init__(self, moves: Moves[S], state: S | None = None) -> None:
        self.moves = moves
        self.state: S = moves.rows[0][0] if state is None else state

    def __repr__(self) -> str:
        return f"<{self.moves.title}: {self.state}>"

    def move(self, cause: str) -> None:
        target = self.moves.by_cause.get((self.state, cause))
        if target is None:
            raise ForbiddenMove(f"{self.moves.title}: {cause!r} cannot happen while {self.state}")
        self.state = target


# --- A link between two incarnations (core/link.py) ------------------------------------------------------------


class LinkState(State):
    NEW = "no connection was ever open; what is sent waits for the first one"
    OPEN = "a connection carries its frames"
    BROKEN = "the connection is gone; frames are kept, and the next connection goes on where this one stopped"
    OVER = "the incarnation at the other end is over, or was refused for good: nothing is sent to it or heard of it"


LINK = Moves(
    "a link",
    (
        (LinkState.NEW, "opened", LinkState.OPEN),
        # The other end may notice a broken connection first, and come with a new one.
        (LinkState.OPEN, "opened", LinkState.OPEN),
        (LinkState.OPEN, "lost", LinkState.BROKEN),
        (LinkState.BROKEN, "opened", LinkState.OPEN),
        (LinkState.NEW, "fenced", LinkState.OVER),
        (LinkState.OPEN, "fenced", LinkState.OVER),
        (LinkState.BROKEN, "fenced", LinkState.OVER),
    ),
)


# --- A cut, at a server (core/cut.py) --------------------------------------------------------------------------


class CutState(State):
    IDLE = "no cut is under way here"
    ASKED = "it has said how far it is, and waits for the marks; asynchronously, all pushes are held back"
    AWAITING = "the marks are named; pushes beyond them are held back, and the rows are captured when all before are in"
    CAPTURED = "the rows of that instant are captured and being stored, while training goes on"


CUT = Moves(
    "a cut at a server",
    (
        (CutState.IDLE, "asked", CutState.ASKED),
        (CutState.ASKED, "marks named", CutState.AWAITING),
        (CutState.ASKED, "too late", CutState.IDLE),
        (CutState.AWAITING, "marks reached", CutState.CAPTURED),
        (CutState.ASKED, "held too long", CutState.IDLE),
        (CutState.AWAITING, "held too long", CutState.IDLE),
        (CutState.ASKED, "over", CutState.IDLE),
        (CutState.AWAITING, "over", CutState.IDLE),
        (CutState.CAPTURED, "over", CutState.IDLE),
    ),
)


# --- A cut, at the coordinator (core/cuts.py) ------------------------------------------------------------------


class AttemptState(State):
    ASKING = "every server is asked how far it is"
    CUTTING = "all are told at which marks to capture their rows"
    STORING = "all have captured; each stores its part"
    WRITING = "all parts are stored; the manifest that makes a checkpoint of them is being written"
    OVER = "it exists, or was given up"


ATTEMPT = Moves(
    "a cut at the coordinator",
    (
        (AttemptState.ASKING, "all told their marks", AttemptState.CUTTING),
        (AttemptState.CUTTING, "all have captured", AttemptState.STORING),
        (AttemptState.STORING, "all have stored", AttemptState.WRITING),
        (AttemptState.WRITING, "manifest written", AttemptState.OVER),
        # The last cut of a run may be one that was made already.
        (AttemptState.CUTTING, "nothing new", AttemptState.OVER),
        (AttemptState.ASKING, "given up", AttemptState.OVER),
        (AttemptState.CUTTING, "given up", AttemptState.OVER),
        (AttemptState.STORING, "given up", AttemptState.OVER),
        (AttemptState.WRITING, "given up", AttemptState.OVER),
    ),
)


# --- A save of a server's own rows (core/own_saves.py) ---------------------------------------------------------


class OwnSaveState(State):
    IDLE = "no save is under way here"
    CAPTURED = "the rows of that instant are captured; the holders of copies do not have all that was pushed until then"
    STORING = "they have; what was captured is being stored, while training goes on"


OWN_SAVE = Moves(
    "a save of one server",
    (
        (OwnSaveState.IDLE, "captured", OwnSaveState.CAPTURED),
        (OwnSaveState.CAPTURED, "copies have it", OwnSaveState.STORING),
        (OwnSaveState.CAPTURED, "over", OwnSaveState.IDLE),
        (OwnSaveState.STORING, "over", OwnSaveState.IDLE),
    ),
)


# --- The way back of a server that begins without its rows (core/wayback.py) -----------------------------------


class WayState(State):
    LEARNING = "it does not know where its rows stand; requests of workers wait"
    RETURNING = "requests are served; whoever needs a row that is not back waits for that row"
    SETTLING = "all rows are here, but parity holders do not have them yet; requests of workers wait"
    FILLING = "every row that was ever touched is back; untouched ones are computed when somebody asks, or time allows"
    WHOLE = "all rows are here: a server like any other"


WAY = Moves(
    "a way back",
    (
        (WayState.LEARNING, "holders have told", WayState.RETURNING),
        (WayState.LEARNING, "saves were found", WayState.RETURNING),
        (WayState.RETURNING, "last row is back", WayState.FILLING),
        (WayState.FILLING, "all filled", WayState.WHOLE),
        (WayState.LEARNING, "all loaded", WayState.SETTLING),
        (WayState.SETTLING, "holders have it", WayState.WHOLE),
    ),
)


# --- A place in the view, as the coordinator sees it (core/coordinator.py) -------------------------------------


class MemberState(State):
    EMPTY = "nobody has come for this place yet"
    AWAITED = "a view of an earlier coordinator names its server, which this coordinator has not heard of"
    STARTING = "its server has registered, and is taking memory for its rows: silence means nothing"
    RETURNING = "its server is a replacement whose rows come back: it does not count towards tolerance"
    SERVING = "its server has all its rows"
    DEAD = "its server counts as dead; a successor is on its way"


MEMBER = Moves(
    "a place in the view",
    (
        (MemberState.EMPTY, "registered", MemberState.STARTING),
        (MemberState.EMPTY, "named by a view", MemberState.AWAITED),
        (MemberState.AWAITED, "registered", MemberState.STARTING),
        (MemberState.AWAITED, "back with its rows", MemberState.SERVING),
        (MemberState.AWAITED, "back without its rows", MemberState.RETURNING),
        (MemberState.AWAITED, "named by a view", MemberState.AWAITED),
        (MemberState.STARTING, "named by a view", MemberState.AWAITED),
        (MemberState.SERVING, "named by a view", MemberState.AWAITED),
        (MemberState.RETURNING, "named by a view", MemberState.AWAITED),
        (MemberState.DEAD, "named by a view", MemberState.AWAITED),
        (MemberState.STARTING, "ready", MemberState.SERVING),
        (MemberState.STARTING, "ready to return", MemberState.RETURNING),
        (MemberState.STARTING, "back with its rows", MemberState.SERVING),
        (MemberState.STARTING, "back without its rows", MemberState.RETURNING),
        (MemberState.SERVING, "back with its rows", MemberState.SERVING),
        (MemberState.SERVING, "back without its rows", MemberState.RETURNING),
        (MemberState.RETURNING, "back without its rows", MemberState.RETURNING),
        (MemberState.RETURNING, "back with its rows", MemberState.SERVING),
        (MemberState.RETURNING, "recovered", MemberState.SERVING),
        (MemberState.STARTING, "died", MemberState.DEAD),
        (MemberState.SERVING, "died", MemberState.DEAD),
        (MemberState.RETURNING, "died", MemberState.DEAD),
        (MemberState.AWAITED, "died", MemberState.DEAD),
        (MemberState.DEAD, "registered", MemberState.STARTING),
    ),
)


# --- A worker's session (core/session.py) ----------------------------------------------------------------------


class SessionState(State):
    LOOKING = "no view is known: nobody to talk to"
    GREETING = "the servers of the view are greeted, and say how far this worker's pushes are durable"
    WORKING = "all have answered; batches are pulled and pushed, through every later view"
    FAILED = "it cannot go on: rows are lost, or a server whose rows nothing protects is gone"


SESSION = Moves(
    "a worker's session",
    (
        (SessionState.LOOKING, "view", SessionState.GREETING),
        (SessionState.GREETING, "view", SessionState.GREETING),
        (SessionState.GREETING, "all have answered", SessionState.WORKING),
        (SessionState.WORKING, "view", SessionState.WORKING),
        (SessionState.LOOKING, "failed", SessionState.FAILED),
        (SessionState.GREETING, "failed", SessionState.FAILED),
        (SessionState.WORKING, "failed", SessionState.FAILED),
    ),
)

ALL: tuple[
    Moves[LinkState]
    | Moves[CutState]
    | Moves[AttemptState]
    | Moves[OwnSaveState]
    | Moves[WayState]
    | Moves[MemberState]
    | Moves[SessionState],
    ...,
] = (LINK, SESSION, MEMBER, WAY, CUT, ATTEMPT, OWN_SAVE)
