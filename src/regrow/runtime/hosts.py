"""Where others reach this host: one address of those that it has, found by itself or chosen by the user.

    node:                    the address of this host: the only one, or the one from which the coordinator is reached
    node:eth1                the address of that interface
    node:10.1.0.0/16         the address within that network

A process is told to listen at such a place (`Assignment.listen`) and finds out itself what that is, because nobody else
knows the addresses of its host. Nothing listens at all of them: what is offered is one address, and it is what others
are told.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import ipaddress
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Any

from regrow.errors import UserError

NODE = "node:"
HINT = "--advertise INTERFACE or --advertise CIDR says which address others reach this host at"

Host = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAddress:
    """One of this host."""

    interface: str
    host: Host

    def __str__(self) -> str:
        return f"{self.interface} {self.host}"


def resolve_listen(address: str, *, toward: str | None = None) -> str:
    """An address to listen at, of this host if `address` says so. `toward`: what must be reached from it."""
    if not address.startswith(NODE):
        return address
    return f"tcp:{choose_host(address.removeprefix(NODE), toward=toward)}:0"


def choose_host(wish: str = "", *, toward: str | None = None, known: list[HostAddress] | None = None) -> str:
    """The address of this host that is meant: an interface, a network (CIDR), or "" for the one there is. UserError
    where there is none, or more than one and nothing to choose by."""
    known = list_addresses() if known is None else known
    if wish:
        return str(_choose_wanted(wish, known).host)
    usual = [each for each in known if not each.host.is_loopback and not each.host.is_link_local]
    if len(usual) == 1:
        return str(usual[0].host)
    if (host := _find_route(toward)) is not None:
        return host
    if not usual:
        return str(next((each.host for each in known if each.host.version == 4), "127.0.0.1"))
    raise UserError(f"this host has {len(usual)} addresses: {', '.join(map(str, usual))}", hint=HINT)


def check_wish(wish: str) -> str | None:
    """Why this can be neither an interface nor a network, or None."""
    if "/" not in wish:
        return None if wish and not set(wish) & set(" :,") else f"{wish!r} is not the name of an interface"
    try:
        ipaddress.ip_network(wish, strict=False)
    except ValueError as error:
        return str(error)
    return None


def _choose_wanted(wish: str, known: list[HostAddress]) -> HostAddress:
    if "/" in wish:
        try:
            network = ipaddress.ip_network(wish, strict=False)
        except ValueError as error:
            raise UserError(f"--advertise {wish}: {error}", hint=HINT) from None
        found = [each for each in known if each.host.version == network.version and each.host in network]
    else:
        found = [each for each in known if each.interface == wish and not each.host.is_link_local]
        found = [each for each in found if each.host.version == 4] or found
    if len(found) == 1:
        return found[0]
    here = ", ".join(map(str, known)) or "none"
    what = "no address" if not found else f"{len(found)} addresses"
    raise UserError(f"--advertise {wish}: this host has {what} there", hint=f"it has {here}")


def _find_route(toward: str | None) -> str | None:
    """From which of our addresses a host is reached, as the system would choose. Nothing is sent."""
    scheme, _, rest = (toward or "").partition(":")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host:
        return None
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, int(port) or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError:
        return None


# -- what the system says ------------------------------------------------------------------------------------


class _Address(ctypes.Structure):
    pass


_Address._fields_ = [
    ("next", ctypes.POINTER(_Address)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
    ("mask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]
IFF_UP = 1


def list_addresses() -> list[HostAddress]:
    """Of all interfaces that are up."""
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    first = ctypes.POINTER(_Address)()
    if libc.getifaddrs(ctypes.byref(first)):
        raise UserError(f"the addresses of this host cannot be read: error {ctypes.get_errno()}", hint=HINT)
    found: list[HostAddress] = []
    try:
        each: Any = first
        while each:
            entry = each.contents
            if entry.flags & IFF_UP and (host := _read_host(entry.address)) is not None:
                found.append(HostAddress(interface=entry.name.decode(), host=host))
            each = entry.next
    finally:
        libc.freeifaddrs(first)
    return found


def _read_host(place: int | None) -> Host | None:
    """What is in a sockaddr, if it is an address of IP."""
    if not place:
        return None
    head = ctypes.string_at(place, 2)
    family = head[1] if sys.platform == "darwin" else struct.unpack("=H", head)[0]
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(ctypes.string_at(place + 4, 4))
    if family == socket.AF_INET6:
        return ipaddress.IPv6Address(ctypes.string_at(place + 8, 16))
    return None
