"""Wrong messages for real machines: whatever a peer says is obeyed, ignored or refused, and nothing else.

A simulated run is stopped here and there (before the first view, in the middle of a recovery, of a cut, of a step);
there its coordinator, servers and sessions get messages of that very run with one field that is wrong (`mutate.py`),
through the real encoding. What must hold:

- The only errors that leave a machine are refusals (`Refuse`, `ProtocolError`). Anything else would end a process.
- A refusal changes nothing: what the machine knows and what its store holds are the same before and after.
- The same run, with all the messages that were refused while nothing else was wrong, comes to its end as without them,
  with every invariant of the simulator.
- Nothing takes long, and nothing takes memory that the message does not have.

Messages that are accepted leave a machine that was lied to. It is sent more: it may be wrong then, but must not break.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
import traceback
from collections import Counter
from typing import Any

import msgspec
import numpy as np

from regrow.core.checks import RowChecks
from regrow.core.coordinator import Coordinator
from regrow.core.door import ServerDoor
from regrow.core.effects import Delivered, Joined, Log, Lost, Refuse, Stop, Tick
from regrow.core.framing import FrameReader, Limits, Stamp, encode
from regrow.core.groups import Groups
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.messages import Message, Register, View
from regrow.core.server import AWAKE
from regrow.core.session import Failed, Session
from regrow.core.states import Life, SessionState
from regrow.errors import ProtocolError
from regrow.sim.forks import Fork, ForkEnded
from regrow.sim.machines import is_cutting
from regrow.sim.mutate import Pool, impersonate, mutate
from regrow.sim.nodes import Node
from regrow.sim.profiles import PROFILES
from regrow.sim.runner import run
from regrow.sim.world import World
from regrow.store.memory import MemoryStore

LIMITS = Limits(meta_bytes_max=1 << 20, section_bytes_max=1 << 20)
STOP_RATE = 1 / 500  # of the events of a run: where it is stopped
UNREST_WEIGHT = 4  # events while somebody comes back, or a cut is made, count more
BATCHES = 6  # at each stop
BATCH_MESSAGES = 300  # More: machines that were lied to again and again. Fewer: forks cost more than messages.
CAREFUL_RATE = 0.12
CAREFUL_MESSAGES = 160
CAREFUL_FIELDS = 3
TARGETS_MAX = 3  # machines of a batch
FINISH_RATE = 0.15  # of the stops: the run goes on from there with what was refused
BATCH_SECONDS_MAX = 120.0
RUN_SECONDS_MAX = 600.0
LOOK_RATE = 1 / 24  # of the messages: the machine is compared with itself before
TICK_RATE = 1 / 40
BACKGROUND_MAX = 200  # rounds of background work before a machine is compared: more than any small world has
MEMORY_BYTES_MAX = 1 << 30  # that a batch may take; the rows of a world are some kilobytes
TABLE_BYTES_MAX = 1 << 20  # A first view with larger tables is right, and takes the memory that it says.
# What time and the bare fact of a message change.
UNSEEN = frozenset(
    {
        "heard",
        "steady_since",
        "closed",
        "has_news",
        "_now",
        "_store",
        "store",
        "_build_store",
        "requests",
        "geometry",
        "_groups",
    }
    | {"_epochs", "_upkeep_asked"}
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that must not be."""

    where: str  # the same for the same mistake
    text: str
    world: int  # the seed that shows it


