"""Goal: a process offers the address that others reach it at, or says why it cannot know.

Method: lists of addresses as hosts have them; and what this machine says of itself."""

from __future__ import annotations

import ipaddress
import socket

import pytest

from regrow.errors import UserError
from regrow.runtime.hosts import HostAddress, check_wish, choose_host, list_addresses, resolve_listen


def host(text: str) -> HostAddress:
    interface, _, address = text.partition(" ")
    return HostAddress(interface=interface, host=ipaddress.ip_address(address))


LO, LO6 = host("lo 127.0.0.1"), host("lo ::1")
ETH0, ETH1 = host("eth0 10.1.0.5"), host("eth1 192.168.7.9")
LINK = host("eth0 fe80::1")


def test_where_there_is_one_it_is_found() -> None:
    assert choose_host(known=[LO, LO6, ETH0, LINK]) == "10.1.0.5"
    assert choose_host(known=[LO6, LO]) == "127.0.0.1"
    assert choose_host(known=[]) == "127.0.0.1"


@pytest.mark.parametrize(
    ("wish", "found"), [("eth1", "192.168.7.9"), ("10.0.0.0/8", "10.1.0.5"), ("lo", "127.0.0.1"), ("::/0", "::1")]
)
def test_a_wish_is_an_interface_or_a_network(wish: str, found: str) -> None:
    assert choose_host(wish, known=[LO, LO6, ETH0, ETH1]) == found


def test_of_several_the_one_toward_the_coordinator() -> None:
    assert choose_host(known=[LO, ETH0, ETH1], toward="tcp:127.0.0.1:7000") == "127.0.0.1"
    with pytest.raises(UserError, match=r"this host has 2 addresses: eth0 10.1.0.5, eth1 192.168.7.9") as error:
        choose_host(known=[LO, ETH0, ETH1], toward="unix:/somewhere")
    assert "--advertise" in str(error.value.hint)


@pytest.mark.parametrize("wish", ["eth2", "172.16.0.0/12", "0.0.0.0/0", "10.0.0.0/99"])
def test_a_wish_that_does_not_fit_says_what_there_is(wish: str) -> None:
    with pytest.raises(UserError, match=f"--advertise {wish}"):
        choose_host(wish, known=[LO, ETH0, ETH1])


def test_wishes_are_checked_before_anybody_is_asked() -> None:
    assert check_wish("eth0") is None
    assert check_wish("10.0.0.0/8") is None
    assert check_wish("10.0.0.0/99") is not None
    assert check_wish("a b") is not None


def test_this_machine_has_a_loopback_and_listens_there() -> None:
    assert any(each.host.is_loopback for each in list_addresses())
    assert resolve_listen("tcp:127.0.0.1:0") == "tcp:127.0.0.1:0"
    address = resolve_listen("node:127.0.0.0/8")
    scheme, where, port = address.split(":")
    assert (scheme, port) == ("tcp", "0")
    with socket.socket() as door:
        door.bind((where, 0))
