"""Goal: everybody computes the same answer to who protects whom, and to what is lost when servers are down together.

Method: all small rings, every row, every set of servers that are down, compared with the plain definition: a stripe is
k rows that follow each other in the table, on consecutive servers, and its r parities are on the r servers after them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from helpers import job, table

from regrow.core.groups import Groups, by_table
from regrow.core.job import JobSpec
from regrow.core.layout import Layout

SERVERS_MAX = 6


def shapes() -> Iterator[tuple[int, int, int, int]]:
    """Every (servers, rings, k, r) with parities."""
    for servers in range(1, SERVERS_MAX + 1):
        for rings in (g for g in range(1, servers + 1) if servers % g == 0):
            for k, r in itertools.product(range(1, servers + 1), range(1, servers + 1)):
                if k + r <= servers // rings:
                    yield servers, rings, k, r


SHAPES = list(shapes())
MIXED = [
    # (servers, rings, (k, r) of each table): groups are shared where (k - j, r) are equal, and not otherwise
    (4, 1, [(3, 1), (1, 1), (2, 1)]),
    (4, 1, [(2, 2), (1, 3), (2, 1)]),
    (6, 2, [(2, 1), (1, 2), (1, 1)]),
]


def uniform(servers: int, rings: int, k: int, r: int, *, rows: int = 29) -> JobSpec:
    return job(*(table(f"t{t}", rows=rows, k=k, r=r) for t in range(3)), servers=servers, rings=rings)


def mixed(servers: int, rings: int, codes: list[tuple[int, int]], *, rows: int = 29) -> JobSpec:
    tables = [table(f"t{t}", rows=rows, k=k, r=r) for t, (k, r) in enumerate(codes)]
    return job(*tables, servers=servers, rings=rings)


JOBS = [uniform(*shape) for shape in SHAPES] + [mixed(*each) for each in MIXED]


def stripe_homes(of: JobSpec, index: int, stripe: int) -> list[int]:
    """The servers of the k data members, then of the r parities."""
    spec = of.tables[index]
    return homes(of.servers, of.rings, spec.k, spec.r, index, stripe)


@functools.cache
def homes(servers: int, rings: int, k: int, r: int, index: int, stripe: int) -> list[int]:
    layout = Layout(servers=servers, k=k, r=r, rings=rings)
    first = int(layout.place([stripe * k], table=index)[0][0])
    base = first - first % layout.ring
    return [base + (first - base + m) % layout.ring for m in range(k + r)]


def test_the_rings_are_many_enough() -> None:
    assert len(SHAPES) == 40
    assert {(1, 1), (2, 1), (1, 2), (5, 1), (2, 2), (3, 3), (1, 5)} <= {(k, r) for _, _, k, r in SHAPES}


def test_holders_of_a_row_are_those_of_its_stripe() -> None:
    for of in JOBS:
        groups = Groups(of)
        for index, spec in enumerate(of.tables):
            layout = Layout(servers=of.servers, k=spec.k, r=spec.r, rings=of.rings)
            for row in range(spec.rows):
                stripe, j = divmod(row, spec.k)
                home = stripe_homes(of, index, stripe)
                server, slot = (int(each[0]) for each in layout.place([row], table=index))
                assert server == home[j]
                assert slot % spec.k == j
                counts = np.zeros(len(of.tables), np.int32)
                counts[index] = 1
                g = int(groups.of_slots(counts, np.array([slot], np.uint32))[0])
                assert groups.holders(server, g) == tuple(home[spec.k :])
                assert groups.member(index, g) == j
                for holder in home[spec.k :]:
                    assert server in groups.sources(holder, g)


def test_holders_and_sources_are_inverse_to_each_other() -> None:
    for of in JOBS:
        groups = Groups(of)
        assert len(groups) == len(set(groups.list)) == len(groups.list)
        for g, source, holder in itertools.product(range(len(groups)), range(of.servers), range(of.servers)):
            assert (holder in groups.holders(source, g)) == (source in groups.sources(holder, g))
        for g, server in itertools.product(range(len(groups)), range(of.servers)):
            assert len(set(groups.holders(server, g))) == len(set(groups.sources(server, g))) == groups.list[g][1]
            assert server not in groups.holders(server, g)


def test_each_member_of_a_table_is_in_one_group() -> None:
    for of in JOBS:
        groups = Groups(of)
        for index, spec in enumerate(of.tables):
            members = [groups.member(index, g) for g in range(len(groups))]
            assert sorted(j for j in members if j is not None) == list(range(spec.k))
            assert [members[g] for g in groups.of_member[index]] == list(range(spec.k))


def test_a_job_without_parities_has_no_groups() -> None:
    groups = Groups(job(table(k=2), servers=3))
    assert len(groups) == 0
    assert groups.of_member[0].tolist() == [-1, -1]


# --- What may be lost ---


def lost_stupid(of: JobSpec, down: set[int], *, stripes_too: bool) -> dict[str, int]:
    """Counted stripe by stripe. `stripes_too`: also a table that has no row in the stripes that are lost."""
    lost: dict[str, int] = {}
    for index, spec in enumerate(of.tables):
        ring = of.servers // of.rings
        stripes = max(-(-spec.rows // spec.k), of.rings * ring if stripes_too else 0)
        for stripe in range(stripes):
            home = stripe_homes(of, index, stripe)
            if len(down.intersection(home)) > spec.r:
                rows = [stripe * spec.k + j for j in range(spec.k) if home[j] in down]
                count = sum(row < spec.rows for row in rows)
                if rows:
                    lost[spec.name] = lost.get(spec.name, 0) + count
    return lost


def subsets(servers: int) -> Iterator[set[int]]:
    for size in range(servers + 1):
        yield from map(set, itertools.combinations(range(servers), size))


def test_lost_rows_are_counted_exactly_where_blocks_are_full() -> None:
    codes = [(s, g, [(k, r)] * 2) for s, g, k, r in SHAPES if s <= 5 or g > 1] + MIXED
    for servers, rings, table_codes in codes:
        blocks = 2 * servers  # of every ring, twice round
        tables = [table(f"t{t}", rows=blocks * k, k=k, r=r) for t, (k, r) in enumerate(table_codes)]
        of = job(*tables, servers=servers, rings=rings)
        machine = Groups(of)
        for down in subsets(servers):
            assert dict(machine.lost_tables(down)) == lost_stupid(of, down, stripes_too=False), (of, down)


@pytest.mark.parametrize("rows", [1, 2, 5, 13])
def test_tables_with_holes_are_named_and_counted_to_within_a_block(rows: int) -> None:
    """Never too few. Also a table whose lost stripes are all empty: nobody could say that they were."""
    for servers, rings, k, r in SHAPES:
        if servers > 5:
            continue
        of = uniform(servers, rings, k, r, rows=rows)
        for down in subsets(servers):
            lost = dict(Groups(of).lost_tables(down))
            expected = lost_stupid(of, down, stripes_too=True)
            assert lost.keys() == expected.keys(), (of, down)
            for name, count in lost.items():
                assert 0 <= count - expected[name] < k * max(1, len(down))


def test_tolerance_is_that_no_stripe_loses_more_than_its_parities() -> None:
    for of in JOBS:
        if of.servers > 5 and of.rings == 1:
            continue
        groups = Groups(of)
        ring = of.servers // of.rings
        for down in subsets(of.servers):
            worst = all(
                len(down.intersection(stripe_homes(of, index, stripe))) <= spec.r
                or not down.intersection(stripe_homes(of, index, stripe)[: spec.k])
                for index, spec in enumerate(of.tables)
                for stripe in range(ring * of.rings)
            )
            assert groups.tolerates(sorted(down)) == worst


def test_any_r_servers_may_be_lost() -> None:
    for of in JOBS:
        least = min(spec.r for spec in of.tables)
        for down in itertools.combinations(range(of.servers), least):
            assert Groups(of).tolerates(down)


# --- by_table ---


def test_by_table_cuts_a_part_where_its_tables_begin() -> None:
    floats = [2, 1, 3]
    for counts in itertools.product(range(3), repeat=3):
        slots = np.arange(10, 10 + sum(counts), dtype=np.uint32)
        values = np.arange(sum(c * f for c, f in zip(counts, floats, strict=True)), dtype=np.float32)
        found = by_table((np.array(counts, np.int32), slots, values), floats)
        assert list(found) == [t for t, count in enumerate(counts) if count]
        if found:
            assert np.concatenate([part for part, _ in found.values()]).tolist() == slots.tolist()
            assert np.concatenate([part for _, part in found.values()]).tolist() == values.tolist()
        for t, (part, of_rows) in found.items():
            assert (part.size, of_rows.size) == (counts[t], counts[t] * floats[t])
            assert part.base is slots and of_rows.base is values  # uncopied