@dataclasses.dataclass(slots=True, kw_only=True)
class Tally:
    """What was sent, and what came of it."""

    messages: int = 0
    worlds: int = 0
    finished: int = 0  # runs that came to their end with refused messages in them,
    finished_refused: int = 0  # and how many these were
    looks: int = 0  # machines compared with themselves
    verdicts: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)  # by kind and verdict
    states: Counter[str] = dataclasses.field(default_factory=Counter)
    findings: dict[str, Finding] = dataclasses.field(default_factory=dict)

    def report(self, where: str, text: str, world: int) -> None:
        self.findings.setdefault(where, Finding(where=where, text=text, world=world))

    def add(self, other: Tally) -> None:
        for name in ("messages", "worlds", "finished", "finished_refused", "looks"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.verdicts.update(other.verdicts)
        self.states.update(other.states)
        self.findings = other.findings | self.findings


Refused = tuple[Identity, Identity, Message]  # target, source, what it refused


class Fuzz:
    """One run, what is sent at some of its events, and the runs that go on from there. A function of its seed.

    At each stop the process forks: every batch of messages meets the machines as the run has made them, and the run
    itself goes on as if nothing had happened.
    """

    def __init__(self, seed: int, *, batches: int = BATCHES, memory_bytes_max: int | None = MEMORY_BYTES_MAX) -> None:
        self.seed = seed
        self.tally = Tally(worlds=1)
        self._batches = batches
        self._memory_bytes_max = memory_bytes_max
        self._rng = random.Random(f"fuzz {seed}")
        self._profile = self._rng.choice(list(PROFILES))
        self._pool = Pool()
        self._world: World | None = None
        self._events = 0
        self._stop_at = 0
        self._fork: Fork | None = None  # in the process that goes on with refused messages
        self._ends: list[tuple[str, str]] = []  # how those ended: (invariant, text)

    def run(self) -> Tally:
        self._plan_stop()
        result = run(self._profile, seed=self.seed, note=self._on_event, watch=self._watch)
        if self._fork is not None:
            self._fork.answer((result.invariant, result.text))
        for invariant, text in self._ends:
            if invariant and not result.invariant:  # else it is not the messages' doing
                self.tally.report(f"a run with refused messages breaks {invariant}", text, self.seed)
        return self.tally

    def _plan_stop(self) -> None:
        self._stop_at = self._events + 1 + int(self._rng.expovariate(STOP_RATE))

    def _watch(self, world: World) -> None:
        self._world = world

    def _on_event(self, text: str, identity: Identity | None, event: Any) -> None:
        """Between two events every machine is at rest."""
        if self._fork is not None or self._world is None:
            return
        if isinstance(event, Delivered) and identity is not None:
            self._pool.add(event.source, identity, event.message)
        self._events += 1 if is_quiet(self._world) else UNREST_WEIGHT
        if self._events >= self._stop_at and self._pool.count:
            self._plan_stop()
            self._stop(self._world)

    def _stop(self, world: World) -> None:
        self._add_underway(world)
        refused: list[Refused] = []
        for _ in range(self._batches):
            refused += self._send_batch(Batch(world, self._pool, seed=self._rng.randrange(2**62), world_seed=self.seed))
        if refused and self._rng.random() < FINISH_RATE:
            self._go_on(world, refused)

    def _add_underway(self, world: World) -> None:
        """What is on its way. The first of each wire is what the target waits for, and the likeliest to be believed."""
        self._pool.next = {}
        for wire in world.network.wires.values():
            said = [(wire.source, wire.target, item.message) for item in wire.items if item.message is not None]
            if said and wire.target in world.nodes:
                self._pool.next.setdefault(wire.target, []).append(said[0])
                for each in said:
                    self._pool.add(*each)

    def _send_batch(self, batch: Batch, *, notes: bool = False) -> list[Refused]:
        fork = Fork(memory_bytes_max=self._memory_bytes_max)
        if fork.is_child:
            fork.act(lambda: batch.send(fork, notes=notes))
        try:
            tally, refused = fork.wait(BATCH_SECONDS_MAX)
        except ForkEnded as ended:
            if not notes:
                return self._send_batch(batch, notes=True)  # once more, to say at which message
            self.tally.report(ended.reason, str(ended), self.seed)
            return []
        self.tally.add(tally)
        some: list[Refused] = refused
        return some

    def _go_on(self, world: World, refused: list[Refused]) -> None:
        """The run goes on, in another process, with all that was refused in it: that must make no difference."""
        fork = Fork()
        if fork.is_child:
            self._fork = fork
            for target, source, message in refused:
                refuse_again(world, world.nodes[target], source, message)
            return
        self.tally.finished += 1
        self.tally.finished_refused += len(refused)
        try:
            self._ends.append(fork.wait(RUN_SECONDS_MAX))
        except ForkEnded as ended:
            self._ends.append((ended.reason, str(ended)))


class Batch:
    """Some messages for a few machines of one world, in a process of their own."""

    def __init__(self, world: World, pool: Pool, *, seed: int, world_seed: int) -> None:
        self.tally = Tally()
        self.refused: list[Refused] = []  # while the machine had been told nothing else that is wrong
        self._rng = rng = random.Random(seed)
        self._world = world
        self._world_seed = world_seed
        self._pool = pool
        self._nodes = world.nodes
        # A careful batch looks after every message, and goes no further with a machine that believed one. What it sends
        # has several wrong fields: the more is refused, the more goes along when the run is finished.
        self._is_careful = rng.random() < CAREFUL_RATE
        restless = [identity for identity, node in self._nodes.items() if not is_at_rest(node.machine)]
        some = rng.sample(list(self._nodes), min(TARGETS_MAX, len(self._nodes)))
        if restless and rng.random() < 0.6:
            some[0] = rng.choice(restless)
        self._targets = list(self._nodes) if self._is_careful else sorted(set(some))
        self._reader = FrameReader(limits=LIMITS)
        self._lied_to: set[Identity] = set()
        self._looked: dict[Identity, bytes] = {}  # what a machine was like when it was last looked at, if it still is
        self._now = world.now

    def send(self, fork: Fork, *, notes: bool = False) -> tuple[Tally, list[Refused]]:
        for number in range(CAREFUL_MESSAGES if self._is_careful else BATCH_MESSAGES):
            if not self._targets:
                break
            node = self._nodes[self._rng.choice(self._targets)]
            if self._rng.random() < TICK_RATE and not self._is_careful:
                self._pass_time(node)
                if node.identity not in self._targets:
                    continue
            source, message = self._make(node.identity)
            fork.note(number, f"{message!r} of {source!r} at {node.identity!r}" if notes else "")
            self.tally.messages += 1
            self.tally.states[describe_state(node.machine)] += 1
            arrived = self._pass_wire(message)
            kind = type(message).__name__
            if arrived is None:
                self.tally.verdicts[kind, "not a message"] += 1
            elif not _is_first_view_too_large(node.machine, arrived):
                self.tally.verdicts[kind, self._deliver(node, source, arrived)] += 1
        return self.tally, self.refused

    def _make(self, target: Identity) -> tuple[Identity, Message]:
        rng = self._rng
        source, _, message = self._pool.pick(target, rng)
        for _ in range(CAREFUL_FIELDS if self._is_careful else rng.random() < 0.9):
            message = mutate(message, self._pool, rng)
        if rng.random() < 0.12:
            source = impersonate(source, list(self._nodes), rng)
        return source, message

    def _pass_wire(self, message: Message) -> Message | None:
        """What arrives of it; None: the frame is refused."""
        frames = []
        try:
            for piece in encode(message, Stamp()):
                data = memoryview(piece).cast("B")
                while data:
                    room = self._reader.buffer()
                    count = min(len(room), len(data))
                    room[:count] = data[:count]
                    frames += list(self._reader.advance(count))
                    data = data[count:]
        except ProtocolError:
            self._reader = FrameReader(limits=LIMITS)
            return None
        except Exception as error:
            self._reader = FrameReader(limits=LIMITS)
            self._report(error, f"{message} on the wire")
            return None
        (frame,) = frames
        return frame.message

    def _deliver(self, node: Node, source: Identity, message: Message) -> str:
        machine, identity = node.machine, node.identity
        looks = self._is_careful or self._rng.random() < LOOK_RATE
        before = (self._looked.pop(identity, b"") or look(machine)) if looks else b""
        may_change = _may_change(machine, source, message)
        try:
            effects = machine.receive(Delivered(source=source, message=message))
        except ProtocolError:
            effects = [Refuse(target=source, reason="an error")]
        except Exception as error:
            self._targets.remove(identity)
            self._report(error, f"{message} of {source!r} at {identity!r}")
            return "broken"
        verdict = judge(source, effects)
        after = look(machine) if looks else b""
        if verdict == "refused" and not may_change:
            if before != after:
                where = f"a refused {type(message).__name__} changed a machine"
                self.tally.report(where, f"{message} of {source!r} at {identity!r}: {effects}", self._world_seed)
            elif identity not in self._lied_to:
                self.refused.append((identity, source, message))
        self.tally.looks += looks
        is_same = looks and before == after
        if is_same and self._is_careful:
            self._looked[identity] = after
        elif not (is_same or (verdict == "refused" and not may_change)):
            self._lied_to.add(identity)
        is_over = any(isinstance(effect, Stop | Failed) for effect in effects)
        if is_over or (self._is_careful and identity in self._lied_to):
            self._targets.remove(identity)
        return verdict

    def _pass_time(self, node: Node) -> None:
        """Whatever a machine was told must not break it later either."""
        self._lied_to.add(node.identity)
        self._now += self._rng.choice((0.01, 0.3, 3.0))
        peer = self._rng.choice(list(self._nodes))
        events: list[Any] = [Joined(peer=peer), Lost(peer=peer, reason="fuzz")]
        if not isinstance(node.machine, Session):
            events += [Tick(now=self._now)] * 4
        event = self._rng.choice(events)
        try:
            node.machine.receive(event)
        except Exception as error:
            self._targets.remove(node.identity)
            self._report(error, f"{event} at {node.identity!r}")

    def _report(self, error: BaseException, text: str) -> None:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_telling(frame.filename)]
        at = f"{frames[-1].filename.rpartition('/regrow/')[2]}:{frames[-1].lineno}" if frames else "?"
        story = "".join(traceback.format_exception(error)[-6:])
        self.tally.report(f"{type(error).__name__} at {at}", f"{text[:1500]}\n{story[-2500:]}", self._world_seed)


