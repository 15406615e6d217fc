"""Saves of single servers, for people: which there are, whether they are sound, and whose run is over.

None of them is a consistent state, so nothing here is offered to `--resume`. What a run that goes on needs cannot be
told from outside: it may save once in a day. So nobody but its own servers deletes a save, until somebody says that the
run is over (`regrow ckpt prune --saves RUN`).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence

from regrow.checkpoint.load import Problem, verify_pieces
from regrow.checkpoint.manifest import MANIFEST
from regrow.checkpoint.saves import IDS, Chain, SaveManifest, find_chain
from regrow.checkpoint.saves_ids import IdsFile
from regrow.checkpoint.saves_write import OwnSaves, list_owners, read_saves
from regrow.checkpoint.storage import Storage
from regrow.errors import CheckpointError, StorageError, UserError


@dataclasses.dataclass(frozen=True, slots=True)
class ServerSaves:
    """What is there of one server, and what its successor would load; None and no `problem`: nothing was saved yet."""

    found: OwnSaves
    chain: Chain | None
    problem: str = ""

    @property
    def bytes(self) -> int:
        return sum(save.bytes for save in self.found.manifests)


def list_saves(storage: Storage) -> list[ServerSaves]:
    """By run and server. Manifests are read, rows are not."""
    listed = []
    for owner in list_owners(storage):
        found = read_saves(storage, owner)
        try:
            listed.append(ServerSaves(found, find_chain(found.manifests, owner, broken=found.broken)))
        except CheckpointError as error:
            listed.append(ServerSaves(found, None, error.message.removeprefix(f"{owner.directory}/")))
    return [each for each in listed if each.found.manifests or each.found.broken or each.found.unfinished]


def verify_saves(storage: Storage, listed: Sequence[ServerSaves], *, deep: bool) -> list[Problem]:
    """Everything wrong with saves, by directory. `deep` reads and decodes every chunk; else sizes only."""
    problems: list[Problem] = []
    for each in listed:
        where = each.found.owner.directory
        problems += [Problem(f"{where}/{name}", MANIFEST, what) for name, what in each.found.broken.items()]
        what = "not there: being written just now, or left behind by a process that died"
        problems += [Problem(f"{where}/{name}", MANIFEST, what, harmful=False) for name in each.found.unfinished]
        problems += verify_pieces(storage, each.found.manifests, deep=deep)
        problems += filter(None, (_check_ids(storage, save) for save in each.found.manifests))
        if each.problem and not each.found.broken:
            problems.append(Problem(where, "", f"what is saved cannot be loaded: {each.problem}"))
    return sorted(problems, key=lambda problem: (problem.piece, problem.file))


def _check_ids(storage: Storage, save: SaveManifest) -> Problem | None:
    if save.ids is None:
        return None
    path = f"{save.name}/{IDS}"
    try:
        file = IdsFile(storage.read(path), save)
        for number, info in enumerate(save.chunks):
            file.rows_of(number, info)
    except StorageError as error:
        return Problem(save.name, IDS, "missing" if error.missing else error.message, unanswered=not error.missing)
    except CheckpointError as error:
        return Problem(save.name, IDS, error.message.removeprefix(f"{path}: "))
    return None


def find_run(listed: Sequence[ServerSaves], wish: str) -> str:
    """The run that a user means, by its name or the beginning of it."""
    runs = sorted({each.found.owner.run for each in listed})
    meant = [run for run in runs if run == wish] or [run for run in runs if wish and run.startswith(wish)]
    if len(meant) == 1:
        return meant[0]
    near = difflib.get_close_matches(wish, runs) or runs[:3]
    hint = f"there are saves of {', '.join(near)}" if runs else "no server has saved anything there"
    raise UserError(f"{'several runs are' if meant else 'no run is'} {wish!r}", hint=hint)
