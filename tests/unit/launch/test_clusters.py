"""Goal: what a user says about a cluster is checked before anything starts, and what a cluster needs of the launcher
holds without one.

Method: options by hand; nodes as Ray describes them, in values; the supervisor and the judges with what only a cluster
asks of them.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from regrow.clusters import parse_label
from regrow.config import TrainConfig
from regrow.core.identity import Identity
from regrow.errors import ConfigError, UserError
from regrow.launch import memory, ray_connect, ray_nodes
from regrow.launch.backend import Exit
from regrow.launch.judges import Judges
from regrow.launch.orders import Judge
from regrow.launch.placement import Need
from regrow.launch.reports import ReadyToJudge
from regrow.launch.supervisor import (
    Appoint,
    KeepSpares,
    ProcessBegun,
    ProcessDelayed,
    ProcessEnded,
    Promote,
    Stance,
    Start,
    Supervisor,
    TakeStance,
    Tick,
)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"cluster": "slurm"}, "local"),
        ({"address": "host:1"}, 'cluster "local" does not use it'),
        ({"server_cpus": 0.5}, 'cluster "local" does not use it'),
        ({"cluster": "ray", "server_cpus": float("nan")}, "between 0 and 4096"),
        ({"cluster": "ray", "worker_gpus": -1.0}, "between 0 and 4096"),
        ({"cluster": "ray", "servers_per_node": 0}, "at least 1"),
        ({"cluster": "ray", "server_memory": -1}, "at least 0"),
        ({"cluster": "ray", "worker_cpus": 1e9}, "between 0 and 4096"),
        ({"cluster": "ray", "job": "a/b"}, "letters, digits, dots and dashes"),
        ({"cluster": "ray", "transport": "unix"}, "over TCP"),
        ({"cluster": "ray", "store": "tiered", "store_dir": "/d", "protection": "batch"}, "of a node are lost with it"),
        ({"cluster": "ray", "store": "tiered", "store_dir": "d"}, "is not the same on every node"),
        ({"cluster": "ray", "step_digests": True}, "one machine"),
        ({"cluster": "ray", "node_label": ("zone",)}, "is no KEY=VALUE"),
        ({"cluster": "ray", "node_label": ("spare:zone=a",)}, "is no KEY=VALUE"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        TrainConfig(**options)


def test_a_cluster_speaks_over_tcp_and_a_stored_config_says_so() -> None:
    config = TrainConfig(cluster="ray", node_label=("zone=a",))
    assert config.transport == "tcp"
    assert TrainConfig.from_dict({**config.to_dict(), "node_label": ["zone=a"]}) == config


def test_labels() -> None:
    assert parse_label("zone=a") == ("", "zone", "a")
    assert parse_label("server:example.com/zone=a=b") == ("server", "example.com/zone", "a=b")


def test_what_a_run_wants_of_a_cluster() -> None:
    config = TrainConfig(
        cluster="ray", protection="ec", k=3, r=2, servers=6, workers=3, server_cpus=2.0, worker_gpus=1.0
    )
    wish = ray_nodes.make_wish(config, 1 << 30)
    assert (wish.stripes.k, wish.stripes.r, wish.spares, wish.workers) == (3, 2, 2, 3)
    assert wish.need("standby") == wish.need("server") == Need(cpus=2.0, memory_bytes=1 << 30)
    assert wish.need("worker") == Need(cpus=1.0, gpus=1.0)
    assert wish.need("coordinator") == Need()
    given = ray_nodes.make_wish(config.replace(server_memory=7), 1 << 30)
    assert given.need("server").memory_bytes == 7
    assert ray_nodes.make_wish(config.replace(protection="none"), 0).stripes.r == 0


def test_a_server_is_counted_with_its_share() -> None:
    config = TrainConfig(protection="ec", servers=5)
    one = memory.count_server_bytes(config)
    whole = memory.estimate_need(config, config.load_model())
    assert whole.tables < 5 * one < whole.total


class FakeRay:
    """What the library says about nodes."""

    def __init__(self, *entries: dict[str, Any]) -> None:
        self._entries = list(entries)

    def nodes(self) -> list[dict[str, Any]]:
        return self._entries


def make_entry(id: str, host: str, **more: Any) -> dict[str, Any]:
    return {
        "NodeID": id,
        "Alive": True,
        "NodeName": host,
        "NodeManagerAddress": host,
        "NodeManagerPort": 1,
        "Labels": {"zone": "a"},
        "Resources": {"CPU": 4.0, "memory": 8.0, "GPU": 1.0},
        **more,
    }


def test_nodes_as_ray_describes_them() -> None:
    ray = FakeRay(
        make_entry("aaaaaaaaaa", "10.0.0.1", Resources={"CPU": 1.0, ray_nodes.HEAD_RESOURCE: 1.0}),
        make_entry("bbbbbbbbbb", "10.0.0.2"),
        make_entry("cccccccccc", "10.0.0.2"),
        make_entry("dddddddddd", "10.0.0.3", Alive=False),
    )
    nodes, where = ray_nodes.read_nodes(ray.nodes(), {"bbbbbbbbbb": {"CPU": 1.5}})
    assert [node.name for node in nodes] == ["10.0.0.1", "10.0.0.2#bbbbbb", "10.0.0.2#cccccc"]
    assert [node.is_head for node in nodes] == [True, False, False]
    assert nodes[1].free == Need(cpus=1.5)
    assert nodes[2].free == Need(cpus=4.0, memory_bytes=8, gpus=1.0)
    assert where["bbbbbbbbbb"].host == "10.0.0.2"


def test_an_address_where_nobody_listens_is_known_at_once() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'regrow[ray]'")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    began = time.monotonic()
    with pytest.raises(UserError, match=f"no Ray cluster answers at '{address}': nobody listens at "):
        ray_connect.connect(address)
    assert time.monotonic() - began < 60.0, "Ray would try for minutes"


def test_files_that_nodes_must_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("clicks.tsv").write_text("1\n")
    config = TrainConfig(cluster="ray", data="criteo:clicks.tsv")
    assert ray_nodes.list_files(config) == [str(tmp_path / "clicks.tsv"), str(tmp_path)]
    files = tuple((path, ray_nodes.digest_file(path) or "") for path in ray_nodes.list_files(config))
    assert ray_nodes.probe(ray_nodes.Asked(files=files, marker=None)).problems == ()
    Path("clicks.tsv").write_text("2\n")
    assert ray_nodes.probe(ray_nodes.Asked(files=files, marker=None)).problems == (
        f"{tmp_path / 'clicks.tsv'} is another one there",
    )
    Path("clicks.tsv").unlink()
    found = ray_nodes.probe(
        ray_nodes.Asked(files=files, marker=str(tmp_path / "ckpt" / "marker"), peers=(("B", "", 1),))
    )
    assert found.problems == (
        f"there is no {tmp_path / 'clicks.tsv'} there",
        f"{tmp_path / 'ckpt'} is not the same directory there",
        "it cannot reach node B at ",
    )


def test_storage_that_nodes_must_reach(tmp_path: Path) -> None:
    """Asked from each of them: a URL that the command reaches may be out of reach for a node, or unknown there."""
    config = TrainConfig(cluster="ray", resume="s3://bucket/before@cut-7", publish="s3://bucket/rows")
    assert ray_nodes.list_urls(config) == ("s3://bucket/before", "s3://bucket/rows")
    assert ray_nodes.list_urls(TrainConfig(cluster="ray", resume=str(tmp_path))) == ()
    assert str(tmp_path) in ray_nodes.list_files(TrainConfig(cluster="ray", resume=f"{tmp_path}@cut-7"))
    good, bad = (tmp_path / "there").as_uri(), "nonsense://bucket"
    (problem,) = ray_nodes.probe(ray_nodes.Asked(files=(), marker=None, urls=(good, bad))).problems
    assert problem.startswith(f"it cannot reach {bad}: ")


# -- what a cluster asks of the launcher ---------------------------------------------------------------------

S0, HEIR = Identity(role="server", id=0), Identity(role="server", id=0, incarnation=1)
SPARES = [Identity(role="standby", id=number) for number in range(2)]
LOST = Exit(code=-9, cause="was lost with its node")


def staffed(**options: Any) -> Supervisor:
    made = Supervisor(replaces=True, **options)
    for role in ("coordinator", "server"):
        made.receive(Appoint(role=role, id=0, now=0.0))
    made.receive(TakeStance(stance=Stance.REPLACING))
    made.receive(KeepSpares(count=2, now=0.0))
    made.receive(Tick(now=0.0))
    return made


@pytest.mark.parametrize("choice", [0, 1])
def test_the_spare_with_the_best_seat_follows(choice: int) -> None:
    asked: list[tuple[Identity, list[Identity]]] = []

    def prefer(heir: Identity, spares: Any) -> Identity | None:
        asked.append((heir, list(spares)))
        return SPARES[choice]

    orders = staffed(prefer=prefer).receive(ProcessEnded(who=S0, exit=LOST, now=0.1))
    assert asked == [(HEIR, SPARES)]
    assert Promote(spare=SPARES[choice], who=HEIR) in orders


def test_no_spare_may_be_good_enough() -> None:
    orders = staffed(prefer=lambda heir, spares: None).receive(ProcessEnded(who=S0, exit=LOST, now=0.1))
    assert Start(who=HEIR) in orders


def test_one_that_waits_for_room_is_not_hung() -> None:
    """However long that takes; and from its start on it is expected to answer."""
    subject = staffed(prefer=lambda heir, spares: None)
    subject.receive(ProcessEnded(who=S0, exit=LOST, now=0.1))
    for now in range(1, 1000):
        subject.receive(ProcessDelayed(who=HEIR))
        subject.receive(Tick(now=float(now), busy=True))
    assert subject.current("server", 0) == HEIR
    subject.receive(ProcessBegun(who=HEIR, now=1000.0))
    for now in range(1000, 1200):
        subject.receive(Tick(now=float(now), busy=True))
    assert subject.current("server", 0).incarnation > HEIR.incarnation


def test_a_late_start_of_one_that_was_followed_is_nothing() -> None:
    subject = staffed(prefer=lambda heir, spares: None)
    subject.receive(ProcessEnded(who=S0, exit=LOST, now=0.1))
    subject.receive(ProcessDelayed(who=HEIR))
    subject.receive(ProcessEnded(who=HEIR, exit=LOST, now=0.2))
    assert subject.receive(ProcessBegun(who=HEIR, now=0.3)) == []
    assert subject.current("server", 0).incarnation == 2


def test_workers_that_share_no_directory_leave_it_to_the_first() -> None:
    judges = Judges(workers=2, directory="d", shares=False)
    ready = ReadyToJudge(loop=1, step=None, call=1, merges=True, steps=9)
    assert judges.receive(0, ready) == []
    assert judges.receive(1, ready) == [(0, Judge(number=1, index=0, count=1, directory="d"))]
