"""Shard servers and the coordinator as processes: a state machine, an endpoint, and nothing between them."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from regrow import _core
from regrow.core.coordinator import Coordinator
from regrow.core.effects import Delivered, Joined, Log, Lost, Refuse, Send
from regrow.core.link import Identity
from regrow.core.messages import Message, Ready, Register
from regrow.core.shard import ShardServer
from regrow.errors import ConnectionLost, RegrowError
from regrow.runtime.client import new_event_loop
from regrow.runtime.parent import Parent
from regrow.runtime.transport import Endpoint
from regrow.store.memory import MemoryStore

log = logging.getLogger("regrow.serve")

COORDINATOR = Identity(role="coordinator", id=0)
REPORT_SECONDS = 1.0


class Node:
    """One state machine behind one endpoint, until it is told to stop."""

    def __init__(self, parent: Parent) -> None:
        assignment = parent.assignment
        self.parent = parent
        self.identity = Identity(
            role=assignment["role"], id=assignment["id"], incarnation=assignment["incarnation"]
        )
        self.section_bytes_max = int(assignment["config"]["frame_bytes_max"])
        self.machine: ShardServer | Coordinator
        if self.identity.role == "server":
            self.machine = ShardServer(
                identity=self.identity, build_store=MemoryStore, reply_bytes_max=self.section_bytes_max
            )
        else:
            self.machine = Coordinator(servers=assignment["config"]["servers"])
        self._stopped: asyncio.Future[None] | None = None

    async def run(self) -> None:
        assignment = self.parent.assignment
        loop = asyncio.get_running_loop()
        self._stopped = loop.create_future()
        self.endpoint = Endpoint(
            local=self.identity,
            token=bytes.fromhex(assignment["token"]),
            section_bytes_max=self.section_bytes_max,
            on_open=lambda peer: self._receive(Joined(peer=peer)),
            on_message=lambda source, message: self._receive(Delivered(source=source, message=message)),
            on_lost=lambda peer, reason: self._receive(Lost(peer=peer, reason=reason)),
            throttles_readers=True,
        )
        self.parent.on_command(lambda command: loop.call_soon_threadsafe(self._on_command, command))
        address = await self.endpoint.listen(assignment["listen"])
        self.parent.report("listening", address=address)
        if self.identity.role == "server":
            await self.endpoint.connect(assignment["coordinator"], COORDINATOR)
            self.endpoint.send(COORDINATOR, Register(address=address))
        reporting = loop.create_task(self._report_often())
        try:
            await self._stopped
        finally:
            reporting.cancel()
            self._report()
            await self.endpoint.close()

    def _receive(self, event: Any) -> None:
        if isinstance(event, Joined) and isinstance(self.machine, ShardServer):
            return  # a server waits until it is spoken to
        try:
            effects = self.machine.receive(event)
        except Exception as error:
            # A state machine that raised is in no state to go on: stop the process, and say so.
            self._stop(error)
            return
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect.target, effect.message)
            elif isinstance(effect, Refuse):
                log.warning("refused %s: %s", effect.target, effect.reason)
                self.endpoint.refuse(effect.target, effect.reason)
            else:
                assert isinstance(effect, Log)
                log.info("%s", effect.text)
        if isinstance(event, Lost) and event.peer == COORDINATOR and self.machine.view is None:
            # Later on nothing is lost with it: a coordinator is only needed when somebody joins or dies.
            self._stop(ConnectionLost(f"lost the coordinator: {event.reason}"))

    def _send(self, target: Identity, message: Message) -> None:
        if isinstance(message, Ready):
            self.parent.report("ready", rows=message.rows, bytes=message.memory_bytes)
        self.endpoint.send(target, message)

    def _on_command(self, command: dict[str, Any]) -> None:
        if command.get("do") == "stop":
            self._stop(None)

    def _stop(self, error: BaseException | None) -> None:
        if self._stopped is None or self._stopped.done():
            return
        if error is None:
            self._stopped.set_result(None)
        else:
            self._stopped.set_exception(error)

    async def _report_often(self) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._report()

    def _report(self) -> None:
        if isinstance(self.machine, ShardServer):
            self.parent.report(
                "server",
                pulls=self.machine.pulls,
                pushes=self.machine.clock,
                bytes_in=self.endpoint.bytes_in,
                bytes_out=self.endpoint.bytes_out,
            )


def run(parent: Parent) -> None:
    """Serves until told to stop. Raises RegrowError when it cannot go on."""
    _core.set_threads(max(1, int(parent.assignment["threads"])))
    loop = new_event_loop()
    try:
        loop.run_until_complete(Node(parent).run())
    except MemoryError as error:
        raise RegrowError(
            f"not enough memory for the tables: {error}",
            hint="Lower --rows-max, take a smaller model, or add servers on other machines.",
        ) from None
    finally:
        loop.close()
