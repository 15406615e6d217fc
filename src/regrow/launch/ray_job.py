"""A run on a cluster that outlives the terminal it was started from: the launcher as a detached actor.

    submit          starts it under a name; it runs until everything that can be wrong is known not to be, and on

What others ask of it, from a terminal, is in `launch/ray_jobs.py`.

The actor runs `launch/local.py` in a thread, as the command itself does on one machine, and keeps what is shown; asking
it costs the run nothing. It stays when the run has ended, for whoever asks for the result, until it is fetched away by
`stop`, replaced by another of its name, or `KEEP_SECONDS` have passed. One that was refused has no result, and is soon
gone.

When it dies, Ray starts it again, on another node if it must: then it takes the run over (`launch/takeover.py`) from
the processes of the run, which wait for it (`launch/outpost.py`). What a job said before is not there any more.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import msgspec

from regrow.clusters import parse_label
from regrow.config import TrainConfig
from regrow.errors import EXIT_FAILED, RegrowError, UserError
from regrow.launch import local, ray_posts, takeover
from regrow.launch.display import Display, PlainDisplay
from regrow.launch.hosting import Host
from regrow.launch.outpost import Superseded
from regrow.launch.patience import Patience
from regrow.launch.ray_connect import NAMESPACE, connect
from regrow.launch.ray_jobs import ANSWER_SECONDS_MAX, ENDED, FAILED, PREFIX, RUNNING, Failure, Glance, Page, ask, find
from regrow.launch.ray_nodes import list_nodes
from regrow.launch.ray_posts import LAUNCHERS_MAX, Seat
from regrow.launch.rundir import RunDir

KEEP_SECONDS = 86400.0  # Too short: nobody has looked at the result yet. Too long: a small process for each job.
KEEP_REFUSED_SECONDS = 60.0  # of one that was refused before it had a directory: for whoever waits for the reason
READ_SECONDS_MAX = 1.0  # of one question for news
PAGE_LINES_MAX = 200
LINES_KEPT_MAX = 100_000
CHUNK_BYTES = 1 << 20
CALLS_AT_ONCE = 8


class Transcript:
    """What a run shows, kept. The oldest goes where it is too much."""

    def __init__(self, launcher: int = 0) -> None:
        self._changed = threading.Condition()
        self._lines: list[tuple[bool, str]] = []
        self._dropped = launcher << 32  # whoever followed one before it begins with the first line of this one

    def open(self, *, is_result: bool) -> TextIO:
        """As a stream that a display prints to."""
        return _Stream(self, is_result)  # type: ignore[return-value]

    def add(self, is_result: bool, line: str) -> None:
        with self._changed:
            self._lines.append((is_result, line))
            if len(self._lines) > LINES_KEPT_MAX:
                self._dropped += len(self._lines) - LINES_KEPT_MAX
                del self._lines[:-LINES_KEPT_MAX]
            self._changed.notify_all()

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def read(self, since: int, seconds: float, over: Callable[[], bool]) -> tuple[tuple[tuple[bool, str], ...], int]:
        """Lines from that one on, and the number of the next."""
        with self._changed:
            self._changed.wait_for(lambda: self._dropped + len(self._lines) > since or over(), seconds)
            first = max(0, since - self._dropped)
            found = tuple(self._lines[first : first + PAGE_LINES_MAX])
            return found, self._dropped + first + len(found)

    @property
    def last(self) -> str:
        with self._changed:
            return next((line for _, line in reversed(self._lines) if line.strip()), "")


class _Stream:
    def __init__(self, transcript: Transcript, is_result: bool) -> None:
        self._transcript, self._is_result, self._pending = transcript, is_result, ""

    def write(self, text: str) -> int:
        *lines, self._pending = (self._pending + text).split("\n")
        for line in lines:
            self._transcript.add(self._is_result, line)
        return len(text)

    def flush(self) -> None:
        pass


class Job:
    """The launcher of a run, in a process of its own."""

    def __init__(self, name: str, options: dict[str, Any], *, overwrite: bool, directory: str) -> None:
        if os.path.isdir(directory):
            os.chdir(directory)
        self._name = name
        self._config = TrainConfig.from_dict(options)
        self._overwrite = overwrite
        self._seat = _take_seat(name, self._config)
        self._transcript = Transcript(0 if self._seat is None else self._seat.launcher)
        self._over: Over | None = None  # how the run ended with another launcher
        self._run: Any = None  # once it has a directory
        self._state = RUNNING
        self._failure: Failure | None = None
        threading.Thread(target=self._train, name="run", daemon=True).start()

    # -- for whoever asks --------------------------------------------------------------------------------------

    def read(self, since: int, seconds: float = READ_SECONDS_MAX) -> Page:
        lines, following = self._transcript.read(since, seconds, lambda: self._state != RUNNING)
        # Its end is told when all lines are.
        is_all = len(lines) < PAGE_LINES_MAX
        return Page(lines, following, self._state if is_all else RUNNING, self._run is not None, self._failure)

    def glance(self) -> Glance:
        if self._over is not None:
            return Glance(self._name, self._state, self._transcript.last, self._over.directory, self._over.node)
        return Glance(self._name, self._state, self._transcript.last, str(self._root or ""), os.uname().nodename)

    def stop(self, save: bool) -> str | None:
        """None, or why not."""
        if self._state != RUNNING or self._run is None:
            return None if self._state != RUNNING else "it has not begun yet"
        if save and not self._config.merges:
            return "it makes no checkpoints: it was started without --ckpt"
        if save:
            self._run.farewell.begin()
        else:
            self._run.signals.stop()
        return None

    def list_files(self) -> list[tuple[str, int]]:
        """Of the run directory: path and size."""
        root = self._root
        if root is None or not root.is_dir():
            return []
        return [(str(path.relative_to(root)), path.stat().st_size) for path in root.rglob("*") if path.is_file()]

    def read_file(self, path: str, offset: int) -> bytes:
        root = self._root
        assert root is not None
        with (root / path).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)

    @property
    def _root(self) -> Path | None:
        if self._over is not None:
            return Path(self._over.directory) if self._over.directory else None
        return None if self._run is None else self._run.run_dir.path.resolve()

    # -- the run -----------------------------------------------------------------------------------------------

    def _train(self) -> None:
        try:
            self._train_or_go_on()
            self._state = ENDED
        except Superseded:
            os._exit(1)  # this was taken for dead, and another is the launcher
        except RegrowError as error:
            self._failure = Failure(error.message, error.hint, error.exit_code)
        except BaseException:
            self._failure = Failure(f"a bug in the launcher:\n{traceback.format_exc()}", None, EXIT_FAILED)
        if self._failure is not None:
            self._state = FAILED
        if self._seat is not None and self._over is None:
            over = Over(failure=self._failure, directory=str(self._root or ""), node=os.uname().nodename)
            ray_posts.note_over(self._seat, msgspec.json.encode(over))
        self._transcript.notify()
        time.sleep(KEEP_REFUSED_SECONDS if self._root is None else KEEP_SECONDS)
        self._leave()

    def _train_or_go_on(self) -> None:
        display = PlainDisplay(*[self._transcript.open(is_result=is_result) for is_result in (False, True)])
        if self._seat is None or self._seat.launcher == 0:
            local.train(
                self._config,
                overwrite=self._overwrite,
                display=display,
                on_start=self._note_start,
                seat=self._seat,
            )
            return
        over = ray_posts.read_over(self._seat)
        if over is not None:
            self._over = msgspec.json.decode(over, type=Over)
            self._failure = self._over.failure
            display.say(f"this run had ended before its launcher was lost; its directory: {self._over.directory}")
        else:
            go_on(connect(self._config.address), self._config, self._seat, display=display, on_start=self._note_start)

    def _leave(self) -> None:
        """For good: Ray would start it again."""
        import ray

        if self._seat is not None:
            ray_posts.forget(self._seat.actor)
            with contextlib.suppress(Exception):  # the cluster may be gone
                ray.kill(ray.get_runtime_context().current_actor, no_restart=True)
        os._exit(0)

    def _note_start(self, run: Any) -> None:
        self._run = run


class Over(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, and where its directory is."""

    failure: Failure | None
    directory: str
    node: str


