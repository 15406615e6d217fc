"""What the checkpoint commands do besides showing: find the cut that was meant, copy, fold, prune.

Two rules. A user's typo is answered with what is there. And whatever writes can be stopped: Ctrl-C is looked at between
two files (`Stop`), and what was begun and not finished is taken away again (`Guard`); a second Ctrl-C stops at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from regrow.checkpoint.address import LATEST, local_path
from regrow.checkpoint.chunks import decode_chunk
from regrow.checkpoint.direct import Bytes
from regrow.checkpoint.lineage import Graph, Plan
from regrow.checkpoint.load import Problem, verify_pieces
from regrow.checkpoint.manifest import MANIFEST, ChunkInfo, Cut, Manifest
from regrow.checkpoint.merge import PieceBroken, fold
from regrow.checkpoint.retention import UNFINISHED_SECONDS, Rules, plan_unfinished, prune_plan
from regrow.checkpoint.storage import Data, Storage, Unfinished
from regrow.core.names import cut_step, is_piece_name, parse_piece_name, piece_name
from regrow.errors import CheckpointError, Interrupted, StorageError, UserError

NEAR_MAX = 3  # cuts that are named when one is not found
COPY_THREADS = 4
LOOK_SECONDS = 0.2  # how often a wait looks whether it was stopped

T = TypeVar("T")
Progress = Callable[[int, int], None]  # bytes done, bytes in all


# -- where, and which cut ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Store:
    """A storage URL as it was when it was opened. `broken`: pieces whose manifest cannot be read, and why."""

    storage: Storage
    graph: Graph
    broken: tuple[tuple[str, str], ...]

    @property
    def url(self) -> str:
        return self.storage.url

    def find_cut(self, wish: str | None) -> Cut:
        """The cut a user means; None: the newest that can be restored."""
        try:
            return self.graph.choose(wish)
        except UserError as error:
            text = (wish or "").removeprefix("@")
            hint = f"`regrow ckpt ls {self.url}` lists all cuts"
            for name, what in self.broken:
                target = parse_piece_name(name)[1]
                if _could_mean(text, target):
                    message = f"cut {target} cannot be read: {name}/{MANIFEST}: {what}"
                    raise CheckpointError(message, hint=f"`regrow ckpt verify {self.url}` lists all damage") from None
            if any(_could_mean(text, cut) for cut in self.graph.cuts):
                raise UserError(f"{self.url}: {error.message}", hint=hint) from None
            near = ", ".join(_find_near(text, list(self.graph.cuts.values())))
            raise UserError(f"{self.url} has no cut {text!r}; near it: {near}", hint=hint) from None


def open_store(url: str, *, may_be_empty: bool = False) -> Store:
    storage = Storage.open(url)
    if storage.local:
        path = local_path(url)
        if not path.is_dir():
            what = "is not a directory" if path.exists() else "is not there"
            raise UserError(f"{url} {what}", hint="give the directory or URL that holds the checkpoints")
    manifests, found = storage.manifests()
    broken = tuple((name, what.removeprefix(f"{name}/{MANIFEST}: ")) for name, what in found)
    if not manifests and not may_be_empty:
        if broken:
            raise CheckpointError(
                f"{url}: no manifest can be read ({len(broken)} damaged); {broken[0][0]}: {broken[0][1]}",
                hint=f"`regrow ckpt verify {url}` lists all damage",
            )
        raise UserError(f"{url} has no checkpoints", hint="is it the right URL? Checkpoints of other runs are not here")
    return Store(storage, Graph(manifests), broken)


def _could_mean(text: str, cut: str) -> bool:
    return cut.startswith(text) or (text.isdecimal() and int(text) == cut_step(cut))


def _find_near(text: str, cuts: Sequence[Cut]) -> list[str]:
    """By step where the text begins with one, by letters otherwise."""
    if number := re.match(r"\d+", text):
        step = int(number[0])
        found = sorted(cuts, key=lambda cut: (abs(cut.step - step), cut.id))[:NEAR_MAX]
        return [f"{cut.id} (step {cut.step})" for cut in sorted(found, key=lambda cut: cut.id)]
    if difflib.get_close_matches(text, [LATEST]):
        return [LATEST]
    return [f"{cut.id} (step {cut.step})" for cut in cuts[-NEAR_MAX:]]


def why_not(store: Store, cut: str) -> str:
    """Why a cut cannot be restored."""
    reasons = []
    for gone in store.graph.missing(cut):
        damaged = [name for name, _ in store.broken if parse_piece_name(name)[1] == gone]
        reasons.append(f"{damaged[0]} is damaged" if damaged else f"nothing leads to {gone}")
    return ", ".join(reasons)


def find_lost_cuts(store: Store, problems: Sequence[Problem]) -> list[str]:
    """Cuts that cannot be restored, given what `verify` found."""
    left = store.graph.without(problem.piece for problem in problems if problem.harmful)
    reachable = {cut.id for cut in left.restorable()}
    torn = {parse_piece_name(name)[1] for name, _ in store.broken}
    return sorted({*store.graph.cuts, *torn} - reachable)


# -- stopping ----------------------------------------------------------------------------------------------


class Stop(threading.Event):
    """Ctrl-C and SIGTERM while inside `with`: noted, and looked at where it does no harm. The second acts at once."""

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        # Not `Event.set`: its lock may be held by the very thread that this handler interrupts.
        if self._number:
            raise KeyboardInterrupt
        self._number = number

    def is_set(self) -> bool:
        return bool(self._number)

    def wait(self, timeout: float | None = None) -> bool:
        end = None if timeout is None else time.monotonic() + timeout
        while not self._number and (end is None or time.monotonic() < end):
            time.sleep(LOOK_SECONDS if end is None else min(LOOK_SECONDS, max(0.0, end - time.monotonic())))
        return self.is_set()

    def check(self, message: str = "interrupted; nothing half-written is left") -> None:
        if self._number:
            raise Interrupted(message, signal_number=self._number)


class Guard:
    """A storage that reads here and writes there (or here too), stops when it is told to, and cleans up after itself:
    a piece that was begun inside `with` and has no manifest in the end is taken away."""

    def __init__(self, source: Storage, target: Storage, stop: Stop) -> None:
        self._source, self._target, self._stop = source, target, stop
        self._begun: set[str] = set()
        self._made: set[str] = set()
        self._written: set[str] = set()  # files

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __enter__(self) -> Storage:
        return cast(Storage, self)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            # In a copy, nothing that was made is wanted if it did not end well.
            copied = self._made if self._target is not self._source else set()
            for piece in self._begun | copied:
                with contextlib.suppress(StorageError):
                    if piece in copied or MANIFEST not in self._target.names(piece):
                        self._target.delete_piece(piece)

    def read(self, path: str, *, into: Bytes | None = None) -> bytes | memoryview:
        self._stop.check()
        return (self._target if path in self._written else self._source).read(path, into=into)

    def names(self, piece: str) -> dict[str, int]:
        return (self._target if piece in self._begun | self._made else self._source).names(piece)

    def write(self, path: str, data: Data) -> None:
        piece = path.partition("/")[0]
        if is_piece_name(piece):
            self._begun.add(piece)
        self._target.write(path, data)
        self._written.add(path)

    def read_manifest(self, name: str) -> Manifest:
        return self._target.read_manifest(name)

    def write_manifest(self, manifest: Manifest) -> None:
        self._target.write_manifest(manifest)
        self._begun.discard(manifest.name)
        self._made.add(manifest.name)

    def delete_piece(self, name: str) -> None:
        self._stop.check()
        self._target.delete_piece(name)

    def keep_only(self, piece: str) -> None:
        """Deletes what a fold with little memory made on the way."""
        for other in self._made - {piece}:
            self._target.delete_piece(other)


# -- copying and folding -----------------------------------------------------------------------------------


def go_around(store: Store, cut: Cut, job: Callable[[Plan], T]) -> tuple[T, list[PieceBroken]]:
    """Does something with the cheapest way to a cut, and with the next one where a piece turns out broken."""
    graph, broken = store.graph, list[PieceBroken]()
    while True:
        if broken and (cut.id not in graph.cuts or graph.path(cut.id) is None):
            what = "; ".join(error.message for error in broken)
            newest = graph.newest()
            other = f"; the newest cut without it is @{newest.id}" if newest is not None else ""
            raise CheckpointError(
                f"cut {cut.id} cannot be restored, there is no way around: {what}",
                hint=f"`regrow ckpt verify {store.url}` lists all damage{other}",
            ) from broken[0]
        try:
            return job(graph.restore_plan(cut.id)[0]), broken
        except PieceBroken as error:
            broken.append(error)
            graph = graph.without([error.piece])


def copy_cut(
    source: Storage, plan: Plan, target: Storage, *, stop: Stop, approximate: bool, progress: Progress
) -> Manifest:
    """Writes the plan's cut to another storage as one full, and reads it back."""
    _refuse_mixed(plan.pieces, approximate=approximate)
    guard = Guard(source, target, stop)
    with guard as storage:
        if len(plan.pieces) == 1:
            made = _copy_as_it_is(storage, plan.pieces[0], progress)
        else:
            graph = Graph(plan.pieces)
            made = fold(storage, graph, None, plan.target.id, approximate=approximate, progress=progress)
        guard.keep_only(made.name)
        stop.check()
        if problems := verify_pieces(target, [made], deep=True):
            raise CheckpointError(f"the copy at {target.url} did not read back: {problems[0]}", hint="copy it again")
        stop.check()
    return made


