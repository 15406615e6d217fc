"""Goal: servers sit so that as few nodes as possible matter, and what is said of it is true.

Method: small spaces are enumerated and compared with stupid code: every way to seat servers, every set of nodes, and
the rule of the core about lost servers. Sentences are compared whole.
"""

from __future__ import annotations

import itertools

import pytest

from regrow.core.identity import Identity
from regrow.core.job import OptimizerSpec, TableSpec
from regrow.core.protection import Coded
from regrow.launch.placement import (
    Need,
    Node,
    NoRoom,
    Stripes,
    Wish,
    choose_node,
    count_tolerated,
    describe_safety,
    find_lossy,
    list_remedies,
    plan_seats,
    rank_spare,
    seat_servers,
)

NAMES = {str(i): "ABCDEFGHIJ"[i] for i in range(10)}
CODES = [
    Stripes(servers=s, k=k, r=r, rings=rings)
    for s in range(2, 7)
    for k in (1, 2, 3)
    for r in (1, 2)
    for rings in (1, 2)
    if Stripes(servers=s, k=k, r=r, rings=rings).fits
]


def make_nodes(count: int, *, cpus: float = 1.0, head: bool = False) -> list[Node]:
    return [
        Node(id=str(i), name=NAMES[str(i)], free=Need(cpus=cpus, memory_bytes=1 << 30), is_head=head and i == 0)
        for i in range(count)
    ]


def make_wish(stripes: Stripes, **more: object) -> Wish:
    return Wish(stripes=stripes, needs={"server": Need(cpus=1.0)}, **more)  # type: ignore[arg-type]


def by_server(seats: list[int]) -> dict[int, str]:
    return {server: str(index) for server, index in enumerate(seats)}


@pytest.mark.parametrize("stripes", CODES, ids=str)
def test_what_is_tolerated_is_what_the_core_says(stripes: Stripes) -> None:
    table = TableSpec(
        name="t",
        rows=1000,
        dim=1,
        init_bound=0.1,
        optimizer=OptimizerSpec(kind="sgd", learning_rate=0.1),
        k=stripes.k,
        r=stripes.r,
    )
    code = Coded(k=stripes.k, r=stripes.r, rings=stripes.rings)
    for count in range(stripes.servers + 1):
        for lost in itertools.combinations(range(stripes.servers), count):
            verdict = code.verdict(lost, tables=[table], servers=stripes.servers)
            assert stripes.tolerates(lost) == verdict.survivable, lost


