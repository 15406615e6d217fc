"""Goal: look-ups over HTTP are those of the replica; what cannot be is refused with a word, and the process goes on."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from publishing import Run, make_run

from regrow.errors import UserError
from regrow.serving import Replica
from regrow.serving import http as rows_http
from regrow.serving.http import RowServer


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = make_run(tmp_path)
    made.train()
    made.publish()
    return made


@pytest.fixture
def port(run: Run) -> Iterator[int]:
    replica = Replica(run.url, follow=False, wait_seconds=0.0)
    with RowServer(("127.0.0.1", 0), replica) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join(60.0)


def ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    connection.request(method, path, body)
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return found


def look_up(port: int, wish: Any) -> tuple[int, Any]:
    code, _, body = ask(port, "POST", "/lookup", json.dumps(wish).encode())
    return code, json.loads(body)


def test_json(run: Run, port: int) -> None:
    code, found = look_up(port, {"table": "user", "ids": [3, 1, 3]})
    assert (code, found["step"]) == (200, 1)
    assert np.array(found["rows"], np.float32).tobytes() == run.rows("user")[[3, 1, 3]].tobytes()
    assert look_up(port, {"table": "user", "ids": []})[1]["rows"] == []


def test_bytes(run: Run, port: int) -> None:
    code, headers, body = ask(port, "POST", "/lookup/dense", np.array([5, 0], "<u4").tobytes())
    assert (code, headers["x-regrow-step"], headers["x-regrow-dim"]) == (200, "1", "8")
    assert body == run.rows("dense")[[5, 0]].tobytes()


def test_status(port: int) -> None:
    code, _, body = ask(port, "GET", "/status")
    found = json.loads(body)
    assert code == 200
    assert (found["step"], found["tables"]["user"], found["problem"]) == (1, {"rows": 50, "dim": 4}, None)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"table": "user", "ids": [50]}, "no row 50"),
        ({"table": "user", "ids": [-1]}, "no row -1"),
        ({"table": "user", "ids": ["x"]}, "ids of table 'user' are"),
        ({"table": "user", "ids": [[1], [2, 3]]}, "whole numbers"),
        ({"table": "user", "ids": [2**70]}, "ids of table 'user' are"),
        ({"table": "nobody", "ids": [1]}, "no table 'nobody'"),
        ({"table": "user"}, "a look-up is"),
        ([1, 2], "a look-up is"),
    ],
)
def test_what_cannot_be(port: int, wish: Any, words: str) -> None:
    code, found = look_up(port, wish)
    assert code == 400
    assert words in found["error"]
    assert look_up(port, {"table": "user", "ids": [0]})[0] == 200, "and it goes on"


def test_bounds(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_http, "ROWS_MAX", 2)
    assert look_up(port, {"table": "user", "ids": [1, 2]})[0] == 200
    assert look_up(port, {"table": "user", "ids": [1, 2, 3]})[0] == 413
    monkeypatch.setattr(rows_http, "REQUEST_BYTES_MAX", 10)
    assert look_up(port, {"table": "user", "ids": [1, 2]})[0] == 413
    assert ask(port, "POST", "/lookup/user", b"123")[0] == 400
    assert ask(port, "GET", "/elsewhere")[0] == 404
    assert ask(port, "POST", "/elsewhere", b"")[0] == 404


def test_too_many_connections(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_http, "CONNECTIONS_MAX", 1)
    replica = Replica(run.url, follow=False, wait_seconds=0.0)
    with RowServer(("127.0.0.1", 0), replica) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        port = server.server_address[1]
        first = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
        first.request("GET", "/status")
        assert first.getresponse().read()
        with socket.create_connection(("127.0.0.1", port), timeout=60.0) as second:
            assert second.recv(1) == b"", "it is closed at once"
        first.close()
        server.shutdown()
        thread.join(60.0)


def test_a_port_that_is_taken(run: Run, port: int) -> None:
    with pytest.raises(UserError, match="cannot listen on"):
        RowServer(("127.0.0.1", port), Replica(run.url, follow=False, wait_seconds=0.0))
