"""Hosts that are network namespaces of this machine, behind one bridge in a namespace of its own: nothing of their
traffic reaches a real interface. Where what they send is to be late or lost and the kernel has no netem, a process is
between them instead of the bridge (slow_wire.py). Everything is removed when it is closed, whatever happened."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

COMMAND_SECONDS_MAX = 30.0
WIRE = Path(__file__).with_name("slow_wire.py")
QUEUE_PACKETS = 10_000  # of a host that the process between them has not come to


class Slow(NamedTuple):
    """What becomes of what a host sends."""

    delay_seconds: float = 0.0
    loss_share: float = 0.0

    def words(self) -> tuple[str, ...]:
        """Those of netem."""
        return ("delay", f"{1e3 * self.delay_seconds:g}ms", "loss", f"{100 * self.loss_share:g}%")


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def find_obstacle(*, slow: bool = False) -> str | None:
    """Why there can be no such hosts here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "ip is not installed"
    try:
        with Hosts(1, slow=Slow() if slow else None):
            pass
    except OSError as error:
        return f"network namespaces, or devices in them, are not permitted here: {error}"
    return None


def has_netem() -> bool:
    if shutil.which("tc") is None:
        return False
    try:
        with Hosts(1) as hosts:
            hosts.disturb(0, Slow(0.001))
    except OSError:
        return False
    return True


class Hosts:
    """`count` hosts with the addresses 10.77.0.1, 10.77.0.2, ... `slow`: what they send, with netem or without."""

    def __init__(self, count: int, *, slow: Slow | None = None) -> None:
        self._slow = slow
        self._wire: subprocess.Popen[str] | None = None
        self._tag = f"rg{secrets.token_hex(3)}"
        self._count = count
        self._namespaces: list[str] = []

    def __enter__(self) -> Hosts:
        try:
            if self._slow is not None and not has_netem():
                self._add_wire(self._slow)
                return self
            self._add_namespace(self._hub)
            self._in(self._hub, "ip", "link", "add", "br0", "type", "bridge")
            self._in(self._hub, "ip", "link", "set", "br0", "up")
            for host in range(self._count):
                self._add_host(host)
                if self._slow is not None:
                    self.disturb(host, self._slow)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._namespaces:
            with contextlib.suppress(OSError):
                for pid in run("ip", "netns", "pids", name).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), 9)
            with contextlib.suppress(OSError):
                run("ip", "netns", "del", name)
        if self._wire is not None:
            self._wire.kill()
            self._wire.communicate()

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def start(self, host: int, *words: str, **options: Any) -> subprocess.Popen[bytes]:
        """A process of this host."""
        return subprocess.Popen(["ip", "netns", "exec", self._name(host), *words], **options)

    def cut(self, host: int) -> None:
        """Nothing leaves or reaches this host."""
        self._in(self._hub, "ip", "link", "set", f"p{host}", "down")

    def heal(self, host: int) -> None:
        self._in(self._hub, "ip", "link", "set", f"p{host}", "up")

    def part(self, one: int, other: int) -> None:
        """These two do not reach each other; everybody else does."""
        for here, there in ((one, other), (other, one)):
            self._in(self._name(here), "ip", "route", "add", "blackhole", f"{self.address(there)}/32")

    def disturb(self, host: int, how: Slow) -> None:
        """What leaves this host is late, or lost."""
        self._in(self._name(host), "tc", "qdisc", "add", "dev", "eth0", "root", "netem", *how.words())

    @property
    def _hub(self) -> str:
        return f"{self._tag}hub"

    def _name(self, host: int) -> str:
        return f"{self._tag}h{host}"

    def _add_namespace(self, name: str) -> None:
        run("ip", "netns", "add", name)
        self._namespaces.append(name)
        self._in(name, "ip", "link", "set", "lo", "up")

    def _add_host(self, host: int) -> None:
        name, port = self._name(host), f"p{host}"
        self._add_namespace(name)
        self._in(self._hub, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        self._in(self._hub, "ip", "link", "set", port, "master", "br0", "up")
        self._in(name, "ip", "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        self._in(name, "ip", "link", "set", "eth0", "up")

    def _add_wire(self, slow: Slow) -> None:
        """A process between hosts that have no bridge."""
        for host in range(self._count):
            self._add_namespace(self._name(host))
        pairs = [f"{self._name(host)}={self.address(host)}" for host in range(self._count)]
        words = [sys.executable, str(WIRE), str(slow.delay_seconds), str(slow.loss_share), "7", *pairs]
        self._wire = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._wire.stdout is not None and self._wire.stderr is not None
        if self._wire.stdout.readline() != "ready\n":
            raise OSError(self._wire.stderr.read().strip().rpartition("\n")[2])
        for host in range(self._count):
            name = self._name(host)
            self._in(name, "ip", "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            self._in(name, "ip", "link", "set", "eth0", "txqueuelen", str(QUEUE_PACKETS), "up")

    @staticmethod
    def _in(name: str, *words: str) -> str:
        return run("ip", "netns", "exec", name, *words)
