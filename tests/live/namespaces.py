"""Hosts that are network namespaces of this machine, behind one bridge in a namespace of its own: nothing of their
traffic reaches a real interface. Everything is removed when it is closed, whatever happened."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from typing import Any

COMMAND_SECONDS_MAX = 30.0


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def find_obstacle(*, netem: bool = False) -> str | None:
    """Why there can be no such hosts here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"{missing[0]} is not installed"
    try:
        with Hosts(1) as hosts:
            if netem:
                hosts.disturb(0, "delay", "1ms")
    except OSError as error:
        return f"network namespaces, or netem, are not permitted here: {error}"
    return None


class Hosts:
    """`count` hosts with the addresses 10.77.0.1, 10.77.0.2, ..."""

    def __init__(self, count: int) -> None:
        self._tag = f"rg{secrets.token_hex(3)}"
        self._count = count
        self._namespaces: list[str] = []

    def __enter__(self) -> Hosts:
        try:
            self._add_namespace(self._hub)
            self._in(self._hub, "ip", "link", "add", "br0", "type", "bridge")
            self._in(self._hub, "ip", "link", "set", "br0", "up")
            for host in range(self._count):
                self._add_host(host)
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

    def disturb(self, host: int, *how: str) -> None:
        """What leaves this host is late, or lost: the words of netem."""
        self._in(self._name(host), "tc", "qdisc", "add", "dev", "eth0", "root", "netem", *how)

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

    @staticmethod
    def _in(name: str, *words: str) -> str:
        return run("ip", "netns", "exec", name, *words)
