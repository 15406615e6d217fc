"""Goal: a run on several hosts is what it is on one: a host that is cut off is replaced and does no harm when it comes
back, slow and lossy networks kill nobody, and the token is seen nowhere.

Method: every role by `regrow serve` in a network namespace of its own, the lead by `regrow lead` in another
(namespaces.py). Where that is not permitted, the tests are skipped and say why. Deaths come by step, waits are polls
with a deadline.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from namespaces import Hosts, Slow, find_obstacle

from regrow.launch.token import make_token

REGROW = (sys.executable, "-P", "-m", "regrow")
SECONDS_MAX = 240.0
ROLES = (("coordinator", 0), ("server", 0), ("server", 1), ("server", 2), ("worker", 0), ("standby", 0))
SERVER_1 = 1 + ROLES.index(("server", 1))
SMALL = ("--servers", "3", "--workers", "1", "--protect", "ec", "--k", "2", "--rows-max", "300", "--batch", "32")
SLOW = (Slow(0.001), Slow(0.01), Slow(0.05), Slow(0.0, 0.001), Slow(0.0, 0.01))
LISTEN = "import socket; s = socket.create_server(('', 9000)); print('listens', flush=True)\nwhile True: s.accept()"
CONNECT = """
import json, socket, sys, time
began = time.monotonic()
try:
    socket.create_connection((sys.argv[1], 9000), timeout=3.0)
    print(json.dumps(time.monotonic() - began))
except TimeoutError:
    print(json.dumps(None))
"""


class Run:
    """A lead on host 0, and a place on each of the others."""

    def __init__(self, hosts: Hosts, path: Path, *options: str, tls: str = "off") -> None:
        self.hosts, self.path = hosts, path
        self.token = path / "token"
        make_token(str(self.token))
        common = ("--token-file", str(self.token), "--tls", tls)
        self.lead = self._start(
            0, "lead", *common, "--listen", f"{hosts.address(0)}:7000", "--out", str(path / "out"), *SMALL, *options
        )
        self.places = [
            self._start(
                1 + number,
                *("serve", "--role", role, "--id", str(id), "--coordinator", f"{hosts.address(0)}:7000"),
                *("--logs", str(path / f"logs {role} {id}"), *common),
            )
            for number, (role, id) in enumerate(ROLES)
        ]

    def _start(self, host: int, *words: str) -> subprocess.Popen[bytes]:
        with (self.path / f"host-{host}.txt").open("ab") as log:
            return self.hosts.start(host, *REGROW, *words, stdout=log, stderr=log, cwd=self.path)

    def read_metrics(self) -> list[dict[str, Any]]:
        with contextlib.suppress(OSError):
            return [json.loads(line) for line in (self.path / "out" / "metrics.jsonl").read_text().splitlines()]
        return []

    def until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while not done():
            assert self.lead.poll() is None, f"the lead ended before {what}: {self.describe()}"
            assert time.monotonic() < deadline, f"no {what}: {self.describe()}"
            time.sleep(0.1)

    def await_step(self, step: int) -> None:
        self.until(lambda: any(line.get("step", 0) >= step for line in self.read_metrics()), f"step {step}")

    def finish(self) -> dict[str, Any]:
        assert self.lead.wait(SECONDS_MAX) == 0, self.describe()
        assert [place.wait(SECONDS_MAX) for place in self.places] == [0] * len(ROLES), "all are told that it is over"
        summary: dict[str, Any] = json.loads((self.path / "out" / "summary.json").read_text())
        return summary

    def describe(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(self.path.glob("host-*.txt")))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if obstacle := find_obstacle():
        pytest.skip(obstacle)
    with Hosts(1 + len(ROLES)) as made:
        yield made


def test_a_host_that_is_cut_off_is_replaced_and_does_no_harm(hosts: Hosts, tmp_path: Path) -> None:
    """Its server, its process and its place are well, and hear nobody. The standby takes its place; when the cut heals,
    what comes back is over."""
    run = Run(hosts, tmp_path, "--steps", "400", "--check-parity")
    run.await_step(20)
    hosts.cut(SERVER_1)
    output = tmp_path / "host-0.txt"
    run.until(lambda: "S1 died" in output.read_text() and "rows back" in output.read_text(), "recovery")
    hosts.heal(SERVER_1)
    summary = run.finish()
    assert summary["status"] == "ok"
    assert [(failure["role"], failure["id"]) for failure in summary["failures"]] == [("server", 1)]
    assert summary["parity_stripes"] > 0
    assert summary["parity_wrong"] == 0
    secret = run.token.read_text().strip()
    for path in tmp_path.rglob("*"):
        if path.is_file() and path != run.token:
            assert secret not in path.read_text(errors="replace"), path


@pytest.mark.slow
def test_two_servers_that_do_not_reach_each_other(hosts: Hosts, tmp_path: Path) -> None:
    run = Run(hosts, tmp_path, "--steps", "1500", "--check-parity", "--patience", "10s")
    run.await_step(20)
    hosts.part(SERVER_1, SERVER_1 + 1)
    summary = run.finish()
    assert summary["status"] == "ok"
    assert summary["parity_wrong"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", SLOW, ids=lambda how: " ".join(how.words()))
def test_slow_and_lossy_networks_kill_nobody(how: Slow, tmp_path: Path) -> None:
    if obstacle := find_obstacle(slow=True):
        pytest.skip(obstacle)
    with Hosts(1 + len(ROLES), slow=how) as hosts:
        began = time.monotonic()
        summary = Run(hosts, tmp_path, "--steps", "150", "--check-parity").finish()
        seconds = time.monotonic() - began
    assert summary["failures"] == []
    assert summary["parity_stripes"] > 0
    assert summary["parity_wrong"] == 0
    assert seconds > 150 * 2 * how.delay_seconds, "this network is not slow: a step is there and back"


@pytest.mark.slow
def test_a_slow_network_is_slow_and_loses(tmp_path: Path) -> None:
    """What the others rely on."""
    if obstacle := find_obstacle(slow=True):
        pytest.skip(obstacle)
    for how, times, least in ((Slow(0.05), 5, 0.1), (Slow(0.0, 1.0), 1, None)):
        with Hosts(2, slow=how) as hosts:
            words = (sys.executable, "-c", CONNECT, hosts.address(1))
            listener = hosts.start(1, sys.executable, "-c", LISTEN, stdout=subprocess.PIPE)
            assert listener.stdout is not None
            listener.stdout.readline()
            for _ in range(times):
                took = json.loads(hosts.start(0, *words, stdout=subprocess.PIPE).communicate()[0])
                assert took is None if least is None else took >= least, "there and back"
            listener.kill()
            listener.communicate()


@pytest.mark.slow
def test_the_same_with_tls(hosts: Hosts, tmp_path: Path) -> None:
    options = ("--steps", "80", "--kill", "server:1@step:20", "--kill", "coordinator@step:40", "--check-parity")
    summary = Run(hosts, tmp_path, *options, tls="auto").finish()
    assert {failure["role"] for failure in summary["failures"]} == {"server", "coordinator"}
    assert summary["parity_wrong"] == 0
