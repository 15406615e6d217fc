"""How a run goes on with another launcher: what the first one leaves (`make_memo`), and how the next one begins
(`adopt`), with the processes that it finds instead of new ones.

Who is found is asked in `launch/ray_posts.py`; who is in office then, and which numbers may be given, is decided in
`launch/legacy.py`. What was said to the dead launcher is said once more, by the places of those who said it, to the
same `receive_report`; who is missing is reported as ended, and followed like anybody.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import msgspec

from regrow.core.identity import Identity
from regrow.errors import NotSaved, RegrowError
from regrow.launch import checkpoints
from regrow.launch.backend import Exit
from regrow.launch.events import Inherit, Kill, ProcessEnded
from regrow.launch.legacy import NUMBERS_PER_LAUNCHER, Memo, Settled, number_block, parse_memo, settle
from regrow.launch.lines import parse_report
from regrow.launch.reports import Malformed
from regrow.launch.supervisor import SPARE_ROLES

if TYPE_CHECKING:
    from regrow.launch.local import Launch
    from regrow.launch.ray_posts import Found

FAILURES_KEPT_MAX = 100  # in a memo, the newest
GOES_ON_IN = ("training", "evaluating", "stopping")
MISSED = Exit(code=-signal.SIGKILL, cause="was gone when another launcher asked for it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """`room`: what was reserved, and on which nodes. `is_old_directory`: what was written is still there."""

    memo: Memo
    found: tuple[Found, ...]
    room: tuple[Any, list[str]] | None
    is_old_directory: bool

    @property
    def is_judged(self) -> bool:
        """Whether worker 0 was asked to judge the model; or its successor will be, when it is through."""
        judges = [each.estate for each in self.found if is_first_worker(each)]
        asked = any("evaluate" in estate.told for estate in judges)
        return asked or (self.memo.phase == "evaluating" and not judges)

    @property
    def phase(self) -> str:
        return "evaluating" if self.memo.phase == "training" and self.is_judged else self.memo.phase


def is_first_worker(found: Found) -> bool:
    who = found.estate.who
    return who is not None and (who.role, who.id) == ("worker", 0)


def find_memo(found: list[Found]) -> Memo:
    """The newest. A RegrowError says that there is nothing to go on with."""
    if not found:
        raise RegrowError(
            "the launcher died, and another found none of its processes", hint="with checkpoints, --resume goes on"
        )
    newest = max(found, key=lambda each: each.estate.memo_number)
    memo = parse_memo(newest.estate.memo) if newest.estate.memo else None
    if memo is None or memo.phase not in GOES_ON_IN:
        raise RegrowError("the launcher died before training began", hint="start the job again")
    return memo


def number(run: Launch) -> range | None:
    """The incarnations that this launcher may give."""
    return None if run.host.seat is None else number_block(run.host.seat.launcher)


def make_memo(run: Launch) -> Memo:
    status = run.status
    return Memo(
        run=run.run_id,
        directory=str(run.run_dir.path.resolve()),
        started_at=run.started_at.timestamp(),
        phase=status.phase,
        template=run.crew.template(Identity(role="worker", id=0)),
        office=run.supervisor.list_office(),
        start=None if run.start is None else dataclasses.asdict(run.start),
        asked=None if run.asked is None else dataclasses.asdict(run.asked),
        restores=status.restores,
        cuts_dead=status.cuts_dead,
        checkpoints=status.checkpoints,
        failures=status.list_failures()[-FAILURES_KEPT_MAX:],
        evaluated=status.evaluated,
        not_saved=None if run.not_saved is None else (run.not_saved.message, run.not_saved.hint),
    )


def recall_start(known: dict[str, Any] | None) -> checkpoints.Start | None:
    return None if known is None else msgspec.convert(known, checkpoints.Start)


def adopt(run: Launch, inherited: Inherited) -> None:
    """All processes that were found are this launcher's; who is missing has a successor, if that is how it is."""
    memo, found = inherited.memo, inherited.found
    _recall(run, memo)
    if inherited.room is not None:
        run.backend.adopt_room(*inherited.room)
    settled = settle(
        [each.estate.who for each in found if each.estate.who is not None],
        places=_list_places(run),
        remembered=memo.office,
        spare_roles=SPARE_ROLES.values(),
    )
    whole_logs = not inherited.is_old_directory
    handles = [run.backend.adopt(each, template=memo.template, whole_logs=whole_logs) for each in found]
    lost = [run.backend.adopt_lost(who, template=memo.template, exit=MISSED) for who in settled.lost]
    run.crew.adopt([*handles, *lost], memo.template)
    run.supervise(Inherit(office=settled.office, spares=settled.spares, now=time.monotonic()))
    for who in settled.office:
        run.status.note_successor(who.role, who.id, who.incarnation) if who.role in ("server", "worker") else None
    run.status.enter("training", time.monotonic())
    _tell(run, settled, is_old_directory=inherited.is_old_directory, before=memo.directory)
    for who in settled.zombies:
        run.crew.carry_out(Kill(who=who, reason="another is in its place"))
    for each, handle in zip(found, handles, strict=True):
        for line in each.estate.said if handle.who in settled.office else ():
            report = parse_report(line)
            if report is not None and not isinstance(report, Malformed):
                run.receive_report(handle, report)
    run.saboteur.take_due(run.status.step)  # done already, or never
    run.enter(inherited.phase)
    if inherited.phase != "stopping":
        for who in settled.lost:
            run.supervise(ProcessEnded(who=who, exit=MISSED, now=time.monotonic()))


def _recall(run: Launch, memo: Memo) -> None:
    """What was known before."""
    status, seat = run.status, run.host.seat
    assert seat is not None
    run.started_at = datetime.fromtimestamp(memo.started_at).astimezone()
    status.started_at = time.monotonic() - max(0.0, time.time() - memo.started_at)
    status.launchers_before = seat.launcher
    status.restores, status.cuts_dead, status.checkpoints = memo.restores, memo.cuts_dead, memo.checkpoints
    status.failures_before, status.evaluated = memo.failures, memo.evaluated
    run.gatherings.judges.number_from(seat.launcher * NUMBERS_PER_LAUNCHER)
    if memo.not_saved is not None:
        run.not_saved = NotSaved(memo.not_saved[0], hint=memo.not_saved[1])


def _list_places(run: Launch) -> list[tuple[str, int]]:
    config = run.config
    counts = {"coordinator": 1, "server": config.servers, "worker": config.workers, "merger": config.mergers}
    return [(role, id) for role, count in counts.items() for id in range(count)]


def _tell(run: Launch, settled: Settled, *, is_old_directory: bool, before: str) -> None:
    run.display.say(f"another launcher goes on with this run: {settled}")
    if not is_old_directory:
        here = run.run_dir.path.resolve()
        run.display.say(f"the run directory goes on in {here}; what was written before is in {before} on another node")
