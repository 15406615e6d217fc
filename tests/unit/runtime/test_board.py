"""Goal: who asks a board gets what was shown last, whole; without the token, or from nobody, gets nothing, in time.

Method: a board in this process, and sockets of the machine.
"""

from __future__ import annotations

import socket

import numpy as np
import pytest

from regrow.runtime import board as boards
from regrow.runtime.board import LOOK, STATES, Board, ask, split_states

TOKEN = b"t" * 32


def make_state(*values: float) -> memoryview:
    return np.array(values, np.float32).data.cast("B")


def test_what_is_shown_is_seen() -> None:
    board = Board(TOKEN)
    board.show({3: make_state(1.0, 2.0), 4: make_state(3.0)}, b"words")
    assert ask(board.address, LOOK, TOKEN) == b"words"
    answer = ask(board.address, STATES, TOKEN)
    assert answer is not None
    assert split_states(answer) == {3: bytes(make_state(1.0, 2.0)), 4: bytes(make_state(3.0))}
    board.show({}, b"")
    assert ask(board.address, STATES, TOKEN) == b""


def test_strangers_see_nothing() -> None:
    board = Board(TOKEN)
    board.show({}, b"words")
    assert ask(board.address, LOOK, b"x" * 32) is None


def test_who_is_gone_or_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boards, "ANSWER_SECONDS_MAX", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, as a stopped process does
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert ask(address, LOOK, TOKEN) is None
    assert ask(address, LOOK, TOKEN) is None
