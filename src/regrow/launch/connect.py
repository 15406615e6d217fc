"""A cluster that somebody else started: `regrow.connect(address, token_file)`.

Whoever has a cluster gives away two things: where its coordinator listens, and a file that only the same user can read
(`LocalCluster.address`, `LocalCluster.token_file`). The file has the token that every connection proves to know, and
what the cluster is like: its servers and what protects their rows. So protection is the cluster's, whoever declares
tables first; and the cluster's own process starts successors for whoever dies.

A worker that connects again must have a higher incarnation than all before it, and nobody here knows of the others:
it is the time since the cluster was made.
"""

from __future__ import annotations

import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

import msgspec

from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.errors import ConnectionLost, UserError
from regrow.protection import MIB, ErasureCode, Partial
from regrow.runtime.client import Client, SocketClient
from regrow.runtime.transport import parse_address

FORMAT = 1
ANSWER_SECONDS_MAX = 10.0  # until a socket takes a connection; longer, and a wrong address is found late
OPEN_SECONDS_MAX = 600.0  # filling very large tables takes minutes
TICKS_PER_SECOND = 100  # of incarnations: 32 bits last for more than a year


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What is in a token file."""

    format: int
    token: str
    servers: int
    authenticate: str
    frame_bytes_max: int
    made_at: float
    protection: dict[str, Any] | None = None


def write_ticket(path: Path, ticket: Ticket) -> None:
    """For this user alone, from the first byte on."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(file, "wb") as out:
        out.write(msgspec.json.encode(ticket))


def describe_protection(protection: ErasureCode | Partial | None) -> dict[str, Any] | None:
    if protection is None:
        return None
    names = [name for each in reversed(type(protection).__mro__) for name in getattr(each, "__annotations__", {})]
    return {"kind": type(protection).__name__} | {name: getattr(protection, name) for name in names}


def connect(address: str, token_file: str | Path) -> ConnectedCluster:
    """The cluster at this address. Nothing is declared yet; collections and clients of it do that."""
    ticket = _read_ticket(Path(token_file))
    kind, where, port = parse_address(address)
    try:
        if kind == "unix":
            with socket.socket(socket.AF_UNIX) as door:
                door.settimeout(ANSWER_SECONDS_MAX)
                door.connect(where)
        else:
            socket.create_connection((where, port), ANSWER_SECONDS_MAX).close()
    except OSError as error:
        raise UserError(
            f"no cluster answers at {address}: {error.strerror or error}",
            hint="is the process that made it still there? its `cluster.address` says where it listens",
        ) from None
    return ConnectedCluster(address, ticket)


class ConnectedCluster:
    """A cluster of another process. What is closed here are this process's connections."""

    def __init__(self, address: str, ticket: Ticket) -> None:
        self.address = address
        self.server_count = ticket.servers
        self.protection = _make_protection(ticket.protection)
        self._ticket = ticket
        self._incarnation = 0
        self._clients: list[SocketClient] = []
        self._process = os.getpid()

    def client(self, job: JobSpec, *, worker: int = 0, redo_bytes_max: int = 64 * MIB) -> Client:
        """Connects a worker; a later client of the same worker takes its place, in whatever process."""
        mine, theirs = ((getattr(each, "k", None), getattr(each, "r", 0)) for each in (self.protection, job.protection))
        if mine != theirs or job.protection.replaces_servers != (self.protection is not None):
            raise UserError(
                f"the tables would be protected by {job.protection}, the cluster is by {self.protection}",
                hint="leave protection out: it is given where the cluster is made",
            )
        if self._process != os.getpid():  # forked: the threads of these are not here, and their links not ours
            self._process, self._clients = os.getpid(), []
        now = int((time.time() - self._ticket.made_at) * TICKS_PER_SECOND)
        self._incarnation = max(now, self._incarnation + 1)
        try:
            client = SocketClient(
                identity=Identity(role="worker", id=worker, incarnation=self._incarnation),
                token=bytes.fromhex(self._ticket.token),
                coordinator=self.address,
                job=job,
                redo_bytes_max=redo_bytes_max,
                section_bytes_max=self._ticket.frame_bytes_max,
                open_seconds_max=OPEN_SECONDS_MAX,
                authenticate=self._ticket.authenticate,
            )
        except ConnectionLost as error:
            raise ConnectionLost(f"the cluster at {self.address}: {error.message}", hint=error.hint) from None
        self._clients.append(client)
        return client

    def close(self) -> None:
        """Ends this process's connections. The cluster stays."""
        clients, self._clients = self._clients, []
        for client in clients if self._process == os.getpid() else ():
            client.close()

    def __enter__(self) -> ConnectedCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_ticket(path: Path) -> Ticket:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(
            f"token file {path}: {error.strerror}", hint="`cluster.token_file` of the process that made the cluster"
        ) from None
    found = os.fstat(file)
    if stat.S_ISDIR(found.st_mode):
        os.close(file)
        raise UserError(f"token file {path} is a directory")
    with os.fdopen(file, "rb") as source:
        if not stat.S_ISREG(found.st_mode):
            raise UserError(f"token file {path} is not a file")
        if found.st_uid != os.getuid():
            raise UserError(f"token file {path} belongs to another user", hint="a copy of your own, with mode 0600")
        if found.st_mode & 0o077:
            raise UserError(
                f"token file {path} has mode {stat.S_IMODE(found.st_mode):04o}: others can read or change it",
                hint=f"chmod 600 {path}; whoever has read it has the cluster's token",
            )
        text = source.read(MIB)
    try:
        ticket = msgspec.json.decode(text, type=Ticket)
        bytes.fromhex(ticket.token)
    except (msgspec.DecodeError, ValueError) as error:
        raise UserError(f"{path} is not a token file: {error}") from None
    if ticket.format != FORMAT:
        raise UserError(f"{path} is of format {ticket.format}, this version reads {FORMAT}")
    return ticket


def _make_protection(said: dict[str, Any] | None) -> ErasureCode | Partial | None:
    if said is None:
        return None
    kinds: dict[str, Any] = {"ErasureCode": ErasureCode, "Partial": Partial}
    fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in said.items()}
    try:
        return kinds[str(fields.pop("kind"))](**fields)  # type: ignore[no-any-return]
    except (KeyError, TypeError) as error:
        raise UserError(f"the token file tells of a protection that is not known here: {error}") from None