def _copy_as_it_is(storage: Storage, piece: Manifest, progress: Progress) -> Manifest:
    """Checked, and byte by byte: a full that is there already need not be made."""

    def copy(info: ChunkInfo) -> int:
        path = f"{piece.name}/{info.name}"
        try:
            data = storage.read(path)
            decode_chunk(data, piece, info)
        except CheckpointError as error:
            if isinstance(error, StorageError) and not error.missing:
                raise
            raise PieceBroken(piece.name, error.message) from error
        storage.write(path, data)
        return info.bytes

    done = 0
    with ThreadPoolExecutor(COPY_THREADS, thread_name_prefix="copy") as pool:
        for count in pool.map(copy, piece.chunks):
            done += count
            progress(done, piece.bytes)
    storage.write_manifest(piece)
    return piece


def fold_between(
    store: Store, source: str | None, target: str, *, stop: Stop, approximate: bool, progress: Progress
) -> tuple[Manifest, bool]:
    """(the piece source -> target, whether it was there already)"""
    graph = store.graph
    if (found := graph.pieces.get(piece_name(source, target))) is not None:
        return found, True
    while True:
        path = graph.path(target, starts=(source,))
        if path is None:
            raise CheckpointError(
                f"no path of pieces leads from {source or 'nothing'} to {target}",
                hint=f"`regrow ckpt ls {store.url}` shows which cut follows which",
            )
        _refuse_mixed(path, approximate=approximate)
        try:
            with Guard(store.storage, store.storage, stop) as storage:
                return fold(storage, graph, source, target, approximate=approximate, progress=progress), False
        except PieceBroken as error:
            graph = graph.without([error.piece])
            if target not in graph.cuts or graph.path(target, starts=(source,)) is None:
                raise


