"""One run from a seed or a tape, and what came of it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from regrow.core.cuts import STEPS_AHEAD
from regrow.core.identity import Identity
from regrow.core.states import ForbiddenMove
from regrow.sim import machines, shelf
from regrow.sim.bounds import shrink as shrink_bounds
from regrow.sim.choices import Choices, tape_from_text, tape_text
from regrow.sim.cuts import Start
from regrow.sim.nodes import Fallen, Violation
from regrow.sim.paged import Disk
from regrow.sim.probes import Probes
from regrow.sim.profiles import PROFILES, STORAGE, Scenario, make_resumed, make_scenario
from regrow.sim.world import World

ALL = (*PROFILES, STORAGE)
GARBAGE_OBJECTS = 50_000  # between two collections: some ten megabytes
FALLS_MAX = 3  # of everybody, in a row
BATCH_BYTES = 40  # of streams and sweeps: one or two rows at a time


@dataclasses.dataclass(slots=True, kw_only=True)
class Result:
    """What came of one run."""

    profile: str
    tape: list[int]
    invariant: str = ""  # the one that failed
    text: str = ""
    events: int = 0
    digest: str = ""
    crashes: dict[str, int] = dataclasses.field(default_factory=dict)
    probes: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def name(self) -> str:
        """What `--replay` takes."""
        return f"{self.profile}:{tape_text(self.tape)}"


def run(
    profile: str,
    *,
    seed: int | None = None,
    tape: Sequence[int] = (),
    note: Callable[[str, Identity | None, Any], None] | None = None,
    watch: Callable[[World], None] | None = None,
) -> Result:
    """One schedule. `note` hears what happens, `watch` gets the world before it begins."""
    choices = Choices(tape, seed=seed)
    if profile == STORAGE:
        return _run_storage(choices, note)
    probes = Probes()
    scenario = make_scenario(PROFILES[profile], choices)
    result = Result(profile=profile, tape=choices.tape)
    steps_ahead = scenario.cuts.steps_ahead if scenario.cuts is not None else STEPS_AHEAD
    start: Start | None = None
    falls = 0
    disks: list[Disk] | None = None
    small = machines.small_batches(BATCH_BYTES, steps_ahead=steps_ahead)
    with small, shrink_bounds(scenario.bounds), rare_collections():
        while True:
            world = World(scenario, choices, probes=probes, note=note, start=start, disks=disks)
            if watch is not None:
                watch(world)
            has_fallen = False
            try:
                world.run()
            except Fallen:
                has_fallen = True
            except Violation as violation:
                result.invariant = violation.invariant
                result.text = str(violation)
            except ForbiddenMove as error:  # of a link, which belongs to nobody's machine
                result.invariant, result.text = "moves", f"moves: {error}"
            if world.network.resent:
                probes.hit("frames resent")
            result.events += world.network.order
            result.digest += world.digest
            for role, count in world.sabotage.crashes.items():
                result.crashes[role] = result.crashes.get(role, 0) + count
            if has_fallen:
                falls += 1
                start, disks, scenario = _begin_again(world, start, falls)
                continue
            if result.invariant or start is not None or not _resumes(world):
                break
            targets = list(world.storage.pieces)
            start = world.storage.chain(targets[choices.pick(len(targets))])
            scenario = make_resumed(scenario, choices)
            probes.hit("resumed")
            if scenario.job.servers != world.job.servers:
                probes.hit("resumed on other servers")
    result.probes = probes.counts
    return result


def _run_storage(choices: Choices, note: Callable[[str, Identity | None, Any], None] | None) -> Result:
    """A world of another kind: no servers, but those who write, merge, delete and read checkpoints."""
    probes = shelf.ShelfProbes()
    world, violation = shelf.play(choices, probes, None if note is None else lambda text: note(text, None, None))
    result = Result(profile=STORAGE, tape=choices.tape, events=world.stage.turns, digest=world.digest.hexdigest()[:16])
    if violation is not None:
        result.invariant, result.text = violation.invariant, str(violation)
    result.crashes = {name.removeprefix("kill "): n for name, n in probes.counts.items() if name.startswith("kill ")}
    result.probes = probes.counts
    return result


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Looks for cycles less often: a world lives for a few milliseconds, and nearly all of it until its end."""
    saved = gc.get_threshold()
    gc.set_threshold(GARBAGE_OBJECTS)
    try:
        yield
    finally:
        gc.set_threshold(*saved)


def _begin_again(world: World, start: Start | None, falls: int) -> tuple[Start | None, list[Disk] | None, Scenario]:
    """After a fall of everybody: what the launcher finds, and the same job once more."""
    found = world.storage.find_newest() or start
    disks = None if world.disks is None else world.disks.crash()
    if found is not None and found.epochs is not None:
        world.probes.hit("begun again from epochs")
    if falls > 1:
        world.probes.hit("fallen again")
    return found, disks, dataclasses.replace(world.scenario, faults_max=world.scenario.faults_max * (falls < FALLS_MAX))


def _resumes(world: World) -> bool:
    cuts = world.scenario.cuts
    if world.scenario.profile.batch:
        return False  # on other servers it has to be restored first
    return cuts is not None and cuts.resumes and not world.lost and bool(world.storage.pieces)


def parse_replay(text: str) -> tuple[str, list[int]]:
    """(profile, tape) of what `Result.name` gives. ValueError says what is wrong."""
    profile, colon, tape = text.strip().partition(":")
    if not colon or profile not in ALL:
        raise ValueError(f"a replay begins with a profile and a colon ({', '.join(ALL)})")
    return profile, tape_from_text(tape)
