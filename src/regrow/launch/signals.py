"""Signals that ask a run to stop. They are only counted here: a handler may interrupt anything, so the loop of the run
looks at the count where it is in a known state."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

WAKE_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalWatch:
    """Ctrl-C, SIGTERM and SIGHUP are counted, and acted on where the run is in a known state."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.count = 0
        self.first: int | None = None
        self._wake = wake
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalWatch:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python has no say in signals
            for number in WAKE_SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def stop(self) -> None:
        """As if SIGTERM had come; from any thread."""
        self._receive(signal.SIGTERM, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.first is None:
            self.first = number
        self._wake()
