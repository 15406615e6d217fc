"""An object storage for simulated processes: it answers late, twice or not at all, and its listings are behind.

What is promised, and no more: an object that was put is read as a whole, by whoever asks for it by name; what was asked
for and not answered happens within `LATE_SECONDS_MAX` or never; a listing may show what was there up to
`BEHIND_SECONDS_MAX` ago. `SimStorage` is the real `Storage` on top, without threads: its calls are those of the actor
whose turn it is.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import math
import threading
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from regrow.checkpoint import storage
from regrow.checkpoint.direct import Bytes
from regrow.checkpoint.files import Data, Whole
from regrow.errors import StorageError
from regrow.sim.choices import Choices
from regrow.sim.nodes import Violation
from regrow.sim.probes import Probes
from regrow.sim.stage import Stage

LATE_SECONDS_MAX = 40.0
BEHIND_SECONDS_MAX = 15.0
RETRY_SECONDS = 1.0
TIMEOUT_SECONDS = 30.0
ATTEMPTS = 2
PROBLEM = "the storage has a problem"

T = TypeVar("T")


class NoAnswer(Exception):
    """The caller gives up waiting. What it asked for may happen."""


@dataclasses.dataclass(frozen=True, slots=True)
class Object:
    data: bytes
    at: float  # by the storage's clock, which never jumps


class Objects:
    """What is there, what listings show, and what goes wrong. `watch` sees every change: (path, before, after)."""

    def __init__(
        self,
        stage: Stage,
        choices: Choices,
        probes: Probes,
        *,
        error_rate: float,
        behind_rate: float,
        watch: Callable[[str, Object | None, Object | None], None],
    ) -> None:
        self.there: dict[str, Object] = {}
        self.listed: dict[str, Object] = {}
        self.error_rate, self.behind_rate = error_rate, behind_rate
        self._stage, self._choices, self._probes, self._watch = stage, choices, probes, watch
        self._behind: dict[str, float] = {}  # until when a listing does not show what happened to a path

    def ask(self, look: Callable[[], T]) -> T:
        """A question: it may fail, and takes its time before and after."""
        self._stage.rest()
        if self._choices.flag(self.error_rate):
            self._probes.hit("object storage fails")
            raise OSError(errno.EIO, PROBLEM)
        found = look()
        self._stage.rest()
        return found

    def change(self, path: str, data: bytes | None, *, until: float = math.inf) -> None:
        """A put, or a delete; not after so long, for the caller has given up."""
        self._stage.rest()
        if self._stage.now > until:
            raise NoAnswer
        fate = 1 + self._choices.pick(5) if self._choices.flag(self.error_rate) else 0
        if fate in (0, 1, 2):
            self._apply(path, data)
        if fate == 2:
            self._probes.hit("done and not told")
        if fate in (1, 4):
            self._probes.hit("done twice" if fate == 1 else "done late")
            seconds = LATE_SECONDS_MAX * (1 + self._choices.pick(8)) / 8
            self._stage.later(seconds, lambda: self._apply(path, data))
        self._stage.rest()
        if fate in (2, 3):
            raise OSError(errno.EIO, PROBLEM)
        if fate in (4, 5):
            raise NoAnswer

    def _apply(self, path: str, data: bytes | None) -> None:
        before = self.there.pop(path, None)
        after = None if data is None else Object(data, self._stage.now)
        if after is not None:
            self.there[path] = after
        seconds = 0.0
        if self._choices.flag(self.behind_rate):
            self._probes.hit("listing behind")
            seconds = BEHIND_SECONDS_MAX * (1 + self._choices.pick(4)) / 4
        due = max(self._stage.now + seconds, self._behind.get(path, 0.0))
        self._behind[path] = due
        if due > self._stage.now:
            self._stage.later(due - self._stage.now, lambda: self._show(path, after))
        else:
            self._show(path, after)
        try:
            self._watch(path, before, after)
        except Violation as violation:  # not through the code of the actor, which has an answer to every error
            self._stage.fail(violation)

    def _show(self, path: str, after: Object | None) -> None:
        self.listed.pop(path, None)
        if after is not None:
            self.listed[path] = after


class ObjectFiles:
    """`files.Files` for the actor whose turn it is."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self.until = math.inf  # of the call that is made now

    def directories(self, under: str = "") -> list[str]:
        return sorted({name.partition("/")[0] for name, _ in self._list(under) if "/" in name})

    def names(self, directory: str) -> dict[str, int]:
        found = self._list(directory)
        return {name: len(each.data) for name, each in found}

    def changes(self, directory: str) -> list[tuple[int, float | None]]:
        return [(len(each.data), each.at) for _, each in self._list(directory)]

    def _list(self, directory: str) -> list[tuple[str, Object]]:
        listed = self._objects.listed
        prefix = f"{directory}/" if directory else ""
        return self._objects.ask(
            lambda: sorted((path[len(prefix) :], listed[path]) for path in listed if path.startswith(prefix))
        )

    def stamp(self, path: str) -> str | None:
        found = self._objects.ask(lambda: self._objects.there.get(path))
        return None if found is None else f"{zlib.crc32(found.data):08x} {found.at} {len(found.data)}"

    def read(self, path: str) -> bytes:
        found = self._objects.ask(lambda: self._objects.there.get(path))
        if found is None:
            raise FileNotFoundError(errno.ENOENT, path)
        return found.data

    def read_into(self, path: str, memory: Bytes) -> bytes:
        return self.read(path)

    def write(self, path: str, data: Data, given_up: threading.Event) -> None:
        whole = bytes(data) if isinstance(data, Whole) else b"".join(data)
        self._objects.change(path, whole, until=self.until)

    def delete(self, path: str) -> None:
        self._objects.change(path, None)

    def delete_directory(self, directory: str) -> None:
        """There are none."""

    def tidy(self, directory: str) -> None:
        """Nothing here has a temporary name."""


class Inline(concurrent.futures.Executor):
    """No threads: whatever is asked for is done at once."""

    def submit(self, job: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            future.set_result(job(*args, **kwargs))
        except Exception as error:  # not `Killed`
            future.set_exception(error)
        return future


class SimStorage(storage.Storage):
    """The real one, whose calls are made by the actor itself."""

    def __init__(self, stage: Stage, objects: Objects) -> None:
        self._object_files = ObjectFiles(objects)
        super().__init__("sim://", self._object_files, timeout_seconds=TIMEOUT_SECONDS, attempts=ATTEMPTS)
        self._stage = stage

    def open_threads(self, count: int, name: str) -> concurrent.futures.Executor:
        return Inline()

    def _call(self, verb: str, path: str, job: Callable[[threading.Event], T]) -> T:
        where = f"sim://{path}"
        until = self._stage.now + TIMEOUT_SECONDS
        for attempt in range(ATTEMPTS):
            try:
                self._object_files.until = until  # what follows is read before anybody else has a turn
                return job(_NOT_GIVEN_UP)
            except NoAnswer:
                raise StorageError(f"cannot {verb} {where}: no answer") from None
            except Exception as error:
                if attempt == ATTEMPTS - 1 or self._stage.now > until or not storage.may_pass(error):
                    raise storage.make_error(verb, where, error) from error
            self._stage.rest(RETRY_SECONDS)
        raise AssertionError("the last attempt returns or raises")


_NOT_GIVEN_UP = threading.Event()
