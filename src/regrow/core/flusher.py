"""What a server tells the holders of its parities: flushes, what they have acknowledged, and streams to new ones.

Theory of operation. A server applies pushes at once and tells its parity holders later: XOR differences compose, so a
row that ten pushes changed travels once. What leaves is a **flush** of a group (rows with the same holders): for each
changed row, published XOR current, and the **marks** (last push of each worker, or last step) that the rows of the
group then stand for. Rows and marks belong together, and a holder applies both or neither. That is the invariant under
everything else: *at a holder, a row contains a push if and only if the marks cover it*. A replacement takes the marks
from its holders, workers send again what is above them, and each push is in each row exactly once.

All holders of a group get the same flushes by number, so two of them can differ by number only: the one that is behind
can be given what it lacks. `history` remembers which marks belong to which number until all have acknowledged it.

A push is **durable** when, in every group, each holder that counts has acknowledged a flush covering it. A holder that
was replaced has nothing; it is **streamed** every touched row and does not count meanwhile, or training would wait for
it. That is safe because a stream ends with a flush number whose marks cover all that was ever reported durable: with
other holders alive they have acknowledged everything before the end is sent (flushes are held back until then, or the
end would never come); without, the source flushes first. While all holders of a group are new, what is applied counts.

Rows without parities are a group too, the bare one: no holders, nothing pending, and what is applied is as durable as
it gets.

Where rows may come back from older saves (`recall.py`), `updates` counts what pushes did to them, up to the marks of
the group that is copied and never recalled. It goes along with every flush: after a loss the holders of that group know
it, and with that what a replacement lacks. `updates_lost` goes along too, for successors that are not recalled.

A holder whose parity is void, because it has parts of a server that was recalled, asks for a stream from the beginning
(`on_stream_ask`): to a source it is then as new as one that was replaced.

What breaks without the rules:
- Marks only with rows: pushes that change nothing in a group never become durable, windows fill, training stops.
- Durability that waits for a holder being streamed to: the same, for as long as a recovery takes.
- A stream that ends without marks: a source that dies next is brought back to zero marks, and pushes count twice.
- Rows streamed as touched before anything of them was published: their first weights are lost with this server.
- Unbounded flushes ahead of a slow holder: memory for its sake. It gets what comes together as one flush.
- A commit for what is durable: its worker may be told of that first, and say no more (two-phase commit). Flushes with
  later pushes of other workers wait for ever.
- A bound on flushes that are staged and not committed: a flush waits for a commit, the commit for a push that another
  server has not staged, and that server's flush for a commit of this one. Nothing moves any more.

Two-phase commit (`commit = "2pc"`) flushes pushes as `staged`; holders apply them when the source commits, which is
when the worker has seen them staged everywhere. A flush waits only for answers, which a holder gives at once; what is
staged and not committed is bounded by the workers' windows, as it consists of pushes that they keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from regrow import _kernels
from regrow.core.effects import Send
from regrow.core.flush_group import FlushGroup, Part, StreamOut, find_least
from regrow.core.flush_pace import FlushPace
from regrow.core.groups import Groups, by_table
from regrow.core.identity import Identity
from regrow.core.messages import (
    Float32Array,
    Flush,
    FlushAck,
    FlushCommit,
    Have,
    Int32Array,
    Stream,
    StreamAsk,
    StreamBegin,
    StreamEnd,
    UInt32Array,
)
from regrow.core.protection import FlushSpec
from regrow.store.interface import FlushedRows

STREAM_BYTES = 1 << 20  # Too small: messages cost more than rows. Too large: pulls wait behind one.
# Per group: not answered, neither as applied nor as staged. Too few: flushes wait for the slowest holder. Too many:
# memory for its sake.
FLUSHES_UNACKED_MAX = 64
STREAMS_UNDERWAY_MAX = 2  # per holder and group; one is on the way while the other is applied


class Budget:
    """How many bytes of background work may leave now. Refilled by time; 0 bytes per second: no limit."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._left = float(STREAM_BYTES)
        self._most = max(self._left, bytes_per_s / 4)
        self._now: float | None = None

    def set_rate(self, bytes_per_s: float) -> None:
        """From now on. What is left of what was allowed stays."""
        self._rate = bytes_per_s
        self._most = max(float(STREAM_BYTES), bytes_per_s / 4)
        self._left = min(max(self._left, 0.0), self._most)

    def refill(self, now: float) -> bool:
        """Whether there was nothing, and is something now."""
        since, self._now = self._now, now
        if self._left >= self._most or since is None or not self._rate:
            return False
        was_empty = self._left <= 0
        self._left = min(self._left + (now - since) * self._rate, self._most)
        return was_empty and self._left > 0

    def has_some(self) -> bool:
        """Go on. What is begun may overdraw it once."""
        return not self._rate or self._left > 0

    def take(self, count: int) -> None:
        self._left -= count


