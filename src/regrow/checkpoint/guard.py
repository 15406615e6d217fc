"""How whatever writes pieces is stopped without harm.

Ctrl-C is looked at between two files (`Stop`), and what was begun and not finished is taken away again (`Guard`). A
second Ctrl-C stops at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import Any, cast

from regrow.checkpoint.direct import Bytes
from regrow.checkpoint.files import Data
from regrow.checkpoint.manifest import MANIFEST, Manifest
from regrow.checkpoint.storage import Storage
from regrow.core.names import is_piece_name
from regrow.errors import Interrupted, StorageError

LOOK_SECONDS = 0.2  # how often a wait looks whether it was stopped


class Stop(threading.Event):
    """Ctrl-C and SIGTERM while inside `with`: noted, and looked at where it does no harm. The second acts at once."""

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        # Not `Event.set`: its lock may be held by the very thread that this handler interrupts.
        if self._number:
            raise KeyboardInterrupt
        self._number = number

    def is_set(self) -> bool:
        return bool(self._number)

    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        while not self._number and (end is None or time.monotonic() < end):
            time.sleep(LOOK_SECONDS if end is None else min(LOOK_SECONDS, max(0.0, end - time.monotonic())))
        return self.is_set()

    def check(self, message: str = "interrupted; nothing half-written is left") -> None:
        if self._number:
            raise Interrupted(message, signal_number=self._number)


class Guard:
    """A storage that reads here and writes there (or here too), stops when it is told to, and cleans up after itself:
    a piece that was begun inside `with` and has no manifest in the end is taken away."""

    def __init__(self, source: Storage, target: Storage, stop: Stop) -> None:
        self._source, self._target, self._stop = source, target, stop
        self._begun: set[str] = set()
        self._made: set[str] = set()
        self._written: set[str] = set()  # files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __enter__(self) -> Storage:
        return cast(Storage, self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # In a copy, nothing that was made is wanted if it did not end well.
            copied = self._made if self._target is not self._source else set()
            for piece in self._begun | copied:
                with contextlib.suppress(StorageError):
                    if piece in copied or MANIFEST not in self._target.names(piece):
                        self._target.delete_piece(piece)

    def read(self, path: str, *, into: Bytes | None = None) -> bytes | memoryview:
        self._stop.check()
        return (self._target if path in self._written else self._source).read(path, into=into)

    def names(self, piece: str) -> dict[str, int]:
        return (self._target if piece in self._begun | self._made else self._source).names(piece)

    def write(self, path: str, data: Data) -> None:
        piece = path.partition("/")[0]
        if is_piece_name(piece):
            self._begun.add(piece)
        self._target.write(path, data)
        self._written.add(path)

    def find_lost(self, manifest: Manifest) -> str | None:
        return self._target.find_lost(manifest)

    def read_manifest(self, name: str) -> Manifest:
        return self._target.read_manifest(name)

    def write_manifest(self, manifest: Manifest) -> None:
        self._target.write_manifest(manifest)
        self._begun.discard(manifest.name)
        self._made.add(manifest.name)

    def delete_piece(self, name: str) -> None:
        self._stop.check()
        self._target.delete_piece(name)

    def keep_only(self, piece: str) -> None:
        """Deletes what a fold with little memory made on the way."""
        for other in self._made - {piece}:
            self._target.delete_piece(other)
