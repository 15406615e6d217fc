"""Goal: everybody computes the same answer to who protects whom.

Method: all small rings, every row, compared with the plain definition of a stripe (rings.py).
"""

from __future__ import annotations

import itertools

import numpy as np
from helpers import job, table
from rings import JOBS, SHAPES, stripe_homes

from regrow.core.groups import Groups, by_table


def test_the_rings_are_many_enough() -> None:
    assert len(SHAPES) == 40
    assert {(1, 1), (2, 1), (1, 2), (5, 1), (2, 2), (3, 3), (1, 5)} <= {(k, r) for _, _, k, r in SHAPES}


def test_holders_of_a_row_are_those_of_its_stripe() -> None:
    for of in JOBS:
        groups = Groups(of)
        for index, spec in enumerate(of.tables):
            layout = of.layout(index)
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


def test_rows_without_parities_are_a_group_without_holders() -> None:
    groups = Groups(job(table(k=2), servers=3))
    assert (len(groups), groups.total, groups.bare) == (0, 1, 0)
    assert groups.of_member[0].tolist() == [0, 0]
    mixed_tables = Groups(job(table("t0", k=2, r=1), table("t1", k=1), servers=3))
    assert (len(mixed_tables), mixed_tables.total, mixed_tables.bare) == (2, 3, 2)
    assert [of.tolist() for of in mixed_tables.of_member] == [[1, 0], [2]]
    assert [mixed_tables.holders(0, g) for g in range(3)] == [(1,), (2,), ()]
    assert Groups(job(table(k=2, r=1), servers=3)).bare is None


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
