"""Shard servers and the coordinator as processes: a state machine, an endpoint, and nothing between them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy.ma  # noqa: F401  (else the first `np.unique` imports it: 10 ms of every holder while all wait for rows)

from regrow import _kernels
from regrow.checkpoint.epochs import EpochWriter
from regrow.checkpoint.manifests import ManifestWriter
from regrow.checkpoint.model_names import note
from regrow.checkpoint.publications import PublicationWriter
from regrow.core.coordinator import PATIENCE_SECONDS, SILENT_SECONDS, Coordinator
from regrow.core.cut import PUBLICATION_TENANT, TENANT, Save, Unsave
from regrow.core.cuts import CutNow, CutPlan, WriteManifest
from regrow.core.door import ServerDoor
from regrow.core.effects import (
    Condemn,
    Delivered,
    Dial,
    Died,
    Forget,
    Joined,
    Log,
    Lost,
    Notice,
    Refuse,
    Replace,
    Send,
    Stop,
    Tick,
)
from regrow.core.identity import COORDINATOR, Identity
from regrow.core.job import JobSpec
from regrow.core.messages import CutMarks, Message, Ready
from regrow.core.own_saves import OwnSaved, SaveOwn, SavePlan, UnsaveOwn
from regrow.core.paging import Fetched, Upkeep, UpkeepDue
from regrow.core.recall import SAVES_TENANT
from regrow.core.recall_events import SavesRead
from regrow.core.server import Server
from regrow.core.wayback import FetchSaved, FindSaves, Load
from regrow.errors import CheckpointError, ConnectionLost, Refusal, RegrowError, UserError
from regrow.launch import orders, reports
from regrow.launch.saving import OwnSaving, Saving, TieredRows
from regrow.runtime.checkpoint import Loader, Saver, chunk_memory
from regrow.runtime.client import new_event_loop
from regrow.runtime.costs import Costs, make_costs
from regrow.runtime.hosts import resolve_listen
from regrow.runtime.parent import Parent
from regrow.runtime.priorities import choose_tables
from regrow.runtime.saves import OwnLoader, OwnSaver
from regrow.runtime.sockets import prepare_sockets
from regrow.runtime.tiers import DiskWaits, open_tiered
from regrow.runtime.transport import Endpoint, parse_address
from regrow.runtime.writers import make_manifests, make_publications
from regrow.store.interface import Store
from regrow.store.memory import MemoryStore

log = logging.getLogger("regrow.serve")

REPORT_SECONDS = 1.0
CLOSE_SECONDS = 5.0
READING_SECONDS = 5.0  # between two signs that saves are being read
TICK_SECONDS = 0.05  # Too large: silence is noticed late. Too small: ticks cost more than they find.


class Node:
    """One state machine behind one endpoint, until it is told to stop."""

    def __init__(self, parent: Parent) -> None:
        assignment = parent.assignment
        self.parent = parent
        self.identity = assignment.identity
        self.section_bytes_max = assignment.frame_bytes_max
        self.machine: ServerDoor | Coordinator
        self.savers: dict[int, Saver] = {}  # by tenant
        self.own_saver: OwnSaver | None = None  # partial recovery
        self.own_loader: OwnLoader | None = None
        self.manifests: ManifestWriter | EpochWriter | None = None
        self.publications: PublicationWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._marked_at = 0.0  # since when pushes are held back for a cut
        self._hold_seconds_max = 0.0
        self._disk_waits = DiskWaits()
        self.costs = make_costs(assignment.config)
        self._save_began, self._rows_left = 0.0, 0
        saving, start, publications = assignment.saving, assignment.start, assignment.publications
        if self.identity.role == "server":
            self.machine = ServerDoor(
                identity=self.identity,
                address="",  # known once we listen
                build_store=self._build_store,
                reply_bytes_max=self.section_bytes_max,
                cut=None if start is None or start.epochs else start.cut,
                save_plan=None if saving is None else make_save_plan(saving.own),
                marks=start.marks if start is not None and start.epochs else None,
            )
            if saving is not None and not saving.epochs:
                self.savers[TENANT] = self._make_saver(saving)
            if publications is not None:
                self.savers[PUBLICATION_TENANT] = self._make_saver(publications, weights_only=True)
            if saving is not None and saving.own is not None:
                self.own_saver = OwnSaver(
                    url=saving.url,
                    server=self.identity.id,
                    run=saving.run,
                    start=saving.starts,
                    incarnation=self.identity.incarnation,
                    base=None if start is None else start.cut,
                    base_url=None if start is None else start.url,
                    tell=self._on_own_saved,
                    made_by=saving.made_by,
                    encoding=saving.encoding,  # and all bits, whatever checkpoints have: rows come back as they were
                    bytes_per_second=saving.bytes_per_second,
                )
        else:
            hanging = assignment.hanging
            self.machine = Coordinator(
                servers=assignment.servers,
                silent_seconds=SILENT_SECONDS if hanging is None else hanging.silent_seconds,
                patience_seconds=PATIENCE_SECONDS if hanging is None else hanging.patience_seconds,
                term=self.identity.incarnation,
                cut_plan=make_cut_plan(saving),
                publication_plan=make_cut_plan(publications),
                cut_salt="".join(each.salt for each in (saving, publications) if each is not None),
            )
            if saving is not None:
                self.manifests = make_manifests(saving, assignment.config)
            if publications is not None:
                self.publications = make_publications(publications, assignment.config)
        self._stopped: asyncio.Future[None] | None = None

    def _make_saver(self, saving: Saving, *, weights_only: bool = False) -> Saver:
        return Saver(
            url=saving.url,
            server=self.identity.id,
            tell=self._receive,
            encoding=saving.encoding,
            bits=saving.bits,
            bytes_per_second=saving.bytes_per_second,
            weights_only=weights_only,
        )

    def _build_store(self, job: JobSpec, server: int, recovering: bool) -> Store:
        tiers = self.parent.assignment.tiers
        store: Store = MemoryStore(job, server, recovering) if tiers is None else self._open_tiered(job, server, tiers)
        tenants = [*self.savers, *([] if self.own_saver is None else [SAVES_TENANT])]
        for tenant in range(max(tenants, default=-1) + 1):  # a number that nobody has costs a bit a row
            assert store.add_tenant() == tenant
        if not recovering:  # else rows are waited for
            rows = sum(store.slots(table) for table in range(len(job.tables)))
            for saver in (self.savers.get(TENANT), self.own_saver):
                if saver is not None:
                    self._run_task(saver.get_ready(chunk_memory(job, rows)))
        saving = self.parent.assignment.saving
        if self.own_saver is not None and saving is not None and saving.own is not None:
            own = saving.own
            store.set_priority(SAVES_TENANT, own.priority, choose_tables(job, own), own.share, own.seed, own.period)
        return store

    def _open_tiered(self, job: JobSpec, server: int, tiers: TieredRows) -> Store:
        """Rows on disk: what the disk has done wakes the loop."""
        start = self.parent.assignment.start
        epochs = () if start is None else start.epochs
        store: Any = open_tiered(job, server, tiers, at_epoch=epochs[server] if epochs else None)
        asyncio.get_running_loop().add_reader(store.fetch_fd, lambda: self._receive(Fetched()))
        log.info("files in %s: %s", tiers.directory, store.io_description)
        self.parent.report(reports.StoreOpened(io=store.io_description))
        rows: Store = store
        return rows

    async def run(self) -> None:
        assignment = self.parent.assignment
        loop = asyncio.get_running_loop()
        self._stopped = loop.create_future()
        self.endpoint = Endpoint(
            local=self.identity,
            token=bytes.fromhex(assignment.token),
            section_bytes_max=self.section_bytes_max,
            on_open=lambda peer: self._receive(Joined(peer=peer)),
            on_message=lambda source, message: self._receive(Delivered(source=source, message=message)),
            on_lost=lambda peer, reason: self._receive(Lost(peer=peer, reason=reason)),
            on_resumed=self._on_resumed,
            on_fenced=self._on_fenced,
            throttles_workers=True,
            authenticate=assignment.authenticate,
            tls=assignment.tls,
        )
        self.parent.on_command(lambda command: loop.call_soon_threadsafe(self._on_command, command))
        place = resolve_listen(assignment.listen, toward=assignment.coordinator)
        self._address = address = await self.endpoint.listen(place)
        if isinstance(self.machine, ServerDoor):
            self.machine.address = address
            self.parent.follow_coordinator(
                lambda coordinator, address: loop.call_soon_threadsafe(self.endpoint.dial, coordinator, address)
            )
        self.parent.report(reports.Listening(address=address))
        tasks = [loop.create_task(self._report_often()), loop.create_task(self._tick_often())]
        for task in tasks:
            task.add_done_callback(self._on_task_done)
        try:
            await self._stopped
        finally:
            for task in tasks:
                task.cancel()
            self._report()
            for saver in (*self.savers.values(), self.own_saver):
                if saver is not None:
                    with contextlib.suppress(TimeoutError):  # a storage that hangs must not keep anybody
                        await asyncio.wait_for(asyncio.to_thread(saver.close), CLOSE_SECONDS)
            await self.endpoint.close()

    def _receive(self, event: Any) -> None:
        if self._stopped is None or self._stopped.done():
            return
        try:
            if self.costs is not None:
                self._receive_measured(event, self.costs)
            else:
                for effect in self.machine.receive(event):
                    self._run_effect(effect)
            if isinstance(self.machine, ServerDoor) and (server := self.machine.server) is not None and server.paging:
                self._disk_waits.look(server.paging)
        except Exception as error:
            # A state machine that raised is in no state to go on: stop the process, and say so.
            self._stop(error)

    def _receive_measured(self, event: Any, costs: Costs) -> None:
        costs.enter_event(event)
        effects = self.machine.receive(event)
        costs.leave()
        for effect in effects:
            if isinstance(effect, Send):
                costs.enter_send(effect.message)
                self._run_effect(effect)
                costs.leave()
            else:
                self._run_effect(effect)
        costs.watch(self.machine.server if isinstance(self.machine, ServerDoor) else None)

    def _run_effect(self, effect: Any) -> None:
        match effect:
            case Send(target=target, message=message):
                self._send(target, message)
            case Refuse(target=target, reason=reason, kind=kind):
                log.warning("refused %s: %s", target, reason)
                self.endpoint.refuse(target, reason, kind)
            case Log(text=text):
                log.info("%s", text)
            case Dial(peer=peer, address=address):
                self.endpoint.dial(peer, address)
            case Forget(peer=peer):
                self.endpoint.forget(peer)
            case Stop(reason=reason):
                self._end_fenced(reason)
            case Replace(peer=peer, reason=reason):
                log.warning("%s counts as dead: %s", peer, reason)
                self.parent.report(reports.Replace(peer=peer, reason=reason))
            case Condemn(peer=peer, reason=reason):
                log.warning("%s is given up: %s", peer, reason)
                self.parent.report(reports.Condemn(peer=peer, reason=reason))
            case Notice():
                report = report_of(effect)
                if isinstance(report, reports.CheckpointSaved) and report.kind is None and self.manifests is not None:
                    self._run_task(self._write_extra(report))
                elif isinstance(report, reports.Publication) and report.status == "saved" and report.kind is not None:
                    self._run_task(self._report_publication(report))
                else:
                    self.parent.report(report)
            case Save():
                server = self._server()
                if server.view.job.mode == "async":  # else nobody waited
                    held = time.perf_counter() - self._marked_at
                    self._hold_seconds_max = max(held, self._hold_seconds_max)
                self.savers[effect.tenant].begin(effect, server.view.job, server.store)
            case Unsave(number=number, tenant=tenant):
                self.savers[tenant].give_up(number)
            case WriteManifest():
                self._run_task(self._write_manifest(effect))
            case Load():
                self._run_task(self._load(effect))
            case Upkeep():
                asyncio.get_running_loop().call_soon(self._receive, UpkeepDue())
            case SaveOwn() | UnsaveOwn() | FindSaves() | FetchSaved():
                self._save_own(effect)
            case _:
                raise AssertionError(f"an effect that a node does not know: {effect!r}")

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """One that must not end did: a process without a clock would wait for ever."""
        if not task.cancelled():
            self._stop(task.exception())

    def _run_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write_manifest(self, cut: WriteManifest) -> None:
        assert isinstance(self.machine, Coordinator) and self.machine.view is not None
        writer = self.manifests if cut.tenant == TENANT else self.publications
        assert writer is not None
        self._receive(await asyncio.to_thread(writer.write, self.machine.view.job, cut))
        if cut.discard:
            await asyncio.to_thread(writer.discard, cut.discard)

    async def _write_extra(self, report: reports.CheckpointSaved) -> None:
        """Before it is said that nothing is new: a script may want something to be kept with what is there."""
        assert self.manifests is not None
        try:
            await asyncio.to_thread(self.manifests.write_extra)
        except CheckpointError as error:
            log.warning("what the script wants to be kept is not: %s", error.message)
        self.parent.report(report)

    async def _report_publication(self, report: reports.Publication) -> None:
        """With what the manifest says of it, and who reads."""
        assert self.publications is not None
        known = await asyncio.to_thread(self.publications.describe_last)
        self.parent.report(msgspec.structs.replace(report, **known))

    def _server(self) -> Server:
        """What is behind the door, of a server with a view."""
        assert isinstance(self.machine, ServerDoor) and self.machine.server is not None
        return self.machine.server

    async def _load(self, load: Load) -> None:
        start, store = self.parent.assignment.start, self._server().store
        assert start is not None
        loader = Loader(
            url=start.url,
            cut=load.cut,
            server=self.identity.id,
            tell=self._receive,
            backlog_bytes=lambda: self.endpoint.kept_bytes + store.pending_bytes(),
            progress=lambda done, total: self.parent.report(reports.Loading(done=done, total=total)),
        )
        try:
            report = await loader.load(load.job)
        except Exception as error:
            self._stop(error)
            return
        for problem in report.broken:
            log.warning("damaged, and gone around: %s", problem)
            self.parent.report(reports.Damaged(what=str(problem)))
        log.info("%d rows of %s loaded in %.1f s", report.rows, load.cut, report.seconds)

    # -- partial recovery --------------------------------------------------------------------------------------

    def _save_own(self, effect: SaveOwn | UnsaveOwn | FindSaves | FetchSaved) -> None:
        assert self.own_saver is not None
        server = self._server()
        match effect:
            case SaveOwn(number=number, full=full, marks=marks, updates=updates, skipped=skipped):
                store = server.store
                self._save_began, self._rows_left = time.monotonic(), store.capture_skipped()
                self.own_saver.begin(
                    number, server.view.job, store, full=full, marks=marks, updates=updates, updates_skipped=skipped
                )
            case UnsaveOwn(number=number, reason=reason):
                self.own_saver.give_up(number)
                self.parent.report(reports.OwnSaved(number=number, error=reason))
            case FindSaves(job=job, tables=tables):
                self._run_task(self._recall(job, tables))
            case FetchSaved(table=table, ids=ids) if self.own_loader is not None:
                self.own_loader.want(table, ids)

    def _on_own_saved(self, number: int, error: str, full_wanted: bool) -> None:
        assert self.own_saver is not None
        saved = self.own_saver.saved
        report = reports.OwnSaved(
            number=number,
            error=error,
            rows=0 if error or saved is None else saved.rows,
            rows_left=self._rows_left,
            seconds=round(time.monotonic() - self._save_began, 3),
        )
        self.parent.report(report)
        self._receive(OwnSaved(number=number, error=error, full_wanted=full_wanted))

    async def _recall(self, job: JobSpec, tables: tuple[int, ...]) -> None:
        assert self.own_saver is not None
        self.own_loader = OwnLoader(
            saver=self.own_saver,
            server=self.identity.id,
            tell=self._receive,
            progress=lambda done, total: self.parent.report(reports.Recalling(done=done, total=total)),
        )
        reading = asyncio.get_running_loop().create_task(self._say_reading())
        try:
            report = await self.own_loader.load(job, tables)
        except Exception as error:
            self._stop(error)
            return
        finally:
            reading.cancel()
        for name in report.chain.passed_over:
            self.parent.report(reports.Damaged(what=f"save {name} cannot be read, an older one is used"))
        log.info(
            "%d rows of %d saves loaded in %.2f s, known after %.2f s",
            report.rows,
            len(report.chain.saves),
            report.seconds,
            report.found_seconds,
        )

    async def _say_reading(self) -> None:
        """Every call of storage has a bound, and so has their number: as long as it loads, it gets further."""
        while True:
            await asyncio.sleep(READING_SECONDS)
            self._receive(SavesRead())

    def _send(self, target: Identity, message: Message) -> None:
        if isinstance(message, Ready):
            self.parent.pulse.begin()  # allocating took as long as it took
            self.parent.report(reports.Ready(rows=message.rows, bytes=message.memory_bytes))
        elif isinstance(message, CutMarks):
            self._marked_at = time.perf_counter()
        self.endpoint.send(target, message)

    def _on_resumed(self, peer: Identity) -> None:
        # A server goes on as if nothing had happened. A coordinator keeps count of who is there.
        if isinstance(self.machine, Coordinator):
            self._receive(Joined(peer=peer))

    def _on_fenced(self, peer: Identity, refusal: Refusal, reason: str) -> None:
        # Others may have heard of our successor first, but only the coordinator makes it one.
        if refusal is Refusal.REPLACED:
            if peer.role == COORDINATOR.role:
                self._end_fenced(reason)
        elif peer.role == COORDINATOR.role:
            self._stop(ConnectionLost(f"the coordinator does not want this process: {reason}", refusal=refusal))
        elif isinstance(self.machine, ServerDoor) and self.machine.is_peer(peer):
            # What this server says is not understood by one it must talk to. Its successor starts from good parities;
            # to stay would keep every worker waiting.
            self._end_fenced(f"{peer} does not go on with this server: {reason}")

    def _end_fenced(self, reason: str) -> None:
        if self._stopped is None or self._stopped.done():
            return
        log.warning("fenced: %s", reason)
        self.parent.report(reports.Fenced(reason=reason))
        self._stop(None)

    def _on_command(self, command: orders.AnyCommand) -> None:
        match command:
            case orders.Stop():
                self._stop(None)
            case orders.MakeCheckpoint(still=still, full=full, extra=extra) if isinstance(self.machine, Coordinator):
                if extra is not None and self.manifests is not None:
                    self.manifests.extras.keep(extra.step, extra.text)
                self._receive(CutNow(full=full, still=still))
            case orders.NameModel(text=text):
                for writer in (self.manifests, self.publications):
                    if writer is not None:  # anew: a thread may be reading it
                        writer.extra = writer.extra | note(text)
            case orders.MakePublication(still=still) if isinstance(self.machine, Coordinator):
                self._receive(CutNow(still=still, tenant=PUBLICATION_TENANT))
            case orders.SaveEvery(seconds=seconds) if isinstance(self.machine, ServerDoor):
                self._receive(SavePlan(every_seconds=seconds))
            case orders.PeerDied(peer=peer) if isinstance(self.machine, Coordinator):
                self._receive(Died(peer=peer))
            case _:
                log.warning("a command that is not for this process: %s", command)

    def _stop(self, error: BaseException | None) -> None:
        if self._stopped is None or self._stopped.done():
            return
        if error is None:
            self._stopped.set_result(None)
        else:
            self._stopped.set_exception(error)

    async def _tick_often(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self.parent.pulse.beat()
            self._receive(Tick(now=loop.time()))
            await asyncio.sleep(TICK_SECONDS)

    async def _report_often(self) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            self._report()
            await self._mend_door()

    async def _mend_door(self) -> None:
        """A socket file that is gone (whoever clears away temporary files) is made again: links that stand do not need
        it, but a successor of any process does. Where that fails, the next try is a second away."""
        scheme, path, _ = parse_address(self._address)
        if scheme == "unix" and not os.path.exists(path) and prepare_sockets(Path(path).parent) is None:
            with contextlib.suppress(UserError):
                await self.endpoint.listen(self._address)
                log.warning("%s was gone, and is back", path)

    def _report(self) -> None:
        if isinstance(self.machine, ServerDoor):
            counters = reports.ServerCounters(
                bytes_in=self.endpoint.bytes_in,
                bytes_out=self.endpoint.bytes_out,
                kept_bytes=self.endpoint.kept_bytes,
                costs=None if self.costs is None else self.costs.to_dict(),
                **self._saving_counters(),
                **self._add_waits(self.machine.report()),
            )
            self.parent.report(counters)

    def _add_waits(self, report: dict[str, Any]) -> dict[str, Any]:
        if "tiers" in report:
            report["tiers"]["wait_seconds"] = round(self._disk_waits.seconds, 3)
        return report

    def _saving_counters(self) -> dict[str, Any]:
        savers = [saver for saver in (*self.savers.values(), self.own_saver) if saver is not None]
        if not savers:
            return {}
        return {
            "capture_seconds_max": round(max(saver.pause_seconds_max for saver in savers), 5),
            "capture_work_seconds_max": round(max(saver.work_seconds_max for saver in savers), 5),
            "hold_seconds_max": round(self._hold_seconds_max, 5),
        }


# What a state machine calls the news, and what the launcher does; a checkpoint by how it stands.
REPORTS: dict[tuple[str, str | None], type[reports.Report]] = {
    ("recovery", None): reports.Recovery,
    ("recovered", None): reports.Recovered,
    ("loaded", None): reports.Loaded,
    ("joined", None): reports.Joined,
    ("waiting", None): reports.Waiting,
    ("waited", None): reports.Waited,
    ("checkpoint", "begun"): reports.CheckpointBegun,
    ("checkpoint", "saved"): reports.CheckpointSaved,
    ("checkpoint", "failed"): reports.CheckpointFailed,
}


def make_cut_plan(saving: Saving | None) -> CutPlan | None:
    return None if saving is None else CutPlan(**msgspec.structs.asdict(saving.times))


def make_save_plan(own: OwnSaving | None) -> SavePlan | None:
    return None if own is None else SavePlan(every_seconds=own.every_seconds, every_steps=own.every_steps)


def report_of(notice: Notice) -> reports.Report:
    """The same as a report. A name that is not known here is a mistake in this program."""
    values = dict(notice.values)
    if notice.name == "publication":
        return reports.Publication(**values)
    kind = REPORTS.get((notice.name, values.pop("status", None)))
    assert kind is not None, f"a notice that a node does not know: {notice!r}"
    return kind(**values)


def run(parent: Parent) -> None:
    """Serves until told to stop. Raises RegrowError when it cannot go on."""
    _kernels.set_threads(max(1, parent.assignment.threads))
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


def standby(parent: Parent) -> None:
    """A process without a place yet: everything is imported, so that it serves within milliseconds once it is told
    whose place to take (`Become`). Returns when it has stopped."""
    new_event_loop().close()  # imports whatever the loop is made of
    parent.report(reports.Standby())
    while not isinstance(command := parent.next_command(), orders.Stop):
        if isinstance(command, orders.Become):
            parent.become(command.assignment)
            run(parent)
            return