@pytest.mark.parametrize("stripes", CODES, ids=str)
@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_no_other_seats_lose_fewer_nodes(stripes: Stripes, nodes: int) -> None:
    """Among all with as few servers on a node."""
    most = -(-stripes.servers // nodes)
    found = by_server(seat_servers(stripes, [stripes.servers] * nodes))
    assert max(list(found.values()).count(node) for node in found.values()) == most
    fewest = min(
        len(find_lossy(stripes, by_server(list(seats))))
        for seats in itertools.product(range(nodes), repeat=stripes.servers)
        if max(seats.count(node) for node in seats) <= most
    )
    assert len(find_lossy(stripes, found)) == fewest


@pytest.mark.parametrize("stripes", CODES, ids=str)
@pytest.mark.parametrize("nodes", [2, 3, 4, 6])
def test_so_many_nodes_may_be_lost_and_no_more(stripes: Stripes, nodes: int) -> None:
    seats = by_server(seat_servers(stripes, [stripes.servers] * nodes))
    used = sorted(set(seats.values()))
    survived = [
        count
        for count in range(1, len(used) + 1)
        if all(
            stripes.tolerates([server for server, node in seats.items() if node in lost])
            for lost in itertools.combinations(used, count)
        )
    ]
    assert count_tolerated(stripes, seats) == max(survived, default=0)


def test_a_large_job_is_seated_within_its_steps() -> None:
    seats = by_server(seat_servers(Stripes(servers=64, k=4, r=2), [64] * 16))
    assert find_lossy(Stripes(servers=64, k=4, r=2), seats) == []


@pytest.mark.parametrize(
    ("stripes", "nodes", "sentence"),
    [
        (Stripes(servers=8, k=3, r=1), 4, "8 servers on 4 nodes, k = 3, r = 1: any one node may be lost"),
        (Stripes(servers=5, k=3, r=2), 5, "5 servers on 5 nodes, k = 3, r = 2: any 2 nodes may be lost"),
        (
            Stripes(servers=7, k=3, r=1),
            5,
            "7 servers on 5 nodes, k = 3, r = 1: losing one of A or B loses rows; "
            "2 more nodes, an 8th server, or --r 2, would survive it",
        ),
        (
            Stripes(servers=4, k=3, r=1),
            3,
            "4 servers on 3 nodes, k = 3, r = 1: losing node A loses rows; 1 more node would survive it",
        ),
        (Stripes(servers=3), 2, "3 servers on 2 nodes, without parities: losing a node with a server loses its rows"),
    ],
)
def test_what_is_survived_is_said(stripes: Stripes, nodes: int, sentence: str) -> None:
    seats = by_server(seat_servers(stripes, [stripes.servers] * nodes))
    assert describe_safety(stripes, seats, NAMES) == sentence


@pytest.mark.parametrize("stripes", CODES, ids=str)
@pytest.mark.parametrize("nodes", [2, 3])
def test_remedies_help(stripes: Stripes, nodes: int) -> None:
    for remedy in list_remedies(stripes, nodes):
        more_nodes, better = nodes, stripes
        if "node" in remedy:
            more_nodes += int(remedy.split()[0])
        elif remedy.startswith("--r"):
            better = Stripes(servers=stripes.servers, k=stripes.k, r=int(remedy.split()[1]), rings=stripes.rings)
        else:
            number = int("".join(letter for letter in remedy if letter.isdigit()))
            better = Stripes(servers=number, k=stripes.k, r=stripes.r, rings=stripes.rings)
        seats = by_server(seat_servers(better, [better.servers] * more_nodes))
        assert count_tolerated(better, seats) >= 1, remedy


def test_everybody_has_a_seat_and_the_spare_a_node_of_its_own() -> None:
    wish = make_wish(Stripes(servers=4, k=3, r=1), workers=2, spares=1)
    seats = plan_seats(make_nodes(6, cpus=2.0, head=True), wish)
    assert sorted(seats) == [
        ("coordinator", 0),
        *(("server", server) for server in range(4)),
        ("standby", 0),
        ("worker", 0),
        ("worker", 1),
    ]
    assert seats["coordinator", 0] == "0", "the head: without it there is nothing anyway"
    servers = [seats["server", server] for server in range(4)]
    assert len({*servers, seats["standby", 0]}) == 5


def test_a_spare_without_room_is_left_out() -> None:
    seats = plan_seats(make_nodes(4), make_wish(Stripes(servers=4, k=3, r=1), spares=1))
    assert ("standby", 0) not in seats


@pytest.mark.parametrize(
    ("nodes", "wish", "problem"),
    [
        (
            make_nodes(2),
            make_wish(Stripes(servers=4, k=3, r=1)),
            "no room for 4 servers with 1 CPU each: A has 1 CPU and 1.0 GiB, B has 1 CPU and 1.0 GiB",
        ),
        (
            make_nodes(3, cpus=8),
            make_wish(Stripes(servers=4, k=3, r=1), per_node=1),
            "no room for 4 servers with 1 CPU each, at most 1 on a node: A has 8 CPUs and 1.0 GiB, "
            "B has 8 CPUs and 1.0 GiB, C has 8 CPUs and 1.0 GiB",
        ),
        (
            make_nodes(2, cpus=2),
            Wish(stripes=Stripes(servers=2), workers=3, needs={"server": Need(cpus=1), "worker": Need(cpus=1)}),
            "no room for 3 workers with 1 CPU each (2 of them fit): A has 1.0 GiB, B has 1.0 GiB",
        ),
        (
            make_nodes(2),
            Wish(stripes=Stripes(servers=2), labels={"server": {"zone": "a"}}),
            "no node for 2 servers: none of 2 nodes has the label zone=a",
        ),
    ],
)
def test_what_is_missing_is_said(nodes: list[Node], wish: Wish, problem: str) -> None:
    with pytest.raises(NoRoom) as refused:
        plan_seats(nodes, wish)
    assert str(refused.value) == problem


def test_labels_choose_nodes() -> None:
    nodes = [Node(id=str(i), name=NAMES[str(i)], free=Need(cpus=4), labels={"zone": "ab"[i % 2]}) for i in range(4)]
    wish = Wish(stripes=Stripes(servers=2), workers=2, labels={"server": {"zone": "b"}, "worker": {"zone": "a"}})
    seats = plan_seats(nodes, wish)
    assert {seats["server", 0], seats["server", 1]} == {"1", "3"}
    assert {seats["worker", 0], seats["worker", 1]} == {"0", "2"}


S0 = Identity(role="server", id=0, incarnation=1)
FOUR = Stripes(servers=4, k=3, r=1)


def choose(
    seats: dict[int, str], living: list[int], *, stripes: Stripes = FOUR, cpus: float = 1.0
) -> tuple[object, str]:
    nodes = [node for node in make_nodes(8, cpus=cpus) if int(node.id) in living]
    choice = choose_node(S0, nodes, {("server", s): node for s, node in seats.items()}, make_wish(stripes))
    return choice.node, choice.reason


def test_a_successor_goes_where_least_is_lost() -> None:
    seats = {server: str(server) for server in range(4)}
    assert choose(seats, [1, 2, 3, 5]) == ("5", "no server is there")
    assert choose(seats, [0, 1, 2, 3, 5]) == ("0", "it was there before")
    assert choose(seats, [1, 2, 3]) == ("1", "no spare node is left, and there most stripes stay safe")
    eight = Stripes(servers=8, k=3, r=1)
    spread = {server: str(server % 4) for server in range(8)} | {4: "5"}
    assert choose(spread, [1, 2, 3, 5], stripes=eight) == ("5", "it shares no stripe with the servers there")


def test_a_successor_waits_where_there_is_no_room() -> None:
    seats = {server: str(server) for server in range(4)}
    node, reason = choose(seats, [1, 2], cpus=0.5)
    assert node is None
    assert reason == "no room for a server with 1 CPU each: B has 0.5 CPUs and 1.0 GiB, C has 0.5 CPUs and 1.0 GiB"
    assert choose(seats, []) == (None, "no node is left")


def test_a_worker_goes_back_or_where_it_is_empty() -> None:
    who = Identity(role="worker", id=0, incarnation=1)
    seats = {("worker", 0): "0", ("server", 0): "1"}
    wish = Wish(stripes=Stripes(servers=1))
    assert choose_node(who, make_nodes(3), seats, wish).node == "0"
    assert choose_node(who, make_nodes(3)[1:], seats, wish).node == "2"


def test_a_spare_that_sits_badly_is_known() -> None:
    """Server 0 died, its node lives: with its successor at B, the loss of B would be one of rows."""
    seats = {("server", server): str(server) for server in range(4)}
    assert rank_spare(0, "1", make_nodes(4), seats, FOUR) == 1
    assert rank_spare(0, "4", make_nodes(5), seats, FOUR) == 0
    assert rank_spare(0, "1", make_nodes(4)[1:], seats, FOUR) == 0, "there is nothing better"
