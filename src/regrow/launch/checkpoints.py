"""What the launcher has to do with checkpoints: where a run starts from, and what its processes are told."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from regrow.checkpoint.address import split_cut
from regrow.checkpoint.chunks import load_zstd
from regrow.checkpoint.epochs import EpochManifest, find_newest_epochs
from regrow.checkpoint.extras import KEY as EXTRA
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.manifest import Cut
from regrow.checkpoint.model_names import KEY as MODEL
from regrow.checkpoint.storage import Storage
from regrow.config import TrainConfig, read_stored
from regrow.core.names import parse_piece_name
from regrow.errors import CheckpointError, NotSaved, UserError
from regrow.launch import tiers
from regrow.launch.partial import PartialPlan
from regrow.launch.saving import CheckpointTimes, Extra, Saving, StoredCut
from regrow.launch.version import version

DATA_OPTIONS = ("mode", "workers", "seed", "data", "schema", "batch", "train_rows", "skew", "skip_bad_lines")
# Between two looks of the merger; within these, as long as between two checkpoints, if that is a time. Too short: it
# looks for nothing, on processors that training wants. Too long: what is unneeded stays, and a restore reads more.
MERGE_SECONDS_MIN, MERGE_SECONDS_MAX = 2.0, 60.0
RESTORES_MAX = 5  # A run that falls back to a checkpoint again and again makes no progress.

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a run starts from."""

    url: str
    cut: str
    step: int
    protection: str | None = None  # of the run that made it, as far as that is known
    epochs: tuple[int, ...] = ()  # by server, where rows are in the files of servers already,
    marks: tuple[int, ...] = ()  # and after which pushes
    extra: str | None = None  # what the script wanted to be kept with it
    model: str | None = None  # what the parameters of its model were called


def find(config: TrainConfig) -> Start:
    """The checkpoint that this run shall go on from; a UserError or CheckpointError says what is wrong with it."""
    assert config.resume is not None
    if tiers.holds_epochs(config.resume, config):
        manifest = tiers.find_epochs(config.resume)
        _check_fits(config, manifest.target)
        return make_start(manifest, config.resume)
    url, wish = split_cut(config.resume)
    manifests, broken = Storage.open(url).manifests()
    if not manifests:
        text = f"; {len(broken)} cannot be read, the first: {broken[0][1]}" if broken else ""
        raise UserError(f"{url}: there is no checkpoint{text}")
    plan, _ = Graph(manifests).restore_plan(wish)
    if any(piece.encoding == "zstd" for piece in plan.pieces):
        load_zstd()  # servers would miss it when they have all been started
    target = plan.target
    if target.kind == "publication":
        hint = "it has no optimizer state; name a checkpoint, which `regrow ckpt ls` shows"
        raise UserError(f"{target.id} is a publication, and nobody can train on from it", hint=hint)
    before = _check_fits(config, target)
    said = _find_said(target)
    return Start(url=url, cut=target.id, step=target.step, protection=before.get("protection"), **said)


def make_start(manifest: EpochManifest, url: str) -> Start:
    target = manifest.target
    said = _find_said(target)
    return Start(url=url, cut=target.id, step=target.step, epochs=manifest.epochs, marks=target.marks, **said)


def _find_said(target: Cut) -> dict[str, Any]:
    """By the script that made it."""
    return {"extra": target.extra.get(EXTRA), "model": target.extra.get(MODEL)}


def make_stored(start: Start | None) -> StoredCut | None:
    """What servers are told of it."""
    if start is None:
        return None
    names = ("url", "cut", "epochs", "marks", "extra", "model")
    return StoredCut(**{name: getattr(start, name) for name in names})


def _check_fits(config: TrainConfig, target: Cut) -> dict[str, Any]:
    """The options that it was made with."""
    before = read_stored(target.extra.get("config", {}))
    for name in DATA_OPTIONS:  # a step is a batch of certain samples, for every worker
        if name in before and before[name] != getattr(config, name):
            raise UserError(
                f"{target.id} was made with {name} = {before[name]!r}, this run has {getattr(config, name)!r}",
                hint=f"--{name.replace('_', '-')} {before[name]}, or the data would not go on where it was",
            )
    if config.steps is not None and target.step > config.steps:
        raise UserError(f"{target.id} is of step {target.step}, this run shall end at step {config.steps}")
    return before


def note_protection(config: TrainConfig, start: Start) -> str | None:
    """What a user may not have meant: a run that goes on without the protection that it began with."""
    if config.protection != "none" or start.protection in (None, "none"):
        return None
    return (
        f"{start.cut} was made with --protect {start.protection}, this run has --protect none: "
        "the loss of a process ends it, and it makes no checkpoints"
    )


