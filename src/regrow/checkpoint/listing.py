"""Which cuts a URL holds, and which of them a user means. A typo is answered with what is there.

A `Listing` is what was there when it was read; manifests are read, chunks are not. What can be done with its cuts is in
maintain.py, what is shown of them in the command line.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence

from regrow.checkpoint.address import LATEST, local_path
from regrow.checkpoint.bounded import ask
from regrow.checkpoint.epochs import find_newest_epochs
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.load import Problem
from regrow.checkpoint.manifest import MANIFEST, Cut
from regrow.checkpoint.storage import Storage
from regrow.core.names import cut_step, parse_piece_name
from regrow.errors import CheckpointError, UserError

NEAR_MAX = 3  # cuts that are named when one is not found


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
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


def read_listing(url: str, *, may_be_empty: bool = False) -> Listing:
    storage = Storage.open(url)
    if storage.local:
        path = local_path(url)
        if not ask(f"look at {url}", path.is_dir):
            what = "is not a directory" if ask(f"look at {url}", path.exists) else "is not there"
            raise UserError(f"{url} {what}", hint="give the directory or URL that holds the checkpoints")
    elif (missing := storage.find_missing()) is not None:
        raise UserError(f"{url}: {missing}", hint="give the directory or URL that holds the checkpoints")
    elif may_be_empty and not storage.directories(""):
        raise UserError(f"{url}: nothing is there", hint="is it the right URL? Checkpoints of other runs are not here")
    manifests, found = storage.manifests()
    if not manifests and not found and (newest := find_newest_epochs(url)) is not None:
        raise UserError(
            f"{url} has a checkpoint in the files of its rows: {newest.target.id}",
            hint=f"`regrow ckpt restore {url} --to URL` makes an ordinary one of it; `--resume {url}` goes on from it",
        )
    broken = tuple((name, what.removeprefix(f"{name}/{MANIFEST}: ")) for name, what in found)
    if not manifests and not may_be_empty:
        if broken:
            raise CheckpointError(
                f"{url}: no manifest can be read ({len(broken)} damaged); {broken[0][0]}: {broken[0][1]}",
                hint=f"`regrow ckpt verify {url}` lists all damage",
            )
        raise UserError(f"{url} has no checkpoints", hint="is it the right URL? Checkpoints of other runs are not here")
    return Listing(storage, Graph(manifests), broken)


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


def why_not(listing: Listing, cut: str) -> str:
    """Why a cut cannot be restored."""
    reasons = []
    for gone in listing.graph.missing(cut):
        damaged = [name for name, _ in listing.broken if parse_piece_name(name)[1] == gone]
        reasons.append(f"{damaged[0]} is damaged" if damaged else f"nothing leads to {gone}")
    return ", ".join(reasons)


def find_lost_cuts(listing: Listing, problems: Sequence[Problem]) -> list[str]:
    """Cuts that cannot be restored, given what `verify` found."""
    left = listing.graph.without(problem.piece for problem in problems if problem.harmful)
    reachable = {cut.id for cut in left.restorable()}
    torn = {parse_piece_name(name)[1] for name, _ in listing.broken}
    return sorted({*listing.graph.cuts, *torn} - reachable)
