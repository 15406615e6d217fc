"""The nodes of a Ray cluster, as `launch/placement.py` wants them; and whether each of them can run our processes.

Asked before anything is started: a task on every node says which Python, Regrow and build of it are there, and whether
it can reach what the run needs. What is wrong is one error that names the node.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regrow.checkpoint.address import split_cut
from regrow.checkpoint.storage import Storage
from regrow.clusters import parse_label
from regrow.config import TrainConfig
from regrow.errors import RegrowError, UserError
from regrow.launch.placement import Need, Node, NoRoom, Seats, Stripes, Wish, plan_seats
from regrow.launch.ray_connect import reach
from regrow.launch.version import version
from regrow.protection import ErasureCode

HEAD_RESOURCE = "node:__internal_head__"
ID_LABEL = "ray.io/node-id"
# For Ray to start a process on a node and to get an answer of it. Too small: a cold node counts as a broken one. Too
# large: the user waits for a node that hangs.
PROBE_SECONDS_MAX = 120.0


def ask_node(ray: Any, node: str, function: Callable[..., Any], *words: Any) -> Any:
    """Runs that function on that node, once, in a process that ends with it: Ray would keep one that idles there for
    as long as the cluster lives, for half a percent of a processor and a hundred megabytes."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(function)
    return task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(*words)


# -- what there is ------------------------------------------------------------------------------------------


class Where(NamedTuple):
    """Where a node is: for other nodes, and for the user."""

    host: str
    port: int  # of Ray there
    name: str


def list_nodes(ray: Any) -> tuple[list[Node], dict[str, Where]]:
    """Those that live, with what is free there; where they are, by id."""
    from ray._private.state import available_resources_per_node

    return read_nodes(ray.nodes(), available_resources_per_node())


def read_nodes(
    described: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]]
) -> tuple[list[Node], dict[str, Where]]:
    """The same, of what Ray says of its nodes, and of what is free on each."""
    entries = [entry for entry in described if entry["Alive"]]
    names = _name_nodes(entries)
    nodes = [
        Node(
            id=entry["NodeID"],
            name=names[entry["NodeID"]],
            free=_read_resources(free.get(entry["NodeID"], entry["Resources"])),
            labels=dict(entry.get("Labels") or {}),
            is_head=HEAD_RESOURCE in entry["Resources"],
        )
        for entry in entries
    ]
    where = {
        entry["NodeID"]: Where(entry["NodeManagerAddress"], entry["NodeManagerPort"], names[entry["NodeID"]])
        for entry in entries
    }
    return sorted(nodes, key=lambda node: (node.name, node.id)), where


