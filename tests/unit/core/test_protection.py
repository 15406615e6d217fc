"""Goal: everybody computes the same answer to what is lost when servers are down together, and asks the protection
rather than the tables. No place outside core/protection.py knows which kinds of it there are, but those that make one.

Method: all small rings and every set of servers that are down, counted stripe by stripe from the plain definition
(rings.py). Who names a kind is read from the sources.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Collection, Iterator
from pathlib import Path

import msgspec
import pytest
from helpers import job, table
from rings import JOBS, MIXED, SHAPES, stripe_homes, uniform

import regrow
from regrow.core import protection
from regrow.core.job import JobSpec, TableSpec
from regrow.core.protection import (
    Batched,
    Coded,
    CodedPartial,
    FlushSpec,
    Partial,
    Unprotected,
    Verdict,
    count_lost_rows,
)

SOURCE = Path(regrow.__file__).parent
KINDS = {"Unprotected", "Batched", "Coded", "Partial", "CodedPartial"}
# Who may name a kind, and how often: the job has a default, a user's wish becomes one, the simulator makes jobs.
MAKERS = {"core/job.py": 2, "nn/coded.py": 10, "sim/profiles.py": 10}


def count_lost(of: JobSpec, down: Collection[int]) -> list[tuple[str, int]]:
    return count_lost_rows(down, tables=of.tables, servers=of.servers, rings=of.rings)


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
        for down in subsets(servers):
            assert dict(count_lost(of, down)) == lost_stupid(of, down, stripes_too=False), (of, down)


@pytest.mark.parametrize("rows", [1, 2, 5, 13])
def test_tables_with_holes_are_named_and_counted_to_within_a_block(rows: int) -> None:
    """Never too few. Also a table whose lost stripes are all empty: nobody could say that they were."""
    for servers, rings, k, r in SHAPES:
        if servers > 5:
            continue
        of = uniform(servers, rings, k, r, rows=rows)
        for down in subsets(servers):
            lost = dict(count_lost(of, down))
            expected = lost_stupid(of, down, stripes_too=True)
            assert lost.keys() == expected.keys(), (of, down)
            for name, count in lost.items():
                assert 0 <= count - expected[name] < k * max(1, len(down))


def test_tolerance_is_that_no_stripe_loses_more_than_its_parities() -> None:
    for of in JOBS:
        if of.servers > 5 and of.rings == 1:
            continue
        ring = of.servers // of.rings
        for down in subsets(of.servers):
            worst = all(
                len(down.intersection(stripe_homes(of, index, stripe))) <= spec.r
                or not down.intersection(stripe_homes(of, index, stripe)[: spec.k])
                for index, spec in enumerate(of.tables)
                for stripe in range(ring * of.rings)
            )
            assert of.verdict(sorted(down)).survivable == worst


def test_any_r_servers_may_be_lost() -> None:
    for of in JOBS:
        least = min(spec.r for spec in of.tables)
        for down in itertools.combinations(range(of.servers), least):
            assert of.verdict(down).survivable


# --- The answers ---


def test_nothing_is_survived_without_protection() -> None:
    of = job(table(rows=10), servers=3)
    assert isinstance(of.protection, Unprotected)
    assert of.verdict([]) == Verdict(True, "no server is down")
    assert of.verdict([2, 0]) == Verdict(False, "S0, S2: nothing protects the rows of these servers")
    assert not of.protection.has_parities and not of.protection.replaces_servers
    assert (of.protection.lost_together_max, of.protection.begins_together, of.rings) == (0, False, 1)


def test_a_verdict_names_what_is_lost() -> None:
    of = job(table("a", rows=12, k=2, r=1), table("b", rows=6, k=1, r=1), servers=3)
    assert of.verdict([1]) == Verdict(True, "no stripe has lost more members than it has parities, without S1")
    assert of.verdict([1, 2]) == Verdict(False, "S1, S2 are down together: up to 10 rows are lost, in a (8), b (2)")
    many = job(*(table(f"t{t}", rows=3, k=1, r=1) for t in range(10)), servers=3)
    assert many.verdict([0, 1]).reason.endswith("t7 (1) and 2 more tables")


def test_spares_and_recoveries_follow_from_the_parities() -> None:
    one, two = (job(table(k=1, r=r), servers=3).protection for r in (1, 2))
    assert (one.lost_together_max, one.begins_together) == (1, False)
    assert (two.lost_together_max, two.begins_together) == (2, True)


def test_a_table_without_parities_beside_others_is_lost_with_any_server() -> None:
    """Dense parameters with copies, and tables that nobody can pay parities for."""
    of = job(table("rows", rows=9, k=1, r=0), table("dense", rows=3, k=1, r=1), servers=3)
    assert of.invalid_reason() is None
    assert of.protection.has_parities and of.protection.replaces_servers
    assert of.verdict([1]) == Verdict(False, "S1 are down together: up to 3 rows are lost, in rows (3)")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protection": Unprotected()}, "table 't0' has parities (r = 1), but the job is not coded"),
        ({"protection": Coded(k=2, r=1, rings=2)}, "rings must divide servers: 3 servers, 2 rings"),
        ({"protection": Coded(k=2, r=0)}, "a code has at least one row and one parity, not k=2, r=0"),
        ({"tables": (table(k=1, r=2),)}, "table 't0' has 2 parities, the code of the job 1"),
        ({"protection": Batched()}, "table 't0' has parities (r = 1), but the job is not coded"),
        ({"protection": Batched(flush_seconds=-1.0)}, "rows of a checkpoint cannot be written within -1.0 s"),
        ({"tables": (table(k=1, r=0),)}, "no table has a parity (r >= 1), but the job is coded"),
    ],
)
def test_what_does_not_fit(changes: dict[str, object], reason: str) -> None:
    of = job(table(k=2, r=1), servers=3)
    assert of.invalid_reason() is None
    assert msgspec.structs.replace(of, **changes).invalid_reason() == reason


def test_a_protection_survives_the_wire() -> None:
    epochs = msgspec.structs.replace(job(table(), servers=3), protection=Batched(flush_seconds=3.0))
    for of in (job(table(), servers=3), job(table(k=2, r=1), servers=3), epochs):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(of), type=JobSpec) == of


# --- Parities first, saves beyond ---


def make_both(servers: int, *, k: int, r: int, rings: int = 1, **changes: object) -> JobSpec:
    tables = (table("rows", rows=4 * servers * k, k=k, r=r), table("dense", rows=servers, k=1, r=r + 1))
    of = job(*tables, servers=servers, rings=rings)
    protection = CodedPartial(k=k, r=r, rings=rings, **changes)  # type: ignore[arg-type]
    return msgspec.structs.replace(of, protection=protection)


def test_who_is_recalled_is_who_a_stripe_cannot_bring_back_and_all_others_of_its_ring() -> None:
    for servers, rings, k, r in ((5, 1, 3, 1), (6, 1, 2, 1), (6, 2, 2, 1), (6, 1, 2, 2), (4, 1, 1, 1)):
        of = make_both(servers, k=k, r=r, rings=rings)
        assert of.invalid_reason() is None
        ring = servers // rings
        for down in subsets(servers):
            expected = set()
            for first in range(0, servers, ring):
                mine = {server for server in down if first <= server < first + ring}
                homes = [stripe_homes(of, 0, stripe) for stripe in range(servers)]
                expected |= mine if any(len(mine.intersection(home)) > r for home in homes) else set()
            assert of.protection.find_recalled(down, begun=(), servers=servers) == expected
            copies_lost = any(down.issuperset(stripe_homes(of, 1, stripe)) for stripe in range(servers))
            assert of.verdict(down).survivable == (not copies_lost)


def test_who_was_recalled_and_is_not_back_is_recalled_again_and_its_ring_with_it() -> None:
    """What is left of its parities is being made anew: nobody of the ring can be decoded from them."""
    of = make_both(8, k=2, r=1, rings=1)
    assert of.protection.find_recalled([2, 6], begun=[], servers=8) == frozenset()
    assert of.protection.find_recalled([2, 6], begun=[2], servers=8) == {2, 6}
    apart = make_both(6, k=2, r=1, rings=2)
    assert apart.protection.find_recalled([1, 4], begun=[1], servers=6) == {1}


def test_answers_of_parities_with_saves() -> None:
    of = make_both(5, k=3, r=1)
    told = of.protection
    assert (told.has_parities, told.replaces_servers, told.saves_own, told.begins_together) == (True,) * 4
    assert told.lost_together_max == 2
    assert [told.recalls(spec) for spec in of.tables] == [True, False]
    assert of.verdict([1]) == Verdict(True, "no stripe has lost more members than it has parities, without S1")
    assert of.verdict([1, 3]) == Verdict(True, "too many of a stripe are lost: S1, S3 go back to their saves")
    assert not of.verdict([1, 2, 3]).survivable
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(of), type=JobSpec) == of
    for changes, reason in (
        ({"tables": of.tables[:1]}, "no table has copies, so nobody would know how far a lost server was"),
        ({"tables": of.tables[1:]}, "every table is copied, and none would be recalled"),
        (
            {"tables": (*of.tables, table("t", k=2, r=1))},
            "table 't' has k=2, r=1; here it is k=3 and r=1, or k=1 and r=2",
        ),
        ({"protection": CodedPartial(k=3, r=1, rings=2)}, "rings must divide servers: 5 servers, 2 rings"),
        (
            {"protection": CodedPartial(k=3, r=1, flush=FlushSpec(commit="2pc"))},
            "commit = '2pc' does not go with partial recovery",
        ),
    ):
        assert msgspec.structs.replace(of, **changes).invalid_reason() == reason


# --- Who knows the kinds ---


def test_the_union_has_the_kinds_that_this_file_knows() -> None:
    assert {kind.__name__ for kind in protection.Protection.__args__} == KINDS  # type: ignore[attr-defined]


def test_nobody_else_knows_which_kinds_there_are() -> None:
    found: dict[str, int] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if name == "core/protection.py":
            continue
        tree = ast.parse(path.read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        kinds = [
            alias.name
            for node in imports
            if node.module == "regrow.core.protection"  # a user's wish may be called the same (regrow.protection)
            for alias in node.names
            if alias.name in KINDS
        ]
        named = sum(isinstance(node, ast.Name) and node.id in kinds for node in ast.walk(tree)) + len(kinds)
        if named:
            found[name] = named
    assert found == MAKERS


@pytest.mark.parametrize(
    "name", ["coordinator", "session", "door", "server", "serving", "serving_async", "serving_sync"]
)
def test_machines_do_not_look_at_the_parities_of_tables(name: str) -> None:
    """They ask the protection. (Reading parities for a client needs to know how many there are: once.)"""
    tree = ast.parse((SOURCE / "core" / f"{name}.py").read_text())
    looks = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "r"]
    assert len(looks) == (1 if name == "serving" else 0)


def partial_tables(*, r: int = 1) -> tuple[TableSpec, ...]:
    return table(name="rows", rows=100), msgspec.structs.replace(table(name="dense", rows=10), r=r)


def test_partial_recovery_survives_what_its_copies_survive() -> None:
    protection, tables = Partial(), partial_tables()
    assert protection.verdict([1], tables=tables, servers=4).survivable
    assert protection.verdict([1, 3], tables=tables, servers=4).survivable
    verdict = protection.verdict([1, 2], tables=tables, servers=4)
    assert not verdict.survivable
    assert "dense" in verdict.reason and "rows (" not in verdict.reason


@pytest.mark.parametrize(
    ("protection", "tables", "problem"),
    [
        (Partial(), partial_tables(), None),
        (Partial(r=2), partial_tables(r=2), None),
        (Partial(), partial_tables(r=0), "no table has copies"),
        (Partial(r=2), partial_tables(), "here it is k=1"),
        (Partial(flush=FlushSpec(commit="2pc")), partial_tables(), "does not go with partial"),
    ],
)
def test_partial_recovery_says_what_does_not_fit(
    protection: Partial, tables: tuple[TableSpec, ...], problem: str | None
) -> None:
    reason = protection.invalid_reason(tables=tables, servers=5, mode="async")
    assert (reason is None) if problem is None else (reason is not None and problem in reason)