def find_newest(url: str, *, run: str, progress: Progress | None = None) -> tuple[Start | None, list[str]]:
    """The newest checkpoint of this run that can be restored, and the damage that was found on the way. Not of another
    run: one that was started from a checkpoint on purpose must not fall back to what it was to leave behind.

    With `progress` all files of the checkpoint are read before it is taken, and damaged ones are left out. That takes
    as long as loading it, so it is done only once a load has found damage."""
    from regrow.checkpoint.load import verify_pieces

    storage = Storage.open(url)
    manifests, broken = storage.manifests()
    graph, sound = Graph(manifests), set[str]()
    damage: dict[str, str] = {}
    while True:
        cuts = [cut for cut in graph.restorable() if cut.extra.get("run") == run]
        cut = cuts[-1] if cuts else None
        unread = [piece for piece in graph.path(cut.id) or () if piece.name not in sound] if cut is not None else []
        if progress is None or not unread:
            break
        problems = verify_pieces(storage, unread, deep=True, progress=progress)
        damage |= {problem.piece: str(problem) for problem in problems if problem.harmful}
        graph = graph.without(damage)
        sound |= {piece.name for piece in unread} - damage.keys()
    beyond = "" if cut is None else cut.id  # ids begin with the step
    unreadable = [what for name, what in broken if parse_piece_name(name)[1] > beyond]
    start = None if cut is None else Start(url=url, cut=cut.id, step=cut.step, **_find_said(cut))
    return start, [*damage.values(), *unreadable]


def find_newest_here(config: TrainConfig) -> Start | None:
    """The same where checkpoints stay in the files of servers: the newest is the only one."""
    assert config.store_dir is not None
    found = find_newest_epochs(config.store_dir)
    return None if found is None else make_start(found, config.store_dir)


def plan_saving(
    config: TrainConfig,
    *,
    run: str,
    start: Start | None,
    starts: int = 0,
    dead: Sequence[str] = (),
    partial: PartialPlan | None = None,
) -> Saving | None:
    """What servers, the coordinator and the merger need to know to make checkpoints; None: they make none.

    `starts`: how often this run began again; what it stores from now on is newer than all it stored before.
    `dead`: cuts that processes of this run were making when they died, which the merger clears away.
    `partial`: how servers save their own rows, and how often all of them make a checkpoint then."""
    if not config.saves:
        return None
    url = config.ckpt if not config.saves_epochs else str(Path(config.store_dir or "").resolve())
    assert url is not None
    seconds, steps = config.interval if partial is None else (partial.cut_seconds, None)
    return Saving(
        url=url,
        epochs=config.saves_epochs,
        encoding=config.ckpt_encoding,
        bits=config.ckpt_bits,
        bytes_per_second=config.ckpt_bytes_per_s,
        run=run,
        starts=starts,
        salt=secrets.token_hex(8),
        keep_last=config.ckpt_keep_last,
        pinned=() if start is None else (start.cut,),
        made_by=f"regrow {version()}",
        merge_seconds=min(max(seconds or 0.0, MERGE_SECONDS_MIN), MERGE_SECONDS_MAX),
        dead=tuple(dead),
        own=None if partial is None else partial.own,
        model=None if start is None else start.model,
        extras=() if start is None or start.extra is None else (Extra(step=0, text=start.extra),),
        times=CheckpointTimes(
            every_seconds=seconds,
            every_steps=steps,
            full_every=1 if config.protection in ("full", "batch") else config.full_every,
            pause=config.ckpt_pause,
        ),
    )


def explain_unsaved(told: dict[str, Any], *, tries: int, seconds: float) -> NotSaved:
    """The model is trained, and its last checkpoint is not there: why, and what is."""
    reason, last = told["last_error"] or f"it was not stored within {seconds:.0f} s", told["last"]
    have = "no checkpoint of this run is stored" if last is None else f"the newest that is stored is {last['cut']}"
    return NotSaved(
        f"the model is trained, but its checkpoint failed {tries} times: {reason}",
        hint=f"{have}; when storage is well again, --resume goes on from it",
    )


def clear_saves(config: TrainConfig, *, run: str) -> None:
    """At the end of a run, whose last checkpoint has everything, saves of single servers only take space. Where they
    cannot be deleted they stay, and `regrow ckpt ls` shows them."""
    from regrow.checkpoint.saves_write import delete_run

    assert config.ckpt is not None
    with contextlib.suppress(CheckpointError):
        delete_run(Storage.open(config.ckpt), run)