def _take_seat(name: str, config: TrainConfig) -> Seat | None:
    """None: nobody follows this launcher."""
    if config.cluster == "local":  # its processes end with this one
        return None
    if config.saves_own:  # what partial recovery has planned is in its launcher alone
        return None
    import ray

    return ray_posts.claim_seat(ray, PREFIX + name)


def go_on(
    ray: Any, config: TrainConfig, seat: Seat, *, display: Display, on_start: Callable[[Any], object]
) -> dict[str, Any]:
    """As `local.train`, with what an earlier launcher has left."""
    found = ray_posts.take_over(ray, seat)
    try:
        memo = takeover.find_memo(found)
        token = ray_posts.read_token(ray, seat, found)
    except BaseException:
        ray_posts.clear(ray, seat)
        raise
    host = Host(config, seat=seat, inherits=True)
    run_dir, is_old = RunDir.go_on(Path(memo.directory), run=memo.run, config=config)
    with contextlib.closing(run_dir):
        run = local.Launch(config, run_dir, display, host, Patience(), takeover.recall_start(memo.start))
        run.asked = takeover.recall_start(memo.asked)
        run.run_id, run.token, run.files = memo.run, token, host.open_files(overwrite=False)
        run.inherited = takeover.Inherited(
            memo=memo, found=tuple(found), room=ray_posts.find_room(seat), is_old_directory=is_old
        )
        on_start(run)
        return run.run()


