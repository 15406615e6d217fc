"""Goal: the faults of which nobody dies (`sim/hangs.py`) do what they say, and only they do.

Method: single faults, made to happen in a world that runs quietly, and looked at. That they are met in all sorts of
schedules, and matter, is shown by the probes, the fixed seeds and the planted bugs of the other files.
"""

from __future__ import annotations

import pytest

from regrow.sim import hangs
from regrow.sim.choices import Choices
from regrow.sim.followed import Followed
from regrow.sim.forever import Forever
from regrow.sim.hangs import Clock, Hangs, find_method
from regrow.sim.launcher import PARTED_SECONDS
from regrow.sim.moving import Moving
from regrow.sim.net import COORDINATOR
from regrow.sim.nodes import Violation
from regrow.sim.parted import Parted
from regrow.sim.probes import Probes
from regrow.sim.profiles import PROFILES, make_scenario
from regrow.sim.sabotage import Saboteur
from regrow.sim.vanishing import Vanishing
from regrow.sim.world import World


def start(profile: str, *, events: int = 120) -> World:
    """A world in which everybody works."""
    choices = Choices()
    world = World(make_scenario(PROFILES[profile], choices), choices, probes=Probes())
    for _ in range(events):
        world._step()
    assert all(node.program.opened for node in world.nodes.values() if node.program is not None)
    return world


def run_for(world: World, seconds: float) -> None:
    until = world.now + seconds
    while world.now < until:
        world._step()


def test_every_profile_names_faults_that_exist() -> None:
    for profile in PROFILES.values():
        for name, weight in profile.weights:
            own, method = "_" + name.replace(" ", "_"), find_method(name)
            assert weight > 0
            others = any(hasattr(kind, method) for kind in (Hangs, Forever, Moving, Parted, Vanishing, Followed))
            assert hasattr(Saboteur, own) or others, (profile.name, name)


def test_a_server_that_is_cut_off_counts_as_down_until_it_is_heard_again() -> None:
    world = start("partitions")
    assert world.sabotage.down() == set()
    assert world.sabotage.hangs.inject_cut_off()
    (server,) = world.sabotage.down()
    before = world.heard[server]
    run_for(world, 0.2)
    assert world.heard[server] == before
    world.network.stuck.clear()
    node = world.node("server", server)
    assert node is not None
    world.sabotage.hangs.release(node.identity)
    assert world.sabotage.down() == {server}
    run_for(world, 0.5)
    assert world.sabotage.down() == set()


def test_a_server_that_stays_cut_off_is_replaced_and_the_run_ends_well() -> None:
    world = start("partitions")
    world.sabotage.left = 0
    assert world.sabotage.hangs.inject_cut_off()
    world.actions.clear()  # it does not end by itself
    (server,) = world.sabotage.down()
    run_for(world, 3.0)
    assert any(peer.id == server for peer in world.condemned)
    world.run()
    assert world.newest["server", server] >= 1


def test_nobody_is_declared_dead_while_the_coordinator_hangs_nor_right_after() -> None:
    world = start("hangs")
    assert world.sabotage.hangs.inject_coordinator_hang()
    coordinator = world.node(COORDINATOR)
    assert coordinator is not None and coordinator.paused
    run_for(world, 5.0)
    coordinator.paused = False
    run_for(world, 3.0)
    assert not world.condemned
    world.run()


def test_a_coordinator_that_was_replaced_gives_orders_that_nobody_obeys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "SPELLS", (1.2,))  # it goes on for long enough to mind that connections are closed
    world = start("hangs")
    old = world.node(COORDINATOR)
    assert old is not None and world.sabotage.hangs.inject_coordinator_zombie()
    assert world.node(COORDINATOR) is not old
    world.sabotage.left = 0
    run_for(world, 4.0)
    assert world.probes.counts["coordinator zombie"] == 1
    assert world.probes.counts["zombie gives orders"] >= 1
    assert not world.condemned
    world.run()


def test_a_healthy_server_that_is_declared_dead_is_a_violation() -> None:
    world = start("hangs")
    peer = next(identity for identity in world.nodes if identity.role == "server")
    with pytest.raises(Violation, match="suspicion"):
        world.sabotage.hangs.check_suspicion(peer, "silent for 2.0 s")
    world.nodes[peer].paused = True
    world.sabotage.hangs.check_suspicion(peer, "silent for 2.0 s")


def test_a_clock_runs_at_its_rate_and_jumps() -> None:
    clock = Clock(since=10.0, shows=0.0, rate=0.5)
    assert clock.read(14.0) == 2.0
    clock.jump(14.0, -3600.0)
    assert clock.read(14.0) == -3598.0
    assert clock.read(16.0) == -3597.0


def test_of_two_servers_that_do_not_reach_each_other_one_is_replaced() -> None:
    world = start("parted", events=60)
    assert world.sabotage.parted.inject_sever()
    (one, other), before = world.sabotage.down(), dict(world.newest)
    assert len(world.network.stuck) >= 1
    world.calm = True
    world.sabotage.stop()
    assert len(world.network.stuck) >= 1, "it is cut for good"
    run_for(world, PARTED_SECONDS - 1.0)
    assert world.newest == before
    while world.newest == before:
        world._step()
        assert world.now < 3 * PARTED_SECONDS
    assert {place for place in world.newest if world.newest[place] != before[place]} <= {
        ("server", one),
        ("server", other),
    }
    while not world.is_finished():
        world._step()
    assert not world.lost
