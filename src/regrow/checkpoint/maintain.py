"""What is done with the pieces at a URL besides writing and restoring them: copy a cut elsewhere, fold pieces, prune.

The rule: nothing is deleted or overwritten that a cut to be kept needs, and whatever writes can be stopped (guard.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from regrow.checkpoint.chunks import decode_chunk
from regrow.checkpoint.guard import Guard, Stop
from regrow.checkpoint.lineage import Graph, Plan
from regrow.checkpoint.listing import Listing
from regrow.checkpoint.load import verify_pieces
from regrow.checkpoint.manifest import ChunkInfo, Cut, Manifest
from regrow.checkpoint.merge import PieceBroken, fold
from regrow.checkpoint.retention import UNFINISHED_SECONDS, Rules, plan_unfinished, prune_plan
from regrow.checkpoint.storage import Storage, Unfinished
from regrow.core.names import piece_name
from regrow.errors import CheckpointError, StorageError, UserError

COPY_THREADS = 4

T = TypeVar("T")
Progress = Callable[[int, int], None]  # bytes done, bytes in all


# -- copying and folding -----------------------------------------------------------------------------------


def go_around(listing: Listing, cut: Cut, job: Callable[[Plan], T]) -> tuple[T, list[PieceBroken]]:
    """Does something with the cheapest way to a cut, and with the next one where a piece turns out broken."""
    graph, broken = listing.graph, list[PieceBroken]()
    while True:
        if broken and (cut.id not in graph.cuts or graph.path(cut.id) is None):
            what = "; ".join(error.message for error in broken)
            newest = graph.newest()
            other = f"; the newest cut without it is @{newest.id}" if newest is not None else ""
            raise CheckpointError(
                f"cut {cut.id} cannot be restored, there is no way around: {what}",
                hint=f"`regrow ckpt verify {listing.url}` lists all damage{other}",
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
    with storage.open_threads(COPY_THREADS, "copy") as pool:
        for count in pool.map(copy, piece.chunks):
            done += count
            progress(done, piece.bytes)
    storage.write_manifest(piece)
    return piece


def fold_between(
    listing: Listing, source: str | None, target: str, *, stop: Stop, approximate: bool, progress: Progress
) -> tuple[Manifest, bool]:
    """(the piece source -> target, whether it was there already)"""
    graph = listing.graph
    if (found := graph.pieces.get(piece_name(source, target))) is not None:
        return found, True
    while True:
        path = graph.path(target, starts=(source,))
        if path is None:
            raise CheckpointError(
                f"no path of pieces leads from {source or 'nothing'} to {target}",
                hint=f"`regrow ckpt ls {listing.url}` shows which cut follows which",
            )
        _refuse_mixed(path, approximate=approximate)
        try:
            with Guard(listing.storage, listing.storage, stop) as storage:
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

    def bytes(self, listing: Listing) -> int:
        """Of all that goes."""
        sizes = {name: piece.bytes for name, piece in listing.graph.pieces.items()}
        sizes |= {piece.name: piece.bytes for piece in self.unfinished}
        return sum(sizes[name] for name in self.doomed)


def plan_prune(
    listing: Listing, rules: Rules, *, now: float, unfinished_seconds: float = UNFINISHED_SECONDS
) -> PrunePlan:
    """What the rules say, once every piece that would stay was looked at: one that is damaged is no reason to delete
    another. Merged pieces are read whole, since the pieces they replace are those that go."""
    for wish in rules.pinned:
        listing.graph.restore_plan(wish)
    damaged: dict[str, str] = {}
    sound: set[str] = set()
    while True:
        usable = listing.graph.without(damaged)
        doomed, why = prune_plan(usable, rules, now=now)
        kept = [piece for name, piece in usable.pieces.items() if name not in doomed and name not in sound]
        merged = [piece for piece in kept if piece.folded]
        others = [piece for piece in kept if not piece.folded]
        problems = [
            *verify_pieces(listing.storage, merged, deep=True),
            *verify_pieces(listing.storage, others, deep=False),
        ]
        harmful = {problem.piece: f"{problem.file}: {problem.what}" for problem in problems if problem.harmful}
        if not harmful:
            break
        damaged |= harmful
        sound |= {piece.name for piece in kept} - set(harmful)
    why |= {name: f"kept: damaged ({what})" for name, what in damaged.items()}
    unfinished = tuple(listing.storage.look_at_unfinished())
    litter, reasons = plan_unfinished(listing.graph, unfinished, now=now, seconds=unfinished_seconds)
    return PrunePlan([*doomed, *litter], why | reasons, unfinished)


def delete_pieces(listing: Listing, names: Sequence[str], *, stop: Stop) -> Iterator[str]:
    """Deletes pieces one by one. Stops between two, never within one."""
    for name in names:
        stop.check("interrupted; what was not listed as deleted is still there")
        if name not in listing.graph.pieces and listing.storage.has_manifest(name):
            continue  # it was unfinished, and somebody has finished it since
        listing.storage.delete_piece(name)
        yield name
