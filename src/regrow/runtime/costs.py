"""What a recovery costs a server: processor time by part, while somebody's rows are on their way back. Or what steps
cost it, from its first push on.

Only with `--recovery-profile` or `--step-profile`, as every border between two parts is a reading of two clocks, and
so part of what it measures. At any moment one part is
charged: `enter` ends the part before, `leave` goes back to it, so nothing is counted twice and nothing is left out:
what belongs to no part is the loop, which reads and writes sockets and takes frames apart. A part of the store is named
together with what asked for it (`SnapAsk/published`), since the same kernel serves training and recovery.

Processor time is that of the whole process: kernels have threads. Pages are counted as they are first touched; what one
costs is for whoever reads the figures to know (`bench/recovery_costs.py`).
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

from regrow.core.effects import Delivered
from regrow.core.server import Server

LOOP, SEND = "loop", "send"
STORE = (
    *("gather", "update", "pending_rows", "pending_bytes", "take_flush", "published", "next_touched"),
    *("parity_apply", "parity_read", "parity_add", "parity_members", "parity_touched"),
    *("know_touched", "prepare", "put", "fill", "missing_rows"),
)


class Costs:
    """Processor seconds, calls, pages and bytes by part, of the time in which rows were on their way back; with `steps`
    of all time from the first push on."""

    def __init__(self, *, steps: bool = False) -> None:
        self._steps = steps
        self.parts: dict[str, list[float]] = {}  # seconds, times entered, pages
        self.bytes: dict[str, int] = {}  # sent and received, by kind of message
        self._stack = [LOOP]
        self._counts = False
        self._clock, self._pages = 0.0, 0
        self._server: Server | None = None

    def to_dict(self) -> dict[str, list[float]]:
        parts = {name: [round(value, 6) for value in values] for name, values in self.parts.items()}
        return parts | {f"bytes/{kind}": [float(count)] for kind, count in self.bytes.items()}

    def watch(self, server: Server | None) -> None:
        """To be called after every event: from the view on that names somebody who comes back, until all are back."""
        if server is not None and server is not self._server:
            self._server = server
            self._wrap_parts(server)
        counts = server is not None and (
            server.serving.clock > 0 if self._steps else any([member.recovering for member in server.view.servers])
        )
        if counts and not self._counts:
            self._read()
        self._counts = counts

    def _wrap_parts(self, server: Server) -> None:
        store: Any = server.store
        for name in STORE:
            if hasattr(store, name):
                setattr(store, name, self._wrap(getattr(store, name), name, of_store=True))
        for part, method, of in (
            ("sweep", "sweep", server.holder.decoder),
            ("sweep", "release_faults", server.holder.decoder),
            ("adjust", "adjust", server.holder.decoder),
            ("stream", "stream", server.flusher),
            ("missing", "find_missing", server.ways),
            ("retry", "retry", server.serving),
            ("fill", "tick", server.ways),
        ):
            setattr(of, method, self._wrap(getattr(of, method), part))

    def _wrap(self, method: Callable[..., Any], part: str, *, of_store: bool = False) -> Callable[..., Any]:
        def call(*values: Any, **named: Any) -> Any:
            self.enter(f"{self._stack[-1]}/{part}" if of_store else part)
            try:
                return method(*values, **named)
            finally:
                self.leave()

        return call

    def enter_event(self, event: Any) -> None:
        name = type(event.message if isinstance(event, Delivered) else event).__name__
        self.enter(name)
        if isinstance(event, Delivered) and self._counts:
            self._add_bytes(event.message)

    def enter_send(self, message: Any) -> None:
        self.enter(SEND)
        if self._counts:
            self._add_bytes(message)

    def _add_bytes(self, message: Any) -> None:
        kind = type(message).__name__
        size = sum([getattr(message, name).nbytes for name in message.SECTION_FIELDS])
        self.bytes[kind] = self.bytes.get(kind, 0) + size

    def enter(self, part: str) -> None:
        self._charge()
        self._stack.append(part)
        if self._counts:
            self.parts.setdefault(part, [0.0, 0, 0])[1] += 1

    def leave(self) -> None:
        self._charge()
        self._stack.pop()

    def _charge(self) -> None:
        if not self._counts:
            return
        clock, pages = self._clock, self._pages
        self._read()
        part = self.parts.setdefault(self._stack[-1], [0.0, 0, 0])
        part[0] += self._clock - clock
        part[2] += self._pages - pages

    def _read(self) -> None:
        self._clock = time.process_time()
        self._pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def make_costs(config: dict[str, Any]) -> Costs | None:
    """What this run wants to be measured."""
    steps = bool(config.get("step_profile"))
    return Costs(steps=steps) if steps or config.get("recovery_profile") else None
