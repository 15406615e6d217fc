"""Known bugs for the storage profile (shelf.py): what could go wrong between writers, mergers, retention and readers of
checkpoints, put into the real code. As in planted.py, each names the invariants that must see it.
"""

from __future__ import annotations

from typing import Any

from regrow.checkpoint import lineage, load, retention
from regrow.checkpoint.manifest import MANIFEST
from regrow.checkpoint.manifests import ManifestWriter
from regrow.checkpoint.merge import Fold
from regrow.checkpoint.merger import Merger
from regrow.checkpoint.order import Run
from regrow.checkpoint.storage import Storage
from regrow.core.cuts import Cuts
from regrow.core.states import AttemptState
from regrow.sim import patches
from regrow.sim.planted import Bug

STORAGE = ("storage",)


class _Instead:
    """A storage of which some methods are others."""

    def __init__(self, real: Any, **methods: Any) -> None:
        self._real = real
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def manifest_before_chunks(original: Any) -> Any:
    def run(self: Any, progress: Any) -> Any:
        real = self.storage
        kept: list[tuple[str, bytes]] = []

        def write_manifest(manifest: Any) -> None:
            real.write_manifest(manifest)
            for path, data in kept:
                real.write(path, data)

        self.storage = _Instead(
            real,
            write=lambda path, data: kept.append((path, b"".join(bytes(part) for part in data))),
            find_lost=lambda manifest: None,
            write_manifest=write_manifest,
        )
        try:
            return original(self, progress)
        finally:
            self.storage = real

    return run


def inputs_deleted_first(original: Any) -> Any:
    def run(self: Any, progress: Any) -> Any:
        real, path = self.storage, self.path

        def write_manifest(manifest: Any) -> None:
            for piece in path:
                real.delete_piece(piece.name)
            real.write_manifest(manifest)

        self.storage = _Instead(real, write_manifest=write_manifest)
        try:
            return original(self, progress)
        finally:
            self.storage = real

    return run


def newest_by_clock(original: Any) -> Any:
    def sort_runs(cuts: Any, sources: Any) -> list[Run]:
        ordered = sorted(cuts.values(), key=lambda cut: (cut.created, cut.step, cut.id))
        return [Run("all", tuple(ordered), True)] if ordered else []

    return sort_runs


def term_forgotten(original: Any) -> Any:
    def make_line(self: Any, storage: Any, number: int) -> Any:
        return original(self, storage, number % (1 << 32))

    return make_line


def start_forgotten(original: Any) -> Any:
    def make_line(self: Any, storage: Any, number: int) -> Any:
        self.starts = 0
        return original(self, storage, number)

    return make_line


def no_grace(original: Any) -> Any:
    def make(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **{**options, "grace_seconds": 0.0})

    return make


def chunks_deleted_first(original: Any) -> Any:
    def delete_piece(self: Any, name: str) -> None:
        for file in self.names(name):
            if file != MANIFEST:
                self.delete(f"{name}/{file}")
        original(self, name)

    return delete_piece


def only_the_youngest(original: Any) -> Any:
    def choose_cuts(graph: Any, rules: Any) -> Any:
        return [kept for kept in original(graph, rules) if "beside the newest" not in kept[1]]

    return choose_cuts


def discards_what_may_exist(original: Any) -> Any:
    def abandon(self: Any, *arguments: Any, **values: Any) -> Any:
        attempt = self._attempt
        if attempt.target and attempt.life.state is AttemptState.WRITING:
            self._given_up.append(attempt.piece)
        return original(self, *arguments, **values)

    return abandon


def listing_believed(original: Any) -> Any:
    def check_size(storage: Any, piece: Any, info: Any, found: Any) -> str | None:
        return original(storage, piece, info, found) if info.name in found else "missing"

    return check_size


def unfinished_for_ever(original: Any) -> Any:
    return lambda self, name: True


BUGS: dict[str, Bug] = {
    "manifest-before-chunks": Bug(
        "a merged piece has its manifest before its chunks", Fold, "run", manifest_before_chunks, STORAGE, ("whole",)
    ),
    "inputs-deleted-first": Bug(
        "a merger deletes what it merged before its manifest is there",
        Fold,
        "run",
        inputs_deleted_first,
        STORAGE,
        ("kept", "newest"),
    ),
    "part-of-a-cut": Bug(
        "a checkpoint is written when the first server has stored its part",
        Cuts,
        "on_saved",
        patches.one_server_is_enough,
        STORAGE,
        ("rows", "end"),
    ),
    "newest-by-clock": Bug(
        "a clock says which checkpoint is the newest",
        lineage,
        "sort_runs",
        newest_by_clock,
        STORAGE,
        ("newest", "kept", "end"),
    ),
    "term-forgotten": Bug(
        "a manifest that a replaced coordinator writes late counts as the newest",
        ManifestWriter,
        "_make_line",
        term_forgotten,
        STORAGE,
        ("newest", "kept", "end"),
    ),
    "start-forgotten": Bug(
        "what a run stores after it fell back counts as older than what it stored before",
        ManifestWriter,
        "_make_line",
        start_forgotten,
        STORAGE,
        ("newest", "kept", "end"),
    ),
    "no-grace": Bug("a merger does not wait for readers", Merger, "__init__", no_grace, STORAGE, ("reading",)),
    "chunks-deleted-first": Bug(
        "a piece loses its chunks before its manifest",
        Storage,
        "delete_piece",
        chunks_deleted_first,
        STORAGE,
        ("whole",),
    ),
    "only-the-youngest": Bug(
        "what a run stores is deleted while a younger one goes on beside it",
        retention,
        "_choose_cuts",
        only_the_youngest,
        STORAGE,
        ("kept",),
    ),
    "discards-what-may-exist": Bug(
        "a checkpoint whose manifest was not answered for is cleared away",
        Cuts,
        "_abandon",
        discards_what_may_exist,
        STORAGE,
        ("kept", "newest"),
    ),
    "listing-believed": Bug(
        "a chunk that a listing does not show yet counts as lost",
        load,
        "_check_size",
        listing_believed,
        STORAGE,
        ("end", "reading"),
    ),
    "unfinished-for-ever": Bug(
        "what a dead writer left behind stays", Merger, "_may_come", unfinished_for_ever, STORAGE, ("end",)
    ),
}
