"""Who runs on which node, and which nodes may be lost: arithmetic, and nothing else.

A node that is lost takes all of its servers with it, so what is survived depends on who sits together: no stripe may
have more members on the lost nodes than it has parities. That is asked of the same rule that the coordinator asks
(`core/protection.py`), over sets of nodes instead of servers.

    plan_seats        servers, spares, workers and the coordinator onto nodes, before anything is started
    describe_safety   what that survives, in a sentence, and what would survive more
    choose_node       where a successor starts, with the reason

Every server has a node of its own where there are enough. With fewer, servers that sit together are k + r places apart
in their ring, where that is possible: `seat_servers` searches for it, within `SEARCH_STEPS_MAX`. Nodes, needs and
seats come in as values; nothing here knows Ray, a clock or a process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from regrow.core.identity import Identity
from regrow.core.layout import Layout

# Of the search for good seats. Too small: seats that lose more than they must, with many servers on few nodes. Too
# large: seconds before a large job starts.
SEARCH_STEPS_MAX = 20_000
LOST_NODES_MAX = 4  # so many together are asked about, at most
SETS_MAX = 20_000  # of nodes that are asked about
NAMES_MAX = 3
SERVERS_MORE_MAX = 8  # tried, to say what would help


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripes:
    """How rows protect each other: k of them and r parities, on neighbours of a ring. r = 0: not at all."""

    servers: int
    k: int = 1
    r: int = 0
    rings: int = 1

    def tolerates(self, lost: Collection[int]) -> bool:
        """Whether all of these servers may be lost together."""
        if not lost or not self.r:
            return not lost
        layout = Layout(servers=self.servers, k=self.k, r=self.r, rings=self.rings)
        width, down = self.k + self.r, frozenset(lost)
        firsts = {layout.step(server, -offset) for server in down for offset in range(width)}
        return all(sum(layout.step(first, m) in down for m in range(width)) <= self.r for first in firsts)

    @property
    def fits(self) -> bool:
        return not self.servers % self.rings and self.k + self.r <= self.servers // self.rings


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one process takes of its node."""

    cpus: float = 0.0
    memory_bytes: int = 0
    gpus: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.cpus:g} CPU" + ("s" if self.cpus != 1 else "")] if self.cpus else []
        parts += [f"{self.gpus:g} GPU" + ("s" if self.gpus != 1 else "")] if self.gpus else []
        parts += [f"{self.memory_bytes / 2**30:.1f} GiB"] if self.memory_bytes else []
        return " and ".join(parts) or "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster, with what is free there."""

    id: str
    name: str
    free: Need
    labels: Mapping[str, str] = field(default_factory=dict)
    is_head: bool = False

    def count_room(self, need: Need) -> int:
        """How many processes with this need fit; many, where nothing is needed."""
        # What is free was computed from fractions: a thousandth less is no less.
        rooms = [
            math.floor(has / wants + 1e-3)
            for wants, has in zip(_amounts(need), _amounts(self.free), strict=True)
            if wants > 0
        ]
        return max(0, min(rooms, default=1 << 20))

    def take(self, need: Need, count: int = 1) -> Node:
        """The same node with so much less; a negative count gives back."""
        cpus, memory, gpus = (
            has - count * wants for wants, has in zip(_amounts(need), _amounts(self.free), strict=True)
        )
        return replace(self, free=Need(cpus=cpus, memory_bytes=int(memory), gpus=gpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is to be seated. `labels`: by role, what its nodes must have; "" is for all roles."""

    stripes: Stripes
    workers: int = 1
    spares: int = 0
    needs: Mapping[str, Need] = field(default_factory=dict)
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    per_node: int | None = None  # servers; None: one where there are enough nodes, else as few as possible

    def need(self, role: str) -> Need:
        """A spare needs what it will need as a server."""
        return self.needs.get("server" if role == "standby" else role, Need())

    def allows(self, role: str, node: Node) -> bool:
        own = "server" if role == "standby" else role
        wanted = {**self.labels.get("", {}), **self.labels.get(own, {})}
        return all(node.labels.get(name) == value for name, value in wanted.items())


class NoRoom(Exception):
    """What is wanted, and what there is; in words."""


Place = tuple[str, int]  # role and number
Seats = dict[Place, str]  # to the id of a node


# -- before the start ---------------------------------------------------------------------------------------


def plan_seats(nodes: Sequence[Node], wish: Wish) -> Seats:
    """Servers first, as what is survived depends on them; then spares, workers, and the coordinator, which needs least.

    Spares have no room reserved where there is none: a spare that has no seat is left out. Raises NoRoom.
    """
    left = {node.id: node for node in nodes}
    seats: Seats = {}

    def sit(role: str, id: int, where: str) -> None:
        seats[role, id] = where
        left[where] = left[where].take(wish.need(role))

    for server, where in enumerate(_seat_all_servers(nodes, wish)):
        sit("server", server, where)
    for spare in range(wish.spares):
        node = _choose_for_spare(left, seats, wish)
        if node is not None:
            sit("standby", spare, node.id)
    for worker in range(wish.workers):
        free = [node for node in left.values() if wish.allows("worker", node) and node.count_room(wish.need("worker"))]
        if not free:
            raise NoRoom(explain_room("worker", wish.workers, wish, [*left.values()], placed=worker))
        counts = _count_seats(seats)
        # Away from servers where that is possible: losing a node should be one loss.
        sit("worker", worker, min(free, key=lambda node: (counts.get(node.id, 0), -node.free.cpus)).id)
    heads = [node for node in left.values() if wish.allows("coordinator", node)]
    if not heads:
        raise NoRoom(explain_room("coordinator", 1, wish, nodes))
    # Without its head there is no cluster any more, so nothing is added to what can be lost.
    counts = _count_seats(seats)
    sit("coordinator", 0, min(heads, key=lambda node: (not node.is_head, counts.get(node.id, 0))).id)
    return seats


def _seat_all_servers(nodes: Sequence[Node], wish: Wish) -> list[str]:
    stripes, need = wish.stripes, wish.need("server")
    fit = [node for node in nodes if wish.allows("server", node)]
    rooms = [min(node.count_room(need), stripes.servers, wish.per_node or stripes.servers) for node in fit]
    if sum(rooms) < stripes.servers:
        raise NoRoom(explain_room("server", stripes.servers, wish, nodes))
    # The head last: it is the one whose loss nothing helps against. Then where there is most room.
    order = sorted((i for i in range(len(fit)) if rooms[i]), key=lambda i: (fit[i].is_head, -rooms[i], i))
    found = seat_servers(stripes, [rooms[i] for i in order])
    return [fit[order[index]].id for index in found]


def seat_servers(stripes: Stripes, rooms: Sequence[int]) -> list[int]:
    """The node of each server, as an index of `rooms`, which say how many fit. As few on one node as possible; among
    those seats some with the fewest nodes whose loss loses rows."""
    most = next(limit for limit in itertools.count(1) if sum(min(room, limit) for room in rooms) >= stripes.servers)
    capped = [min(room, most) for room in rooms]
    return _Search(stripes, capped).run()


class _Search:
    """Server after server; nodes with the fewest first. A branch that loses no fewer nodes than the best is left."""

    def __init__(self, stripes: Stripes, rooms: Sequence[int]) -> None:
        self._stripes = stripes
        self._rooms = rooms
        self._held: list[list[int]] = [[] for _ in rooms]
        self._is_lossy = [False] * len(rooms)
        self._best: list[int] = []
        self._best_lossy = len(rooms) + 1
        self._steps = 0

    def run(self) -> list[int]:
        self._seat(0, [], 0)
        return self._best

    def _seat(self, server: int, seats: list[int], lossy: int) -> None:
        if lossy >= self._best_lossy or (self._steps > SEARCH_STEPS_MAX and self._best):
            return
        if server == self._stripes.servers:
            self._best, self._best_lossy = [*seats], lossy
            return
        for index, adds in self._list_choices(server):
            self._steps += 1
            before, self._is_lossy[index] = self._is_lossy[index], self._is_lossy[index] or adds
            self._held[index].append(server)
            self._seat(server + 1, [*seats, index], lossy + (self._is_lossy[index] and not before))
            self._held[index].pop()
            self._is_lossy[index] = before

    def _list_choices(self, server: int) -> list[tuple[int, bool]]:
        """Nodes with room, and whether their loss would lose rows then. Of equal empty nodes only the first."""
        choices, seen_empty = [], set()
        for index, held in enumerate(self._held):
            if len(held) >= self._rooms[index]:
                continue
            if not held:
                if self._rooms[index] in seen_empty:
                    continue
                seen_empty.add(self._rooms[index])
            choices.append((index, bool(self._stripes.r) and not self._stripes.tolerates([*held, server])))
        return sorted(choices, key=lambda choice: (choice[1], len(self._held[choice[0]]), choice[0]))


def _choose_for_spare(left: Mapping[str, Node], seats: Seats, wish: Wish) -> Node | None:
    """A node without servers and spares; else the one where a spare would do least harm, whoever it follows."""
    free = [node for node in left.values() if wish.allows("standby", node) and node.count_room(wish.need("standby"))]
    servers = _count_seats(seats, "server")
    spares = _count_seats(seats, "standby")
    stripes, by_server = wish.stripes, _by_server(seats)

    def count_harm(node: Node) -> int:
        moves = [{**by_server, server: node.id} for server in range(stripes.servers)]
        return sum(len(find_lossy(stripes, moved)) for moved in moves) if stripes.r and stripes.servers <= 64 else 0

    def order(node: Node) -> tuple[int, int, int, bool]:
        held = servers.get(node.id, 0)
        return (spares.get(node.id, 0), held, count_harm(node) if held else 0, node.is_head)

    return min(free, key=order, default=None)


def explain_room(role: str, count: int, wish: Wish, nodes: Sequence[Node], *, placed: int = 0) -> str:
    """Why there is no room for `count` processes of a role: what is wanted, and what every node has."""
    need = wish.need(role)
    each = "" if str(need) == "nothing" else f" with {need} each"
    fit = [node for node in nodes if wish.allows(role, node)]
    what = f"{count} {role}s" if count != 1 else f"a {role}"
    if not fit:
        labels = {**wish.labels.get("", {}), **wish.labels.get(role, {})}
        wanted = ", ".join(f"{name}={value}" for name, value in labels.items())
        return f"no node for {what}: none of {len(nodes)} nodes has the label {wanted}"
    has = ", ".join(f"{node.name} has {node.free}" for node in fit[:NAMES_MAX])
    more = f", and {len(fit) - NAMES_MAX} more" if len(fit) > NAMES_MAX else ""
    limit = f", at most {wish.per_node} on a node" if wish.per_node and role == "server" else ""
    so_far = f" ({placed} of them fit)" if placed else ""
    return f"no room for {what}{each}{limit}{so_far}: {has}{more}"


# -- what is survived ---------------------------------------------------------------------------------------


def find_lossy(stripes: Stripes, seats: Mapping[int, str]) -> list[str]:
    """Nodes whose loss alone loses rows, in the order of their first server."""
    return [node for node, held in _by_node(seats).items() if not stripes.tolerates(held)]


def count_tolerated(stripes: Stripes, seats: Mapping[int, str]) -> int:
    """So many nodes may be lost together, whichever they are."""
    nodes = _by_node(seats)
    for count in range(1, min(len(nodes), LOST_NODES_MAX) + 1):
        sets = itertools.islice(itertools.combinations(nodes, count), SETS_MAX + 1)
        for asked, chosen in enumerate(sets):
            if asked == SETS_MAX or not stripes.tolerates([server for node in chosen for server in nodes[node]]):
                return count - 1
    return min(len(nodes), LOST_NODES_MAX)


def describe_safety(stripes: Stripes, seats: Mapping[int, str], names: Mapping[str, str]) -> str:
    """One sentence for the user."""
    nodes = len(set(seats.values()))
    what = f"{_count('server', stripes.servers)} on {_count('node', nodes)}"
    if not stripes.r:
        return f"{what}, without parities: losing a node with a server loses its rows"
    what += f", k = {stripes.k}, r = {stripes.r}" + (f", {stripes.rings} rings" if stripes.rings > 1 else "")
    lossy = find_lossy(stripes, seats)
    if not lossy:
        count = count_tolerated(stripes, seats)
        return f"{what}: any {'one node' if count == 1 else f'{count} nodes'} may be lost"
    named = join_words([names[node] for node in lossy], "or")
    helps = list_remedies(stripes, nodes)
    listed = f"{', '.join(helps[:-1])}, or {helps[-1]}," if len(helps) > 1 else "".join(helps)
    would = f"; {listed} would survive it" if helps else ""
    return f"{what}: losing {'node ' if len(lossy) == 1 else 'one of '}{named} loses rows{would}"


def list_remedies(stripes: Stripes, nodes: int) -> list[str]:
    """What would let any one node be lost: more nodes, more servers, or more parities. Each was tried."""
    found = []
    for more in range(1, stripes.servers - nodes + 1):
        if _is_safe(stripes, nodes + more):
            found.append(f"{more} more node{'s' if more > 1 else ''}")
            break
    for more in range(1, SERVERS_MORE_MAX + 1):
        larger = replace(stripes, servers=stripes.servers + more)
        if larger.fits and _is_safe(larger, nodes):
            found.append(f"{_ordinal(larger.servers)} server" if more == 1 else f"{larger.servers} servers")
            break
    more_parities = replace(stripes, r=stripes.r + 1)
    if more_parities.fits and _is_safe(more_parities, nodes):
        found.append(f"--r {more_parities.r}")
    return found


def _is_safe(stripes: Stripes, nodes: int) -> bool:
    seats = seat_servers(stripes, [stripes.servers] * nodes)
    return not find_lossy(stripes, {server: str(index) for server, index in enumerate(seats)})


# -- successors ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Where a successor starts, and why; without a node: why it has to wait."""

    node: str | None
    reason: str


def choose_node(who: Identity, nodes: Sequence[Node], seats: Mapping[Place, str], wish: Wish) -> Choice:
    """`nodes` live, with what is free now. `seats`: who sits where now, and where `who` sat before."""
    role, place = who.role, (who.role, who.id)
    free = [node for node in nodes if wish.allows(role, node) and node.count_room(wish.need(role))]
    if not free:
        return Choice(node=None, reason=explain_room(role, 1, wish, nodes) if nodes else "no node is left")
    others = {other: node for other, node in seats.items() if other != place}
    counts, before = _count_seats(others), seats.get(place)
    if role == "standby":
        spare = _choose_for_spare({node.id: node for node in nodes}, dict(others), wish)
        assert spare is not None
        return Choice(node=spare.id, reason="least harm is done there, whoever it follows")
    if role != "server":
        best = min(free, key=lambda node: (node.id != before, counts.get(node.id, 0), -node.free.cpus))
        return Choice(
            node=best.id, reason="it was there before" if best.id == before else "it has the fewest processes"
        )
    return _choose_for_server(who.id, free, _by_server(others), before, wish.stripes)


def _choose_for_server(
    server: int, free: Sequence[Node], others: Mapping[int, str], before: str | None, stripes: Stripes
) -> Choice:
    held = _by_node(others)
    lossy = {node.id: _count_harm(stripes, others, server, node.id) for node in free}
    best = min(free, key=lambda node: (lossy[node.id], len(held.get(node.id, ())), node.id != before, node.is_head))
    if not held.get(best.id):
        reason = "it was there before" if best.id == before else "no server is there"
    elif lossy[best.id] == 0 and stripes.r:
        reason = "it shares no stripe with the servers there"
    else:
        reason = "no spare node is left, and there most stripes stay safe"
    return Choice(node=best.id, reason=reason)


def rank_spare(
    server: int, spare_node: str, nodes: Sequence[Node], seats: Mapping[Place, str], stripes: Stripes
) -> int:
    """How many nodes' losses would lose rows with the successor of this server there, more than at best elsewhere."""
    others = _by_server({place: node for place, node in seats.items() if place != ("server", server)})
    best = min((_count_harm(stripes, others, server, node.id) for node in nodes), default=0)
    return max(0, _count_harm(stripes, others, server, spare_node) - best)


def _count_harm(stripes: Stripes, others: Mapping[int, str], server: int, node: str) -> int:
    return len(find_lossy(stripes, {**others, server: node})) if stripes.r else 0


# -- small things -------------------------------------------------------------------------------------------


def _amounts(need: Need) -> tuple[float, float, float]:
    return (need.cpus, need.memory_bytes, need.gpus)


def _count_seats(seats: Mapping[Place, str], role: str | None = None) -> dict[str, int]:
    counts: dict[str, int] = {}
    for (of, _), node in seats.items():
        if role in (None, of):
            counts[node] = counts.get(node, 0) + 1
    return counts


def _by_server(seats: Mapping[Place, str]) -> dict[int, str]:
    return {id: node for (role, id), node in seats.items() if role == "server"}


def _by_node(seats: Mapping[int, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for server in sorted(seats):
        found.setdefault(seats[server], []).append(server)
    return found


def join_words(words: Sequence[str], last: str) -> str:
    """ "a", "a or b", "a, b or c", "a, b, c or 4 more"."""
    shown = [*words[:NAMES_MAX], *([f"{len(words) - NAMES_MAX} more"] if len(words) > NAMES_MAX else [])]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} {last} {shown[-1]}"


def _count(what: str, count: int) -> str:
    return f"{count} {what}{'s' if count != 1 else ''}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    article = "an" if str(number).startswith("8") or number in (11, 18) else "a"
    return f"{article} {number}{ending}"
