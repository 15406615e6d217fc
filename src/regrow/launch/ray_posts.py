"""The outposts of a job, found by name: how the launcher of a job on a cluster takes over what one before it started.

Everything that a job starts has a name with the id of its launcher's actor, which stays when Ray starts that again on
some node. Each start claims a number in Ray's key-value store, once for all: so launchers are numbered, and none has
another's number. The token of the run is never there, nor in Ray's object store: it comes from an outpost's memory.

The rule to keep: when nobody launches any more, nothing of a job stays: outposts end (`launch/outpost.py`), and with
the last of them the room that was reserved.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any, NamedTuple

from regrow.launch.outpost import Estate
from regrow.launch.ray_connect import NAMESPACE

# How often Ray starts the launcher of a job anew. Too small: a long run ends for want of a launcher. Too large: one
# that cannot live, for want of memory say, is tried for hours.
LAUNCHERS_MAX = 100
# For outposts to answer a new launcher. Too small: living processes on a busy machine are replaced. Too large: who died
# with the launcher is replaced later.
TAKE_OVER_SECONDS_MAX = 15.0
OVER = "over"


class Seat(NamedTuple):
    """A launcher of a job. `actor` is the id of the actor that it is, and that all launchers of the job are."""

    actor: str
    job: str  # as the actor is named
    launcher: int  # how many there were before

    @property
    def group(self) -> str:
        return f"room/{self.actor}"

    @property
    def prefix(self) -> str:
        return f"post/{self.actor}/"

    def name_post(self, number: int) -> str:
        return f"{self.prefix}{self.launcher}/{number}"


class Found(NamedTuple):
    """An outpost that answered, and where it is."""

    actor: Any
    node: str
    estate: Estate


def claim_seat(ray: Any, job: str) -> Seat:
    """In the process of the launcher. Asks Ray, which answers once for each number."""
    from ray.experimental.internal_kv import _internal_kv_put

    actor = ray.get_runtime_context().get_actor_id()
    for number in range(LAUNCHERS_MAX + 1):
        if not _internal_kv_put(_key(actor, str(number)), b"claimed", overwrite=False, namespace=NAMESPACE.encode()):
            return Seat(actor=actor, job=job, launcher=number)
    raise AssertionError("Ray starts no launcher as often as that")


def note_over(seat: Seat, words: bytes) -> None:
    """The run has ended, so; for a launcher that is started all the same."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(_key(seat.actor, OVER), words, overwrite=True, namespace=NAMESPACE.encode())


def read_over(seat: Seat) -> bytes | None:
    from ray.experimental.internal_kv import _internal_kv_get

    found: bytes | None = _internal_kv_get(_key(seat.actor, OVER), namespace=NAMESPACE.encode())
    return found


def forget(actor: str) -> None:
    """Its numbers, and its end."""
    from ray.experimental.internal_kv import _internal_kv_del

    _internal_kv_del(_key(actor, ""), del_by_prefix=True, namespace=NAMESPACE.encode())


def _key(actor: str, what: str) -> bytes:
    return f"launchers/{actor}/{what}".encode()


# -- a launcher after another --------------------------------------------------------------------------------


def take_over(ray: Any, seat: Seat) -> list[Found]:
    """All outposts of the job that answer; they obey no earlier launcher any more. Those that do not, and those that
    nobody told what to be, are ended."""
    posts = _list_posts(ray, seat)
    asked = [(post, post.take_over.remote(seat.launcher)) for post in posts]
    nodes = _list_seats(ray)
    deadline = time.monotonic() + TAKE_OVER_SECONDS_MAX
    found: list[Found] = []
    for post, answer in asked:
        try:
            estate: Estate = ray.get(answer, timeout=max(0.1, deadline - time.monotonic()))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            end_post(ray, post)
            continue
        node = nodes.get(post._actor_id.hex())
        if estate.who is None or node is None:
            end_post(ray, post)
        else:
            found.append(Found(post, node, estate))
    return found


def read_token(ray: Any, seat: Seat, found: list[Found]) -> str:
    """From whoever has the newest memo."""
    newest = max(found, key=lambda each: each.estate.memo_number)
    token: str = ray.get(newest.actor.read_token.remote(seat.launcher), timeout=TAKE_OVER_SECONDS_MAX)
    return token


def find_room(seat: Seat) -> tuple[Any, list[str]] | None:
    """What an earlier launcher reserved: the group, and the node of each part of it ("" for one that is lost)."""
    from ray.util.placement_group import get_placement_group, placement_group_table

    try:
        group = get_placement_group(seat.group)
    except ValueError:
        return None
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return group, [nodes[index] for index in sorted(nodes)]


def clear(ray: Any, seat: Seat) -> None:
    """Ends all that is left of a job that nobody goes on with."""
    for post in _list_posts(ray, seat):
        end_post(ray, post)
    _remove_room(seat)


def end_post(ray: Any, post: Any) -> None:
    with contextlib.suppress(Exception):  # it is gone already, or will end by itself
        ray.kill(post, no_restart=True)


def _list_posts(ray: Any, seat: Seat) -> list[Any]:
    names = [entry["name"] or "" for entry in ray.util.list_named_actors(all_namespaces=True)]
    posts = []
    for name in sorted(name for name in names if name.startswith(seat.prefix)):
        with contextlib.suppress(ValueError):  # it has ended meanwhile
            posts.append(ray.get_actor(name, namespace=NAMESPACE))
    return posts


def _list_seats(ray: Any) -> dict[str, str]:
    """The node of each actor that lives, by their ids."""
    from ray._private.state import actors

    return {id: entry["Address"]["NodeID"] for id, entry in actors().items()}


def _remove_room(seat: Seat) -> None:
    from ray.util.placement_group import get_placement_group, remove_placement_group

    with contextlib.suppress(ValueError):
        remove_placement_group(get_placement_group(seat.group))


# -- an outpost without a launcher ---------------------------------------------------------------------------


def leave(seat: Seat) -> None:
    """Runs in an outpost that nobody has asked anything for long. A launcher that lives may have lost sight of this one
    alone, and keeps its room."""
    import ray

    try:
        launcher = ray.get_actor(seat.job, namespace=NAMESPACE)
        is_gone = launcher._actor_id.hex() != seat.actor
    except ValueError:
        is_gone = True
    if is_gone:
        _remove_room(seat)
    os._exit(0)