def _is_telling(path: str) -> bool:
    """Whether a line of this file says what went wrong: the table of moves is only where it is noticed."""
    return "/regrow/" in path and not path.endswith("/states.py")


def refuse_again(world: World, node: Node, source: Identity, message: Message) -> None:
    """Delivers a message that will be refused. What the machine does besides (background work) is carried out."""
    try:
        effects = node.machine.receive(Delivered(source=source, message=message))
    except ProtocolError:
        return
    for effect in effects:
        if not isinstance(effect, Refuse):
            world.driver._carry_out(node, effect)


def judge(source: Identity, effects: list[Any]) -> str:
    """What became of a message."""
    if any(isinstance(effect, Refuse) and effect.target == source for effect in effects):
        return "refused"
    return "obeyed" if any(not isinstance(effect, Log) for effect in effects) else "ignored"


def _may_change(machine: Any, source: Identity, message: Message) -> bool:
    """What even a refusal may change: a newer worker is known by its first word, whatever that is; and of a server that
    was replaced the view that it remembers counts."""
    if isinstance(machine, ServerDoor) and source.role == "worker" and machine.server is not None:
        known = machine.server.serving._workers.get(source.id)
        return known is None or known.incarnation < source.incarnation
    return isinstance(message, Register)


def _is_first_view_too_large(machine: Any, message: Message) -> bool:
    if not isinstance(message, View) or not isinstance(machine, ServerDoor) or machine.server is not None:
        return False
    if message.job.invalid_reason() is not None:
        return False
    return any(table.rows * table.record_floats * 4 > TABLE_BYTES_MAX for table in message.job.tables)


