"""The second backend: processes on the nodes of a Ray cluster, each behind an actor.

    this process -> actor on a node (`launch/outpost.py`) -> the ordinary child (`launch/child.py`)

Ray starts the actors where this file says, and says who is gone; nothing of a run's data passes through it, only the
lines of `launch/orders.py` and `launch/reports.py`: of each direction one call is under way for each process, with
whatever there is by then. Nothing is ever restarted or retried by Ray (`max_restarts=0`, `max_task_retries=0`): a word
must never reach another incarnation.

Who sits where is decided by `launch/placement.py`. Room for servers and spares is reserved at the start by one
placement group; whoever comes later takes what is free of it, or of its node. Where there is no room, a process waits
for it, and that is told.

A run that is a job (`seat`) may have another launcher after this one: its actors and its room are detached, found by
name, and outlive this process (`launch/ray_posts.py`).

The rule to keep: a process of which Ray says that it is gone has ended; so has one whose actor does not answer when it
is to be killed; and so have all on a node where none of several answers. Ray's own word may come much later.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import signal
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from regrow.core.identity import Identity
from regrow.errors import RegrowError, UserError
from regrow.launch.backend import KILL_SECONDS_MAX, Begun, Delayed, Ended, Exit, News, Noted, Said, name_of
from regrow.launch.lines import encode
from regrow.launch.orders import Assignment
from regrow.launch.outpost import GATHER_SECONDS, HEAR_SECONDS_MAX, REMOTE_COMMAND, Heard, Outpost, Superseded
from regrow.launch.placement import (
    Choice,
    Need,
    Node,
    Seats,
    Wish,
    choose_node,
    describe_safety,
    join_words,
    rank_spare,
)
from regrow.launch.ray_connect import NAMESPACE
from regrow.launch.ray_nodes import ID_LABEL, ask_node, list_nodes, plan
from regrow.launch.ray_posts import Found, Seat, leave
from regrow.launch.ray_process import Bundle, RemoteProcess, make_options, make_resources
from regrow.launch.rundir import Logs
from regrow.launch.tiers import name_directory

ANYWHERE = "tcp:0.0.0.0:0"
POLL_SECONDS = 0.1
GROUP_SECONDS_MAX = 60.0  # for Ray to reserve what it says is free
ROOM_SECONDS = 1.0  # between two looks for room
# Silent for so long, an outpost that is to be killed is out of reach. It answers within `HEAR_SECONDS_MAX`, whatever
# its child does.
UNREACHABLE_SECONDS = 2.5
# ... and a node with several outposts, of which none answers, is gone. Too small: a network that stands still for a
# moment costs a node. Too large: workers there are missed late; servers are missed by the coordinator anyway.
NODE_SILENT_SECONDS = 10.0
OWN_PAUSE_SECONDS = 1.0  # after such a gap this process was not there itself
CALLS_AT_ONCE = 6  # of an outpost: hear, tell, act, keep, and as a launcher before this one may still be about
SERVER_ROLES = ("server", "standby")


class RayProcesses:
    """All processes of a run on a cluster; a `Backend`. `ray` is the library, connected."""

    def __init__(
        self,
        *,
        ray: Any,
        logs: Logs,
        wish: Wish,
        command: Sequence[str] = REMOTE_COMMAND,
        directory: str | None = None,
        seat: Seat | None = None,
        gather_seconds: float = GATHER_SECONDS,
    ) -> None:
        self.seat = seat
        self._gather_seconds = gather_seconds
        self._launcher = 0 if seat is None else seat.launcher
        self._memo, self._memo_number, self._token = b"", 0, ""
        self._posts = 0
        self._superseded = False
        self.handles: list[RemoteProcess] = []
        self._ray = ray
        self._logs = logs
        self._wish = wish
        self._command = tuple(command)
        self._directory = directory
        self._outpost = ray.remote(Outpost)
        self._arrived: queue.SimpleQueue[tuple[RemoteProcess | str, str, Any] | None] = queue.SimpleQueue()
        self._planned: Seats = {}
        self._bundles: list[Bundle] = []
        self._group: Any = None
        self._news: list[News] = []  # to be told by the next `wait`
        self._room_due = 0.0
        self._looked_at = time.monotonic()
        self._gone: set[str] = set()  # nodes that we count as lost, whatever Ray says
        # Nodes where an actor could not be reached, and who that was; until a task there is answered, or is not.
        self._doubted: dict[str, list[str]] = {}
        self._delays: dict[Identity, str] = {}  # who waits, and for what
        self._nodes, self._where = list_nodes(ray)
        self._base = {node.id: node for node in self._nodes}  # as they were before anything of ours was there
        self._safety = ""  # as it was said
        self._safe_seats: dict[int, str] = {}
        self._safe_words = ""
        self._closed = False

    # -- the start ---------------------------------------------------------------------------------------------

    def reserve(self) -> str:
        """Decides who sits where, and reserves room for servers and spares. Says what is survived."""
        self._planned = plan(self._nodes, self._wish)
        from ray.util.placement_group import placement_group

        nodes = [node for (role, _), node in self._planned.items() if role in SERVER_ROLES]
        need = self._wish.need("server")
        self._group = placement_group(
            [make_resources(need) for _ in nodes],
            strategy="STRICT_SPREAD" if len(set(nodes)) == len(nodes) else "SPREAD",
            bundle_label_selector=[{ID_LABEL: node} for node in nodes],
            **({} if self.seat is None else {"name": self.seat.group, "lifetime": "detached"}),
        )
        if not self._group.wait(GROUP_SECONDS_MAX):
            self.close()
            raise UserError(
                f"Ray did not reserve {need} on each of {len(set(nodes))} nodes within {GROUP_SECONDS_MAX:.0f} s",
                hint="does another job take them? `ray status` says what is free",
            )
        self._bundles = [Bundle(index, node) for index, node in enumerate(nodes)]
        self._safety = self._describe_safety()
        return self._safety

    def adopt(self, found: Found, *, template: Assignment, whole_logs: bool) -> RemoteProcess:
        """A process that an earlier launcher started, and that this one hears from now on."""
        estate = found.estate
        assert estate.who is not None and estate.born is not None
        handle = RemoteProcess(
            who=estate.who,
            assignment=msgspec.structs.replace(template, identity=estate.who),
            backend=self,
            log_path=self._logs.log(estate.born.role, estate.born.id, estate.born.incarnation),
            node=found.node,
            actor=found.actor,
            pid=estate.pid,
            heard_at=time.monotonic(),
            whole_log=whole_logs,
        )
        self.handles.append(handle)
        if estate.bundle is not None and estate.bundle < len(self._bundles):
            handle.bundle = self._bundles[estate.bundle]
            handle.bundle.user = handle
        else:
            self._give_back(found.node, self._wish.need(estate.who.role))
        self._ask(handle)
        return handle

    def adopt_lost(self, who: Identity, *, template: Assignment, exit: Exit) -> RemoteProcess:
        """One that was there, and is not found any more."""
        path = self._logs.log(who.role, who.id, who.incarnation)
        assignment = msgspec.structs.replace(template, identity=who)
        handle = RemoteProcess(who=who, assignment=assignment, backend=self, log_path=path, exit=exit)
        self.handles.append(handle)
        return handle

    def adopt_room(self, group: Any, nodes: Sequence[str]) -> None:
        """... and the room that it reserved. What of it was on lost nodes is gone."""
        self._group = group
        self._bundles = [Bundle(index, node) for index, node in enumerate(nodes)]
        for node in nodes:
            self._give_back(node, self._wish.need("server"))

    def _give_back(self, node: str, need: Need) -> None:
        """What is ours was not free when this launcher looked, and is taken off again wherever room is counted."""
        if node in self._base:
            self._base[node] = self._base[node].take(need, -1)

    def keep(self, memo: bytes, token: str) -> None:
        """For a launcher after this one, in every place."""
        if self.seat is None or memo == self._memo:
            return
        self._memo, self._token = memo, token
        self._memo_number += 1
        for handle in self._list_running():
            self._leave_memo(handle)

    def _leave_memo(self, handle: RemoteProcess) -> None:
        if self._memo and handle.actor is not None:
            told = handle.actor.keep.remote(self._memo, self._memo_number, self._token, launcher=self._launcher)
            self._call(handle, "kept", told)

    def _describe_safety(self) -> str:
        servers = {id: node for (role, id), node in self._list_seats().items() if role == "server"}
        if servers != self._safe_seats:  # with 64 servers it takes a twentieth of a second
            names = {id: at.name for id, at in self._where.items()}
            self._safe_seats, self._safe_words = servers, describe_safety(self._wish.stripes, servers, names)
        return self._safe_words

    def _list_seats(self) -> Seats:
        """Who sits where, or sat last; as planned, who was not started yet. Of spares only those that run."""
        seats = {place: node for place, node in self._planned.items() if place[0] != "standby"}
        for handle in self.handles:
            if handle.node is not None and (handle.who.role != "standby" or handle.exit is None):
                seats[handle.who.role, handle.who.id] = handle.node
        return seats

    def name_node(self, node: str | None) -> str:
        return "no node" if node is None else self._where[node].name

    # -- a backend ---------------------------------------------------------------------------------------------

    def choose_address(self, who: Identity, *, before: str | None) -> str:
        """Where it is started decides: see `address`."""
        return ANYWHERE

    def address(self, assignment: Assignment, node: str | None) -> Assignment:
        """At its node's own address, with its rows in its node's own directory."""
        assert node is not None
        if assignment.tiers is not None:
            own = name_directory(assignment.tiers.directory, node)
            tiers = msgspec.structs.replace(assignment.tiers, directory=own)
            assignment = msgspec.structs.replace(assignment, tiers=tiers)
        if assignment.listen != ANYWHERE:
            return assignment
        return msgspec.structs.replace(assignment, listen=f"tcp:{self._where[node].host}:0")

    def start(self, assignment: Assignment) -> RemoteProcess:
        who = assignment.identity
        path = self._logs.log(who.role, who.id, who.incarnation)
        self._logs.open_log(who.role, who.id, who.incarnation).close()
        handle = RemoteProcess(who=who, assignment=assignment, backend=self, log_path=path)
        self.handles.append(handle)
        self._try_to_start(handle)
        return handle

    def wait(self, seconds: float) -> list[News]:
        now = time.monotonic()
        if now - self._looked_at > OWN_PAUSE_SECONDS:  # nobody can have answered that
            for handle in self._list_running():
                handle.heard_at = now
        news, self._news = self._news, []
        timeout = 0.0 if news else max(0.0, min(seconds, POLL_SECONDS))
        with contextlib.suppress(queue.Empty):
            entry = self._arrived.get(timeout=timeout) if timeout else self._arrived.get_nowait()
            while True:
                if entry is not None:
                    self._take(*entry, news)
                entry = self._arrived.get_nowait()
        self._look_for_lost()
        self._look_for_room()
        self._say_safety()
        self._looked_at = time.monotonic()
        news += self._news
        self._news = []
        return news

    def wake(self) -> None:
        self._arrived.put(None)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._superseded:  # they are another launcher's
            for handle in self._list_running():
                self._end(handle, Exit(code=0, cause="goes on with another launcher"))
            return
        deadline = time.monotonic() + KILL_SECONDS_MAX
        for handle in self._list_running():
            handle.kill()
        while any(handle.actor is not None for handle in self._list_running()) and time.monotonic() < deadline:
            self.wait(POLL_SECONDS)
        for handle in self._list_running():
            self._end(handle, Exit(code=-signal.SIGKILL, cause="could not be reached any more"))
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            with contextlib.suppress(Exception):  # the cluster may be gone
                remove_placement_group(self._group)

    def prefer(self, heir: Identity, spares: Sequence[Identity]) -> Identity | None:
        """The spare with the best seat for this server; None: a fresh process elsewhere would keep more safe."""
        if heir.role != "server" or not spares:
            return None
        self._refresh()
        free, seats = self._list_free("server"), self._list_seats()
        running = {handle.who: handle.node for handle in self._list_running()}
        doubtful = self._doubted.keys() | self._find_doubtful()
        ranks = {
            spare: rank_spare(heir.id, node, free, seats, self._wish.stripes)
            for spare in spares
            if (node := running.get(spare)) is not None and node not in doubtful
        }
        best = min(ranks, key=lambda spare: ranks[spare], default=None)
        if best is None or ranks[best]:
            return None
        self._news.append(
            Noted(text=f"{name_of(heir)} goes on on node {self.name_node(running[best])}, where a spare was")
        )
        return best

    # -- one process -------------------------------------------------------------------------------------------

    def _try_to_start(self, handle: RemoteProcess) -> str | None:
        """None, or why there is no room."""
        who = handle.who
        choice = self._choose(who)
        if choice.node is None:
            return choice.reason
        handle.node = choice.node
        if who.incarnation:
            self._news.append(Noted(text=f"{name(who)} starts on node {self.name_node(choice.node)}: {choice.reason}"))
        options: dict[str, Any] = {
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": CALLS_AT_ONCE,
            "enable_task_events": False,  # a record of each call, which both sides would send to the head
            **make_options(self._wish.need(who.role), is_server=who.role in SERVER_ROLES),
            "scheduling_strategy": self._choose_strategy(handle),
        }
        abandoned: dict[str, Any] = {}
        if self.seat is not None:
            self._posts += 1
            options |= {"name": self.seat.name_post(self._posts), "namespace": NAMESPACE, "lifetime": "detached"}
            abandoned = {"on_abandoned": functools.partial(leave, self.seat)}
        handle.actor = self._outpost.options(**options).remote(
            role=who.role,
            threads=handle.assignment.threads,
            command=self._command,
            directory=self._directory,
            python_path=os.environ.get("PYTHONPATH"),
            bundle=None if handle.bundle is None else handle.bundle.index,
            gather_seconds=self._gather_seconds,
            **abandoned,
        )
        handle.heard_at = time.monotonic()
        self._leave_memo(handle)
        # The token goes through a call alone: what an actor is made with is kept by Ray, and can be looked at.
        handle.outbox.insert(0, encode(self.address(handle.assignment, choice.node)))
        self.send(handle)
        self._ask(handle)
        return None

    def _choose(self, who: Identity) -> Choice:
        """As planned, for the first in a place; later where it is best by then."""
        planned = self._planned.get((who.role, who.id))
        if who.incarnation == 0 and planned is not None and planned not in self._gone:
            return Choice(node=planned, reason="as planned")
        self._refresh()
        seats = {place: node for place, node in self._list_seats().items() if node not in self._gone}
        return choose_node(who, self._list_free(who.role), seats, self._wish)

    def _choose_strategy(self, handle: RemoteProcess) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

        assert handle.node is not None
        bundle = self._find_bundle(handle.node) if handle.who.role in SERVER_ROLES else None
        if bundle is None:
            return NodeAffinitySchedulingStrategy(handle.node, soft=False)
        bundle.user, handle.bundle = handle, bundle
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle.index)

    def _find_bundle(self, node: str) -> Bundle | None:
        return next((bundle for bundle in self._bundles if bundle.node == node and bundle.user is None), None)

    def send(self, handle: RemoteProcess) -> None:
        """What is to be told, one call at a time."""
        if handle.actor is None or handle.is_telling or not handle.outbox or handle.exit is not None:
            return
        data = b"".join(line + b"\n" for line in handle.outbox)
        handle.outbox.clear()
        handle.is_telling = True
        self._call(handle, "told", handle.actor.tell.remote(data, handle.who, launcher=self._launcher))

    def act(self, handle: RemoteProcess, number: int) -> None:
        if handle.exit is not None:
            return
        if handle.actor is None:
            if number in (signal.SIGKILL, signal.SIGTERM):
                self._end(handle, Exit(code=-number))
            return
        self._call(handle, "acted", handle.actor.act.remote(int(number), launcher=self._launcher))

    def _ask(self, handle: RemoteProcess) -> None:
        whole_log, handle.whole_log = handle.whole_log, False
        asked = handle.actor.hear.remote(HEAR_SECONDS_MAX, launcher=self._launcher, whole_log=whole_log)
        self._call(handle, "heard", asked)

    def _call(self, handle: RemoteProcess | str, what: str, answer: Any) -> None:
        future = answer.future()
        future.add_done_callback(lambda done: self._arrived.put((handle, what, done)))

    def _take(self, handle: RemoteProcess | str, what: str, done: Any, news: list[News]) -> None:
        """An answer, or that there is none."""
        problem = done.exception()
        if isinstance(handle, str):
            self._settle_doubt(handle, problem)
            return
        if handle.exit is not None:
            return
        if isinstance(problem, Superseded):
            self._superseded = True
            raise problem
        if problem is not None:
            self._lose(handle, problem)
        elif what == "told":
            handle.is_telling = False
            self.send(handle)
        elif what == "heard":
            heard: Heard = done.result()
            handle.heard_at, handle.pid = time.monotonic(), heard.pid
            self.write_log(handle, heard.log)
            news.extend(Said(handle=handle, report=report) for report in handle.reader.feed(heard.reports))
            if heard.exit is None:
                self._ask(handle)
            else:
                code, cpu_seconds, peak = heard.exit
                peak = handle.reader.peak_rss_bytes or peak
                self._end(handle, Exit(code=code, cpu_seconds=cpu_seconds, peak_rss_bytes=peak))

    def write_log(self, handle: RemoteProcess, data: bytes) -> None:
        if data:
            with self._logs.guard(handle.log_path), handle.log_path.open("ab") as log_file:
                log_file.write(data)

    def _end(self, handle: RemoteProcess, exit: Exit) -> None:
        handle.exit = exit
        if handle.bundle is not None:
            handle.bundle.user = None
        if handle.actor is not None and not self._superseded:
            with contextlib.suppress(Exception):  # it may be gone, and the cluster too
                self._ray.kill(handle.actor, no_restart=True)
        handle.actor = None
        self._news.append(Ended(handle=handle, exit=exit))

    # -- nodes -------------------------------------------------------------------------------------------------

    def _lose(self, handle: RemoteProcess, problem: BaseException) -> None:
        """Its actor is gone, or was never made, or cannot be reached."""
        self._refresh()
        if handle.node not in {node.id for node in self._nodes}:
            self._lose_node(handle.node, "is gone")
        elif handle.killed_at is not None:
            self._end(handle, Exit(code=-signal.SIGKILL))
        elif isinstance(problem, self._ray.exceptions.ActorUnavailableError):
            # It may be dead, or its node, or the network. Whatever it is: nobody goes there before that is known.
            self._doubt(handle)
            self._end(
                handle, Exit(code=-signal.SIGKILL, cause=f"cannot be reached on node {self.name_node(handle.node)}")
            )
        else:
            words = [line.strip() for line in str(problem).splitlines() if line.strip()]
            why = words[-1] if words else type(problem).__name__
            self._end(
                handle, Exit(code=-signal.SIGKILL, cause=f"was lost by Ray on {self.name_node(handle.node)}: {why}")
            )

    def _doubt(self, handle: RemoteProcess) -> None:
        assert handle.node is not None
        if handle.node not in self._doubted:
            self._call(handle.node, "answered", ask_node(self._ray, handle.node, answer))
        self._doubted.setdefault(handle.node, []).append(name(handle.who))

    def _settle_doubt(self, node: str, problem: BaseException | None) -> None:
        if problem is None:
            self._doubted.pop(node, None)
        else:
            self._lose_node(node, "is gone")

    def _lose_node(self, node: str | None, why: str) -> None:
        """All that ran there are gone together."""
        assert node is not None
        lost = [handle for handle in self._list_running() if handle.node == node]
        if node not in self._gone:
            self._gone.add(node)
            names = [*self._doubted.pop(node, []), *(name(handle.who) for handle in lost)]
            self._news.append(
                Noted(text=f"node {self.name_node(node)} {why}, and with it {join_words(names or ['nobody'], 'and')}")
            )
        for handle in lost:
            self._end(
                handle, Exit(code=-signal.SIGKILL, cause=f"was lost with node {self.name_node(node)}, which {why}")
            )

    def _look_for_lost(self) -> None:
        now = time.monotonic()
        by_node: dict[str, list[RemoteProcess]] = {}
        for handle in self._list_running():
            if handle.actor is not None and not handle.pid:
                if handle.killed_at is not None and now - handle.killed_at > UNREACHABLE_SECONDS:
                    self._end(handle, Exit(code=-signal.SIGKILL, cause="was never started by Ray"))
            elif handle.actor is not None and handle.node is not None:
                by_node.setdefault(handle.node, []).append(handle)
        for node, handles in by_node.items():
            silent = min(now - handle.heard_at for handle in handles)
            missed = [h for h in handles if h.killed_at is not None and now - h.killed_at > UNREACHABLE_SECONDS]
            if silent > NODE_SILENT_SECONDS or (missed and silent > UNREACHABLE_SECONDS):
                self._lose_node(node, "does not answer")
                continue
            for handle in missed:
                if now - handle.heard_at > UNREACHABLE_SECONDS:
                    self._end(handle, Exit(code=-signal.SIGKILL, cause="was killed, and cannot be reached"))

    def _look_for_room(self) -> None:
        waiting = [handle for handle in self._list_running() if handle.actor is None]
        if not waiting or self._closed or time.monotonic() < self._room_due:
            return
        self._room_due = time.monotonic() + ROOM_SECONDS
        self._refresh()
        for handle in waiting:
            reason = self._try_to_start(handle)
            if reason is None:
                self._delays.pop(handle.who, None)
                self._news.append(Begun(handle=handle))
            else:
                is_new = self._delays.get(handle.who) != reason
                self._delays[handle.who] = reason
                self._news.append(Delayed(handle=handle, reason=reason, is_new=is_new))

    def _refresh(self) -> None:
        """Who is in the cluster now."""
        try:
            self._nodes, where = list_nodes(self._ray)
        except Exception as error:  # whatever Ray raises when there is no cluster any more
            words = str(error).strip().splitlines()
            raise RegrowError(f"the Ray cluster does not answer any more: {words[0] if words else error!r}") from None
        self._where = {**self._where, **where}
        for node in self._nodes:
            self._base.setdefault(node.id, node)

    def _list_free(self, role: str) -> list[Node]:
        """Nodes that live for all we know, with what is free for this role. Ray's own figures are always late."""
        left = self._gone | self._doubted.keys() | self._find_doubtful()
        found = []
        for node in (self._base[node.id] for node in self._nodes if node.id not in left):
            bundles = [bundle for bundle in self._bundles if bundle.node == node.id]
            node = node.take(self._wish.need("server"), len(bundles))
            for handle in self._list_running():
                if handle.node == node.id and handle.bundle is None:
                    node = node.take(self._wish.need(handle.who.role))
            if role in SERVER_ROLES:
                node = node.take(self._wish.need(role), -sum(bundle.user is None for bundle in bundles))
            found.append(node)
        return found

    def _find_doubtful(self) -> set[str]:
        """Nodes of which nobody has answered lately."""
        now = time.monotonic()
        heard: dict[str, float] = {}
        for handle in self._list_running():
            if handle.node is not None and handle.pid:
                heard[handle.node] = max(heard.get(handle.node, 0.0), handle.heard_at)
        return {node for node, at in heard.items() if now - at > UNREACHABLE_SECONDS}

    def _say_safety(self) -> None:
        """Where it is another than before, and nobody is on the way."""
        servers = [handle for handle in self._list_running() if handle.who.role == "server"]
        if len(servers) == self._wish.stripes.servers and all(handle.pid for handle in servers):
            safety = self._describe_safety()
            if safety != self._safety:
                self._safety = safety
                self._news.append(Noted(text=f"now {safety}"))

    def _list_running(self) -> list[RemoteProcess]:
        return [handle for handle in self.handles if handle.exit is None]


def name(who: Identity) -> str:
    """As the user knows it."""
    return "a spare" if who.role == "standby" else name_of(who)


def answer() -> bool:
    """Runs on a node that is doubted."""
    return True
