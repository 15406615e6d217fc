"""A replica for people without Python: look-ups over HTTP, as JSON or as the bytes themselves.

    GET  /status                  cut, step, age, tables
    POST /lookup                  {"table": "user", "ids": [3, 1]} -> {"step": 40, "rows": [[...], [...]]}
    POST /lookup/TABLE            ids as little-endian uint32 -> rows as little-endian float32, X-Regrow-Step and -Dim

HTTP because every language has it, a proxy in front can add names and keys, and a look-up of a hundred rows is a copy
of some kilobytes: what the protocol costs is less than the network. The standard library's server is enough for that:
a thread for each connection, which stays open. Whoever needs more look-ups a second than a process of Python gives
starts several, or uses `Replica` in his own.

Nobody is asked who he is: it listens on the loopback interface unless told otherwise. Everything that comes in is
bounded: bytes of a request, rows, connections, and the time that a connection may be silent.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote

import numpy as np

from regrow.errors import RegrowError, UserError
from regrow.serving.replica import Replica

REQUEST_BYTES_MAX = 16 << 20  # Too small: large batches are refused. Too large: memory, for each connection.
ROWS_MAX = 1 << 20  # of one answer; a table of wide rows makes much of few ids
ANSWER_BYTES_MAX = 256 << 20
CONNECTIONS_MAX = 256  # Too small: clients are refused. Too large: threads.
SILENT_SECONDS_MAX = 60.0  # a connection that says nothing for so long is closed


class RowServer(ThreadingHTTPServer):
    """Serves one replica until `shutdown()`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], replica: Replica) -> None:
        self.replica = replica
        self.lookups = 0
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            where = f"{address[0]}:{address[1]}"
            raise UserError(f"cannot listen on {where}: {error.strerror}", hint="--listen HOST:PORT") from None

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for it, or none: whoever finds no room tries again, or elsewhere."""
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def describe(self) -> dict[str, Any]:
        replica = self.replica
        return {
            "cut": replica.cut,
            "step": replica.step,
            "age_seconds": round(replica.age_seconds, 3),
            "consistent": replica.consistent,
            "problem": replica.problem,
            "lookups": self.lookups,
            "tables": {name: {"rows": rows, "dim": dim} for name, (rows, dim) in replica.tables.items()},
        }


class _Refused(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Handler(BaseHTTPRequestHandler):
    server: RowServer
    protocol_version = "HTTP/1.1"  # connections stay open
    timeout: ClassVar[float] = SILENT_SECONDS_MAX  # of the socket
    server_version = "regrow"
    disable_nagle_algorithm = True  # or an answer of two parts waits for the other side

    def do_GET(self) -> None:
        if self.path == "/status":
            self._answer_json(200, self.server.describe())
        else:
            self._answer_json(404, {"error": f"there is no {self.path[:200]}; GET /status, POST /lookup"})

    def do_POST(self) -> None:
        try:
            body = self._read_body()
            if self.path == "/lookup":
                self._answer_lookup(body)
            elif self.path.startswith("/lookup/"):
                self._answer_bytes(unquote(self.path.removeprefix("/lookup/")), body)
            else:
                raise _Refused(404, f"there is no {self.path[:200]}; POST /lookup")
        except _Refused as error:
            self._answer_json(error.code, {"error": str(error)})
        except RegrowError as error:
            self._answer_json(400, {"error": error.message, "hint": error.hint})

    def log_message(self, format: str, *args: Any) -> None:
        """Not a line for each look-up."""

    def _read_body(self) -> bytes:
        text = self.headers.get("Content-Length") or ""
        if not text.isdecimal() or int(text) > REQUEST_BYTES_MAX:
            self.close_connection = True
            raise _Refused(413, f"a request has a Content-Length of at most {REQUEST_BYTES_MAX}")
        return self.rfile.read(int(text))

    def _look_up(self, table: str, ids: Any) -> tuple[int, Any]:
        dim = self.server.replica.tables.get(table, (0, 0))[1]
        if len(ids) > ROWS_MAX or len(ids) * dim * 4 > ANSWER_BYTES_MAX:
            raise _Refused(413, f"{len(ids)} rows of {dim} floats are too many for one answer")
        step, found = self.server.replica.lookup_many({table: ids})
        self.server.lookups += len(ids)
        return step, found[table]

    def _answer_lookup(self, body: bytes) -> None:
        try:
            wish = json.loads(body)
            table, ids = wish["table"], wish["ids"]
            assert isinstance(table, str) and isinstance(ids, list)
        except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
            raise _Refused(400, 'a look-up is {"table": "user", "ids": [3, 1]}') from None
        try:
            numbers = np.array(ids) if ids else np.zeros(0, np.int64)
        except (ValueError, OverflowError):
            raise _Refused(400, "ids are whole numbers") from None
        step, rows = self._look_up(table, numbers)
        self._answer_json(200, {"step": step, "rows": rows.tolist()})

    def _answer_bytes(self, table: str, body: bytes) -> None:
        if len(body) % 4:
            raise _Refused(400, f"{len(body)} bytes are no whole number of uint32")
        step, rows = self._look_up(table, np.frombuffer(body, "<u4"))
        headers = {"X-Regrow-Step": str(step), "X-Regrow-Dim": str(rows.shape[1])}
        self._answer(200, "application/octet-stream", rows.astype("<f4", copy=False).tobytes(), headers)

    def _answer_json(self, code: int, values: dict[str, Any]) -> None:
        self._answer(code, "application/json", json.dumps(values).encode() + b"\n", {})

    def _answer(self, code: int, kind: str, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