def is_at_rest(machine: Any) -> bool:
    """Whether nothing is under way that only some messages belong to."""
    if isinstance(machine, Session):
        return machine.life.state is SessionState.WORKING
    if isinstance(machine, Coordinator):
        return (
            machine.view is not None and not any(place.is_down for place in machine.places) and not is_cutting(machine)
        )
    server = machine.server
    return server is not None and server.recovered and server.ways.is_whole and not server.holder.decoder.sweeping


def is_quiet(world: World) -> bool:
    return all(is_at_rest(node.machine) for node in world.nodes.values())


def describe_state(machine: Any) -> str:
    """The state that a machine is in, by the words of its lives."""
    if isinstance(machine, Session):
        return f"session {machine.life.state}"
    if isinstance(machine, Coordinator):
        if machine.view is None:
            return "coordinator without a view"
        maker = machine.turns.underway if machine.turns is not None else None
        attempt = maker._attempt if maker is not None else None
        return f"coordinator {'lost' if machine.lost else 'with a view'}, {attempt.life.state if attempt else 'no cut'}"
    if machine.server is None:
        return "server without a view"
    server = machine.server
    state = "recovered" if server.recovered else "recovering"
    ways = ", ".join(str(way.life.state) for way in server.ways.all)
    return f"server {state} ({ways or 'no way back'}), cut {server.cut.life.state}"


