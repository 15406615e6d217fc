"""The network between the hosts of namespaces.py where the kernel has no netem: one process that takes every packet of
every host from its `eth0` (a TUN device) and gives it to the host it is for, late, or not at all.

    python slow_wire.py DELAY_SECONDS LOSS_SHARE SEED NAMESPACE=ADDRESS...

It says "ready" when the devices are there. What is lost is lost to TCP as on a real network: it comes again after
200 ms, or sooner if other packets follow. The devices end with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
PACKET_BYTES_MAX = 1 << 16
TARGET = slice(16, 20)  # of the header of IPv4
AT_ONCE = 64  # packets of one host before the next one's turn
PARENT_SECONDS = 1.0


def open_device(namespace: str) -> int:
    """`eth0` in that namespace; the number stays good outside."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as own, open(f"/run/netns/{namespace}") as other:
        if libc.setns(other.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"eth0", IFF_TUN | IFF_NO_PI))
        finally:
            libc.setns(own.fileno(), CLONE_NEWNET)
    return device


def carry(devices: dict[bytes, int], delay_seconds: float, loss_share: float, seed: int) -> None:
    """Until whoever started this is gone."""
    chance, parent = random.Random(seed), os.getppid()
    poll = select.epoll()
    for device in devices.values():
        poll.register(device, select.EPOLLIN)
    waiting: deque[tuple[float, int, bytes]] = deque()  # when it is due, for whom
    while os.getppid() == parent:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, target, packet = waiting.popleft()
            with contextlib.suppress(OSError):  # its host is going away: lost
                os.write(target, packet)
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else PARENT_SECONDS
        for device, _ in poll.poll(timeout):
            for packet in read_packets(device):
                to = devices.get(packet[TARGET])
                if to is not None and chance.random() >= loss_share:
                    waiting.append((time.monotonic() + delay_seconds, to, packet))


def read_packets(device: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < AT_ONCE:
        try:
            packet = os.read(device, PACKET_BYTES_MAX)
        except OSError:
            break
        if packet[0] >> 4 == 4:
            found.append(packet)
    return found


def main() -> None:
    delay_seconds, loss_share, seed, *hosts = sys.argv[1:]
    pairs = [host.split("=") for host in hosts]
    devices = {socket.inet_aton(address): open_device(namespace) for namespace, address in pairs}
    print("ready", flush=True)
    carry(devices, float(delay_seconds), float(loss_share), int(seed))


if __name__ == "__main__":
    main()
