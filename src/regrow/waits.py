"""Every wait in this package: who waits for what, how long at most, who notices, and what happens then.

The rule: **every wait has a bound, an owner and a verdict.** Whoever adds one declares it here: the state of a machine
that waits (`core/states.py`), the function that blocks, the constant that bounds it. Tests find the states, the
functions and the constants by themselves and fail for those that nobody declared, and for those that are gone; the
table in `docs/failure-model.md` is made from this file (`make diagrams`).

What only looks like a wait is in `paces.py`. A bound is a constant by its address, an option of the user, or another
wait: then somebody else's verdict ends this one, and that somebody is named.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One line of the table. `bounds`: "module:CONSTANT", "--option", or "wait: NAME" for another line."""

    name: str
    who: str
    what: str
    bounds: tuple[str, ...]
    notices: str
    then: str
    states: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()


WAITS: tuple[Wait, ...] = (
    # -- the launcher and its processes -----------------------------------------------------------------------
    Wait(
        name="answer",
        who="launcher",
        what="any process to answer",
        bounds=("--silent-seconds", "launch.watch:STARTING_SERVER_SECONDS", "launch.watch:MERGER_SECONDS"),
        notices="launcher (`launch/watch.py`)",
        then="it is killed and has a successor; where a death ends the run, the run ends and names it",
        states=("MEMBER.EMPTY", "MEMBER.DEAD"),
    ),
    Wait(
        name="start",
        who="launcher",
        what="a new process to answer for the first time",
        bounds=(
            "launch.watch:START_SECONDS_MAX",
            "launch.watch:START_FACTOR",
            "launch.watch:START_SECONDS_MIN",
            "launch.cluster:START_SECONDS_MAX",
        ),
        notices="launcher",
        then="the same",
        calls=("launch/cluster.py:LocalCluster._await_address",),
    ),
    Wait(
        name="work",
        who="launcher",
        what="a process that answers to end its piece of work: a step, a turn of its loop",
        bounds=("launch.watch:LONGEST_FACTOR", "--silent-seconds", "launch.watch:FIRST_SECONDS_MAX"),
        notices="launcher; the process says how long it is at it",
        then="the same: it is stuck",
        states=("MEMBER.STARTING",),
    ),
    Wait(
        name="progress",
        who="launcher",
        what="anything to move while everybody answers",
        bounds=("launch.patience:Patience.stall",),
        notices="launcher",
        then="the run ends, or begins again from a checkpoint: this would be a mistake in the program",
        calls=("launch/local.py:_Run._until",),
    ),
    Wait(
        name="cause",
        who="launcher",
        what="the first death to show, when its victims were heard before it",
        bounds=("launch.patience:Patience.cause", "launch.cluster:NEWS_SECONDS_MAX"),
        notices="launcher",
        then="the first that was heard counts as the cause",
        calls=("launch/local.py:_Run._gather", "launch/cluster.py:LocalCluster.client"),
    ),
    Wait(
        name="stop",
        who="launcher",
        what="processes to stop when told",
        bounds=(
            "launch.patience:Patience.stop",
            "launch.patience:Patience.abort",
            "launch.patience:Patience.term",
            "launch.cluster:STOP_SECONDS",
        ),
        notices="launcher",
        then="SIGTERM, then SIGKILL",
        calls=("launch/backend.py:end", "launch/cluster.py:LocalCluster.close"),
    ),
    Wait(
        name="kill",
        who="launcher",
        what="the end of a process after SIGKILL",
        bounds=("launch.backend:KILL_SECONDS_MAX",),
        notices="launcher",
        then="the system does not let it go: it counts as ended, and is left behind",
        calls=("launch/processes.py:LocalProcesses.close", "launch/ray.py:RayProcesses.close"),
    ),
    Wait(
        name="room",
        who="launcher of a cluster",
        what="a node with room for a successor",
        bounds=("wait: rows",),
        notices="launcher, which says what is missing; the user",
        then="it goes on when a node joins; workers that have waited too long are followed; the user may end the run",
    ),
    Wait(
        name="node",
        who="launcher of a cluster",
        what="an outpost to answer, or any on its node",
        bounds=("launch.ray:UNREACHABLE_SECONDS", "launch.ray:NODE_SILENT_SECONDS", "launch.outpost:HEAR_SECONDS_MAX"),
        notices="launcher; usually Ray, or the coordinator, before it",
        then="all processes of that node count as ended",
        calls=(
            "launch/outpost.py:Outpost.hear",
            "launch/ray.py:RayProcesses._take",
            "launch/outpost.py:Outpost._reap",
        ),
    ),
    Wait(
        name="cluster",
        who="launcher of a cluster, before anything is started",
        what="an answer of every node; room to be reserved",
        bounds=(
            "launch.ray_nodes:PROBE_SECONDS_MAX",
            "launch.ray_nodes:REACH_SECONDS_MAX",
            "launch.ray:GROUP_SECONDS_MAX",
        ),
        notices="launcher",
        then="an error that names the node",
        calls=("launch/ray.py:RayProcesses.reserve",),
    ),
    Wait(
        name="job",
        who="commands about a job on a cluster",
        what="its launcher to answer",
        bounds=("launch.ray_job:ANSWER_SECONDS_MAX", "launch.ray_job:READ_SECONDS_MAX"),
        notices="the command",
        then="an error; the job goes on",
        calls=("launch/ray_job.py:Transcript.read", "launch/ray_job.py:_await_gone"),
    ),
    Wait(
        name="outpost",
        who="an outpost, and its child",
        what="its launcher to ask, or to read",
        bounds=("launch.outpost:LAUNCHER_SECONDS",),
        notices="the outpost",
        then="the child is killed, and the outpost ends",
        calls=("launch/outpost.py:Outpost._watch_launcher", "launch/outpost.py:Outpost._read"),
    ),
    Wait(
        name="launcher",
        who="any process",
        what="a launcher that is stopped to read its reports",
        bounds=("launch.pipes:LAUNCHER_SECONDS_MAX", "launch.pipes:FLUSH_SECONDS_MAX"),
        notices="the process; its work goes on meanwhile",
        then="it ends; a launcher that died is noticed at once, by its closed pipe",
        calls=("launch/pipes.py:PipeParent.close", "launch/pipes.py:PipeParent._write_late"),
    ),
    Wait(
        name="command",
        who="a spare, or a worker that is through or judges with others",
        what="its next command",
        bounds=("wait: answer",),
        notices="launcher, which asks it all the while; its end closes the pipe",
        then="it ends with the launcher",
        calls=("launch/parents.py:LineParent.next_command", "launch/parents.py:LineParent.on_command"),
    ),
    Wait(
        name="place",
        who="lead",
        what="a place on some host for a process that has none",
        bounds=("launch.local:PLACES_SECONDS_MAX",),
        notices="lead, which says after a moment what it waits for",
        then="the run ends",
    ),
    Wait(
        name="lead",
        who="a place",
        what="its lead, at the start and when the link broke",
        bounds=("launch.keeper:LEAD_SECONDS_MAX",),
        notices="the place; its process goes on meanwhile",
        then="the process is ended, and so is the place",
        calls=("launch/keeper.py:Keeper.run",),
    ),
    # -- servers, as the coordinator sees them -----------------------------------------------------------------
    Wait(
        name="beat",
        who="coordinator",
        what="a sign of a server that serves, or a closed connection to come back",
        bounds=("--silent-seconds", "core.coordinator:SILENT_SECONDS", "core.coordinator:LOST_SECONDS"),
        notices="coordinator",
        then="it counts as dead and has a successor; if that would be a loss of rows: *patience*",
        states=("MEMBER.SERVING", "LINK.OPEN", "LINK.BROKEN"),
    ),
    Wait(
        name="patience",
        who="everybody",
        what="a server that seems dead and whose loss would be one of rows",
        bounds=("--patience", "core.coordinator:PATIENCE_SECONDS"),
        notices="coordinator; the display counts",
        then="it is killed; the run falls back to a checkpoint, or ends with `DataLoss`",
    ),
    Wait(
        name="question",
        who="coordinator, before it says that rows are lost",
        what="replacements that count as down to say how they are",
        bounds=("core.coordinator:ASKED_SECONDS_MAX", "wait: patience"),
        notices="coordinator",
        then="one that is heard and does not answer counts as not recovered; a silent one is *patience*",
    ),
    Wait(
        name="parted",
        who="a server; then everybody, as pushes are not durable",
        what="an answer of another server, while the coordinator hears both",
        bounds=("core.partings:UNANSWERED_SECONDS_MAX", "wait: patience"),
        notices="the server, which says so in its beats; coordinator",
        then="the one that does not answer is replaced; if its successor does not either, the other one; then the run"
        " falls back to a checkpoint, or ends with `DataLoss`",
    ),
    Wait(
        name="missing",
        who="a new coordinator",
        what="servers that others know of",
        bounds=("core.coordinator:MISSING_SECONDS",),
        notices="coordinator",
        then="as *beat*",
        states=("MEMBER.AWAITED",),
    ),
    Wait(
        name="way back",
        who="coordinator; whoever needs a row",
        what="a replacement to get further: to be ready, rows, parities, a checkpoint",
        bounds=("core.coordinator:BROUGHT_SECONDS_MAX",),
        notices="coordinator, by what its beats say",
        then="it is replaced itself",
        states=("MEMBER.RETURNING", "WAY.LEARNING", "WAY.RETURNING", "WAY.SETTLING", "WAY.FILLING"),
    ),
    # -- workers -----------------------------------------------------------------------------------------------
    Wait(
        name="rows",
        who="worker",
        what="an answer of servers: rows, records, room in the window, a push to be durable",
        bounds=("runtime.client:ANSWER_SECONDS_MAX",),
        notices="first whoever watches the server (*beat*, *answer*); then the worker itself",
        then="`ConnectionLost`: the worker ends, and is followed",
        states=("SESSION.WORKING",),
        calls=(
            "runtime/client.py:Ticket.wait",
            "runtime/client.py:Client.drain",
            "runtime/client.py:Client.parities",
            "runtime/client.py:Client._read",
            "runtime/client.py:Client._write",
            "runtime/client.py:Client.wait_for",
            "runtime/client.py:Client._wait_for_window",
            "nn/embedding.py:EmbeddingBagCollection.drain",
            "nn/embedding.py:_Lookup.forward",
            "nn/embedding.py:_ExpandedLookup.forward",
            "nn/job.py:Job._wait_for_rows",
            "nn/job.py:Job.refresh",
            "nn/job.py:Job.settle",
            "nn/lookup.py:Lookup.expand",
            "nn/lookup.py:Lookup.pool",
        ),
    ),
    Wait(
        name="view",
        who="worker",
        what="the coordinator, the first view, and all servers of it",
        bounds=(
            "runtime.client:COORDINATOR_SECONDS_MAX",
            "runtime.client:ANSWER_SECONDS_MAX",
            "launch.cluster:OPEN_SECONDS_MAX",
            "launch.connect:OPEN_SECONDS_MAX",
        ),
        notices="worker",
        then="`ConnectionLost`: the run ends, as training has not begun",
        states=("SESSION.LOOKING", "SESSION.GREETING", "LINK.NEW"),
        calls=(
            "runtime/client.py:SocketClient._wait_until_open",
            "nn/job.py:Job._begin",
            "runtime/inprocess.py:InProcessCluster.client",
        ),
    ),
    Wait(
        name="own thread",
        who="worker, lead, place",
        what="the thread of its links to start, to answer and to end",
        bounds=("runtime.client:START_SECONDS_MAX", "launch.wires:CALL_SECONDS_MAX"),
        notices="worker, lead, place",
        then="an error; at the end it is left to the process",
        calls=(
            *("runtime/client.py:SocketClient.__init__", "runtime/client.py:SocketClient.close"),
            *("launch/wires.py:Wires._call", "launch/wires.py:Wires.close"),
        ),
    ),
    Wait(
        name="check",
        who="worker 0",
        what="servers on their way back, before parities are compared",
        bounds=("nn.worker:RECOVERY_SECONDS_MAX",),
        notices="worker",
        then="they are compared all the same",
        calls=("nn/worker.py:check", "nn/check.py:check_parity"),
    ),
    # -- connections -------------------------------------------------------------------------------------------
    Wait(
        name="connect",
        who="whoever dials",
        what="a connection, and its handshake",
        bounds=(
            "runtime.transport:CONNECT_SECONDS_MAX",
            "runtime.connection:HANDSHAKE_SECONDS_MAX",
            "launch.connect:ANSWER_SECONDS_MAX",
        ),
        notices="the dialer",
        then="dialed again, until the peer is forgotten",
        calls=("runtime/transport.py:Endpoint.connect", "runtime/transport.py:Endpoint._keep_open"),
    ),
    Wait(
        name="refusals",
        who="whoever dials",
        what="a peer that answers with nothing but refusals",
        bounds=("runtime.transport:REFUSED_SECONDS_MAX",),
        notices="the dialer",
        then="it counts as refused for good: a server or worker ends, and is followed",
    ),
    Wait(
        name="stranger",
        who="whoever listens",
        what="the first byte of a new connection; the whole handshake; that of TLS before it",
        bounds=(
            *("runtime.connection:FIRST_BYTE_SECONDS_MAX", "runtime.connection:HANDSHAKE_SECONDS_MAX"),
            "runtime.tls:TLS_SECONDS_MAX",
        ),
        notices="the listener",
        then="the connection is closed; where there are too many, the oldest that is silent",
    ),
    Wait(
        name="vanished host",
        who="both ends of a connection over TCP",
        what="the other host to acknowledge",
        bounds=(
            "runtime.connection:KEEPALIVE_IDLE_SECONDS",
            "runtime.connection:KEEPALIVE_EVERY_SECONDS",
            "runtime.connection:UNACKNOWLEDGED_SECONDS_MAX",
        ),
        notices="the system",
        then="the connection is lost, and dialed again",
        calls=("runtime/transport.py:Endpoint._keep_connection",),
    ),
    Wait(
        name="quiet coordinator",
        who="servers and workers",
        what="any frame of the coordinator, over a connection that is open",
        bounds=("runtime.transport:QUIET_SECONDS_MAX",),
        notices="whoever dialed it",
        then="dialed again: another may be in its place",
    ),
    Wait(
        name="close",
        who="any process that ends",
        what="its peers to read the last words and close too",
        bounds=("runtime.connection:CLOSE_SECONDS_MAX", "runtime.transport:STOP_SECONDS_MAX"),
        notices="the process",
        then="connections are cut",
        states=("LINK.OVER",),
        calls=("runtime/transport.py:Endpoint.close",),
    ),
    # -- checkpoints -------------------------------------------------------------------------------------------
    Wait(
        name="cut",
        who="workers, whose pushes are held back",
        what="an asynchronous cut to reach its marks",
        bounds=("core.cut:CUT_SECONDS_MAX", "core.cut:HOLD_SECONDS_MAX"),
        notices="coordinator; a server, if it hears nothing of it",
        then="the cut is given up, and pushes go on",
        states=("CUT.ASKED", "CUT.AWAITING"),
    ),
    Wait(
        name="attempt",
        who="coordinator",
        what="a cut from its first question to its manifest",
        bounds=("core.cuts:ATTEMPT_SECONDS_MAX",),
        notices="coordinator, at a tick",
        then="given up; the next one has all rows again",
        states=(
            "ATTEMPT.ASKING",
            "ATTEMPT.CUTTING",
            "ATTEMPT.STORING",
            "ATTEMPT.WRITING",
            "CUT.CAPTURED",
        ),
    ),
    Wait(
        name="recall",
        who="everybody who needs rows of a server that comes back from its saves",
        what="a storage that does not answer",
        bounds=("runtime.saves:RECALL_SECONDS_MAX", "wait: storage"),
        notices="the server",
        then="all begin again from a checkpoint, if that can be read; else the run ends",
        calls=("runtime/saves.py:OwnLoader._open_patiently",),
    ),
    Wait(
        name="own save",
        who="a server that saves its own rows",
        what="holders of copies to have what it captured, then storage to have it",
        bounds=("core.own_saves:SAVE_SECONDS_MAX", "wait: beat", "wait: staging"),
        notices="the server, at a tick; coordinator, if a holder is gone; the stager",
        then="the save fails, training goes on; the next one has all rows again",
        states=("OWN_SAVE.CAPTURED", "OWN_SAVE.STORING"),
    ),
    Wait(
        name="orphans",
        who="launcher, `regrow ckpt restore`",
        what="servers of a launcher that was killed to let go of their files",
        bounds=("launch.tiers:ORPHANS_SECONDS_MAX",),
        notices="whoever wants the directory",
        then="an error: the directory is in use",
        calls=("launch/tiers.py:StoreLock._wait_for_servers",),
    ),
    Wait(
        name="disk",
        who="whoever needs a row that is on the disk of its server (`--store tiered`)",
        what="the disk to bring it, and room for it in the cache; a checkpoint in its files: space",
        bounds=("core.paging:DISK_SECONDS_MAX", "core.cut:FULL_SECONDS_MAX"),
        notices="the server, at a tick",
        then="`StoreSilent`: the server counts as dead; all begin again from a checkpoint, or the run ends. "
        "Without space the checkpoint fails, and training goes on",
        calls=("runtime/inprocess.py:InProcessCluster._wait_for_disks",),
    ),
    Wait(
        name="storage",
        who="whoever reads or writes checkpoints",
        what="one call of storage, retries included",
        bounds=("checkpoint.storage:TIMEOUT_SECONDS",),
        notices="the caller",
        then="`StorageError`: the cut, fold or load fails; after several hung calls nothing more is tried",
        calls=(
            "checkpoint/storage.py:Storage._call",
            "checkpoint/storage.py:_Call._run",
            "checkpoint/load.py:_Load._chunks_ahead",
            "checkpoint/saves_load.py:SavedRows.rows_newest_first",
            "checkpoint/merge.py:_Writer._wait",
        ),
    ),
    Wait(
        name="look",
        who="commands, launcher",
        what="a path or URL before there is a storage: a mount, a library",
        bounds=("checkpoint.bounded:LOOK_SECONDS_MAX",),
        notices="the caller",
        then="`StorageError`: the command ends",
        calls=("checkpoint/bounded.py:ask",),
    ),
    Wait(
        name="device",
        who="launcher",
        what="torch, in a process of its own, to count CUDA devices (`--device cuda`)",
        bounds=("launch.precheck:DEVICE_SECONDS_MAX",),
        notices="the caller",
        then="the command ends before anything is started",
    ),
    Wait(
        name="staging",
        who="a server's saver, `DeltaCheckpointer`",
        what="staged chunks to move: memory, staging disk, storage",
        bounds=("checkpoint.staging:STALL_SECONDS_MAX",),
        notices="the stager",
        then="the piece is lost, the cut fails, training goes on",
        calls=(
            "checkpoint/staging.py:Stager._wait",
            "checkpoint/staging.py:Stager._stage",
            "checkpoint/staging.py:Stager._wait_for_pace",
            "checkpoint/torch/checkpointer.py:_Copies.__iter__",
            "checkpoint/torch/checkpointer.py:DeltaCheckpointer.save",
            "checkpoint/torch/checkpointer.py:DeltaCheckpointer.close",
            "checkpoint/torch/checkpointer.py:DeltaCheckpointer._join",
        ),
    ),
    Wait(
        name="staging lock",
        who="a server's saver",
        what="another process that begins in the same staging directory",
        bounds=("checkpoint.staging:LOCK_SECONDS_MAX",),
        notices="the stager",
        then="the cut fails; the next one tries again",
        calls=("checkpoint/staging.py:_Locked.__init__",),
    ),
    Wait(
        name="staging end",
        who="a process that ends",
        what="its storing threads",
        bounds=("checkpoint.staging:CLOSE_SECONDS_MAX", "runtime.serve:CLOSE_SECONDS"),
        notices="the stager",
        then="they are left to the end of the process",
        calls=("checkpoint/staging.py:Stager.close", "runtime/serve.py:Node.run"),
    ),
    Wait(
        name="hand over",
        who="a server that loads",
        what="its own loop to take loaded rows",
        bounds=("runtime.checkpoint:HAND_OVER_SECONDS_MAX",),
        notices="the loading thread",
        then="the process ends, its successor loads again",
        calls=("runtime/checkpoint.py:take",),
    ),
    Wait(
        name="backlog",
        who="a server that loads",
        what="parity holders to take what is loaded, as long as it does not shrink",
        bounds=("runtime.checkpoint:BACKLOG_SECONDS_MAX",),
        notices="the loading thread",
        then="the same",
        calls=("runtime/checkpoint.py:Loader._wait_for_holders",),
    ),
    Wait(
        name="last checkpoint",
        who="launcher",
        what="the checkpoint of the trained model, all tries together",
        bounds=("launch.local:SAVE_SECONDS_MAX",),
        notices="launcher",
        then="exit code 5; the model is judged all the same",
    ),
    Wait(
        name="last publication",
        who="launcher",
        what="the publication of the trained model, all tries together",
        bounds=("launch.local:PUBLISH_SECONDS_MAX",),
        notices="launcher",
        then="look-ups have the one before; the run ends as it would have",
    ),
    Wait(
        name="turn",
        who="a checkpoint that is due",
        what="the publication under way",
        bounds=("core.turns:WAIT_SECONDS_MAX",),
        notices="coordinator, at a tick",
        then="the publication is given up, the next one has its rows; a publication waits for a checkpoint's *attempt*",
    ),
    Wait(
        name="yield",
        who="a publication that is due",
        what="servers to store saves of their own",
        bounds=("core.cuts:YIELD_SECONDS_MAX",),
        notices="coordinator, when it asks",
        then="the saves are ended for it",
    ),
    Wait(
        name="first publication",
        who="a replica that starts",
        what="something to be published",
        bounds=("serving.replica:WAIT_SECONDS",),
        notices="the replica",
        then="an error says that nothing was",
        calls=("serving/replica.py:Replica._await_first",),
    ),
    Wait(
        name="replica's end",
        who="whoever closes a replica",
        what="its thread",
        bounds=("serving.replica:CLOSE_SECONDS",),
        notices="the caller",
        then="the thread, which waits for storage, is left behind",
        calls=("serving/replica.py:Replica.close",),
    ),
    Wait(
        name="look-up connection",
        who="`regrow serve-rows`",
        what="a client to ask or to take its answer",
        bounds=("serving.http:SILENT_SECONDS_MAX",),
        notices="the thread of the connection",
        then="it is closed",
    ),
)


def find_constant(address: str) -> float:
    """The value of "module:NAME", or of "module:Class.field" as it is by default."""
    module, _, path = address.partition(":")
    value: Any = importlib.import_module(f"regrow.{module}")
    for name in path.split("."):
        value = getattr(value, name)
        value = value() if isinstance(value, type) else value
    return float(value)


def show_bound(bound: str) -> str:
    """As the table has it: the name, and how long that is."""
    if bound.startswith("wait: "):
        return f"*{bound.removeprefix('wait: ')}*"
    if bound.startswith("--"):
        return f"`{bound}`"
    name = bound.partition(":")[2].rpartition(".")[2]
    if name.endswith("_FACTOR"):
        return f"{find_constant(bound):g} times the longest so far"
    return f"{find_constant(bound):g} s (`{name}`)"


def render() -> Iterator[str]:
    """The lines of the table."""
    yield "| | who | waits for | at most | who notices | then |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for wait in WAITS:
        bounds = ", ".join(show_bound(bound) for bound in wait.bounds)
        yield f"| *{wait.name}* | {wait.who} | {wait.what} | {bounds} | {wait.notices} | {wait.then} |"