def _name_nodes(entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The name or address of a node; with a piece of its id where several have the same."""
    plain = {
        entry["NodeID"]: entry.get("NodeName") or entry.get("NodeManagerHostname") or entry["NodeManagerAddress"]
        for entry in entries
    }
    taken = list(plain.values())
    return {id: name if taken.count(name) == 1 else f"{name}#{id[:6]}" for id, name in plain.items()}


def _read_resources(found: Mapping[str, float]) -> Need:
    return Need(cpus=found.get("CPU", 0.0), memory_bytes=int(found.get("memory", 0.0)), gpus=found.get("GPU", 0.0))


# -- what is wanted -----------------------------------------------------------------------------------------


def make_wish(config: TrainConfig, server_bytes: int) -> Wish:
    """What a run wants of a cluster. `server_bytes`: as much as a server is counted to take."""
    code = config.code
    copies = 0 if code is None else code.copies
    if isinstance(code, ErasureCode):
        stripes = Stripes(servers=config.servers, k=code.k, r=code.r, rings=code.rings)
    else:
        stripes = Stripes(servers=config.servers, k=1, r=copies)
    memory_bytes = config.server_memory if config.server_memory is not None else server_bytes
    labels: dict[str, dict[str, str]] = {}
    for text in config.node_label:
        role, name, value = parse_label(text)
        labels.setdefault(role, {})[name] = value
    return Wish(
        stripes=stripes,
        workers=config.workers,
        spares=copies,
        needs={
            "server": Need(cpus=config.server_cpus, memory_bytes=memory_bytes),
            "worker": Need(cpus=config.worker_cpus, gpus=config.worker_gpus),
        },
        labels=labels,
        per_node=config.servers_per_node,
    )


def plan(nodes: Sequence[Node], wish: Wish) -> Seats:
    """Who sits where, or a UserError that says what is wanted and what there is."""
    try:
        return plan_seats(nodes, wish)
    except NoRoom as problem:
        hint = "more nodes, or less --server-cpus, --server-memory or --worker-cpus"
        raise UserError(str(problem), hint=hint) from None


# -- can they run it? ---------------------------------------------------------------------------------------


class Probe(NamedTuple):
    """What a node says of itself."""

    python: str
    version: str
    build: str
    problems: tuple[str, ...]


class Asked(NamedTuple):
    """What a node is asked about: files (with their size or digest), a file that was just made, where the other nodes
    are (name, host, port), and storage."""

    files: tuple[tuple[str, str], ...]
    marker: str | None
    peers: tuple[tuple[str, str, int], ...] = ()
    urls: tuple[str, ...] = ()


def probe(asked: Asked) -> Probe:
    """Runs on a node."""
    problems = []
    for path, digest in asked.files:
        found = digest_file(path)
        if found is None:
            problems.append(f"there is no {path} there")
        elif found != digest:
            problems.append(f"{path} is another one there")
    if asked.marker is not None and not os.path.exists(asked.marker):
        problems.append(f"{os.path.dirname(asked.marker)} is not the same directory there")
    problems += [f"it cannot reach node {name} at {host}" for name, host, port in asked.peers if not reach(host, port)]
    problems += [problem for url in asked.urls if (problem := _look_at_storage(url)) is not None]
    return Probe(python=_describe_python(), version=version(), build=digest_build(), problems=tuple(problems))


def _look_at_storage(url: str) -> str | None:
    """What is wrong with it from here."""
    try:
        missing = Storage.open(url, attempts=1).find_missing()
    except RegrowError as error:
        return f"it cannot reach {url}: {error.message}"
    return None if missing is None else f"{url}: {missing}"


def _describe_python() -> str:
    return ".".join(map(str, sys.version_info[:2]))


def digest_build() -> str:
    """Of the extension: rows and parities are its business, so all nodes must have the same."""
    from regrow import _kernels

    found = digest_file(str(_kernels.__file__), whole=True)
    return "none" if found is None else found[:12]


def digest_file(path: str, *, whole: bool = False) -> str | None:
    """Its size; or, of a small one or where that is asked for, the digest of its bytes. None: there is none."""
    try:
        if os.path.isdir(path):
            return "a directory"
        size = os.path.getsize(path)
        if size > 1 << 20 and not whole:
            return f"{size} bytes"
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        return None


def check_nodes(ray: Any, nodes: Sequence[Node], where: Mapping[str, Where], config: TrainConfig) -> None:
    """Raises a UserError that names the first node which cannot run this, and why."""
    with _make_marker(config) as marker:
        files = tuple((path, digest) for path in list_files(config) if (digest := digest_file(path)) is not None)
        peers = tuple((at.name, at.host, at.port) for at in where.values())
        asked = Asked(files=files, marker=marker, peers=peers, urls=list_urls(config))
        answers = [(node, ask_node(ray, node.id, probe, asked)) for node in nodes]
        own = Probe(python=_describe_python(), version=version(), build=digest_build(), problems=())
        for node, answer in answers:
            _check_answer(ray, node, answer, own)


def _check_answer(ray: Any, node: Node, answer: Any, own: Probe) -> None:
    try:
        found: Probe = ray.get(answer, timeout=PROBE_SECONDS_MAX)
    except ray.exceptions.GetTimeoutError:
        raise RegrowError(
            f"node {node.name} did not answer within {PROBE_SECONDS_MAX:.0f} s", hint="is it overloaded, or hung?"
        ) from None
    except ray.exceptions.RayError as error:
        words = [line for line in str(error).splitlines() if line.strip()]
        hint = "install the same Regrow there" if "regrow" in str(error) else None
        raise UserError(f"node {node.name} cannot run Regrow: {words[-1] if words else error}", hint=hint) from None
    for what in ("python", "version", "build"):
        here, there = getattr(own, what), getattr(found, what)
        if here != there:
            name = {"python": "Python", "version": "Regrow", "build": "a Regrow built as"}[what]
            raise UserError(
                f"node {node.name} has {name} {there}, this one has {here}", hint="install the same on every node"
            )
    if found.problems:
        raise UserError(
            f"node {node.name}: {found.problems[0]}",
            hint="all nodes need what the run reads: a shared file system or a URL",
        )


def list_files(config: TrainConfig) -> list[str]:
    """Paths that processes of a run read; and the directory that they are relative to, if they are."""
    paths = [str(config.data_path)] if config.data_path is not None and not config.script else []
    paths += [path for path in (config.schema, config.model) if path is not None and path.endswith(".toml")]
    if config.script and config.script[0] != "-m":
        paths.append(config.script[0])
    urls = [url for url in (config.ckpt, config.resume) if url is not None and "://" not in url]
    paths += [split_cut(url)[0] for url in (config.resume,) if url is not None and url in urls]
    is_relative = any(not os.path.isabs(path) for path in (*paths, *urls)) or bool(config.script)
    return [*map(os.path.abspath, paths), *([os.getcwd()] if is_relative else [])]


def list_urls(config: TrainConfig) -> tuple[str, ...]:
    """Storage that is no directory, which every node has to reach."""
    resume = None if config.resume is None else split_cut(config.resume)[0]
    return tuple({url: None for url in (config.ckpt, resume, config.publish) if url and "://" in url})


@contextlib.contextmanager
def _make_marker(config: TrainConfig) -> Iterator[str | None]:
    """A file where checkpoints go, if that is a directory: whoever does not see it has another one."""
    if config.ckpt is None or "://" in config.ckpt:
        yield None
        return
    directory = Path(config.ckpt).absolute()
    is_new = not directory.exists()
    path = directory / f".regrow-probe-{secrets.token_hex(8)}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    except OSError as error:
        raise UserError(f"cannot write to {directory}: {error.strerror}", hint="choose another --ckpt") from None
    try:
        yield str(path)
    finally:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            if is_new:
                directory.rmdir()