class Flusher:
    """The source side of one server's parities."""

    def __init__(
        self, *, server: int, groups: Groups, store: FlushedRows, marks: int, spec: FlushSpec, keeps_undo: bool
    ) -> None:
        self.server = server
        self.groups = [FlushGroup(marks) for _ in range(groups.total)]
        self.coded = self.groups[: len(groups)]  # those that have holders: all but the bare one
        # The last push (step) applied to the rows of each group.
        self.applied: list[list[int]] = [[0] * marks for _ in self.groups]
        # Of rows that may be recalled, a row once for each push that has it, up to the marks of the copied group, also
        # by servers before this one; and how many of them are lost by now.
        self.updates = self.updates_lost = 0
        self.flush_count = 0
        self.flush_bytes = 0
        self.flush_rows = 0
        self.bytes_streamed = 0
        self.rests = False  # the last tick found nothing to flush
        self.geometry = groups
        self.floats = [store.record_floats(table) for table in range(len(groups.job.tables))]
        self._store = store
        self._spec = spec
        self._keeps_undo = keeps_undo
        self._durable = [0] * marks
        self._committed = [0] * marks  # the last push of each worker that may count (two-phase commit)
        self._pace = FlushPace(spec, marks=marks, servers=groups.job.servers)
        self._peers: dict[int, Identity] = {}
        for g, group in enumerate(self.groups):
            for holder in groups.holders(server, g):
                group.acked[holder] = group.prepared[holder] = 0

    # --- What is durable ---

    def durable(self, mark: int) -> int:
        """The last push (of this worker, or step) that survives the loss of any r servers. Never falls."""
        if not self.coded or self._spec.commit == "none":
            return min(applied[mark] for applied in self.applied)
        return self._durable[mark]

    def find_prepared(self, mark: int) -> int:
        """The last push that is staged at every holder (two-phase commit)."""
        return min(self._find_covered(g, group.prepared)[mark] for g, group in enumerate(self.groups))

    def _find_covered(self, g: int, acked: dict[int, int]) -> Sequence[int]:
        """The marks that are covered by what all holders of a group that count have."""
        group = self.groups[g]
        if not group.active:
            return (0,) * len(self._durable)
        least = find_least(group, acked)
        return self.applied[g] if least is None else group.history[least]

    def _settle(self) -> None:
        """Takes account of new acknowledgements."""
        covered = [self._find_covered(g, group.acked) for g, group in enumerate(self.groups)]
        self._durable = list(map(max, map(min, zip(*covered, strict=True)), self._durable))
        # What is durable needs no commit: its worker may have forgotten it without one (two-phase commit).
        self._committed = list(map(max, self._committed, self._durable))
        for group in self.groups:
            if len(group.history) > 2:  # 0 is what a new holder has, and the last flush is never dropped
                least = find_least(group, group.acked)
                for number in [n for n in group.history if 0 < n < (group.number if least is None else least)]:
                    del group.history[number]

    # --- Flushes ---

    def set_marks(self, marks: tuple[int, ...], groups: Iterable[int]) -> None:
        """All rows of these groups are those after these pushes, of a checkpoint; nobody will commit them again."""
        for g in groups:
            self.applied[g][:] = marks
            self.groups[g].active = True
        self._committed = [max(pair) for pair in zip(self._committed, marks, strict=True)]

    def count_push(self, mark: int, push_bytes: int) -> list[Send]:
        """A push of this worker was applied to all groups: flush when enough has come together."""
        if not self.coded or not self._pace.count(mark, push_bytes, self._store.pending_bytes):
            return []
        return self.flush_all()

    def tick(self, now: float) -> list[Send]:
        """Flushes what has waited long enough, or when nothing more seems to come."""
        self.rests = not self._has_unflushed()
        return self.flush_all() if self._pace.tick(now, unflushed=not self.rests) else []

    def _has_unflushed(self) -> bool:
        store = self._store
        for g, (group, applied) in enumerate(zip(self.coded, self.applied, strict=False)):
            if group.active and (group.flushed != tuple(applied) or store.pending_rows(g)):
                return True
        return False

    def flush_all(self) -> list[Send]:
        self._pace.begin_anew()
        sends: list[Send] = []
        if not self.coded:
            return sends
        for g in range(len(self.coded)):
            sends += self.flush(g)
        self._settle()  # a group whose holders are all new is as durable as it gets
        return sends + self._commit_flushes()

    def flush(self, g: int) -> list[Send]:
        """Sends what changed in one group, if anything did: rows, or only the marks."""
        group = self.groups[g]
        marks = tuple(self.applied[g])
        ending = any(stream.ending for stream in group.streams.values())
        if ending and len(group.streams) < len(group.acked):
            return []  # a stream ends once the other holders have acknowledged everything: let them
        if not group.active or (group.flushed == marks and not self._store.pending_rows(g)):
            return []
        if self._count_unanswered(group) >= FLUSHES_UNACKED_MAX:
            return []  # a slow holder gets what comes together meanwhile as one flush
        part = self._store.take_flush(g)
        group.number += 1
        if self._keeps_undo and group.flushed != marks:  # what is loaded between two steps is not undone with one
            group.last = part
        group.flushed = marks
        group.updates = self.updates
        group.history[group.number] = marks
        staged = self._spec.commit == "2pc"
        sends: list[Send] = []
        receivers = 0
        for holder in self.geometry.holders(self.server, g):
            if holder in group.streams:
                sends += self._stream_changes(g, holder, part)
                continue
            receivers += 1
            message = Flush(
                group=g,
                number=group.number,
                stable=find_least(group, group.acked) or 0,
                marks=marks,
                staged=staged,
                updates=self.updates,
                updates_lost=self.updates_lost,
                counts=part[0],
                slots=part[1],
                deltas=part[2],
            )
            sends.append(Send(target=self._peers[holder], message=message))
        if staged and receivers:
            group.staged.append((group.number, marks, part))
        self.flush_count += receivers
        self.flush_rows += receivers * part[1].size
        self.flush_bytes += receivers * (part[1].nbytes + part[2].nbytes)
        return sends

    def _count_unanswered(self, group: FlushGroup) -> int:
        """Flushes that some holder has not answered yet. One that is staged is answered: if it counted until its
        commit, a flush could wait for a commit that waits for a push in that very flush (two-phase commit)."""
        least = find_least(group, group.prepared)
        return 0 if least is None else group.number - least

    def on_ack(self, holder: int, ack: FlushAck) -> list[Send]:
        """A holder has a flush, or the end of its stream: more may be durable, and other streams may end."""
        if ack.group >= len(self.groups):
            raise ValueError(f"there is no group {ack.group}")
        group = self.groups[ack.group]
        if not 0 < ack.number <= group.number or holder not in group.acked or holder in group.streams:
            raise ValueError(f"flush {ack.number} of group {ack.group} was never sent to S{holder}")
        if ack.number > group.acked[holder] and ack.number not in group.history:
            raise ValueError(f"flush {ack.number} of group {ack.group} is not one that S{holder} can be at")
        group.prepared[holder] = max(ack.number, group.prepared[holder])
        if not ack.staged:
            group.acked[holder] = max(ack.number, group.acked[holder])
        sends: list[Send] = []
        for other in list(group.streams):
            sends += self._end_stream(ack.group, other)
        self._settle()
        return sends + self._commit_flushes()

    def find_owing(self) -> Iterator[int]:
        """Holders that have not answered all that was sent to them; what is staged is answered, until its commit."""
        for group in self.coded:
            for holder, prepared in group.prepared.items():
                if (stream := group.streams.get(holder)) is not None:
                    if stream.underway:
                        yield holder
                elif prepared < group.number or group.acked[holder] < group.committed:
                    yield holder

    def commit(self, mark: int, seq: int) -> list[Send]:
        """The worker has seen this push staged everywhere: flushes it covers may count (two-phase commit)."""
        self._committed[mark] = max(seq, self._committed[mark])
        return self._commit_flushes()

    def _commit_flushes(self) -> list[Send]:
        """Commits what every push in it allows; what was loaded or assigned waits for no push."""
        sends: list[Send] = []
        if self._spec.commit != "2pc":
            return sends
        for g, group in enumerate(self.groups):
            number = 0
            while group.staged and all(
                have <= done for have, done in zip(group.staged[0][1], self._committed, strict=True)
            ):
                number = group.staged.popleft()[0]
            if number:
                group.committed = number
                commit = FlushCommit(group=g, number=number)
                holders = [h for h in self.geometry.holders(self.server, g) if h not in group.streams]
                sends += [Send(target=self._peers[h], message=commit) for h in holders]
        return sends

    def last_step(self, g: int) -> Part:
        """What the last step changed in a group: the last flush, or, where that is held back, what waits for it."""
        group = self.groups[g]
        if tuple(self.applied[g]) != group.flushed:
            return self._store.take_flush(g, keep=True)
        return group.last or make_empty_part(len(self.floats))

    def numbers(self) -> list[int]:
        """The flushes that have, or will have, all that was changed so far: one may be held back."""
        return [
            group.number + bool(self._store.pending_rows(g) or group.flushed != tuple(self.applied[g]))
            for g, group in enumerate(self.coded)
        ]

    def _commit_staged(self, g: int, holders: list[int]) -> list[Send]:
        """Commits what a stream waits for. It is in the new holder already, and to wait for its workers could mean to
        wait for a push that is held back here (two-phase commit)."""
        group = self.groups[g]
        if not group.staged:
            return []
        group.committed = group.staged[-1][0]
        commit = FlushCommit(group=g, number=group.committed)
        group.staged.clear()
        return [Send(target=self._peers[holder], message=commit) for holder in holders]

    def has_acked(self, numbers: list[int]) -> bool:
        """Whether every holder that counts has these flushes."""
        return all(
            have >= number
            for group, number in zip(self.coded, numbers, strict=True)
            for holder, have in group.acked.items()
            if holder not in group.streams
        )

    def snapshot(self, holder: int, counts: Int32Array, slots: UInt32Array) -> Float32Array:
        """The values of these rows that `holder` has once all that was sent to it has arrived."""
        out = np.empty(int(counts @ np.array(self.floats, np.int64)), np.float32)
        self._store.published(counts, slots, out)
        if any(group.staged for group in self.groups):
            for table, (part, values) in by_table((counts, slots, out), self.floats).items():
                self._without_staged(holder, table, part, values)
        return out

    def _without_staged(self, holder: int, table: int, slots: UInt32Array, values: Float32Array) -> None:
        """What was sent but not committed is not in the holder's parity yet (two-phase commit)."""
        members = self.geometry.of_member[table]
        for g in np.unique(members[slots % members.size]).tolist():
            group = self.groups[g]
            for number, _, part in group.staged:
                if number > group.since.get(holder, 0):
                    self._exclude(table, slots, values, part)

    def _exclude(self, table: int, slots: UInt32Array, records: Float32Array, part: Part) -> None:
        floats = self._store.record_floats(table)
        if table not in (changes := by_table(part, self.floats)):
            return
        changed, deltas = changes[table]
        order = np.argsort(slots, kind="stable")
        ordered = records.reshape(-1, floats)[order].reshape(-1)
        _kernels.xor_matching(slots[order], ordered, floats, changed, deltas, 1)
        records.reshape(-1, floats)[order] = ordered.reshape(-1, floats)

    # --- Holders that were replaced ---

    def know(self, peers: dict[int, Identity], *, replaced: list[int]) -> None:
        """A view: who is who now, and who has lost what it held. What waits for a flush belongs to the group
        and stays."""
        self._peers = peers
        for g in range(len(self.coded)):
            for holder in self.geometry.holders(self.server, g):
                if holder in replaced:
                    self._begin_stream(g, holder)
        self._settle()

    def activate(self, have: Have, *, undo: Part | None) -> None:
        """A replacement learns where its group stands: its holders have all of flush `number`."""
        g, number, marks = have.group, have.number, have.marks
        group = self.groups[g]
        assert not group.active
        group.active = True
        group.number = number
        group.flushed = marks
        group.updates = have.updates
        if g == self.geometry.copied:
            self.updates = have.updates
        self.updates_lost = max(have.updates_lost, self.updates_lost)
        group.history = {0: (0,) * len(marks), number: marks}
        group.last = undo
        self.applied[g] = list(marks)
        self._committed = [max(pair) for pair in zip(self._committed, marks, strict=True)]
        for holder in group.acked:
            if holder not in group.streams:
                group.acked[holder] = group.prepared[holder] = number
        if all(each.active for each in self.groups):
            self._settle()

    def await_recall(self, groups: Iterable[int]) -> None:
        """The rows of these groups come from saves: no holder has anything that they could be told apart from."""
        for g in groups:
            self.groups[g].active = False
            for holder in self.groups[g].acked:
                self._begin_stream(g, holder)

    def join_recalled(self, groups: Iterable[int], *, updates_saved: int) -> tuple[int, ...]:
        """Rows that came from saves count as being where the copied ones are: what they lack of that is lost. Their
        holders will be told as if that were their first flush. Returns the marks."""
        copied = self.geometry.copied
        assert copied is not None and self.groups[copied].active
        marks = tuple(self.applied[copied])
        self.updates_lost = self.updates - updates_saved
        for g in groups:
            group = self.groups[g]
            self.applied[g] = list(marks)
            group.active = True
            if group.acked:
                group.number, group.flushed = 1, marks
                group.history = {0: (0,) * len(marks), 1: marks}
        self._settle()
        return marks

    def on_stream_ask(self, holder: Identity, ask: StreamAsk) -> list[Send]:
        """What this holder had is void. It was told so much before it asked, and will know from here on what counts."""
        if ask.group >= len(self.coded) or holder.id not in self.groups[ask.group].acked:
            raise ValueError(f"S{holder.id} holds nothing of group {ask.group}")
        self._begin_stream(ask.group, holder.id)
        self._settle()
        return [Send(target=holder, message=StreamBegin(group=ask.group, number=ask.number))]

    def _begin_stream(self, g: int, holder: int) -> None:
        group = self.groups[g]
        group.acked[holder] = group.prepared[holder] = 0
        group.streams[holder] = StreamOut()
        group.history.setdefault(0, (0,) * len(self._durable))

    @property
    def is_streaming(self) -> bool:
        """Somebody is being streamed to."""
        return any([group.streams for group in self.coded])

    def stream(self, budget: Budget) -> list[Send]:
        """Sends the next rows to every new holder that is ready for more. Only for a server with all its rows."""
        sends: list[Send] = []
        for g, group in enumerate(self.groups):
            for holder, stream in list(group.streams.items()):
                while not stream.ending and stream.underway < STREAMS_UNDERWAY_MAX and budget.has_some():
                    sends += self._stream_rows(g, holder, stream, budget)
                sends += self._end_stream(g, holder)
        return sends

    def on_stream_ack(self, holder: int, g: int) -> None:
        if g >= len(self.groups):
            raise ValueError(f"there is no group {g}")
        stream = self.groups[g].streams.get(holder)
        if stream is not None and stream.underway:
            stream.underway -= 1

    def _stream_rows(self, g: int, holder: int, stream: StreamOut, budget: Budget) -> list[Send]:
        tables = len(self.geometry.job.tables)
        while stream.table < tables:
            table = stream.table
            if self.geometry.member(table, g) is None or stream.block >= self._store.blocks(table):
                stream.table, stream.block = table + 1, 0
                continue
            floats = self._store.record_floats(table)
            rows_max = max(1, STREAM_BYTES // (4 * floats))
            slots, stream.block = self._store.next_touched(table, g, stream.block, rows_max)
            if slots.size == 0:
                continue
            # What is staged goes along: it will be committed, and its commit does not reach this holder.
            counts = np.zeros(tables, np.int32)
            counts[table] = slots.size
            relatives = np.empty(slots.size * floats, np.float32)
            self._store.published(counts, slots, relatives)
            told = self._find_told(g, table, slots, relatives)
            if not told.all():
                slots, relatives = slots[told], relatives.reshape(told.size, floats)[told].reshape(-1)
                counts[table] = slots.size
                if slots.size == 0:
                    continue
            stream.underway += 1
            budget.take(relatives.nbytes)
            self.bytes_streamed += relatives.nbytes
            message = Stream(group=g, counts=counts, slots=slots, deltas=relatives)
            return [Send(target=self._peers[holder], message=message)]
        stream.ending = True
        return []

    def _find_told(self, g: int, table: int, slots: UInt32Array, relatives: Float32Array) -> npt.NDArray[np.bool_]:
        """Which of these touched rows were touched by anything that was ever flushed. One that was assigned its first
        weights and not flushed since is published as untouched: its holder must not know better, or a replacement would
        take it for a row that was touched, and keep its initial value when it is assigned again."""
        told = _kernels.find_nonzero(relatives, self.floats[table]).view(np.bool_)
        if not told.all():
            counts, pending, _ = self._store.take_flush(g, keep=True)
            first = int(counts[:table].sum())
            told |= ~np.isin(slots, pending[first : first + int(counts[table])])
        return told

    def _stream_changes(self, g: int, holder: int, part: Part) -> list[Send]:
        """The part of a flush that a new holder needs: rows it has been streamed already."""
        stream = self.groups[g].streams[holder]
        counts = np.zeros_like(part[0])
        slots: list[Any] = []
        deltas: list[Any] = []
        for table, (changed, values) in by_table(part, self.floats).items():
            if table > stream.table:
                break
            known = np.ones(changed.size, bool)
            if table == stream.table:
                known = changed // self.geometry.job.tables[table].k < stream.block
            counts[table] = np.count_nonzero(known)
            slots.append(changed[known])
            deltas.append(values.reshape(changed.size, -1)[known].reshape(-1))
        if not counts.any():
            return []
        stream.underway += 1
        message = Stream(group=g, counts=counts, slots=np.concatenate(slots), deltas=np.concatenate(deltas))
        return [Send(target=self._peers[holder], message=message)]

    def _end_stream(self, g: int, holder: int) -> list[Send]:
        """Ends a stream once nothing is missing: the holder then has flush `number`, and so has every other."""
        group = self.groups[g]
        stream = group.streams[holder]
        if not stream.ending:
            return []
        others = [h for h in group.acked if h not in group.streams]
        sends: list[Send] = []
        if not others:
            sends += self.flush(g)  # all that was reported durable must be in it
        elif any(group.acked[h] < group.number for h in others):
            return self._commit_staged(g, others)
        counts, slots, deltas = group.last or make_empty_part(len(self.geometry.job.tables))
        end = StreamEnd(
            group=g,
            number=group.number,
            marks=group.flushed,
            updates=group.updates,
            updates_lost=self.updates_lost,
            counts=counts,
            slots=slots,
            deltas=deltas,
        )
        del group.streams[holder]
        group.since[holder] = group.number
        group.history.setdefault(group.number, group.flushed)
        return [*sends, Send(target=self._peers[holder], message=end)]


def make_empty_part(tables: int) -> Part:
    return np.zeros(tables, np.int32), np.zeros(0, np.uint32), np.zeros(0, np.float32)
