"""Every error Regrow raises on purpose.

Each is one readable message (what happened, to what) and, where there is something to do about it, a hint.
Whose mistake it was decides the class, and the class decides the exit code: a user's mistake is 2, a run that
failed is 1, one that lost rows for good is 4 (3 is a child's, whose launcher went away), one that trained a model and
could not store it is 5. Anything that is not a
`RegrowError` is a bug and may show its traceback.
"""

from __future__ import annotations

import enum

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DATA_LOSS = 4
EXIT_NOT_SAVED = 5
EXIT_SIGNAL_BASE = 128  # as shells do: 130 after Ctrl-C, 143 after SIGTERM


class RegrowError(Exception):
    """The root of all errors below. `hint` says what to do next and may be absent."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n{self.hint}"


class UserError(RegrowError):
    """Something asked for that cannot be: a bad option, a missing file, a directory in use."""

    exit_code = EXIT_USAGE


class ConfigError(UserError):
    """One option has a value it cannot have. Names the option as it is spelled in `TrainConfig`."""

    def __init__(self, option: str, value: object, problem: str, *, hint: str | None = None) -> None:
        super().__init__(f"{option} = {value!r}: {problem}", hint=hint)
        self.option = option
        self.value = value
        self.problem = problem


class MemoryShort(UserError):
    """The tables do not fit the machine. Raised before anything is started."""


class DataError(UserError):
    """Training data that cannot be read: names the file, the line and the field."""


# Whoever finds that there is no room knows neither options nor checkpoints.
FULL_HINT = (
    "more space under --store-dir, or a larger --store-bytes-max or --cache-bytes; "
    "with --protect batch, --resume then goes on from the newest checkpoint"
)


class StoreDamaged(RegrowError):
    """Rows on disk are not what was written: names the file and the rows. Their values are not served."""


class StoreFull(RegrowError):
    """The device has no room for rows that have to leave the memory. What is in memory is still right."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint or FULL_HINT)


class Refusal(enum.StrEnum):
    """What a refusal means for whoever is refused. Nothing depends on the words beside it."""

    RETRY = "retry"  # this connection cannot go on; another one may
    REPLACED = "replaced"  # this incarnation is over: a newer one is in its place
    FOR_GOOD = "for_good"  # this incarnation has said what it may not, or has no place here

    @property
    def is_final(self) -> bool:
        """Dialing again is of no use to this incarnation."""
        return self is not Refusal.RETRY


class ProtocolError(RegrowError):
    """The other side of a connection sent what it may not: a bad frame, a wrong token, an old incarnation."""

    def __init__(self, message: str, *, hint: str | None = None, refusal: Refusal = Refusal.RETRY) -> None:
        super().__init__(message, hint=hint)
        self.refusal = refusal


class LocalProtocolError(RegrowError):
    """We were about to send what we may not send: a bug on this side, caught before it left."""


class ConnectionLost(RegrowError):
    """A peer went away: its process ended, or its socket closed in the middle of a conversation. `refusal`: it said
    that it does not want us."""

    def __init__(self, message: str, *, hint: str | None = None, refusal: Refusal | None = None) -> None:
        super().__init__(message, hint=hint)
        self.refusal = refusal


class DataLoss(RegrowError):
    """Rows are gone for good: more servers were lost together than there are parities. Nobody goes on with what
    is left, because a model with holes looks like a model."""

    exit_code = EXIT_DATA_LOSS
    HINT = "more parities survive more servers lost together: --r 2 (or higher); this run has to start again"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint or self.HINT)


class CheckpointError(RegrowError):
    """A checkpoint that cannot be made or used: damaged, incomplete, of another job. Names the piece or the file."""


class StorageError(CheckpointError):
    """Reading or writing storage failed. `missing` tells a file that is not there, which a reader may go around, from
    storage that did not answer, about which nothing is known."""

    def __init__(self, message: str, *, hint: str | None = None, missing: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.missing = missing


class StoreSilent(RegrowError):
    """The disk under a server's rows does not answer. The server ends, and counts as dead."""


class NotSaved(CheckpointError):
    """The model is trained and its results are known, but the checkpoint of the end, which was asked for, failed."""

    exit_code = EXIT_NOT_SAVED


class ChildFailed(RegrowError):
    """A process of the run died or reported an error. `log` is where its own words are."""

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        role: str = "",
        child_id: int = 0,
        log: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.role = role
        self.child_id = child_id
        self.log = log


class Interrupted(RegrowError):
    """A signal asked the run to stop: Ctrl-C or SIGTERM. Not a failure, but not a result either."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
        self.exit_code = EXIT_SIGNAL_BASE + signal_number
