"""Goal: parities always stand for the published rows, and a server that is lost comes back bit for bit from them: what
is particular to the kernels (modes, threads, memory, the words of errors); the rest is in test_conformance_coded.py.

Method: a cluster of C++ shards and their twins receive the same updates, flushes and losses, in every mode, and are
compared whole. Decoding uses only what a real recovery would have. Wrong calls are listed; none may change a bit.
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import counts_of
from kernel_modes import MODES, Mode, running

from regrow import _kernels
from regrow.core import twins
from regrow.core.coding import coefficient, decoding_matrix
from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.core.twins import CodedShardTwin, Rule
from regrow.store.memory import MemoryStore

Tables = list[dict[str, Any]]
TABLES: Tables = [
    dict(rows=900, dim=16, k=3, r=2, rule=Rule(optimizer="rowwise_adagrad", learning_rate=0.1)),
    dict(rows=33, dim=5, k=1, r=0, rule=Rule(optimizer="adam", learning_rate=0.01)),
    dict(rows=171, dim=7, k=2, r=2, rule=Rule(optimizer="adagrad", learning_rate=0.3)),
    dict(rows=11, dim=3, k=1, r=1, rule=Rule(optimizer="momentum", learning_rate=0.1)),
]
CODING = [(1, 1), (1, 2), (2, 2), (3, 2)]


class Both:
    """A shard and its twin: what is done to one is done to the other."""

    def __init__(self, servers: int, server: int, groups: int, recovering: bool = False) -> None:
        self.server = server
        self.shard = _kernels.Shard(servers, server, groups, CODING, recovering)
        self.twin = CodedShardTwin(servers, server, groups, coding=CODING, recovering=recovering)
        for index, table in enumerate(TABLES):
            settings = {key: value for key, value in table.items() if key != "rule"}
            settings |= dict(seed=11, init_bound=0.25, table=index)
            rule = table["rule"]
            self.shard.add_table(**settings, **{name: getattr(rule, name) for name in Rule.__slots__})
            self.twin.add_table(**settings, rule=rule)

    def update(self, rng: np.random.Generator, step: int) -> None:
        counts, slots = some_rows(self.shard, rng)
        values = rng.standard_normal(int(counts @ [table["dim"] for table in TABLES])).astype(np.float32)
        for each in (self.shard, self.twin):
            if step % 4 == 3:
                each.assign_untouched(counts, slots, values)
            else:
                each.update(counts, slots, values, step)

    def take_flush(self, group: int) -> tuple[Any, Any, Any]:
        looked = [part.tobytes() for part in self.shard.take_flush(group, keep=True)]
        counts, slots, deltas = self.shard.take_flush(group)
        assert looked == [part.tobytes() for part in (counts, slots, deltas)], "looking changes nothing"
        ordered, at, row = [np.zeros(0, np.float32)], 0, 0
        expected = self.twin.take_flush(group)
        for t, count in enumerate(counts):
            floats = self.shard.record_floats(t)
            order = np.argsort(slots[row : row + count])
            assert (slots[row : row + count][order] == expected[1][row : row + count]).all()
            ordered.append(deltas[at : at + count * floats].reshape(-1, floats)[order].ravel())
            row += count
            at += count * floats
        assert counts.tolist() == expected[0].tolist()
        assert np.concatenate(ordered).tobytes() == expected[2].tobytes()
        return counts, slots, deltas

    def parity_apply(self, source: int, counts: Any, slots: Any, deltas: Any) -> None:
        self.shard.parity_apply(source, counts, slots, deltas)
        self.twin.parity_apply(source, counts, slots, deltas)

    def check(self) -> None:
        assert whole(self.shard) == whole_twin(self.twin)


def some_rows(shard: _kernels.Shard, rng: np.random.Generator, least: int = 0) -> tuple[np.ndarray, np.ndarray]:
    slots = [rng.permutation(n)[: rng.integers(least, n + 1)] for n in map(shard.slots, range(len(TABLES)))]
    return np.array([len(part) for part in slots], np.int32), np.concatenate(slots).astype(np.uint32)


def words_of(bits: np.ndarray) -> np.ndarray:
    words = np.zeros(-(-len(bits) // 64), np.uint64)
    words.view(np.uint8)[: -(-len(bits) // 8)] = np.packbits(bits, bitorder="little")
    return words


def whole(shard: _kernels.Shard) -> list[Any]:
    """Everything a shard of TABLES, with all rows present, holds."""
    parts: list[Any] = [shard.pending_bytes(), shard.missing_rows(), shard.blank_rows()]
    parts += [shard.pending_rows(group) for group in range(len(CODING))]
    for t, table in enumerate(TABLES):
        floats, slots = shard.record_floats(t), shard.slots(t)
        records = np.empty((slots, floats), np.float32)
        shard.read_records(t, 0, slots, records)
        relatives = np.empty((slots, floats), np.float32)
        shard.published(counts_of(len(TABLES), t, slots), np.arange(slots, dtype=np.uint32), relatives)
        parts += [records.tobytes(), relatives.tobytes(), shard.touched(t).tobytes()]
        for q in range(table["r"]):
            blocks = shard.blocks(t)
            out = np.empty((blocks, floats), np.float32)
            shard.parity_read(q, counts_of(len(TABLES), t, blocks), np.arange(blocks, dtype=np.uint32), out)
            parts.append(out.tobytes())
            parts += [shard.parity_members(t, q, member).tobytes() for member in range(table["k"])]
    return parts


def whole_twin(twin: CodedShardTwin) -> list[Any]:
    parts: list[Any] = [sum(4 * len(row) for coded in twin.coded for row in coded.saved.values()), 0, 0]
    for group in range(len(CODING)):
        rows = [set(twin._in_group(t, group)) & set(coded.saved) for t, coded in enumerate(twin.coded)]
        parts.append(sum(map(len, rows)))
    for t, coded in enumerate(twin.coded):
        relatives = twin.published(t, np.arange(len(coded.initial), dtype=np.uint32))
        parts += [twin.records[t].tobytes(), relatives.tobytes(), twin.touched_words(t).tobytes()]
        for q in range(coded.r):
            parts.append(coded.parity[:, q].tobytes())
            parts += [words_of(coded.members[q, member]).tobytes() for member in range(coded.k)]
    return parts


def holders(source: int, group: int, ring: int) -> list[int]:
    distance, r = CODING[group]
    return [source // ring * ring + (source + distance + q) % ring for q in range(r)]


class Cluster:
    def __init__(self, servers: int, groups: int) -> None:
        self.servers, self.groups, self.ring = servers, groups, servers // groups
        self.all = [Both(servers, server, groups) for server in range(servers)]

    def flush(self, source: int, group: int) -> None:
        flush = self.all[source].take_flush(group)
        for holder in holders(source, group, self.ring):
            self.all[holder].parity_apply(source, *flush)

    def run(self, rng: np.random.Generator, steps: int) -> None:
        for step in range(1, steps + 1):
            for server in range(self.servers):
                if rng.random() < 0.6:
                    self.all[server].update(rng, step)
                for group in range(len(CODING)):
                    if rng.random() < 0.3:
                        self.flush(server, group)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("servers", "groups"), [(5, 1), (12, 2)])
def test_cluster_equals_twins(servers: int, groups: int, mode: Mode) -> None:
    with running(mode):
        cluster = Cluster(servers, groups)
        cluster.run(np.random.default_rng(servers), steps=5)
        for each in cluster.all:
            each.check()


# ---- losing servers


def published_of(shard: _kernels.Shard) -> list[np.ndarray]:
    rows = []
    for t in range(len(TABLES)):
        out = np.empty((shard.slots(t), shard.record_floats(t)), np.float32)
        shard.published(counts_of(shard.table_count, t, len(out)), np.arange(len(out), dtype=np.uint32), out)
        rows.append(out)
    return rows


def decoded(cluster: Cluster, dead: list[int], lost: int, t: int, member: int, block: int) -> np.ndarray:
    """The relative value of a lost row, from the servers that live."""
    k, r, ring = TABLES[t]["k"], TABLES[t]["r"], cluster.ring
    base = lost // ring * ring
    first = (lost - member) % ring  # member m of the stripe is on server first + m
    home = [base + (first + m) % ring for m in range(k + r)]
    missing = tuple(j for j in range(k) if home[j] in dead)
    parities = tuple(q for q in range(r) if home[k + q] not in dead)[: len(missing)]
    floats = cluster.all[0].shard.record_floats(t)
    value = np.zeros(floats, np.float32)
    one = counts_of(len(TABLES), t, 1)
    row = decoding_matrix(k, r, missing, parities)[missing.index(member)]
    for q, factor in zip(parities, row, strict=True):
        remain = np.empty(floats, np.float32)
        cluster.all[home[k + q]].shard.parity_read(q, one, np.array([block], np.uint32), remain)
        for j in range(k):
            if j not in missing:
                out = np.empty(floats, np.float32)
                cluster.all[home[j]].shard.published(one, np.array([block * k + j], np.uint32), out)
                _kernels.gf_xor(remain, out, coefficient(q, j, r))
        _kernels.gf_xor(value, remain, factor)
    return value


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("servers", "groups", "dead"), [(5, 1, [2]), (5, 1, [0, 4]), (12, 2, [7, 10])])
def test_lost_servers_come_back(servers: int, groups: int, dead: list[int], mode: Mode) -> None:
    """Rows of r = 0 stay missing; of the tables with r = 1, only those rows are lost with two servers that are not."""
    rng = np.random.default_rng(sum(dead))
    with running(mode):
        cluster = Cluster(servers, groups)
        cluster.run(rng, steps=4)
        ring = cluster.ring
        for lost in dead:
            expected = published_of(cluster.all[lost].shard)
            new = Both(servers, lost, groups, recovering=True)
            coded = [t for t, table in enumerate(TABLES) if table["r"]]
            assert new.shard.missing_rows() == sum(map(new.shard.slots, range(len(TABLES))))
            assert new.shard.missing_rows() - new.shard.missing_rows(len(CODING)) == sum(map(new.shard.slots, coded))
            for group, (distance, r) in enumerate(CODING):
                living = [holder for holder in holders(lost, group, ring) if holder not in dead]
                for t, table in enumerate(TABLES):
                    if table["r"] != r or distance > table["k"] or not living:
                        continue
                    words = cluster.all[living[0]].shard.parity_touched(lost, group, t)
                    bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: new.shard.blocks(t)] == 1
                    new.shard.know_touched(group, t, words)
                    new.twin.know_touched(group, t, bits)
            for _ in range(3):
                counts, slots = some_rows(new.shard, rng)
                missing = new.shard.prepare(counts, slots)
                names = new.twin.prepare(counts, slots)
                tables = np.repeat(np.arange(len(TABLES)), missing[0])
                assert list(zip(tables, missing[1], strict=True)) == names
                relatives = [np.zeros(0, np.float32)]
                for t, slot in names:
                    block, member = divmod(slot, TABLES[t]["k"])
                    if TABLES[t]["r"] and new.twin.coded[t].known[slot]:
                        relatives.append(decoded(cluster, dead, lost, t, member, block))
                        assert relatives[-1].tobytes() == expected[t][slot].tobytes()
                    else:
                        relatives.append(np.zeros(new.shard.record_floats(t), np.float32))
                put = (*missing, np.concatenate(relatives))
                assert new.shard.put(*put) == new.twin.put(*put)
                assert new.shard.put(*put) == 0  # no longer missing
                assert (new.shard.missing_rows(), new.shard.blank_rows()) == new.twin.absent_rows()
                assert [new.shard.pending_rows(group) for group in range(len(CODING))] == [0] * len(CODING)
            for t in coded:
                present = np.flatnonzero(new.twin.coded[t].present).astype(np.uint32)
                out = np.empty((len(present), new.shard.record_floats(t)), np.float32)
                new.shard.published(counts_of(len(TABLES), t, len(present)), present, out)
                assert out.tobytes() == expected[t][present].tobytes()
                for slot in present[:20]:
                    record = np.empty(new.shard.record_floats(t), np.float32)
                    new.shard.read_records(t, int(slot), 1, record)
                    assert record.tobytes() == new.twin.records[t][slot].tobytes()


def test_memory_for_coming_back_is_given_back() -> None:
    """Once every row is there. Before, whoever asks for one is told what to do."""
    job = job_of([(400, 8, 2, 1), (50, 4, 1, 1)])
    normal, new = MemoryStore(job, 1), MemoryStore(job, 1, recovering=True)
    counts = np.array([normal.slots(0), normal.slots(1)], np.int32)
    slots = np.concatenate([np.arange(n, dtype=np.uint32) for n in counts])
    with pytest.raises(ValueError, match="slot 0 of table 0 was not recovered yet; prepare it first"):
        new.gather(counts, slots, np.empty(int(counts @ [8, 4]), np.float32))
    for t, group in ((0, 0), (0, 1), (1, 0)):
        new.know_touched(group, t, words_of(np.arange(new.blocks(t)) % 2 == 0))
    before = new._shard.memory_bytes
    assert new.put(counts, slots, np.ones(int(counts @ [new.record_floats(t) for t in (0, 1)]), np.float32)) > 0
    assert new._shard.memory_bytes == before
    assert new.fill(1 << 20) > 0
    assert new._shard.memory_bytes == normal.memory_bytes < before == new.memory_bytes


def bits_of(store: MemoryStore) -> np.ndarray:
    records = np.empty((store.slots(0), store.record_floats(0)), np.float32)
    store.read_records(0, 0, len(records), records)
    return records.view(np.uint32)


def test_many_rows_are_shared_by_threads() -> None:
    """Enough that threads share lists, words and chunks; a slot that is there twice is added twice."""
    job = job_of([(160_000, 16, 2, 2)], servers=4)
    results = []
    for mode in MODES:
        with running(mode):
            rng = np.random.default_rng(5)
            source, holder = MemoryStore(job, 0), MemoryStore(job, 2)
            every = np.arange(source.slots(0), dtype=np.uint32)
            relatives = np.empty((len(every), source.record_floats(0)), np.float32)
            initial = published = bits_of(source)
            for step in (1, 2, 3, 4):
                slots = rng.permutation(every)[:20_000]
                grads = rng.standard_normal((len(slots), 16)).astype(np.float32)
                source.update(np.array([len(slots)], np.int32), slots, grads, step)
                source.published(np.array([len(every)], np.int32), every, relatives)
                assert (relatives.view(np.uint32) == published ^ initial).all()
                if step % 2:
                    continue
                pending = [source.pending_rows(group) for group in (0, 1)]
                assert sum(pending) > 20_000
                assert source.pending_bytes() == sum(pending) * 4 * source.record_floats(0)
                deltas = np.zeros_like(initial)
                flushes = [source.take_flush(group) for group in (0, 1)]
                for group, (counts, slots, flushed) in enumerate(flushes):
                    assert counts.tolist() == [len(set(slots.tolist()))] == [pending[group]]
                    assert set((slots % 2).tolist()) == {1 - group}
                    deltas[slots] = flushed.view(np.uint32).reshape(len(slots), -1)
                assert (deltas == published ^ bits_of(source)).all()
                published = bits_of(source)
                assert [source.pending_rows(group) for group in (0, 1)] == [0, 0]
                assert source.take_flush(0)[1].size == 0
                _, slots, flushed = flushes[0]
                records = flushed.reshape(len(slots), -1)
                twice = np.concatenate([slots, slots[:3000]])
                counts = np.array([len(twice)], np.int32)
                holder.parity_apply(0, counts, twice, np.concatenate([records, records[:3000]]))
                holder.parity_apply(0, np.array([3000], np.int32), slots[:3000], records[:3000])
            out = np.empty((holder.blocks(0), holder.record_floats(0)), np.float32)
            holder.parity_read(1, np.array([len(out)], np.int32), every[: len(out)], out)
            expected = np.zeros_like(out)
            twins.gf_xor(expected, (published ^ initial)[1::2].view(np.float32), coefficient(1, 1, 2))
            assert out.tobytes() == expected.tobytes()
            results.append((out.tobytes(), holder.parity_touched(0, 0, 0).tobytes()))
    assert all(result == results[0] for result in results)


def test_memory_stays_within_its_bound() -> None:
    for rows, dim, k, r in [(400_000, 16, 4, 1), (400_000, 16, 2, 2), (100_000, 64, 4, 2)]:
        plain = _kernels.shard_bytes(rows, dim, k, 0, 1, 6, "sgd")
        coded = _kernels.shard_bytes(rows, dim, k, r, 1, 6, "sgd")
        assert coded - plain <= plain * (r / k + 0.02) + 2**21
        store = MemoryStore(job_of([(rows, dim, k, r)], servers=6, kind="sgd"), 0, recovering=True)
        assert coded <= store.memory_bytes <= coded + 2**21


def test_a_recovering_store_touches_no_memory() -> None:
    """So that a replacement is there at once, however large the tables are. Pages are counted, not time."""

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident_bytes()
    store = MemoryStore(job_of([(2**24, 16, 2, 1)], kind="sgd"), 0, recovering=True)
    assert store.memory_bytes > 2**28
    assert store.missing_rows() == store.slots(0)
    assert resident_bytes() - before < 2**24


def job_of(tables: list[tuple[int, int, int, int]], servers: int = 3, kind: Any = "rowwise_adagrad") -> JobSpec:
    optimizer = OptimizerSpec(kind=kind, learning_rate=0.1)
    return JobSpec(
        servers=servers,
        workers=1,
        seed=3,
        tables=tuple(
            TableSpec(name=str(i), rows=rows, dim=dim, k=k, r=r, init_bound=0.1, optimizer=optimizer)
            for i, (rows, dim, k, r) in enumerate(tables)
        ),
    )


# ---- what is refused


def call(counts: list[int], slots: list[int], floats: int) -> tuple[Any, Any, Any]:
    return np.array(counts, np.int32), np.array(slots, np.uint32), np.ones(floats, np.float32)


one = call([1, 0, 0, 0], [0], 20)
blocks = np.zeros(1, np.uint32)
record = np.ones(20, np.float32)
WRONG: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("pending_rows", (4,), IndexError, "there is no coding group 4; this shard has 4"),
    ("take_flush", (4,), IndexError, "there is no coding group 4"),
    ("blocks", (4,), IndexError, "there is no table 4"),
    ("published", call([1, 0, 0], [0], 20), ValueError, "counts has 3 entries"),
    ("published", call([1, 0, 0, 0], [180], 20), IndexError, "slot 180 of table 0 is out of range"),
    ("published", call([1, 0, 0, 0], [0], 19), ValueError, "these rows have 20 floats; the array has 19"),
    ("next_touched", (0, 0, 0, 1), ValueError, "table 0 has no rows in coding group 0"),
    ("next_touched", (1, 0, 0, 1), ValueError, "table 1 has no rows in coding group 0"),
    ("next_touched", (0, 1, 61, 1), IndexError, "block 61 of table 0 is out of range; it has 60"),
    ("next_touched", (0, 1, -1, 1), IndexError, "block -1"),
    ("next_touched", (0, 1, 0, 0), ValueError, "rows_max must be at least 1, not 0"),
    ("parity_apply", (5, *one), IndexError, "there is no server 5; there are 5"),
    ("parity_apply", (-1, *one), IndexError, "there is no server -1"),
    ("parity_apply", (0, *one), ValueError, "server 0 holds no parity of slot 0 of table 0 of server 0"),
    ("parity_apply", (3, *one), ValueError, "server 0 holds no parity of slot 0 of table 0 of server 3"),
    ("parity_apply", (2, *call([2, 0, 0, 0], [0, 2], 40)), ValueError, "holds no parity of slot 2 of table 0"),
    ("parity_apply", (2, *call([1, 1, 0, 0], [0, 0], 36)), ValueError, "slot 0 of table 1 of server 2"),
    ("parity_apply", (2, *call([2, 0, 0, 0], [0, 180], 40)), IndexError, "slot 180 of table 0 is out of range"),
    ("parity_apply", (2, *call([1, 0, 0, 0], [0], 16)), ValueError, "these rows have 20 floats; the array has 16"),
    ("parity_apply", (2, *call([2, 0, 0, 0], [0], 20)), ValueError, "counts add up to 2 rows; there are 1 slots"),
    ("parity_apply", (2, *call([1, 0, 0], [0], 20)), ValueError, "counts has 3 entries"),
    ("parity_read", (0, *call([0, 1, 0, 0], [0], 20)), ValueError, "table 1 has no parities"),
    ("parity_read", (2, *call([1, 0, 0, 0], [0], 20)), IndexError, "there is no parity 2; table 0 has 2"),
    ("parity_read", (0, *call([1, 0, 0, 0], [60], 20)), IndexError, "block 60 of table 0 is out of range"),
    ("parity_read", (0, *call([1, 0, 0, 0], [0], 24)), ValueError, "these records have 20 floats"),
    ("parity_read", (0, *call([2, 0, 0, 0], [0], 40)), ValueError, "counts add up to 2 rows; there are 1 slots"),
    ("parity_members", (0, -1, 0), IndexError, "there is no parity -1"),
    ("parity_members", (0, 0, 3), IndexError, "there is no member 3; blocks of table 0 have 3"),
    ("parity_touched", (0, 1, 0), ValueError, "server 0 holds no parity of group 1 of server 0"),
    ("parity_touched", (4, 0, 0), ValueError, "table 0 has no rows in coding group 0"),
    ("parity_touched", (9, 1, 0), IndexError, "there is no server 9"),
    ("know_touched", (1, 0, np.zeros(2, np.uint64)), ValueError, "the bits of 60 blocks are 1 words, not 2"),
    ("know_touched", (1, 0, np.array([1 << 60], np.uint64)), ValueError, "bits beyond the last of 60 blocks"),
    ("know_touched", (0, 0, np.zeros(1, np.uint64)), ValueError, "table 0 has no rows in coding group 0"),
    ("know_touched", (1, 0, np.zeros(1, np.int64)), ValueError, "words must be an array of uint64"),
    ("prepare", (one[0], np.array([180], np.uint32)), IndexError, "slot 180"),
    ("put", (one[0], np.array([180], np.uint32), one[2]), IndexError, "slot 180"),
    ("put", (one[0], one[1], np.ones(16, np.float32)), ValueError, "these rows have 20 floats"),
    ("fill", (0,), ValueError, "rows_max must be at least 1"),
]


@pytest.mark.parametrize("recovering", [False, True])
@pytest.mark.parametrize(("method", "arguments", "error", "message"), WRONG)
def test_a_wrong_call_changes_nothing(
    method: str, arguments: tuple[Any, ...], error: type[Exception], message: str, recovering: bool
) -> None:
    both = Both(5, 0, 1, recovering)
    if recovering:
        before: Any = (both.shard.missing_rows(), both.shard.blank_rows())
    else:
        both.update(np.random.default_rng(1), 1)
        before = whole(both.shard)
    with pytest.raises(error, match=message):
        getattr(both.shard, method)(*arguments)
    assert ((both.shard.missing_rows(), both.shard.blank_rows()) if recovering else whole(both.shard)) == before


def test_another_ring_is_refused() -> None:
    both = Both(10, 0, 2)
    with pytest.raises(ValueError, match="server 7 is in another ring than server 0"):
        both.shard.parity_apply(7, *one)


@pytest.mark.parametrize(
    ("coding", "message"),
    [
        ([(0, 1)], r"coding group \(0, 1\) does not fit a ring of 5 servers"),
        ([(1, 0)], "does not fit"),
        ([(3, 3)], "does not fit"),
        ([(1, 1), (1, 1)], r"coding group \(1, 1\) is there twice"),
    ],
)
def test_wrong_groups_are_refused(coding: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _kernels.Shard(5, 0, 1, coding)


@pytest.mark.parametrize(
    ("servers", "coding", "k", "r", "message"),
    [
        (5, [(1, 2)], 2, 2, r"coding group \(2, 2\) of a table is not among those of the shard"),
        (300, [(1, 2)], 255, 2, "k . r must be at most 256 where both are above 1, not 257"),
    ],
)
def test_tables_that_cannot_be_coded_are_refused(
    servers: int, coding: list[tuple[int, int]], k: int, r: int, message: str
) -> None:
    shard = _kernels.Shard(servers, 0, 1, coding)
    with pytest.raises(ValueError, match=message):
        shard.add_table(rows=9, dim=3, k=k, r=r, optimizer="sgd", learning_rate=0.1, seed=1, init_bound=0.1, table=0)
    assert shard.table_count == 0
