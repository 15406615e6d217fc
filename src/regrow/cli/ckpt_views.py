"""What the checkpoint commands show: tables for people, JSON for programs, and a bar for those who wait.

Everything here reads and prints. Results go to stdout, the bar to stderr, and only on a terminal. Where stdout is not
one, lines are as long as they need to be.
"""

from __future__ import annotations

import datetime
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from regrow.checkpoint.diff import TableDiff
from regrow.checkpoint.lineage import Graph, kind
from regrow.checkpoint.listing import Listing, why_not
from regrow.checkpoint.load import Problem
from regrow.checkpoint.maintain import PrunePlan
from regrow.checkpoint.manifest import ChunkInfo, Cut, Manifest, TableInfo
from regrow.checkpoint.saves import SaveManifest
from regrow.checkpoint.saves_list import ServerSaves
from regrow.checkpoint.storage import Unfinished
from regrow.core.names import cut_step
from regrow.units import age_text, size_text

BAR_AFTER_SECONDS = 2.0
WIDTH_PLAIN = 220  # of lines that go to a file
WRAPPED_MIN = 20  # letters that a column which is broken into lines should have
MARKS_SHOWN_MAX = 16
JSON_SHOWN_MAX = 400  # letters of `job` and `extra`; --json shows all

_DRAWN = re.compile(r"([^●○]*[●○]) (\d{10}-[0-9a-f]{6})")


