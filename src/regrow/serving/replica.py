"""A copy of a model's weights that follows a run's publications, and answers look-ups meanwhile.

Theory of operation. A thread asks for one small file, `latest.json`, now and then. When that has changed it reads the
manifests and looks for the cheapest pieces that lead from what it has to the newest cut: usually one delta. Where
nothing leads from here (training went back to a checkpoint, or pieces were deleted long ago) it begins again from
nothing, so rows that are trained no more get their initial values back. What is newest is decided by the lines of cuts
and not by the file, nor by any clock: a coordinator that was replaced may write late.

With `consistent=True` there are two sides. Rows are written to the one that nobody reads; then all look-ups are turned
to it at once; then, when the last reader has left the other, the same rows are copied there. A look-up sees one cut,
whole. It costs the space twice. With `consistent=False` there is one side, and rows of two cuts may be seen together.

A piece that is missing or damaged is gone around, as everywhere. If no way is left, the replica stays where it is and
asks training for a full (`wanted/full.json`), once for each cut.

The rules to keep: an answer is never half of a row, and never of a cut that is older than an answer before; what goes
wrong with storage makes answers older, and is told (`problem`), but never makes them wrong.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from regrow.checkpoint import model_names
from regrow.checkpoint.chunks import BUFFERS, DENSE, read_chunk
from regrow.checkpoint.columns import join_tables, whole_name
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.manifest import Cut, Manifest, TableInfo
from regrow.checkpoint.publications import (
    Latest,
    Reader,
    ask_for_full,
    check_reader_name,
    is_publication,
    read_latest,
    tell_step,
)
from regrow.checkpoint.storage import Known, Storage
from regrow.errors import CheckpointError, RegrowError, UserError
from regrow.serving.tables import Changed, Floats, Side, check_whole

log = logging.getLogger("regrow.serving")

POLL_SECONDS = 1.0  # Too short: requests that find nothing. Too long: answers are older by as much.
WAIT_SECONDS = 60.0  # for the first publication. Too short: a run that is just starting is taken for none.
# All manifests are looked at so often although `latest.json` says nothing new: it may be wrong. Too short: requests.
LOOK_SECONDS = 60.0
LEAVE_SECONDS = 0.5  # between two looks whether the last reader of the old side has left
CLOSE_SECONDS = 5.0  # for the thread; if storage hangs it is left behind
BROKEN_MAX = 64  # pieces that are gone around in one round


class Replica:
    """Tables that follow a publisher. Any thread may look up; one thread of its own writes."""

    def __init__(
        self,
        url: str,
        *,
        tables: Iterable[str] | None = None,
        consistent: bool = True,
        directory: str | Path | None = None,
        follow: bool = True,
        poll_seconds: float = POLL_SECONDS,
        wait_seconds: float = WAIT_SECONDS,
        name: str | None = None,
    ) -> None:
        """Returns when there is a version to answer with; RegrowError if there is none after `wait_seconds`.

        `tables`: only these. `directory`: where files are mapped, with room for the weights (twice, if `consistent`).
        `follow`: without, nothing happens but in `refresh()`. `name`: training is told where this replica is."""
        if poll_seconds <= 0.0 or wait_seconds < 0.0:
            raise UserError(f"poll_seconds = {poll_seconds}, wait_seconds = {wait_seconds}: they must be times")
        if name is not None:
            check_reader_name(name)
        self.url = url
        self.consistent = consistent
        self.problem: str | None = None  # why answers are not of the newest cut, as far as the last round knew
        self.versions = 0  # that were switched to
        self.rebuilds = 0  # of these, from nothing
        self.bytes_read = 0
        self._wanted_tables = None if tables is None else tuple(tables)
        self._directory = Path(directory or tempfile.gettempdir())
        self._poll_seconds = poll_seconds
        self._name = name
        self._storage = Storage.open(url)
        self._known: Known = {}
        self._latest: Latest | None = None
        self._looked_at = -LOOK_SECONDS
        self._asked_for: set[str] = set()
        self._unreached: str | None = None  # why nothing leads to the newest cut
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._changed = threading.Condition(self._lock)
        self._round = threading.Lock()  # one round at a time
        self._stop = threading.Event()
        self._front: Side | None = None
        self._back: Side | None = None  # if consistent
        self._cut: Cut | None = None
        self._thread: threading.Thread | None = None
        self._await_first(wait_seconds)
        if follow:
            self._thread = threading.Thread(target=self._follow, name="regrow-replica", daemon=True)
            self._thread.start()

    def __enter__(self) -> Replica:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Replica of {self.url} at {self.cut}>"

    def close(self) -> None:
        """Ends the thread. Look-ups may go on with what is there."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    # --- What it has ---

    @property
    def cut(self) -> str:
        assert self._cut is not None
        return self._cut.id

    @property
    def step(self) -> int:
        """Of training, that answers are of (of the slowest worker)."""
        assert self._cut is not None
        return self._cut.step

    @property
    def age_seconds(self) -> float:
        """Since the cut was stored, by the clocks of this machine and of the one that wrote it."""
        assert self._cut is not None
        return max(0.0, time.time() - self._cut.created)

    @property
    def tables(self) -> dict[str, tuple[int, int]]:
        """Rows and floats in each."""
        assert self._front is not None
        return {name: values.shape for name, values in self._front.tables.items()}

    # --- Look-ups ---

    def lookup(self, table: str, ids: Any) -> Floats:
        """Weights of these rows, [len(ids), dim], of one cut if `consistent`. UserError names what does not exist."""
        return self.lookup_many({table: ids})[1][table]

    def lookup_many(self, ids: Mapping[str, Any]) -> tuple[int, dict[str, Floats]]:
        """The same for several tables, all of one cut, and the step of that."""
        with self._lock:
            side, cut = self._front, self._cut
            assert side is not None and cut is not None
            side.readers += 1
        try:
            wanted = {table: side.check(table, each) for table, each in ids.items()}
            found = {table: side.tables[table].take(each, axis=0, mode="clip") for table, each in wanted.items()}
            return cut.step, found
        finally:
            with self._lock:
                side.readers -= 1
                if not side.readers:
                    self._left.notify_all()

    def read_table(self, table: str) -> Floats:
        """A copy of all rows of a table: for the dense part (`"dense"`), which is small."""
        return self.lookup(table, np.arange(self.tables.get(table, (0, 0))[0]))

    def read_dense(self) -> dict[str, Any]:
        """The other parameters and the buffers of a model, by the names that they have in it."""
        from regrow.checkpoint.torch import dense

        with self._lock:
            assert self._cut is not None
            names = model_names.find(self._cut)
        if tables := [table for table in (DENSE, BUFFERS) if names.find_shapes(table)]:
            ids = {table: np.arange(self.tables.get(table, (0, 0))[0]) for table in tables}
            return model_names.cut_tensors(names, self.lookup_many(ids)[1])
        return dense.unpack_model(dense.file_of(self.read_table(dense.DENSE)))

    # --- Following ---

    def wait_for_step(self, step: int, *, timeout_seconds: float) -> bool:
        """Whether answers are of this step or a later one, at the latest after so long."""
        with self._lock:
            return self._changed.wait_for(
                lambda: self._cut is not None and self._cut.step >= step, timeout=timeout_seconds
            )

    def refresh(self) -> bool:
        """One round: whether there is a newer version now. RegrowError if storage does not answer."""
        with self._round:
            is_new = self._refresh()
            self.problem = self._unreached
            return is_new

    def _await_first(self, wait_seconds: float) -> None:
        deadline = time.monotonic() + wait_seconds
        while True:
            problem: RegrowError | None = None
            try:
                if self.refresh():
                    return
            except UserError:
                raise
            except RegrowError as error:
                problem = error
            if time.monotonic() >= deadline:
                if problem is not None:
                    raise problem
                hint = "is it the URL of --publish, and has the run begun?"
                raise RegrowError(f"{self.url}: nothing was published within {wait_seconds:g} s", hint=hint)
            time.sleep(min(self._poll_seconds, max(0.0, deadline - time.monotonic())))

    def _follow(self) -> None:
        while not self._stop.wait(self._poll_seconds):
            try:
                self.refresh()
            except RegrowError as error:
                self._note(error.message)
            except Exception as error:  # answers grow old, and whoever looks at `problem` sees why
                if repr(error) != self.problem:  # and not once a second
                    log.exception("a round failed")
                self._note(repr(error))

    def _note(self, problem: str) -> None:
        if problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem

    def _refresh(self) -> bool:
        latest = read_latest(self._storage)
        now = time.monotonic()
        if latest == self._latest and now - self._looked_at < LOOK_SECONDS:
            return False
        manifests, broken = self._storage.manifests(self._known)
        graph = Graph(piece for piece in manifests if is_publication(piece.target))
        is_new = self._move(graph, [what for _, what in broken])
        if latest is None or latest.cut in graph.cuts:  # else the listing is behind: look again soon
            self._latest, self._looked_at = latest, now
        if is_new and self._name is not None:
            self._tell(self._name)
        return is_new

    def _move(self, whole: Graph, damage: list[str]) -> bool:
        """To the newest cut that something leads to. Whether that is another than before."""
        graph = whole
        for _ in range(BROKEN_MAX):
            newest = self._find_newest(graph)
            if newest is None or newest.id == (None if self._cut is None else self._cut.id):
                break
            way = self._find_way(graph, newest.id)
            assert way is not None
            try:
                self._load(way, newest)
                self._check_reached(whole, newest, damage)
                return True
            except _Broken as error:
                damage = [*damage, str(error)]
                self._note(str(error))
                graph = graph.without([error.piece])
        self._check_reached(whole, self._cut, damage)
        return False

    def _find_newest(self, graph: Graph) -> Cut | None:
        """The newest that can be reached; nothing that is older than what is there."""
        order = [cut for cut in graph.cuts.values() if not self._is_older(cut)]
        return next((cut for cut in reversed(order) if self._find_way(graph, cut.id) is not None), None)

    def _is_older(self, cut: Cut) -> bool:
        """Than what is there, as far as lines tell."""
        if self._cut is None or cut.line is None or self._cut.line is None:
            return False
        mine = self._cut.line
        return cut.line.turn < mine.turn if cut.line.run == mine.run else cut.line.run in mine.seen

    def _find_way(self, graph: Graph, cut: str) -> list[Manifest] | None:
        if self._cut is not None and cut == self._cut.id:
            return []
        starts: Sequence[str | None] = (None,) if self._cut is None else (self._cut.id, None)
        way = graph.path(cut, starts=starts)
        if way and way[0].source is not None and not self._fits(way[-1]):
            return graph.path(cut)  # tables have grown
        return way

    def _fits(self, piece: Manifest) -> bool:
        return self._front is not None and self._front.fits(self._choose_tables(piece), piece.seed)

    def _check_reached(self, graph: Graph, reached: Cut | None, damage: list[str]) -> None:
        """If something newer is there that nothing leads to: a full is wanted."""
        latest, self._unreached = graph.latest(), None
        if latest is None and damage and reached is None:
            raise CheckpointError(f"{self.url}: {damage[0]}")
        if latest is None or (reached is not None and latest.id == reached.id):
            self._asked_for.clear()
            return
        if self._is_older(latest):
            return
        why = self._unreached = f"a replica cannot reach {latest.id}: {damage[0] if damage else 'a piece is missing'}"
        if latest.id in self._asked_for:
            return
        self._asked_for.add(latest.id)
        log.warning("%s; it asks for a full", why)
        try:
            ask_for_full(self._storage, why=why, cut=latest.id, now=time.time())
        except RegrowError as error:  # it may have no right to write there
            log.warning("nobody hears of it: %s", error.message)

    def _tell(self, name: str) -> None:
        try:
            tell_step(self._storage, name, Reader(cut=self.cut, step=self.step, at=time.time()))
        except RegrowError as error:
            log.warning("training is not told: %s", error.message)

    # --- Writing ---

    def _load(self, way: list[Manifest], target: Cut) -> None:
        if way[0].source is None:
            self._rebuild(way, target)
            return
        front, back = self._front, self._back
        assert front is not None
        changed: Changed = {}
        try:
            self._write(way, back or front, changed)
        except BaseException:
            if back is not None:
                back.copy_rows(front, changed)  # as if nothing had come
            raise
        if back is None:
            self._switch(front, None, target)
            return
        self._switch(back, front, target)
        self._await_readers(front)
        front.copy_rows(back, changed)

    def _rebuild(self, way: list[Manifest], target: Cut) -> None:
        """From nothing: rows that no piece has get their initial values."""
        infos, seed = self._choose_tables(way[-1]), way[-1].seed
        check_whole(way[0], infos)
        front, back = self._front, self._back
        is_same = front is not None and front.fits(infos, seed)
        side = back if back is not None and is_same else Side(infos, self._directory, seed=seed)
        try:
            side.fill()
            self._write(way, side, {})
        except BaseException:
            if front is not None and side is back:
                side.copy_all(front)
            raise
        self.rebuilds += 1
        if not self.consistent:
            self._switch(side, None, target)
            return
        old = front if front is not None and is_same else Side(infos, self._directory, seed=seed)
        self._switch(side, old, target)
        self._await_readers(old)
        old.copy_all(side)

    def _choose_tables(self, last: Manifest) -> tuple[TableInfo, ...]:
        wanted = self._wanted_tables
        infos = tuple(info for info in last.tables if wanted is None or whole_name(info) in wanted)
        if wanted is not None and (lack := set(wanted) - {whole_name(info) for info in infos}):
            known = ", ".join(join_tables(last.tables))
            raise UserError(f"there is no table {min(lack)!r}", hint=f"known are: {known}")
        return infos

    def _write(self, way: list[Manifest], side: Side, changed: Changed) -> None:
        for piece in way:
            for info in piece.chunks:
                if self._stop.is_set():
                    raise RegrowError(f"{self.url}: the replica is closed")
                try:
                    chunk = read_chunk(self._storage, piece, info)
                except CheckpointError as error:
                    if getattr(error, "missing", True):
                        raise _Broken(piece.name, f"{piece.name}: {error.message}") from None
                    raise
                self.bytes_read += info.bytes
                side.write(chunk, changed)

    def _switch(self, front: Side, back: Side | None, cut: Cut) -> None:
        with self._lock:
            self._front, self._back, self._cut = front, back, cut
            self.versions += 1
            self._changed.notify_all()
        log.info("at %s, step %d", cut.id, cut.step)

    def _await_readers(self, side: Side) -> None:
        """Until nobody reads the old side. A look-up takes no longer than its rows; whoever is slower is waited for."""
        with self._lock:
            while side.readers and not self._stop.is_set():
                self._left.wait(LEAVE_SECONDS)


class _Broken(Exception):
    """A piece that cannot be read."""

    def __init__(self, piece: str, text: str) -> None:
        super().__init__(text)
        self.piece = piece
