"""The coordinator: knows who serves what, and tells everybody. It is never on the data path.

It waits until every server of the job has registered and the job has been declared, then makes the first
view. Whoever comes later gets the view at once. The rule to keep: epochs only rise, and a view is sent whole.
"""

from __future__ import annotations

from regrow.core.effects import Delivered, Joined, Log, Lost, Refuse, Send
from regrow.core.job import JobSpec
from regrow.core.link import Identity
from regrow.core.messages import Declare, Member, Ready, Register, View

Event = Joined | Delivered | Lost
Effect = Send | Refuse | Log


class Coordinator:
    """One door: `effects = coordinator.receive(event)`."""

    def __init__(self, *, servers: int, job: JobSpec | None = None) -> None:
        self.view: View | None = None
        self.ready: dict[int, Ready] = {}
        self._server_count = servers
        self._job = job
        self._members: dict[int, Member] = {}
        self._peers: dict[Identity, None] = {}  # in order of arrival

    def receive(self, event: Event) -> list[Effect]:
        if isinstance(event, Joined):
            self._peers[event.peer] = None
            return [Send(target=event.peer, message=self.view)] if self.view is not None else []
        if isinstance(event, Lost):
            self._peers.pop(event.peer, None)
            return [Log(text=f"{event.peer} is gone: {event.reason}")]
        message = event.message
        if isinstance(message, Register) and event.source.role == "server":
            return self._on_register(event.source, message)
        if isinstance(message, Declare) and event.source.role == "worker":
            return self._on_declare(event.source, message)
        if isinstance(message, Ready) and self._is_member(event.source):
            self.ready[event.source.id] = message
            return [Log(text=f"{event.source} is ready: {message.rows} rows, {message.memory_bytes} bytes")]
        return [Refuse(target=event.source, reason=f"{type(message).__name__} from a {event.source.role}")]

    def _is_member(self, peer: Identity) -> bool:
        member = self._members.get(peer.id)
        return peer.role == "server" and member is not None and member.incarnation == peer.incarnation

    def _on_register(self, source: Identity, message: Register) -> list[Effect]:
        if source.id >= self._server_count:
            return [Refuse(target=source, reason=f"server {source.id} of a cluster of {self._server_count}")]
        known = self._members.get(source.id)
        if known is not None and known.incarnation >= source.incarnation:
            return [Refuse(target=source, reason=f"server {source.id} is registered already")]
        self._members[source.id] = Member(
            id=source.id, incarnation=source.incarnation, address=message.address
        )
        return [Log(text=f"{source} listens at {message.address}"), *self._announce()]

    def _on_declare(self, source: Identity, message: Declare) -> list[Effect]:
        job = message.job
        if reason := job.invalid_reason():
            return [Refuse(target=source, reason=reason)]
        if job.servers != self._server_count:
            reason = f"the job is for {job.servers} servers, this cluster has {self._server_count}"
            return [Refuse(target=source, reason=reason)]
        if self._job is None:
            self._job = job
            return [Log(text=f"{source} declares {len(job.tables)} tables"), *self._announce()]
        if job != self._job:
            return [Refuse(target=source, reason="another job with other tables runs on this cluster")]
        return []

    def _announce(self) -> list[Effect]:
        """The next view, once it can be whole."""
        if self._job is None or len(self._members) < self._server_count:
            return []
        epoch = self.view.epoch + 1 if self.view is not None else 1
        servers = tuple(self._members[index] for index in range(self._server_count))
        self.view = View(epoch=epoch, servers=servers, job=self._job)
        return [Send(target=peer, message=self.view) for peer in self._peers]
