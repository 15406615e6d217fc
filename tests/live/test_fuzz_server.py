"""Goal: nothing that arrives on a socket harms a server: it answers or closes, serves others meanwhile, and
keeps its size. Over Unix sockets, TCP, and TLS.

Method: a real server process gets thousands of connections with random bytes, damaged handshakes, half frames
and, from a peer with the right token, damaged frames of every kind. Between them a good client pulls and
pushes and compares exact values. Memory is read from /proc before and after. Where there is TLS, all of that comes
from somebody who has the certificate; and damaged words of TLS itself come from somebody who has not.
"""

from __future__ import annotations

import contextlib
import functools
import random
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import COORDINATOR, arrays, example_messages, job, mutated, plan_of, server, table, view, worker

from regrow.core.framing import FrameReader, Limits, Stamp, encode
from regrow.core.identity import Identity
from regrow.core.link import Initiator, Link
from regrow.core.messages import (
    PROTOCOL_VERSION,
    Assign,
    Hello,
    Message,
    Open,
    Pull,
    Push,
    ReadRecords,
    Refused,
    WriteRecords,
)
from regrow.launch import cluster as cluster_file
from regrow.launch.cluster import LocalCluster
from regrow.launch.crew import Crew
from regrow.runtime import strangers
from regrow.runtime.client import Client, SocketClient
from regrow.runtime.seal import Seal
from regrow.runtime.tls import make_tls

ANSWER_SECONDS_MAX = 20.0
QUIET_SECONDS = 0.02  # after which a peer has said what it wants to say, mostly
RSS_GROWTH_BYTES_MAX = 6 << 20
LIMITS = Limits(meta_bytes_max=1 << 20, section_bytes_max=1 << 20)
JOB = job(table(rows=10, dim=2), table("wide", rows=4, dim=9), workers=3)


