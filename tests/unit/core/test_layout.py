"""Goal: every row has one place, the places of a stripe are on different servers, and Python and C++ agree.

Method: small clusters are enumerated whole and held against what the layout promises; C++ is asked through
`Router.plan`, which places rows, and `Shard`, which counts slots and inverts places when it fills them.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from regrow import _kernels
from regrow.core.layout import SERVERS_MAX, Layout
from regrow.core.twins import initial_rows

SMALL = [
    Layout(servers=servers, k=k, r=r, rings=rings)
    for servers in range(1, 9)
    for rings in range(1, servers + 1)
    if servers % rings == 0
    for k in range(1, servers // rings + 1)
    for r in range(servers // rings - k + 1)
]
LARGE = [
    Layout(servers=4096, k=255, r=3),
    Layout(servers=4096, k=3, r=1, rings=64),
    Layout(servers=1000, k=10, r=2, rings=8),
    Layout(servers=7, k=6, r=1),
    Layout(servers=1),
]


def stripes(layout: Layout, count: int) -> np.ndarray:
    return np.arange(count * layout.k)


@pytest.mark.parametrize("layout", SMALL, ids=str)
def test_what_the_layout_promises(layout: Layout) -> None:
    blocks = 3
    rows = stripes(layout, blocks * layout.servers)
    for table in (0, 1, layout.servers + 2):
        server, slot = layout.place(rows, table=table)
        assert len(set(zip(server.tolist(), slot.tolist(), strict=True))) == len(rows)
        assert (layout.row_of(server, slot, table=table) == rows).all()
        # Every server holds k slots of every block, without a gap.
        for one in range(layout.servers):
            assert sorted(slot[server == one]) == list(range(blocks * layout.k))
        # The members of a stripe are on consecutive servers of one ring.
        for members in server.reshape(-1, layout.k):
            group = members // layout.ring
            assert (group == group[0]).all()
            position = members % layout.ring
            assert ((position - position[0]) % layout.ring == np.arange(layout.k)).all()


@pytest.mark.parametrize("layout", SMALL, ids=str)
def test_rows_are_counted_without_the_holes(layout: Layout) -> None:
    for rows, table in itertools.product(range(2 * layout.servers * layout.k + 1), (0, 3)):
        servers, _ = layout.place(np.arange(rows), table=table)
        expected = np.bincount(servers, minlength=layout.servers).tolist()
        assert [layout.rows_on(s, rows=rows, table=table) for s in range(layout.servers)] == expected


def test_one_place_written_out() -> None:
    """7 servers, k = 3: row 44 is member 2 of stripe 14, the first of block 2; the table turns it by 5."""
    layout = Layout(servers=7, k=3, r=2)
    server, slot = layout.place(44, table=5)
    assert (int(server), int(slot)) == ((14 + 2 + 5) % 7, 2 * 3 + 2)


@pytest.mark.parametrize("layout", SMALL, ids=str)
def test_slots_are_as_many_as_needed(layout: Layout) -> None:
    for rows in range(3 * layout.k * layout.servers + 2):
        slots = layout.slots_per_server(rows)
        server, slot = layout.place(np.arange(rows), table=1)
        assert slots % layout.k == 0
        assert slot.max(initial=-1) < slots
        assert slots == 0 or slot.max() >= slots - layout.k
        assert (np.bincount(server, minlength=layout.servers) <= slots).all()


def planned(layout: Layout, rows: int, ids: np.ndarray, table: int) -> list[tuple[int, int]]:
    """(server, slot) of distinct ids as C++ sees them, by server and order of first occurrence."""
    router = _kernels.Router(
        rows=[rows],
        dims=[1],
        k=[layout.k],
        r=[layout.r],
        table_index=[table],
        mean_pooling=[False],
        feature_tables=[0],
        static_tables=[],
        servers=layout.servers,
        rings=layout.rings,
    )
    plan = router.plan(ids, None, len(ids))
    server = np.repeat(np.arange(layout.servers), plan.counts[:, 0])
    return list(zip(server.tolist(), plan.slots.tolist(), strict=True))


def expected(layout: Layout, ids: np.ndarray, table: int) -> list[tuple[int, int]]:
    server, slot = layout.place(ids, table=table)
    order = np.argsort(server, kind="stable")
    return list(zip(server[order].tolist(), slot[order].tolist(), strict=True))


@pytest.mark.parametrize("layout", SMALL, ids=str)
def test_places_in_cpp(layout: Layout) -> None:
    for table in (0, 1, layout.servers + 2):
        ids = stripes(layout, 2 * layout.servers)
        assert planned(layout, len(ids), ids, table) == expected(layout, ids, table)


@pytest.mark.parametrize("layout", LARGE, ids=str)
@pytest.mark.parametrize("table", [0, 5, 12345])
def test_places_in_cpp_at_the_far_end(layout: Layout, table: int) -> None:
    """Reciprocals are exact up to the largest row there can be."""
    rows = 2**32 - 1
    rng = np.random.default_rng(table)
    edges = [rows - 1, rows - 2, 2**31, 2**31 - 1, 0, 1, layout.k * layout.servers - 1]
    multiples = rng.integers(1, rows // (layout.k * layout.servers), 2000) * layout.k * layout.servers
    ids = np.concatenate([edges, multiples, multiples - 1, rng.integers(0, rows, 2000)])
    ids = np.array(list(dict.fromkeys(ids.tolist())))
    assert planned(layout, rows, ids, table) == expected(layout, ids, table)
    server, slot = layout.place(ids, table=table)
    assert (layout.row_of(server, slot, table=table) == ids).all()


@pytest.mark.parametrize("layout", [layout for layout in SMALL if layout.servers in (4, 6)], ids=str)
def test_slots_and_rows_in_cpp(layout: Layout) -> None:
    """A shard fills each slot with the row it believes to be there: the values say which."""
    rows = 2 * layout.k * layout.servers - 1
    values = initial_rows(range(rows), dim=2, seed=7, table=3, bound=1.0)
    for server in range(layout.servers):
        shard = _kernels.Shard(layout.servers, server, layout.rings)
        members = dict(k=layout.k, r=layout.r)
        shard.add_table(
            rows=rows, dim=2, **members, optimizer="sgd", learning_rate=0.1, seed=7, init_bound=1.0, table=3
        )
        slots = layout.slots_per_server(rows)
        assert shard.slots(0) == slots
        records = np.empty((slots, 4), np.float32)
        shard.read_records(0, 0, slots, records)
        for slot, row in enumerate(layout.row_of(np.full(slots, server), np.arange(slots), table=3)):
            assert records[slot, :2].tolist() == (values[row].tolist() if row < rows else [0.0, 0.0])


WRONG = [
    (dict(servers=0), "servers must be between 1 and 4096, not 0"),
    (dict(servers=SERVERS_MAX + 1), "servers must be between 1 and 4096, not 4097"),
    (dict(servers=6, rings=4), "rings must divide servers: 6 servers, 4 rings"),
    (dict(servers=6, rings=0), "rings must divide servers: 6 servers, 0 rings"),
    (dict(servers=6, k=0), "k must be at least 1 and r at least 0, not k=0, r=0"),
    (dict(servers=6, k=1, r=-1), "k must be at least 1 and r at least 0, not k=1, r=-1"),
    (
        dict(servers=6, rings=2, k=3, r=1),
        "k + r = 4 members need as many servers in a ring; there are 3",
    ),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_wrong_layouts_are_refused_alike(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError) as python:
        Layout(**settings)
    assert str(python.value) == message
    given = {"k": 1, "r": 0, "rings": 1} | settings
    with pytest.raises(ValueError) as cpp:
        _kernels.shard_bytes(rows=10, dim=4, optimizer="sgd", **given)
    assert str(cpp.value) == message


def test_wrong_rows_are_refused() -> None:
    layout = Layout(servers=4, k=2)
    with pytest.raises(ValueError, match="rows must not be negative, not -1"):
        layout.place([3, -1], table=0)
    with pytest.raises(ValueError, match="rows must be whole numbers"):
        layout.place([0.5], table=0)
    with pytest.raises(ValueError, match="table must not be negative"):
        layout.place([3], table=-1)
    with pytest.raises(ValueError, match="servers must be below 4, not 4"):
        layout.row_of([4], [0], table=0)
    with pytest.raises(ValueError, match="rows must not be negative"):
        layout.slots_per_server(-1)


def test_shapes_are_kept() -> None:
    layout = Layout(servers=5, k=2, r=1)
    rows = np.arange(12).reshape(3, 4)
    server, slot = layout.place(rows, table=2)
    assert server.shape == slot.shape == rows.shape
    assert (layout.row_of(server, slot, table=2) == rows).all()
    for row, place in zip(rows.ravel(), zip(server.ravel(), slot.ravel(), strict=True), strict=True):
        assert tuple(map(int, layout.place(row, table=2))) == tuple(map(int, place))
    empty = layout.place(np.zeros(0), table=0)
    assert [part.shape for part in itertools.chain(empty)] == [(0,), (0,)]
