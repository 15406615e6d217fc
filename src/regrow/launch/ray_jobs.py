"""Jobs on a cluster (`launch/ray_job.py`), seen from a terminal: which there are, what they say, how they are stopped,
and their directories. Light: it imports nothing of training, so that `regrow status` is quick."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from regrow.errors import RegrowError, UserError
from regrow.launch.ray_connect import NAMESPACE

PREFIX = "job/"
ANSWER_SECONDS_MAX = 30.0  # to say how a job is, among others. Too small: a busy cluster counts as a lost job.
# For Ray to start a launcher anew, and for it to answer. Too small: a job that goes on counts as lost. Too large: one
# that is lost is waited for. Ray misses a node that falls silent after a minute.
SUCCESSOR_SECONDS_MAX = 120.0
RETRY_SECONDS = 0.5
RUNNING, ENDED, FAILED = "running", "ended", "failed"


class Failure(NamedTuple):
    """How a run failed, as an error is: what, what to do, and the code to exit with."""

    message: str
    hint: str | None
    exit_code: int


class Page(NamedTuple):
    """What a job has said since somebody looked. `lines` say whether they belong to standard output."""

    lines: tuple[tuple[bool, str], ...]
    next: int  # what to ask for next
    state: str
    is_begun: bool  # everything was checked, and the run has a directory
    failure: Failure | None


class Glance(NamedTuple):
    """A job in a line."""

    name: str
    state: str
    last: str
    directory: str
    node: str


def find(ray: Any, name: str, *, missing_ok: bool = False) -> Any:
    """The actor of a job."""
    try:
        return ray.get_actor(PREFIX + name, namespace=NAMESPACE)
    except ValueError:
        if missing_ok:
            return None
        known = [glance.name for glance in list_jobs(ray)]
        raise UserError(f"there is no job {name}", hint=f"there are: {', '.join(known)}" if known else None) from None


def list_jobs(ray: Any) -> list[Glance]:
    found = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE and (entry["name"] or "").startswith(PREFIX):
            name = entry["name"].removeprefix(PREFIX)
            job = find(ray, name, missing_ok=True)
            if job is not None:
                try:
                    found.append(ask(ray, job.glance.remote, name, seconds=ANSWER_SECONDS_MAX))
                except RegrowError as error:
                    found.append(Glance(name, "lost", error.message, "", ""))
    return sorted(found)


def follow(ray: Any, job: Any, name: str, show: Callable[[bool, str], None], *, until_begun: bool = False) -> Page:
    """Shows what a job says, until it ends; or until it has begun."""
    since = 0
    while True:
        page: Page = ask(ray, functools.partial(job.read.remote, since), name)
        since = page.next
        for is_result, line in page.lines:
            show(is_result, line)
        if page.state != RUNNING or (until_begun and page.is_begun):
            return page


def stop(ray: Any, name: str, *, save: bool) -> None:
    job = find(ray, name)
    refusal = ask(ray, functools.partial(job.stop.remote, save), name)
    if refusal is not None:
        raise UserError(f"job {name} cannot be stopped so: {refusal}")


def fetch(ray: Any, name: str, out: Path) -> int:
    """Copies the run directory; says how many files that were."""
    job = find(ray, name)
    files = ask(ray, job.list_files.remote, name)
    if not files:
        raise UserError(f"job {name} has no directory yet")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty", hint="choose another --out")
    for path, size in files:
        target = out / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            while file.tell() < size:
                data = ask(ray, functools.partial(job.read_file.remote, path, file.tell()), name)
                if not data:
                    break
                file.write(data)
    return len(files)


def ask(ray: Any, call: Callable[[], Any], name: str, *, seconds: float = SUCCESSOR_SECONDS_MAX) -> Any:
    """Once more, if the launcher dies and has a successor: all questions can be asked again. One that falls silent with
    its node is missed by Ray so late that nothing shorter than the time for a successor would do."""
    deadline = time.monotonic() + SUCCESSOR_SECONDS_MAX
    while True:
        try:
            return ray.get(call(), timeout=seconds)
        except ray.exceptions.GetTimeoutError:
            raise RegrowError(f"job {name} did not answer within {seconds:.0f} s") from None
        except ray.exceptions.RayActorError as error:
            if find(ray, name, missing_ok=True) is None or time.monotonic() >= deadline:
                words = [line.strip() for line in str(error).splitlines() if line.strip()]
                why = words[-1] if words else type(error).__name__
                raise RegrowError(
                    f"job {name} is lost: its launcher died, and has no successor: {why}",
                    hint="with checkpoints, --resume goes on",
                ) from None
        time.sleep(RETRY_SECONDS)
