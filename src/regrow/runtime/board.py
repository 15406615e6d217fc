"""What a worker shows to the other workers of its run, and how they look: a thread that answers whatever the rest of
the process is doing, and a question with an answer.

It exists because who needs something from a worker (a successor: the state that it begins from) must get it while that
worker computes, waits for rows, or has ended its script. States are bytes here, by the step behind which they are. What
they mean is said in `nn/ddp.py`, what is decided by them in `nn/circle.py`.

Every question and every answer has a tag that nobody without the run's token can make, over a number that the one who
asks has made up. Boards are at 127.0.0.1: they are for the processes of one machine.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Mapping

LOOK, STATES = b"l", b"s"  # questions
HOST = "127.0.0.1"
# For an answer. Too small: a busy machine is taken for nobody; it is asked again. Too large: somebody who hangs is
# waited for, while his successor may be there.
ANSWER_SECONDS_MAX = 5.0
ANSWER_BYTES_MAX = 16 << 30
NONCE_BYTES, TAG_BYTES = 16, 32
_HEAD = struct.Struct(f"<Q{TAG_BYTES}s")  # of an answer: its bytes, and its tag
_STATE = struct.Struct("<QQ")  # a step, and the bytes of the state behind it


class Board:
    """Of one worker. Its owner writes, and others look at any time: what they see together was true at one time."""

    def __init__(self, token: bytes) -> None:
        self._token = token
        self._lock = threading.Lock()
        self._states: dict[int, memoryview] = {}
        self._shown = b""
        self._server = _Server(self)
        threading.Thread(target=self._server.serve_forever, name="board", daemon=True).start()

    @property
    def address(self) -> str:
        return f"{HOST}:{self._server.server_address[1]}"

    def show(self, states: Mapping[int, memoryview], shown: bytes) -> None:
        """These states and no others, and what is seen of it all. They do not change any more."""
        with self._lock:
            self._states, self._shown = dict(states), shown

    def answer(self, question: bytes) -> bytes | None:
        """None for a question that nobody who belongs here asks."""
        nonce, kind, tag = question[:NONCE_BYTES], question[NONCE_BYTES : NONCE_BYTES + 1], question[-TAG_BYTES:]
        if not hmac.compare_digest(tag, _make_tag(self._token, nonce, kind)):
            return None
        with self._lock:
            shown, states = self._shown, dict(self._states)
        body = shown
        if kind == STATES:
            body = b"".join(
                part for step, state in sorted(states.items()) for part in (_describe(step, state), bytes(state))
            )
        return _HEAD.pack(len(body), _make_tag(self._token, nonce, body)) + body


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, board: Board) -> None:
        self.board = board
        super().__init__((HOST, 0), _Answer)

    def handle_error(self, request: object, client_address: object) -> None:
        """Who asked is gone, and asks again if it lives."""


class _Answer(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS_MAX
        question = _receive(self.request, NONCE_BYTES + 1 + TAG_BYTES, deadline)
        answer = self.server.board.answer(bytes(question))
        if answer is not None:
            self.request.settimeout(ANSWER_SECONDS_MAX)
            self.request.sendall(answer)


def ask(address: str, kind: bytes, token: bytes) -> bytes | None:
    """What a board answers; None if it does not, in time and with the right tag."""
    host, _, port = address.rpartition(":")
    nonce = secrets.token_bytes(NONCE_BYTES)
    deadline = time.monotonic() + ANSWER_SECONDS_MAX
    try:
        with socket.create_connection((host, int(port)), ANSWER_SECONDS_MAX) as line:
            line.sendall(nonce + kind + _make_tag(token, nonce, kind))
            size, tag = _HEAD.unpack(_receive(line, _HEAD.size, deadline))
            if size > ANSWER_BYTES_MAX:
                return None
            body = bytes(_receive(line, size, None))
    except OSError:
        return None
    return body if hmac.compare_digest(tag, _make_tag(token, nonce, body)) else None


def split_states(body: bytes) -> dict[int, bytes]:
    """The states of an answer."""
    states: dict[int, bytes] = {}
    start = 0
    while start < len(body):
        step, size = _STATE.unpack_from(body, start)
        start += _STATE.size
        states[step] = body[start : start + size]
        start += size
    return states


def _describe(step: int, state: memoryview) -> bytes:
    return _STATE.pack(step, state.nbytes)


def _make_tag(token: bytes, nonce: bytes, body: bytes) -> bytes:
    tag = hashlib.blake2b(nonce, key=token, digest_size=TAG_BYTES)
    tag.update(body)
    return tag.digest()


def _receive(line: socket.socket, size: int, deadline: float | None) -> bytearray:
    """Exactly so many bytes. Without a deadline each part of them has its own time: a state may be large."""
    found = bytearray(size)
    view, done = memoryview(found), 0
    while done < size:
        left = ANSWER_SECONDS_MAX if deadline is None else deadline - time.monotonic()
        line.settimeout(max(left, 0.001))
        count = line.recv_into(view[done:])
        if count == 0:
            raise ConnectionResetError("the other side has closed the connection")
        done += count
    return found
