"""Messages and rows in words: what a scenario prints.

Push n of worker w adds 4^(n - 1) to column w of each of its rows, and rows begin as zeros. So the value of a row says
which pushes it contains, `{W0.1 W0.2}`, and one that is there twice shows: `{W0.1 x2}`. A value that no pushes make, as
a wrong decode does, is `garbage`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from regrow.core import messages as m
from regrow.core.groups import Groups
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.twins import initial_rows

COLUMNS = 4  # floats of a row, one for each worker
PUSHES_MAX = 11  # two bits for each, in the 23 that a float32 adds exactly


def name(identity: Identity) -> str:
    """S1 is a server, S1' its replacement, S1'' the replacement of that."""
    return f"{identity}" + "'" * identity.incarnation


def gradient(seq: int) -> float:
    assert seq <= PUSHES_MAX, "a row can tell no more pushes apart"
    return -float(4 ** (seq - 1))


def contents(weights: Any) -> str:
    """Which pushes a row contains."""
    found: list[str] = []
    for worker, value in enumerate(weights.tolist()):
        if not (0 <= value < 4**PUSHES_MAX and value == int(value)):
            return "{garbage}"
        for seq in range(1, PUSHES_MAX + 1):
            times = int(value) >> 2 * (seq - 1) & 3
            found += [f"W{worker}.{seq}" + (f" x{times}" if times > 1 else "")] if times else []
    return "{" + " ".join(found) + "}"


def marks(values: tuple[int, ...]) -> str:
    return "(" + " ".join(map(str, values)) + ")"


def epoch(value: int) -> str:
    """The term of its coordinator, if it is not the first, and the number of the view."""
    term, number = divmod(value, 1 << 32)
    return f"{term}.{number}" if term else str(number)


def members(servers: Any) -> str:
    return " ".join(name(member.identity) + "*" * member.recovering for member in servers)


