"""The hands of a supervisor: its orders become processes and words, with whatever backend there is.

Here is known which handle is whose, what every process is told when it starts, and where the coordinator listens. No
decision is made here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from regrow.checkpoint.extras import Extras
from regrow.core.identity import Identity
from regrow.errors import RegrowError
from regrow.launch.backend import Backend, Handle
from regrow.launch.orders import Assignment, Become, Command, MakeCheckpoint, NameModel, SaveEvery
from regrow.launch.reports import ModelNamed, SaveNow
from regrow.launch.saving import Extra, Hanging, Saving, StoredCut, TieredRows
from regrow.launch.supervisor import Kill, Order, Pause, Promote, Resume, Start, Tell


class Crew:
    """The processes of a run by identity. All are told the same, but for who they are."""

    def __init__(
        self,
        *,
        backend: Backend,
        threads: Mapping[str, int],
        token: str,
        servers: int,
        frame_bytes_max: int,
        authenticate: str = "auto",
        tls: str = "off",
        config: dict[str, Any] | None = None,
        saving: Saving | None = None,
        publications: Saving | None = None,
        start: StoredCut | None = None,
        hanging: Hanging | None = None,
        tiers: TieredRows | None = None,
    ) -> None:
        self.coordinator_address: str | None = None  # once it listens
        self._backend = backend
        self._threads = threads
        self._token = token
        self._servers = servers
        self._frame_bytes_max = frame_bytes_max
        self._authenticate = authenticate
        self._tls = tls
        self._config = config or {}
        self._saving = saving
        self._publications = publications
        self._start = start
        self._hanging = hanging
        self._tiers = tiers
        self._handles: dict[Identity, Handle] = {}

    def template(self, who: Identity) -> Assignment:
        """What this one would be told, but for the token."""
        return msgspec.structs.replace(self._assign(who), token="")

    def adopt(self, handles: Sequence[Handle], template: Assignment) -> None:
        """Of processes that another launcher started, and told this: their successors are told the same."""
        self._handles |= {handle.who: handle for handle in handles}
        self._saving, self._publications, self._start = template.saving, template.publications, template.start
        self.coordinator_address = template.coordinator

    def handle(self, who: Identity) -> Handle:
        return self._handles[who]

    def tell(self, who: Identity, command: Command) -> None:
        self._handles[who].tell(command)

    def change_saves(self, every: SaveEvery) -> None:
        """Successors save as often as those that live (partial recovery)."""
        assert self._saving is not None and self._saving.own is not None
        own = msgspec.structs.replace(self._saving.own, every_seconds=every.seconds)
        self._saving = msgspec.structs.replace(self._saving, own=own)

    def keep(self, said: SaveNow | ModelNamed) -> Command:
        """What a script says of checkpoints, as the coordinator is told; its successors know of it."""
        if isinstance(said, ModelNamed):
            self._saving = _name_model(self._saving, said.text)
            self._publications = _name_model(self._publications, said.text)
            return NameModel(text=said.text)
        if said.extra is not None:
            self._keep_extra(said.extra)
        return MakeCheckpoint(extra=said.extra)

    def _keep_extra(self, extra: Extra) -> None:
        """Workers' successors know it, too."""
        assert self._saving is not None
        extras = Extras([(each.step, each.text) for each in self._saving.extras])
        extras.keep(extra.step, extra.text)
        kept = tuple(Extra(step=step, text=text) for step, text in extras.kept)
        self._saving = msgspec.structs.replace(self._saving, extras=kept)

    def carry_out(self, order: Order) -> None:
        match order:
            case Start(who=who):
                self._handles[who] = self._start_process(who)
            case Promote(spare=spare, who=who):
                handle = self._handles[who] = self._handles.pop(spare)
                handle.who = who
                handle.tell(Become(assignment=self._assign(who)))
            case Tell(who=who, command=command):
                self.tell(who, command)
            case Kill(who=who):
                self._handles[who].kill()
            case Pause(who=who):
                self._handles[who].pause()
            case Resume(who=who):
                self._handles[who].resume()
            case _:
                raise AssertionError(f"an order that is not for a process: {order!r}")

    def _start_process(self, who: Identity) -> Handle:
        try:
            return self._backend.start(self._assign(who))
        except OSError as error:
            raise RegrowError(f"cannot start {who.role} {who.id}: {error.strerror or error}") from None

    def _assign(self, who: Identity) -> Assignment:
        return Assignment(
            identity=who,
            token=self._token,
            listen=self._backend.choose_address(who, before=self.coordinator_address),
            coordinator=None if who.role == "coordinator" else self.coordinator_address,
            threads=self._threads[who.role],
            servers=self._servers,
            frame_bytes_max=self._frame_bytes_max,
            authenticate=self._authenticate,
            tls=self._tls,
            config=self._config,
            saving=self._saving,
            publications=self._publications,
            start=self._start,
            hanging=self._hanging,
            tiers=self._tiers,
        )


def _name_model(saving: Saving | None, text: str) -> Saving | None:
    return None if saving is None else msgspec.structs.replace(saving, model=text)