# --- Looking at a machine ---


def look(machine: Any) -> bytes:
    """A digest of all that a machine knows and its store holds. Background work is done first: it is nobody's doing."""
    hasher = hashlib.blake2b(digest_size=16)
    server = machine.server if isinstance(machine, ServerDoor) else None
    if server is not None and server.paging is not None:
        return b"rows on disk"  # whoever looks at all of them moves them between the disk and the cache
    if server is not None:
        server.rests_until = AWAKE  # it only saves work in ticks, and whatever comes ends it, a refused message too
        for _ in range(BACKGROUND_MAX):
            if not server.work_in_background():
                break
        _look_at_store(server.store, server.view.job, hasher)
    _look_at(machine, hasher, {})
    return hasher.digest()


def _look_at(value: Any, hasher: Any, seen: dict[int, Any]) -> None:
    """Walks through everything that is reachable. `seen` keeps what was visited: its id stays its own."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        hasher.update(repr(value).encode())
    elif isinstance(value, np.ndarray):
        hasher.update(value.tobytes())
    elif isinstance(value, Life):
        hasher.update(str(value.state).encode())
    elif isinstance(value, JobSpec | Groups | RowChecks | MemoryStore) or callable(value) or id(value) in seen:
        return
    else:
        seen[id(value)] = value
        hasher.update(type(value).__name__.encode())
        _look_inside(value, hasher, seen)


def _look_inside(value: Any, hasher: Any, seen: dict[int, Any]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _look_at(key, hasher, seen)
            _look_at(item, hasher, seen)
    elif isinstance(value, set | frozenset):
        hasher.update(repr(sorted(map(repr, value))).encode())
    elif isinstance(value, msgspec.Struct | Identity):
        hasher.update(repr(value).encode())
    elif hasattr(value, "__iter__"):
        for item in value:
            _look_at(item, hasher, seen)
        hasher.update(b".")
    else:
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        for name in names:
            if name not in UNSEEN:
                hasher.update(name.encode())
                _look_at(getattr(value, name), hasher, seen)


def _look_at_store(store: Any, job: JobSpec, hasher: Any) -> None:
    counters = [store.missing_rows(), store.blank_rows(), store.pending_bytes(), store.capture_left()]
    hasher.update(repr(counters).encode())
    for table, spec in enumerate(job.tables):
        slots = store.slots(table)
        out = np.empty(slots * store.record_floats(table), np.float32)
        hasher.update(store.touched(table).tobytes())
        try:
            store.read_records(table, 0, slots, out)
            hasher.update(out.tobytes())
        except ValueError:
            _look_at_rows(store, table, hasher)
        counts = np.zeros(len(job.tables), np.int32)
        counts[table] = blocks = store.blocks(table)
        parity = np.empty(blocks * store.record_floats(table), np.float32)
        for q in range(spec.r):
            store.parity_read(q, counts, np.arange(blocks, dtype=np.uint32), parity)
            hasher.update(parity.tobytes())


def _look_at_rows(store: Any, table: int, hasher: Any) -> None:
    """One by one: some are not there."""
    row = np.empty(store.record_floats(table), np.float32)
    for slot in range(store.slots(table)):
        try:
            store.read_records(table, slot, 1, row)
        except ValueError:
            hasher.update(b"-")
        else:
            hasher.update(row.tobytes())