class Words:
    """Says what a message of this job says. Slots become rows: whose slots they are depends on the message."""

    def __init__(self, job: JobSpec) -> None:
        spec = job.tables[0]
        self._groups = Groups(job)
        servers, slots = job.layout(0).place(np.arange(spec.rows), table=0)
        places = zip(servers.tolist(), slots.tolist(), strict=True)
        self.place = dict(enumerate(places))  # row -> (server, slot)
        self.row_at = {place: row for row, place in self.place.items()}
        # Zeros, some of them negative: records travel as differences of bits from these.
        self.initial = initial_rows(range(spec.rows), dim=spec.dim, seed=job.seed, table=0, bound=spec.init_bound)
        self._asked: dict[tuple[Identity, Identity, int], Any] = {}  # (decoder, member, request) -> slots

    def say(self, source: Identity, target: Identity, message: Any) -> str:
        """`Flush group 1 number 2 marks (2) rows 0`."""
        kind = type(message).__name__
        told = getattr(self, f"_say_{kind}", None)
        return f"{kind} {told(source, target, message)}".rstrip() if told is not None else kind

    def rows(self, server: int, slots: Any) -> str:
        rows = [str(self.row_at.get((server, slot), "hole")) for slot in slots.tolist()]
        return f"rows {' '.join(rows)}" if rows else "no rows"

    def relatives(self, server: int, slots: Any, relatives: Any) -> str:
        """Rows, and what each contains."""
        told = []
        for slot, relative in zip(slots.tolist(), relatives.reshape(slots.size, -1), strict=True):
            row = self.row_at.get((server, slot))
            bits = relative.view(np.uint32) ^ (self.initial[row].view(np.uint32) if row is not None else 0)
            told.append(f"{'hole' if row is None else row} {contents(bits.view(np.float32))}")
        return f"rows {', '.join(told)}" if told else "no rows"

    # --- Views ---

    def _say_Register(self, source: Identity, target: Identity, message: m.Register) -> str:
        if message.known is None:
            return ""
        return f"knows view {epoch(message.known.epoch)}: {members(message.known.servers)}"

    def _say_View(self, source: Identity, target: Identity, message: m.View) -> str:
        lost = f", lost: {message.lost}" if message.lost else ""
        return f"{epoch(message.epoch)}: {members(message.servers)}{lost}"

    # --- Workers ---

    def _say_Opened(self, source: Identity, target: Identity, message: m.Opened) -> str:
        return f"durable {message.durable} committed {message.committed}"

    def _say_Pull(self, source: Identity, target: Identity, message: m.Pull) -> str:
        step = f"step {message.step} " if message.step else ""
        return f"{step}{self.rows(target.id, message.slots)}"

    def _say_Rows(self, source: Identity, target: Identity, message: m.Rows) -> str:
        values = [contents(value) for value in message.rows.reshape(-1, COLUMNS)]
        return f"{' '.join(values) or 'none'} durable {message.durable}"

    def _say_Push(self, source: Identity, target: Identity, message: m.Push) -> str:
        return f"{message.seq} {self.rows(target.id, message.slots)}"

    def _say_Pushed(self, source: Identity, target: Identity, message: m.Pushed) -> str:
        return f"{message.seq} durable {message.durable}"

    def _say_Durable(self, source: Identity, target: Identity, message: m.Durable) -> str:
        return f"{message.durable}"

    def _say_Commit(self, source: Identity, target: Identity, message: m.Commit) -> str:
        return f"{message.seq}"

    def _say_Expect(self, source: Identity, target: Identity, message: m.Expect) -> str:
        return self.rows(target.id, message.slots)

    # --- Parities ---

    def _say_Flush(self, source: Identity, target: Identity, message: m.Flush) -> str:
        staged = " staged" if message.staged else ""
        head = f"group {message.group} number {message.number} marks {marks(message.marks)}"
        return f"{head}{staged} {self.rows(source.id, message.slots)}"

    def _say_FlushAck(self, source: Identity, target: Identity, message: m.FlushAck) -> str:
        return f"group {message.group} number {message.number}" + (" staged" if message.staged else "")

    def _say_FlushCommit(self, source: Identity, target: Identity, message: m.FlushCommit) -> str:
        return f"group {message.group} number {message.number}"

    def _say_Stream(self, source: Identity, target: Identity, message: m.Stream) -> str:
        return f"group {message.group} {self.rows(source.id, message.slots)}"

    def _say_StreamEnd(self, source: Identity, target: Identity, message: m.StreamEnd) -> str:
        return f"group {message.group} number {message.number} marks {marks(message.marks)}"

    def _say_Undo(self, source: Identity, target: Identity, message: m.Undo) -> str:
        return f"group {message.group} {self.rows(target.id, message.slots)}"

    def _say_Have(self, source: Identity, target: Identity, message: m.Have) -> str:
        bits = np.unpackbits(message.touched.view(np.uint8), bitorder="little")
        blocks, member = np.flatnonzero(bits).tolist(), self._groups.member(0, message.group)
        touched = [
            self.row_at.get((target.id, block * self._groups.job.tables[0].k + (member or 0))) for block in blocks
        ]
        head = f"group {message.group} number {message.number} marks {marks(message.marks)}"
        return f"{head} touched {' '.join(map(str, touched)) or 'none'}"

    def _say_Restored(self, source: Identity, target: Identity, message: m.Restored) -> str:
        return self.relatives(target.id, message.slots, message.relatives)

    def _say_Fault(self, source: Identity, target: Identity, message: m.Fault) -> str:
        return self.rows(source.id, message.slots)

    def _say_SnapAsk(self, source: Identity, target: Identity, message: m.SnapAsk) -> str:
        self._asked[source, target, message.request] = message.slots
        return self.rows(target.id, message.slots)

    def _say_Snap(self, source: Identity, target: Identity, message: m.Snap) -> str:
        return self.relatives(source.id, self._asked[target, source, message.request], message.relatives)

    def _say_Tail(self, source: Identity, target: Identity, message: m.Tail) -> str:
        head = f"of S{message.source} group {message.group} number {message.number} marks {marks(message.marks)}"
        return f"{head} {self.rows(message.source, message.slots)}"

    def _say_TailEnd(self, source: Identity, target: Identity, message: m.TailEnd) -> str:
        return f"of S{message.source} group {message.group} number {message.number}"

    def _say_SyndromeAsk(self, source: Identity, target: Identity, message: m.SyndromeAsk) -> str:
        owners = [self._groups.step(target.id, j - message.k - message.q) for j in message.unknown]
        lost = [self.rows(s, message.blocks * message.k + j) for s, j in zip(owners, message.unknown, strict=True)]
        return " and ".join(lost)

    def _say_Syndrome(self, source: Identity, target: Identity, message: m.Syndrome) -> str:
        return f"made at flushes {marks(message.numbers)}"

    # --- Cuts ---

    def _say_CutMarks(self, source: Identity, target: Identity, message: m.CutMarks) -> str:
        return f"{marks(message.marks)}{message.error}"

    def _say_CutAt(self, source: Identity, target: Identity, message: m.CutAt) -> str:
        return f"{marks(message.marks)}" + (" full" if message.full else "")

    def _say_CutBegun(self, source: Identity, target: Identity, message: m.CutBegun) -> str:
        return "too late" if message.late else ""

    def _say_CutSaved(self, source: Identity, target: Identity, message: m.CutSaved) -> str:
        return message.error

    def _say_CutEnd(self, source: Identity, target: Identity, message: m.CutEnd) -> str:
        return "durable" if message.durable else "given up"