def _refuse_mixed(path: Sequence[Manifest], *, approximate: bool) -> None:
    bits = sorted({piece.bits for piece in path})
    if len(bits) > 1 and not approximate:
        raise UserError(
            f"exact and quantised pieces ({' and '.join(map(str, bits))} bits) would become one",
            hint="with --approximate all of it is quantised",
        )


# -- pruning -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class PrunePlan:
    doomed: list[str]  # in the order in which they go
    why: dict[str, str]  # of every piece, and of what is unfinished
    unfinished: tuple[Unfinished, ...] = ()

    def bytes(self, store: Store) -> int:
        """Of all that goes."""
        sizes = {name: piece.bytes for name, piece in store.graph.pieces.items()}
        sizes |= {piece.name: piece.bytes for piece in self.unfinished}
        return sum(sizes[name] for name in self.doomed)


def plan_prune(store: Store, rules: Rules, *, now: float, unfinished_seconds: float = UNFINISHED_SECONDS) -> PrunePlan:
    """What the rules say, once every piece that would stay was looked at: one that is damaged is no reason to delete
    another. Merged pieces are read whole, since the pieces they replace are those that go."""
    for wish in rules.pinned:
        store.graph.restore_plan(wish)
    damaged: dict[str, str] = {}
    sound: set[str] = set()
    while True:
        usable = store.graph.without(damaged)
        doomed, why = prune_plan(usable, rules, now=now)
        kept = [piece for name, piece in usable.pieces.items() if name not in doomed and name not in sound]
        merged = [piece for piece in kept if piece.folded]
        others = [piece for piece in kept if not piece.folded]
        problems = [*verify_pieces(store.storage, merged, deep=True), *verify_pieces(store.storage, others, deep=False)]
        harmful = {problem.piece: f"{problem.file}: {problem.what}" for problem in problems if problem.harmful}
        if not harmful:
            break
        damaged |= harmful
        sound |= {piece.name for piece in kept} - set(harmful)
    why |= {name: f"kept: damaged ({what})" for name, what in damaged.items()}
    unfinished = tuple(store.storage.look_at_unfinished())
    litter, reasons = plan_unfinished(store.graph, unfinished, now=now, seconds=unfinished_seconds)
    return PrunePlan([*doomed, *litter], why | reasons, unfinished)


def delete_pieces(store: Store, names: Sequence[str], *, stop: Stop) -> Iterator[str]:
    """Deletes pieces one by one. Stops between two, never within one."""
    for name in names:
        stop.check("interrupted; what was not listed as deleted is still there")
        if name not in store.graph.pieces and MANIFEST in store.storage.names(name):
            continue  # it was unfinished, and somebody has finished it since
        store.storage.delete_piece(name)
        yield name
