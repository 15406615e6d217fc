"""What a worker holds: blocking calls over a `Session`, whatever carries its messages.

`Client` keeps the session and turns its effects into futures. `SocketClient` runs it on an event loop in a
thread of its own, so that rows arrive while the caller computes; `regrow.runtime.inprocess` runs it in the
calling thread. Buffers given to a call belong to the client until the call is answered (pull) or durable
(push).
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, assert_never

import msgspec
import numpy as np

from regrow.core.effects import Delivered, Forget, Joined, Lost, Send
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.messages import Declare, Float32Array, Message, Rows, View
from regrow.core.session import (
    AssignWanted,
    Connect,
    Effect,
    Event,
    ExpectWanted,
    Failed,
    Plan,
    PullAnswered,
    PullWanted,
    PushDurable,
    PushReceived,
    PushWanted,
    ReadAnswered,
    ReadWanted,
    Session,
    SessionOpened,
    WriteAnswered,
    WriteWanted,
)
from regrow.errors import ConnectionLost, DataLoss, RegrowError, UserError
from regrow.runtime.parent import Pulse
from regrow.runtime.transport import Endpoint

log = logging.getLogger("regrow.client")

RECORDS_BYTES_MAX = 8 << 20  # per request; too large: servers make everybody else wait for one reply
# Before the first view nothing can begin without a coordinator, and nobody else would say that there is none. Too
# small: a worker gives up while it is restarted. Too large: a run that cannot begin is noticed late.
COORDINATOR_SECONDS_MAX = 10.0
# For any answer. Hung servers and workers are noticed much earlier, by those whose business that is; this is for what
# nobody thought of. Too small: a worker that waits for a slow one gives up.
ANSWER_SECONDS_MAX = 3600.0
START_SECONDS_MAX = 60.0  # for the client's own thread, at both ends of its life
ANOTHER_JOB_HINT = "all workers of a run declare the same tables; a new run needs servers of its own"
RECORD_PADDING_FLOATS = 4  # as servers pad their records


class Ticket:
    """A pull under way. `wait()` gives its rows; the push of the same batch goes back under it."""

    __slots__ = ("_answered", "_client", "plan", "request", "rows")

    def __init__(self, client: Client, request: int, plan: Plan, rows: Float32Array, answered: Future[None]) -> None:
        self._client = client
        self.request = request
        self.plan = plan
        self.rows = rows
        self._answered = answered

    def wait(self, timeout_seconds: float | None = None) -> Float32Array:
        """The rows, once they are there. Without a time of its own it waits as long as the client does for anything."""
        self._client.before_waiting(self._answered.done)
        self._client.wait_for(self._answered, timeout_seconds)
        return self.rows

    @property
    def done(self) -> bool:
        return self._answered.done()


class Client:
    """Calls a worker makes. Subclasses say how an event reaches the session and a message its server."""

    def __init__(
        self,
        job: JobSpec,
        *,
        redo_bytes_max: int,
        records_bytes_max: int = RECORDS_BYTES_MAX,
        pulse: Pulse | None = None,
    ) -> None:
        self.job = job
        self.pulse = pulse or Pulse()
        self.records_bytes_max = records_bytes_max
        self.redo_bytes_max = redo_bytes_max
        self.session = Session()
        self.pushes = 0
        self.staleness_sum = 0.0
        self.staleness_max = 0.0
        self.staleness_count = 0
        self.opened: Future[SessionOpened] = Future()
        self._request = 0
        self._durable = 0
        self._waiting: dict[int, Future[Any]] = {}
        self._redo: dict[int, int] = {}  # seq -> bytes of a push that is not durable; counted by the caller,
        self._window = threading.Condition()  # because the session hears of a push only later
        self._failure: RegrowError | None = None

    # --- Calls ---

    def pull(self, plan: Plan, *, step: int, rows: Float32Array | None = None) -> Ticket:
        """Asks for the rows of `plan`. Step 0 only reads; a training step has its number, from 1."""
        if rows is None:
            rows = np.empty(plan.floats, np.float32)
        _check_floats("rows", rows, plan)
        request, answered = self._expect()
        self._submit(PullWanted(request=request, step=step, plan=plan, rows=rows))
        return Ticket(self, request, plan, rows, answered)

    def push(
        self, ticket: Ticket, grads: Float32Array, rates: tuple[float, ...] = (), *, plan: Plan | None = None
    ) -> int:
        """Sends the gradients of a pulled batch; waits only while the redo window is full; returns its seq. `rates`:
        the learning rate of each table for this push; none: those of the job. `plan`: the rows that have a gradient;
        none: all that were pulled."""
        plan = plan or ticket.plan
        _check_floats("grads", grads, plan)
        self._wait_for_window(grads.nbytes)
        self._submit(PushWanted(seq=self.pushes, request=ticket.request, plan=plan, grads=grads, rates=rates))
        return self.pushes

    def expect(self, plans: Sequence[Plan]) -> None:
        """Says which rows will be pulled soon: where a server is coming back, those come first; from disk they are read
        before they are needed."""
        self._check()
        self._submit(ExpectWanted(plans=tuple(plans)))

    def assign(self, plan: Plan, weights: Float32Array) -> None:
        """Gives rows that nobody has touched these weights."""
        _check_floats("weights", weights, plan)
        self._check()
        self._submit(AssignWanted(plan=plan, weights=weights))

    def drain(self, timeout_seconds: float | None = None) -> None:
        """Waits until every push is durable."""
        self.before_waiting(lambda: self._durable >= self.pushes)
        seconds = ANSWER_SECONDS_MAX if timeout_seconds is None else timeout_seconds
        with self._window, self.pulse.rest():
            done = self._window.wait_for(lambda: self._failure is not None or self._durable >= self.pushes, seconds)
        self._check()
        if not done:
            raise ConnectionLost(f"pushes were not durable after {seconds:g} s")

    def records(self, table: int, row_first: int, row_count: int) -> Float32Array:
        """Whole records (weights, then optimizer state, unpadded) of consecutive rows, in row order."""
        out = np.empty((row_count, self.job.tables[table].record_floats), np.float32)
        for part in self._parts(table, row_count):
            self._read(table, row_first + part.start, out[part])
        return out

    def parities(self, table: int, server: int, slot_first: int, slot_count: int) -> Float32Array:
        """Raw parity records that a server keeps, padded as it keeps them: block b and parity q are slot b * r + q."""
        request, answered = self._expect()
        self._submit(
            ReadWanted(
                request=request,
                server=server,
                table=table,
                slot_first=slot_first,
                slot_count=slot_count,
                parity=True,
            )
        )
        records: Float32Array = self.wait_for(answered).reshape(slot_count, -1)
        return records

    @property
    def recovering(self) -> tuple[int, ...]:
        """The servers whose rows or parities are still coming back, as far as this client knows."""
        return self.session.recovering

    @property
    def reads_ahead(self) -> bool:
        """Whether servers have rows on disk, and read them before they are pulled if they are named (`expect`)."""
        return self.session.reads_ahead

    def write_records(self, table: int, row_first: int, records: Float32Array) -> None:
        """Replaces whole records of consecutive rows, as `records` gives them."""
        for part in self._parts(table, len(records)):
            self._write(table, row_first + part.start, records[part])

    def _parts(self, table: int, row_count: int) -> Iterator[slice]:
        """Cuts rows into requests that no server finds too large."""
        size = max(1, self.records_bytes_max // (4 * _pad_floats(self.job.tables[table].record_floats)))
        for start in range(0, row_count, size):
            yield slice(start, min(start + size, row_count))

    def _read(self, table: int, row_first: int, out: Float32Array) -> None:
        asked: list[tuple[Any, Any, Future[Any]]] = []
        for server, mine, slots in self._place_rows(table, row_first, len(out)):
            request, answered = self._expect()
            first, count = int(slots.min()), int(slots.max() - slots.min()) + 1
            self._submit(ReadWanted(request=request, server=server, table=table, slot_first=first, slot_count=count))
            asked.append((mine, slots - first, answered))
        for mine, within, answered in asked:
            records = self.wait_for(answered).reshape(int(within.max()) + 1, -1)
            out[mine] = records[within, : out.shape[1]]

    def _write(self, table: int, row_first: int, records: Float32Array) -> None:
        floats = records.shape[1]
        asked: list[Future[Any]] = []
        for server, mine, slots in self._place_rows(table, row_first, len(records)):
            request, answered = self._expect()
            part = np.zeros((mine.size, _pad_floats(floats)), np.float32)
            part[:, :floats] = records[mine]
            wanted = WriteWanted(
                request=request,
                server=server,
                table=table,
                slots=slots.astype(np.uint32),
                records=part.reshape(-1),
            )
            self._submit(wanted)
            asked.append(answered)
        for answered in asked:
            self.wait_for(answered)

    def _place_rows(self, table: int, row_first: int, row_count: int) -> list[tuple[int, Any, Any]]:
        """(server, which of the rows, their slots) for every server that has some of these rows."""
        servers, slots = self.job.layout(table).place(np.arange(row_first, row_first + row_count), table=table)
        found = [(server, np.flatnonzero(servers == server)) for server in range(self.job.servers)]
        return [(server, mine, slots[mine].astype(np.int64)) for server, mine in found if mine.size]

    def digest(self, tick: Callable[[], None] = lambda: None) -> str:
        """SHA-256 over every record of every table in row order: equal models have equal digests, however
        many servers hold them. `tick` is called now and then."""
        sha = hashlib.sha256()
        for index, table in enumerate(self.job.tables):
            sha.update(f"{table.name}:{table.rows}:{table.dim}:{table.optimizer.kind}\n".encode())
            for part in self._parts(index, table.rows):
                sha.update(self.records(index, part.start, part.stop - part.start).data)
                tick()
        return sha.hexdigest()

    def close(self) -> None:
        """Leaves; pushes that were not drained may be lost."""

    def before_waiting(self, done: Callable[[], bool]) -> None:
        """Called before a wait for others; a client that nobody else can answer raises here instead."""

    def wait_for(self, answered: Future[Any], timeout_seconds: float | None = None) -> Any:
        """What others answer. TimeoutError, if the caller set the time; else the cluster has failed."""
        with self.pulse.rest():
            try:
                return answered.result(ANSWER_SECONDS_MAX if timeout_seconds is None else timeout_seconds)
            except TimeoutError:
                if timeout_seconds is not None or answered.done():
                    raise
        raise ConnectionLost(f"no answer within {ANSWER_SECONDS_MAX:.0f} s")

    # --- What the session asks for ---

    def _submit(self, event: Event) -> None:
        raise NotImplementedError

    def _send(self, target: Identity, message: Message) -> None:
        raise NotImplementedError

    def _connect(self, view: View) -> None:
        raise NotImplementedError

    def _forget(self, peer: Identity) -> None:
        """This incarnation is over; nothing comes from it any more."""

    def _run(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect.target, effect.message)
            elif isinstance(effect, PullAnswered | WriteAnswered):
                self._answer(effect.request, None)
            elif isinstance(effect, PushReceived):
                self.staleness_sum += effect.staleness
                self.staleness_count += 1
                self.staleness_max = max(self.staleness_max, effect.staleness)
            elif isinstance(effect, PushDurable):
                with self._window:
                    self._durable = effect.seq
                    self._redo.pop(effect.seq, None)
                    self._window.notify_all()
            elif isinstance(effect, ReadAnswered):
                self._answer(effect.request, effect.records)
            elif isinstance(effect, Connect):
                self._connect(effect.view)
            elif isinstance(effect, SessionOpened):
                if not self.opened.done():  # else: a failure was faster
                    # Servers skip what they have seen: counting from 1 after a restart would push into the void.
                    self.pushes = self._durable = effect.durable
                    self.opened.set_result(effect)
            else:
                self._run_rare(effect)

    def _run_rare(self, effect: Forget | Failed) -> None:
        """What views and failures ask for."""
        if isinstance(effect, Forget):
            self._forget(effect.peer)
        elif isinstance(effect, Failed):
            self._fail(DataLoss(effect.reason) if effect.data_loss else ConnectionLost(effect.reason))
        else:
            assert_never(effect)

    def _fail(self, error: RegrowError) -> None:
        """Every wait, now and later, ends with this error."""
        if self._failure is not None:
            return
        self._failure = error
        waiting, self._waiting = self._waiting, {}
        for future in list(waiting.values()):
            future.set_exception(error)
        if not self.opened.done():
            self.opened.set_exception(error)
        with self._window:
            self._window.notify_all()

    def _answer(self, request: int, result: Any) -> None:
        waiting = self._waiting.pop(request, None)
        if waiting is not None:  # else: a failure was faster
            waiting.set_result(result)

    def _expect(self) -> tuple[int, Future[Any]]:
        self._check()
        self._request += 1
        answered: Future[Any] = Future()
        self._waiting[self._request] = answered
        self._check()  # again: a failure in between has not seen this one
        return self._request, answered

    def check(self) -> None:
        """Raises what has failed, if anything has: for who waits for something else than servers."""
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _wait_for_window(self, push_bytes: int) -> None:
        """Takes the next seq once its bytes fit into the redo window. One push always does."""
        with self._window:
            with self.pulse.rest():
                has_room = self._window.wait_for(
                    lambda: (
                        self._failure is not None
                        or not self._redo
                        or sum(self._redo.values()) + push_bytes <= self.redo_bytes_max
                    ),
                    ANSWER_SECONDS_MAX,
                )
            self._check()
            if not has_room:
                raise ConnectionLost(f"no push became durable within {ANSWER_SECONDS_MAX:.0f} s")
            self.pushes += 1
            self._redo[self.pushes] = push_bytes


class SocketClient(Client):
    """A client whose session lives on an event loop in a background thread."""

    def __init__(
        self,
        *,
        identity: Identity,
        token: bytes,
        coordinator: str,
        job: JobSpec,
        redo_bytes_max: int,
        section_bytes_max: int,
        open_seconds_max: float = ANSWER_SECONDS_MAX,
        pulse: Pulse | None = None,
        authenticate: str = "auto",
        tls: str = "off",
    ) -> None:
        job = check_job(job)
        # Half, because the slots of some rows may have others between them.
        records_bytes_max = min(RECORDS_BYTES_MAX, section_bytes_max // 2)
        super().__init__(job, redo_bytes_max=redo_bytes_max, records_bytes_max=records_bytes_max, pulse=pulse)
        self.identity = identity
        self._token = token
        self._coordinator = coordinator
        self._section_bytes_max = section_bytes_max
        self._authenticate = authenticate
        self._tls = tls
        self._patience: asyncio.TimerHandle | None = None
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="links", daemon=True)
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(START_SECONDS_MAX)
            self._wait_until_open(open_seconds_max)
        except BaseException:
            self.close()
            raise

    def _wait_until_open(self, seconds: float) -> None:
        with self.pulse.rest():
            try:
                self.opened.result(seconds)
            except TimeoutError:
                raise ConnectionLost(f"the cluster was not ready within {seconds:.0f} s") from None

    def close(self) -> None:
        if self._loop.is_closed():
            return
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(START_SECONDS_MAX)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_SECONDS_MAX)
        if not self._thread.is_alive():  # else it is a daemon, and ends with the process
            self._loop.close()

    def follow_coordinator(self, coordinator: Identity, address: str) -> None:
        """That one is in office, and there. From any thread; also once this client is closed."""
        with contextlib.suppress(RuntimeError):  # its loop is
            self._loop.call_soon_threadsafe(self.endpoint.dial, coordinator, address)

    @property
    def bytes_moved(self) -> tuple[int, int]:
        return self.endpoint.bytes_in, self.endpoint.bytes_out

    async def _start(self) -> None:
        self.endpoint = Endpoint(
            local=self.identity,
            token=self._token,
            section_bytes_max=self._section_bytes_max,
            on_open=self._on_open,
            on_message=self._on_message,
            on_lost=self._on_lost,
            on_resumed=self._on_resumed,
            on_fenced=lambda peer, refusal, reason: self._fail(
                ConnectionLost(f"lost {peer}: {reason}", refusal=refusal)
            ),
            place=self._place,
            authenticate=self._authenticate,
            tls=self._tls,
        )
        self.endpoint.dial(Identity(role="coordinator", id=0), self._coordinator)

    async def _stop(self) -> None:
        self._fail(ConnectionLost("this client is closed"))
        await self.endpoint.close()

    def _submit(self, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._receive, event)

    def _on_open(self, peer: Identity) -> None:
        if peer.role == "coordinator":  # also to one that was restarted: it may know of no job
            self._on_resumed(peer)
            self.endpoint.send(peer, Declare(job=self.job))

    def _on_resumed(self, peer: Identity) -> None:
        if peer.role == "coordinator" and self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _on_lost(self, peer: Identity, reason: str) -> None:
        if peer.role == "coordinator" and self.session.view is None and self._patience is None:
            error = ConnectionLost(f"lost {peer}: {reason}")
            self._patience = self._loop.call_later(COORDINATOR_SECONDS_MAX, self._fail, error)
        self._receive(Lost(peer=peer, reason=reason))

    def _on_message(self, source: Identity, message: Message) -> None:
        self._receive(Delivered(source=source, message=message))

    def _receive(self, event: Event) -> None:
        try:
            self._run(self.session.receive(event))
        except RegrowError as error:
            self._fail(error)
        except Exception as error:
            log.exception("the session failed")
            self._fail(RegrowError(f"the session failed: {error!r}"))

    def _send(self, target: Identity, message: Message) -> None:
        self.endpoint.send(target, message)

    def _connect(self, view: View) -> None:
        if view.job != self.job:
            difference = self.job.find_difference(view.job)
            self._fail(RegrowError(f"the cluster runs another job: {difference}", hint=ANOTHER_JOB_HINT))
            return
        for member in view.servers:
            self.endpoint.dial(member.identity, member.address)  # known ones stay as they are
            # At once: what the session sends a newcomer first must be queued before whatever comes next.
            self._receive(Joined(peer=member.identity))

    def _forget(self, peer: Identity) -> None:
        self.endpoint.forget(peer)

    def _place(
        self, peer: Identity, cls: type[Message], meta: tuple[Any, ...], sizes: tuple[int, ...]
    ) -> list[np.ndarray[Any, Any]] | None:
        if cls is not Rows:
            return None
        place = self.session.destination(peer, meta[0], sizes[0] // 4)
        return None if place is None else [place]


def _pad_floats(floats: int) -> int:
    return -(-floats // RECORD_PADDING_FLOATS) * RECORD_PADDING_FLOATS


def check_job(job: JobSpec) -> JobSpec:
    """The job as its servers will read it. One that they would refuse, or not even understand, is refused here and at
    once: over a connection it would look like a peer that cannot be reached."""
    try:
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(job), type=JobSpec)
    except (msgspec.ValidationError, TypeError, OverflowError) as error:
        raise UserError(f"this job cannot be declared: {error}") from None
    if reason := read.invalid_reason():
        raise UserError(f"this job cannot be declared: {reason}")
    return read


def _check_floats(name: str, values: Float32Array, plan: Plan) -> None:
    """A caller's mistake, named in the caller's thread."""
    if values.dtype != np.float32 or values.shape != (plan.floats,) or not values.flags.c_contiguous:
        raise ValueError(f"{name} must be {plan.floats} float32 side by side, not {values.dtype} {values.shape}")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop where there is one: less Python per read and write."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