class Bar:
    """Bytes done, from two seconds on."""

    def __init__(self, verb: str) -> None:
        console = Console(stderr=True)
        columns = (TextColumn(verb), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task(verb, total=None)
        self._began = time.monotonic()
        self._shown = False

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._shown:
            self._progress.stop()

    def __call__(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)
        if not self._shown and time.monotonic() - self._began > BAR_AFTER_SECONDS:
            self._progress.start()
            self._shown = True


def say(text: str = "") -> None:
    print(text, flush=True)


def say_json(value: Any) -> None:
    say(json.dumps(value, indent=2))


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Table:
    """Rows under headings. > in front of a heading: numbers, to the right. ~: left out where the terminal is too narrow
    for all columns, the last such one first; so is a column without a word. Only the last column is ever broken into
    lines, as long as the others leave it some room."""

    def __init__(self, *headings: str) -> None:
        self._headings = [heading.lstrip(">~") for heading in headings]
        self._right = [">" in heading for heading in headings]
        self._spare = ["~" in heading for heading in headings]
        self._rows: list[tuple[tuple[str, ...], str]] = []

    def add(self, *cells: str, style: str = "") -> None:
        assert len(cells) == len(self._headings)
        self._rows.append((cells, style))

    def show(self) -> None:
        console = Console(highlight=False, soft_wrap=False)
        if not console.is_terminal:
            console.width = WIDTH_PLAIN
        columns = [each for each in range(len(self._headings)) if any(cells[each] for cells, _ in self._rows)]
        while self._width(columns) > console.width and any(self._spare[each] for each in columns):
            columns.remove(max(each for each in columns if self._spare[each]))
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        fits = self._width(columns) <= console.width
        for each in columns:
            justify: Literal["left", "right"] = "right" if self._right[each] else "left"
            whole = fits and each != columns[-1]
            table.add_column(self._headings[each], justify=justify, no_wrap=whole, overflow="fold")
        for cells, style in self._rows:
            table.add_row(*(Text(cells[each], style=style) for each in columns))
        with console.capture() as captured:
            console.print(table)
        say("\n".join(line.rstrip() for line in captured.get().splitlines()))

    def _width(self, columns: Sequence[int]) -> int:
        """Letters of a line, if the last column has at least some room."""
        widths = [max(self._letters(each)) for each in columns]
        return sum(widths[:-1]) + 2 * (len(columns) - 1) + min(widths[-1], WRAPPED_MIN)

    def _letters(self, column: int) -> Iterator[int]:
        yield len(self._headings[column])
        for cells, _ in self._rows:
            yield from (len(line) for line in cells[column].splitlines())


def count_text(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# -- ls ----------------------------------------------------------------------------------------------------


def show_list(
    listing: Listing,
    *,
    unfinished: Sequence[Unfinished],
    wanted: str | None,
    saves: Sequence[ServerSaves] = (),
    now: float,
) -> None:
    graph = listing.graph
    if graph.cuts:
        _list_table(listing, now).show()
        say()
        size = size_text(sum(piece.bytes for piece in graph.pieces.values()))
        can = len(graph.restorable())
        cuts = count_text(len(graph.cuts), "cut")
        say(f"{cuts}, {can} restorable; {count_text(len(graph.pieces), 'piece')}, {size} on storage")
    else:
        say(f"no checkpoints at {listing.url}")
    for name, what in listing.broken:
        say(f"cannot be read: {name}: {what}")
    if unfinished:
        say(_unfinished_text(unfinished, now))
    if wanted is not None:
        say(f"training was asked for a full: {wanted}")
    if saves:
        say()
        _saves_table(saves, now).show()
        say()
        size, count = size_text(sum(each.bytes for each in saves)), sum(len(each.found.manifests) for each in saves)
        say(f"{count_text(count, 'save')} of single servers, {size}: each server's own, no state of the whole model")


def _saves_table(saves: Sequence[ServerSaves], now: float) -> _Table:
    """One line per server: its newest save."""
    table = _Table("run", "shard", "newest save", "~age", "~marks", "~>rows", ">size", "a reload reads")
    for each in saves:
        owner, chain = each.found.owner, each.chain
        run = f"{owner.run}.{owner.start}"
        if chain is None:
            table.add(run, owner.shard, "-", "", "", "", "", each.problem or "nothing yet", style="dim")
            continue
        reads = f"{count_text(len(chain.saves), 'save')}, {size_text(chain.bytes)}"
        reads += "" if chain.base is None else f", and cut {chain.base}"
        reads += "" if not chain.passed_over else f"; {chain.passed_over[-1]} cannot be read"
        head = chain.head
        marks = ", ".join(map(str, head.marks[:MARKS_SHOWN_MAX])) + (", ..." if head.marks[MARKS_SHOWN_MAX:] else "")
        table.add(
            run,
            owner.shard,
            head.save,
            age_text(now - head.created),
            marks,
            f"{head.rows:,}",
            size_text(head.bytes),
            reads,
        )
    return table


def saves_json(saves: Sequence[ServerSaves]) -> list[dict[str, Any]]:
    return [
        {
            "run": each.found.owner.run,
            "start": each.found.owner.start,
            "shard": each.found.owner.shard,
            "problem": each.problem or None,
            "chain": [save.save for save in each.chain.saves] if each.chain is not None else [],
            "newest": None if each.chain is None else _save_json(each.chain.head),
            "bytes": each.bytes,
        }
        for each in saves
    ]


def _save_json(save: SaveManifest) -> dict[str, Any]:
    fields = ("server", "incarnation", "number", "full", "marks", "updates", "updates_skipped", "created", "base")
    return {"name": save.name, "rows": save.rows, "bytes": save.bytes, **{name: getattr(save, name) for name in fields}}


def _unfinished_text(unfinished: Sequence[Unfinished], now: float) -> str:
    size = size_text(sum(piece.bytes for piece in unfinished))
    newest = max((piece.changed for piece in unfinished if piece.changed is not None), default=None)
    when = "" if newest is None else f", last written to {age_text(now - newest)}"
    return f"{count_text(len(unfinished), 'unfinished piece')}, {size}{when}; `regrow ckpt prune` deletes old ones"


def _list_table(listing: Listing, now: float) -> _Table:
    graph, newest = listing.graph, listing.graph.newest()
    table = _Table("cut", "~>step", "~age", "pieces", "~>rows", ">size", "restore reads")
    for drawn, cut in _read_tree(graph, now):
        pieces = graph.into(cut)
        way = graph.path(cut)
        if way is None:
            need = f"not restorable: {why_not(listing, cut)}"
        else:
            need = f"{count_text(len(way), 'piece')}, {size_text(sum(piece.bytes for piece in way))}"
            need += "" if all(piece.exact for piece in way) else ", approximate"
            need += "  <- newest" if newest is not None and cut == newest.id else ""
        table.add(
            f"{drawn} {cut}",
            f"{graph.cuts[cut].step:,}",
            age_text(now - graph.cuts[cut].created),
            "\n".join(_origin_text(piece) for piece in pieces),
            "\n".join(f"{piece.rows:,}" for piece in pieces),
            "\n".join(size_text(piece.bytes) for piece in pieces),
            need,
            style="dim" if way is None else "",
        )
    return table


def _read_tree(graph: Graph, now: float) -> Iterator[tuple[str, str]]:
    """(what is drawn in front, cut) in the order of the tree."""
    for line in graph.tree(now=now):
        match = _DRAWN.match(line)
        assert match is not None, line
        yield match[1], match[2]


def _origin_text(piece: Manifest) -> str:
    bits = "" if piece.exact else f", {piece.bits} bits"
    return f"{kind(piece)}{'' if piece.source is None else f' from {cut_step(piece.source):,}'}{bits}"


def list_json(
    listing: Listing, *, unfinished: Sequence[Unfinished], wanted: str | None, saves: Sequence[ServerSaves] = ()
) -> dict[str, Any]:
    newest = listing.graph.newest()
    return {
        "url": listing.url,
        "newest": None if newest is None else newest.id,
        "cuts": [cut_json(listing, cut) for cut in listing.graph.cuts.values()],
        "broken": [{"piece": name, "what": what} for name, what in listing.broken],
        "unfinished": [{"piece": piece.name, "bytes": piece.bytes, "changed": piece.changed} for piece in unfinished],
        "full_wanted": wanted,
        "saves": saves_json(saves),
    }


def cut_json(listing: Listing, cut: Cut) -> dict[str, Any]:
    graph = listing.graph
    way = graph.path(cut.id)
    restore = None
    if way is not None:
        restore = {
            "pieces": [piece.name for piece in way],
            "bytes": sum(piece.bytes for piece in way),
            "rows": sum(piece.rows for piece in way),
            "exact": all(piece.exact for piece in way),
        }
    return {
        "id": cut.id,
        "step": cut.step,
        "created": cut.created,
        "parent": graph.parent(cut.id),
        "restorable": way is not None,
        "why_not": why_not(listing, cut.id) if way is None else None,
        "restore": restore,
        "pieces": [piece_json(piece) for piece in graph.into(cut.id)],
    }


def piece_json(piece: Manifest) -> dict[str, Any]:
    return {
        "name": piece.name,
        "kind": kind(piece),
        "source": piece.source,
        "bytes": piece.bytes,
        "rows": piece.rows,
        "bits": piece.bits,
        "encoding": piece.encoding,
        "folded": list(piece.folded),
        "made_by": piece.made_by,
    }


# -- show --------------------------------------------------------------------------------------------------


def show_cut(listing: Listing, cut: Cut, *, chunks: bool, now: float) -> None:
    graph = listing.graph
    way = graph.path(cut.id)
    pieces = way if way is not None else graph.into(cut.id)
    last = pieces[-1]
    created = datetime.datetime.fromtimestamp(cut.created).astimezone().isoformat(" ", "seconds")
    facts = [
        ("cut", f"{cut.id}, step {cut.step:,}"),
        ("created", f"{created} ({age_text(now - cut.created)})"),
        ("trained on from", graph.parent(cut.id) or "nothing that is still here"),
        ("marks", _marks_text(cut.marks)),
        ("job", _json_text(cut.job)),
        ("extra", _json_text(cut.extra)),
        ("seed", str(last.seed)),
    ]
    if way is None:
        facts.append(("restore", f"not possible: {why_not(listing, cut.id)}"))
    else:
        exact = "exact" if all(piece.exact for piece in way) else "approximate: quantised pieces are on every way"
        facts.append(("restore", f"{count_text(len(way), 'piece')}, {size_text(sum(p.bytes for p in way))}, {exact}"))
    width = max(len(name) for name, _ in facts)
    for name, text in facts:
        say(f"{name:{width}}  {text}")
    say()
    _tables_table(last, pieces).show()
    say()
    _pieces_table(pieces).show()
    if chunks:
        say()
        _chunks_table(pieces).show()


def _marks_text(marks: Sequence[int]) -> str:
    if len(marks) <= MARKS_SHOWN_MAX:
        return ", ".join(map(str, marks)) or "none"
    return f"{len(marks)} workers, {min(marks)} to {max(marks)}"


def _json_text(value: dict[str, Any]) -> str:
    text = json.dumps(value)
    return text if len(text) <= JSON_SHOWN_MAX else f"{text[:JSON_SHOWN_MAX]}... ({len(text)} letters; --json)"


def _tables_table(last: Manifest, pieces: Iterable[Manifest]) -> _Table:
    """`rows to write`: one that is in several pieces counts in each."""
    written: dict[str, int] = {}
    for piece in pieces:
        for info in piece.chunks:
            for name, rows in info.rows.items():
                written[name] = written.get(name, 0) + rows
    table = _Table("table", ">rows", ">dim", "~optimizer state", ">rows to write")
    for found in sorted(last.tables, key=lambda table: table.index):
        states = ", ".join(f"{name} ({floats})" for name, floats in found.states)
        cells = found.name, f"{found.rows:,}", str(found.dim), states or "-", f"{written.get(found.name, 0):,}"
        table.add(*cells)
    return table


def _pieces_table(pieces: Iterable[Manifest]) -> _Table:
    table = _Table("piece", "kind", ">rows", ">size", "~>chunks", "~encoding", "~>bits", "~made by")
    for piece in pieces:
        table.add(
            piece.name,
            kind(piece),
            f"{piece.rows:,}",
            size_text(piece.bytes),
            f"{len(piece.chunks):,}",
            piece.encoding,
            str(piece.bits),
            piece.made_by,
        )
    return table


def _chunks_table(pieces: Iterable[Manifest]) -> _Table:
    table = _Table("chunk", "~shard", "~>rows", "~>size", "~crc32c")
    for piece in pieces:
        for info in piece.chunks:
            name = f"{piece.name}/{info.name}"
            rows = f"{sum(info.rows.values()):,}"
            table.add(name, info.shard, rows, size_text(info.bytes), f"{info.crc32c:08x}")
    return table


def show_json(listing: Listing, cut: Cut) -> dict[str, Any]:
    way = listing.graph.path(cut.id)
    pieces = way if way is not None else listing.graph.into(cut.id)
    return {
        **cut_json(listing, cut),
        "marks": list(cut.marks),
        "job": cut.job,
        "extra": cut.extra,
        "seed": pieces[-1].seed,
        "tables": [_table_json(table) for table in pieces[-1].tables],
        "way": [{**piece_json(piece), "chunks": [_chunk_json(info) for info in piece.chunks]} for piece in pieces],
    }


def _table_json(table: TableInfo) -> dict[str, Any]:
    return {
        "name": table.name,
        "rows": table.rows,
        "dim": table.dim,
        "states": dict(table.states),
        "init_bound": table.init_bound,
        "index": table.index,
        **({} if table.columns is None else {"columns": msgspec.to_builtins(table.columns)}),
    }


def _chunk_json(info: ChunkInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "shard": info.shard,
        "bytes": info.bytes,
        "crc32c": f"{info.crc32c:08x}",
        "rows": info.rows,
    }


# -- verify, prune, diff -----------------------------------------------------------------------------------


def show_problems(
    listing: Listing,
    problems: Sequence[Problem],
    lost: Sequence[str],
    *,
    saves: Sequence[ServerSaves] = (),
    quick: bool,
) -> None:
    harmful = [problem for problem in problems if problem.harmful]
    for problem in harmful:
        say(f"damaged   {problem}")
    for problem in problems:
        if not problem.harmful:
            say(f"harmless  {problem}")
    for cut in lost:
        why = why_not(listing, cut) if cut in listing.graph.cuts else "its manifest cannot be read"
        say(f"lost      cut {cut} cannot be restored: {why or 'what is damaged is on every way to it'}")
    size = size_text(sum(piece.bytes for piece in listing.graph.pieces.values()) + sum(each.bytes for each in saves))
    how = "sizes looked at, contents not read" if quick else f"{size} read"
    pieces = count_text(len(listing.graph.pieces) + len(listing.broken), "piece")
    pieces += f", {count_text(sum(len(each.found.manifests) for each in saves), 'save')}" if saves else ""
    if harmful or lost:
        kept = len({*listing.graph.cuts, *lost}) - len(lost)
        damage = count_text(len(harmful), "problem")
        say(f"{damage}; {pieces}, {how}; {count_text(kept, 'cut')} restorable, {len(lost)} not")
    else:
        say(f"no damage: {pieces}, {how}; all {count_text(len(listing.graph.cuts), 'cut')} restorable")


def show_prune(listing: Listing, plan: PrunePlan) -> None:
    graph = listing.graph
    table = _Table("", "piece", "~kind", "~>size", "why")
    order = {cut: index for index, cut in enumerate(graph.cuts)}
    pieces = sorted(graph.pieces.values(), key=lambda piece: (order[piece.target.id], piece.name))
    rows: list[tuple[str, str, int]] = [(piece.name, kind(piece), piece.bytes) for piece in pieces]
    for name, what, size in [*rows, *((piece.name, "-", piece.bytes) for piece in plan.unfinished)]:
        goes = name in plan.doomed
        _, _, why = plan.why[name].partition(": ")
        cells = "delete" if goes else "keep", name, what, size_text(size), why
        table.add(*cells, style="red" if goes else "")
    table.show()
    say()


def show_diff(found: Sequence[TableDiff], origin: str | None) -> None:
    table = _Table(
        "table", ">changed", ">same", ">only in 1st", ">only in 2nd", ">largest change", "~>mean change", "note"
    )
    for each in found:
        notes = [each.note] if each.note else []
        notes += [f"{each.not_finite} not finite"] if each.not_finite else []
        table.add(
            each.table,
            f"{each.changed:,}",
            f"{each.same:,}",
            f"{each.only_left:,}",
            f"{each.only_right:,}",
            "-" if each.largest is None else f"{each.largest:.6g}",
            "-" if each.mean is None else f"{each.mean:.6g}",
            ", ".join(notes),
        )
    table.show()
    if origin is not None:
        say(origin)
    elif all(each.equal for each in found):
        say("the two cuts are equal, bit by bit")