# -- how it begins -------------------------------------------------------------------------------------------


def submit(ray: Any, config: TrainConfig, *, name: str, overwrite: bool) -> Any:
    """The actor of a new job. It runs on this node, where there is one, so that its directory is here; or where
    `--node-label launcher:KEY=VALUE` says."""
    old = find(ray, name, missing_ok=True)
    if old is not None:
        if ask(ray, old.glance.remote, name).state == RUNNING:
            raise _refuse_name(name)
        ray.kill(old, no_restart=True)
        _await_gone(ray, name)
        ray_posts.forget(old._actor_id.hex())
    job = ray.remote(Job).options(
        name=PREFIX + name,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_restarts=0 if config.saves_own else LAUNCHERS_MAX,
        max_task_retries=0,
        max_concurrency=CALLS_AT_ONCE,
        **_choose_node(ray, config),
    )
    try:
        return job.remote(name, config.to_dict(), overwrite=overwrite, directory=os.getcwd())
    except ValueError:  # somebody else's has it since
        raise _refuse_name(name) from None


def _refuse_name(name: str) -> UserError:
    return UserError(f"a job of the name {name} is running", hint=f"regrow attach {name}, or another --job")


def _choose_node(ray: Any, config: TrainConfig) -> dict[str, Any]:
    """For the launcher, and for those that follow it."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    wanted = {key: value for role, key, value in map(parse_label, config.node_label) if role == "launcher"}
    if not wanted:
        here = ray.get_runtime_context().get_node_id()
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=True)}
    nodes, _ = list_nodes(ray)
    if not any(wanted.items() <= node.labels.items() for node in nodes):
        words = ", ".join(f"{key}={value}" for key, value in wanted.items())
        raise UserError(f"no node has the label {words}, for the launcher", hint="`ray start --labels` gives them")
    return {"label_selector": wanted}


def _await_gone(ray: Any, name: str) -> None:
    deadline = time.monotonic() + ANSWER_SECONDS_MAX
    while find(ray, name, missing_ok=True) is not None and time.monotonic() < deadline:
        time.sleep(0.05)