class World:
    """One server, its coordinator, and a good client that knows what its rows must be."""

    def __init__(self, transport: str) -> None:
        self.has_tls = transport == "tls"
        with pytest.MonkeyPatch.context() as patch:
            if self.has_tls:  # a cluster of one machine has no use for it otherwise
                patch.setattr(cluster_file, "Crew", functools.partial(Crew, tls="auto"))
                patch.setattr(cluster_file, "SocketClient", functools.partial(SocketClient, tls="auto"))
            self.cluster = LocalCluster(servers=1, transport="tcp" if self.has_tls else transport)
            self.client: Client = self.cluster.client(JOB)
        assert self.client.session.view is not None
        self.server = self.client.session.view.servers[0].address
        self.coordinator = str(self.cluster._crew.coordinator_address)
        self.token = bytes.fromhex(self.cluster._token)
        own = make_tls("auto", self.token) if self.has_tls else None
        self.dialing = None if own is None else own.dialing
        self.steps = 0
        self.insiders = 0

    def probe(self) -> None:
        """A pull sees what was written, a push changes it by exactly its gradients, all of it is read back."""
        self.steps += 1
        before = np.arange(20, dtype=np.float32).reshape(10, 2) * self.steps
        self.client.write_records(0, 0, before)
        plan = plan_of(JOB, [range(10), []])
        ticket = self.client.pull(plan, step=self.steps)
        rows = ticket.wait(ANSWER_SECONDS_MAX).reshape(10, 2)
        assert np.array_equal(rows, before)
        self.client.push(ticket, np.full(20, self.steps, np.float32))
        self.client.drain(ANSWER_SECONDS_MAX)
        assert np.array_equal(self.client.records(0, 0, 10), before - self.steps)

    def count(self, connections: int) -> int:
        """Those of TLS cost several times as much."""
        return connections // 8 if self.has_tls else connections

    def connect(self, address: str) -> Any:
        """A socket, behind TLS where that is wanted."""
        plain = connect(address)
        return plain if self.dialing is None else Hidden(plain, self.dialing)

    def rss_bytes(self, name: str) -> int:
        status = Path(f"/proc/{self.cluster.pids[name]}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    def log(self, name: str) -> str:
        role, _, index = name.partition(" ")
        return (self.cluster._logs / f"{role}-{index or 0}.log").read_text()


@pytest.fixture(scope="module", params=["unix", "tcp", "tls"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    with made.cluster:
        yield made


def connect(address: str) -> socket.socket:
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(ANSWER_SECONDS_MAX)
        made.connect(rest)
        return made
    host, _, port = rest.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS_MAX)


class Hidden:
    """A socket behind TLS, with what is needed of it here: one that can say that nothing more will come, and listen."""

    def __init__(self, plain: socket.socket, context: ssl.SSLContext) -> None:
        self._plain, self._read, self._written = plain, ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._read, self._written)
        self._heard = bytearray()
        self._repeat(self._tls.do_handshake)

    def _repeat(self, do: Callable[[], Any]) -> Any:
        """Until TLS has what it wants for it; None at the end of all."""
        while True:
            try:
                done = do()
                self._plain.sendall(self._written.read())
                return done
            except ssl.SSLWantReadError:
                self._plain.sendall(self._written.read())
                data = self._plain.recv(1 << 16)
                if not data:
                    return None
                self._read.write(data)
            except ssl.SSLError:  # it was cut off, or we are told why nobody wants us
                return None

    def sendall(self, data: bytes) -> None:
        if data:
            self._repeat(lambda: self._tls.write(data))

    def recv_into(self, buffer: Any) -> int:
        if not self._heard:
            return self._repeat(lambda: self._tls.read(len(buffer), buffer)) or 0
        part = self._heard[: len(buffer)]
        buffer[: len(part)] = part
        del self._heard[: len(part)]
        return len(part)

    def shutdown(self, how: int) -> None:
        """Whoever hears this forgets all that it wanted to say: so that is heard first."""
        self._plain.settimeout(QUIET_SECONDS)
        with contextlib.suppress(TimeoutError):
            while data := self._repeat(lambda: self._tls.read(1 << 16)):
                self._heard += data
        self._plain.settimeout(ANSWER_SECONDS_MAX)
        self._plain.shutdown(how)

    def close(self) -> None:
        self._plain.close()


class Peer:
    """Our end of a connection, byte by byte."""

    def __init__(self, world: World, address: str, machine: Initiator | None = None) -> None:
        self.machine = machine
        self.socket = world.connect(address)
        self.reader = FrameReader(limits=LIMITS)
        self.seal: Seal | None = None  # over TCP, after the handshake

    def send(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # closed on us already: that is an answer too
            self.socket.sendall(data)

    def receive(self) -> list[Message] | None:
        """What came next, but for the handshake; None when the other side has closed."""
        try:
            count = self.socket.recv_into(self.reader.buffer())
        except ConnectionError:
            return None
        # One by one: what follows the last word of the handshake in the same piece is sealed.
        said = [frame.message for frame in self.reader.advance(count) if not self._is_handshake(frame.message)]
        return said if count else None

    def _is_handshake(self, message: Message) -> bool:
        machine = self.machine
        if machine is None or machine.opening is not None or isinstance(message, Refused):
            return False
        for reply in machine.receive(message):
            self.send(bytes_of(reply))
        opening = machine.opening
        if opening is not None and opening.sealed:
            self.seal, self.reader.seal = Seal(opening.key_out), Seal(opening.key_in)
        return True

    def finish(self) -> list[Message]:
        """Says that nothing more will come; the other side must then end it in time, whatever it got."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
        said: list[Message] = []
        while (more := self.receive()) is not None:
            said += more
        self.socket.close()
        return said


def bytes_of(message: Message, stamp: Stamp | None = None, seal: Seal | None = None) -> bytes:
    return b"".join(encode(message, stamp or Stamp(), seal))


# --- Strangers ---

SAMPLES = [bytes_of(message) for message in example_messages()]


def stranger(rng: random.Random, world: World, address: str) -> list[Message]:
    """One connection of somebody without the token."""
    peer = Peer(world, address)
    match rng.randrange(6):
        case 0:
            peer.send(rng.randbytes(rng.randint(1, 5000)))
        case 1:
            peer.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        case 2:
            sample = rng.choice(SAMPLES)
            peer.send(sample[: rng.randrange(len(sample))])
        case 3:
            peer.send(rng.choice(SAMPLES))
        case 4:
            peer.send(mutated(rng, rng.choice(SAMPLES)))
        case 5:
            nonce, proof = rng.randbytes(32), rng.randbytes(32)
            received = rng.choice((0, 1, 2**62))
            who = {"role": "worker", "id": 1, "incarnation": 0, "received": received}
            hello = Hello(protocol=PROTOCOL_VERSION, nonce=nonce, proof=proof, **who)  # type: ignore[arg-type]
            peer.send(bytes_of(hello) + rng.randbytes(rng.randint(0, 50)))
    return peer.finish()


@pytest.mark.parametrize("target", ["server 0", "coordinator"])
def test_strangers(world: World, target: str) -> None:
    rng = random.Random(f"strangers {target}")
    address = world.server if target == "server 0" else world.coordinator
    said: Counter[str] = Counter()
    rss_bytes = 0
    count = world.count(1600)
    for number in range(count):
        if number == count // 4:
            rss_bytes = world.rss_bytes(target)
        if number % 100 == 0:
            world.probe()
        said.update(type(message).__name__ for message in stranger(rng, world, address))
    assert set(said) == {"Challenge", "Refused"}, "a stranger learns nothing else"
    if not world.has_tls:  # which ends at once when the other side does, whatever was on its way
        assert said["Challenge"] == count
    assert said["Refused"] > count // 4
    assert world.rss_bytes(target) - rss_bytes < RSS_GROWTH_BYTES_MAX
    world.probe()
    assert "Traceback" not in world.log(target)


def test_strangers_who_wait(world: World) -> None:
    """Half a frame, and then nothing: others are served, and those who leave are forgotten."""
    for _ in range(3):
        idle = [Peer(world, world.server) for _ in range(100)]
        for number, peer in enumerate(idle):
            peer.send(SAMPLES[0][:number])
        world.probe()
        for peer in idle:
            peer.finish()


# --- Strangers without the certificate ---


def greet() -> bytes:
    """The first word of a client of TLS."""
    written = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), written).do_handshake()
    return written.read()


def knock(rng: random.Random, address: str) -> bytes:
    """One connection of such a stranger, and what it was told."""
    plain = connect(address)
    greeting = greet()
    match rng.randrange(6):
        case 0:
            data = rng.randbytes(rng.randint(1, 5000))
        case 1:
            data = greeting[: rng.randrange(len(greeting))]
        case 2:
            data = mutated(rng, greeting)
        case 3:  # a record that says that it is long
            data = b"\x16\x03\x01" + rng.randbytes(2) + rng.randbytes(rng.randint(0, 400))
        case 4:  # then whatever comes to mind, as if the rest had been agreed
            data = greeting + b"\x17\x03\x03" + rng.randbytes(rng.randint(2, 2000))
        case _:  # who does not know that there is TLS
            data = rng.choice(SAMPLES)
    heard = b""
    with contextlib.suppress(ConnectionError, TimeoutError):
        plain.sendall(data)
        plain.settimeout(QUIET_SECONDS)
        while more := plain.recv(1 << 16):
            heard += more
    plain.close()
    return heard


@pytest.mark.parametrize("target", ["server 0", "coordinator"])
def test_damaged_words_of_tls(world: World, target: str) -> None:
    if not world.has_tls:
        pytest.skip("there is none")
    rng = random.Random(f"knocking at {target}")
    address = world.server if target == "server 0" else world.coordinator
    rss_bytes, answers = 0, 0
    for number in range(400):
        if number == 100:
            rss_bytes = world.rss_bytes(target)
        if number % 100 == 0:
            world.probe()
        heard = knock(rng, address)
        answers += bool(heard)
        assert b"regrow" not in heard, "the certificate is for those who have it"
    assert answers > 12, "this test has lost its variety"
    assert world.rss_bytes(target) - rss_bytes < RSS_GROWTH_BYTES_MAX
    world.probe()
    assert "Traceback" not in world.log(target)


def test_many_who_never_begin(world: World) -> None:
    """They take few of a server's files, and little memory; whoever belongs here is let in meanwhile."""
    if world.server.startswith("unix:"):
        pytest.skip("the system lets no more of them wait than it should")
    limit = strangers.STRANGERS_MAX + 100
    files = Path(f"/proc/{world.cluster.pids['server 0']}/fd")
    before, rss_bytes = len(list(files.iterdir())), world.rss_bytes("server 0")
    with contextlib.ExitStack() as stack:
        for _ in range(700):
            stack.enter_context(connect(world.server))
        world.insiders += 1
        peer, link, said = open_link(random.Random(3), world, world.server, worker(1, world.insiders))
        assert (link is not None, said) == (True, [])
        world.probe()
        assert len(list(files.iterdir())) - before < limit
        assert world.rss_bytes("server 0") - rss_bytes < 4 * RSS_GROWTH_BYTES_MAX
        peer.finish()


# --- Peers with the token ---


def open_link(
    rng: random.Random, world: World, address: str, local: Identity
) -> tuple[Peer, Link | None, list[Message]]:
    """A proper handshake, from a peer that will not behave afterwards. A view that comes with it is ignored.
    Whoever was replaced, or pretends to have received what was never sent, gets no link, but a reason."""
    expected = server(0) if address == world.server else COORDINATOR
    received = rng.choice((0, 0, 0, 0, 1, 2**62))
    machine = Initiator(
        token=world.token, local=local, nonce=rng.randbytes(32), expected=expected, received=lambda: received
    )
    peer = Peer(world, address, machine)
    while machine.peer is None:
        messages = peer.receive()
        assert messages is not None, "the server does not finish a good handshake"
        if messages and machine.peer is None:
            return peer, None, messages
    return peer, Link(local=local, peer=machine.peer), []


def likely(rng: random.Random) -> Message:
    """A message that a worker might send to this server, right or nearly right."""
    counts = [rng.randint(0, 3), rng.randint(0, 3)]
    slots = [rng.randint(0, 10) for _ in range(sum(counts))]
    floats = [rng.uniform(-1, 1) for _ in range(counts[0] * 2 + counts[1] * 9 + rng.choice((0, 0, 0, 1)))]
    part = arrays(counts=counts, slots=slots)
    kinds: list[Any] = [
        lambda: Open(),
        lambda: Pull(request=rng.randint(0, 9), step=rng.randint(0, 9), **part),
        lambda: Push(seq=rng.choice((0, 1, 1, 1, 2, 3)), **part, **arrays(grads=floats)),
        lambda: Assign(**part, **arrays(weights=floats)),
        lambda: ReadRecords(
            request=1,
            table=rng.randint(0, 2),
            parity=rng.random() < 0.2,
            slot_first=rng.randint(0, 9),
            slot_count=rng.randint(0, 3),
        ),
        lambda: WriteRecords(request=1, table=rng.randint(0, 2), **arrays(slots=slots, records=range(4 * len(slots)))),
        lambda: view(JOB, epoch=rng.randint(0, 5)),
    ]
    made: Message = rng.choice(kinds)()
    return made


def insider(rng: random.Random, world: World, address: str) -> list[Message]:
    """One connection of somebody who holds the token and sends what it should not."""
    world.insiders += 1
    # Never as the good client itself: a newer incarnation of it would rightly put it out of work.
    who = rng.choice(
        [
            worker(1, world.insiders),  # a process comes once, under an incarnation of its own
            worker(2, world.insiders),
            worker(1, rng.randint(0, world.insiders)),  # or too late
            worker(rng.randint(3, 2**32 - 1)),
            server(rng.randint(1, 2**32 - 1), rng.randint(0, 9)),
            Identity(role="coordinator", id=1, incarnation=rng.randint(0, 2**32 - 1)),
        ]
    )
    peer, link, said = open_link(rng, world, address, who)
    if link is None:
        return said + peer.finish()
    for _ in range(rng.randint(3, 9)):
        message = likely(rng) if rng.random() < 0.8 else rng.choice(example_messages())
        stamp = link.send(message)
        if rng.random() < 0.1:
            stamp = Stamp(
                source_incarnation=rng.randint(0, 3),
                target_incarnation=rng.randint(0, 1),
                number=rng.choice((0, 1, 2, 2**64 - 1)),
                acknowledged=rng.choice((0, 1, 2**64 - 1)),
            )
        data = bytes_of(message, stamp, peer.seal)
        peer.send(mutated(rng, data) if rng.random() < 0.4 else data)
    return peer.finish()


@pytest.mark.parametrize("target", ["server 0", "coordinator"])
def test_insiders(world: World, target: str) -> None:
    rng = random.Random(f"insider at {target}")
    address = world.server if target == "server 0" else world.coordinator
    said: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    rss_bytes = 0
    count = world.count(800)
    for number in range(count):
        if number == count // 4:
            rss_bytes = world.rss_bytes(target)
        if number % 40 == 0:
            world.probe()
        for message in insider(rng, world, address):
            said[type(message).__name__] += 1
            if isinstance(message, Refused):
                reasons[message.reason.split(" ")[0]] += 1
    if target == "server 0":
        rare = set() if world.has_tls else {"Pushed", "Records", "RecordsWritten"}
        assert {"Rows", "Opened", "Refused", *rare} <= set(said), said
    else:
        assert {"View", "Refused"} <= set(said), said
    assert len(reasons) > 5, f"this test has lost its variety: {reasons}"
    assert world.rss_bytes(target) - rss_bytes < RSS_GROWTH_BYTES_MAX
    world.probe()
    assert "Traceback" not in world.log(target)
    assert "Traceback" not in world.log("server 0")
