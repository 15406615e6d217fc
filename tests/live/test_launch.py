"""Goal: a run ends in one of the ways it should, says which, and leaves nothing behind but its directory.

Method: the real launcher with real processes that only pretend to train (fake_child.py). Deaths are arranged
by events, not by time; waiting is polling with a deadline.
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from regrow.config import TrainConfig
from regrow.errors import ChildFailed, DataLoss, UserError
from regrow.launch import local, signals
from regrow.launch.local import Patience
from regrow.runtime.sockets import SocketDir

pytestmark = pytest.mark.live

HERE = Path(__file__).parent
DEADLINE_SECONDS = 60.0
QUICK = Patience(listen=20.0, stop=20.0, abort=0.5, term=0.5, cause=0.3)


class World:
    """A plan for fake children, a place for their pid files, and a run directory."""

    def __init__(self, path: Path, temp: Path) -> None:
        self.room = path / "room"
        self.room.mkdir()
        self.out = path / "run"
        self.temp = temp
        self.plan_path = path / "plan.json"
        self.started: list[subprocess.Popen[str]] = []
        self.plan()

    def plan(self, **plan: Any) -> None:
        defaults = {"room": str(self.room), "manners": {}, "steps": 3, "endless": False, "patience": {}}
        self.plan_path.write_text(json.dumps({**defaults, **plan}))

    def config(self, **options: Any) -> TrainConfig:
        defaults = {"servers": 3, "workers": 2, "model": "tiny", "batch": 64, "steps": 3}
        return TrainConfig(**{**defaults, "out": str(self.out), **options})

    @property
    def command(self) -> list[str]:
        return [sys.executable, str(HERE / "fake_child.py"), str(self.plan_path)]

    def train(self, *, patience: Patience = QUICK, overwrite: bool = False, **options: Any) -> dict[str, Any]:
        return local.train(
            self.config(**options),
            command=self.command,
            patience=patience,
            memory_check=False,
            overwrite=overwrite,
        )

    def start_regrow(self, *arguments: str, **popen: Any) -> subprocess.Popen[str]:
        """The command as a user starts it."""
        command = [sys.executable, str(HERE / "fake_regrow.py"), str(self.plan_path), "train"]
        options = {"model": "tiny", "servers": 2, "workers": 1, "steps": 3, "out": self.out}
        command += [f"--{name}={value}" for name, value in options.items()]
        process = subprocess.Popen(
            [*command, *arguments],
            text=True,
            env={**os.environ, "TMPDIR": str(self.temp)},
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen},
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        """A test that failed leaves nothing running either: the children go when their launcher does."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.communicate()

    def summary(self) -> dict[str, Any]:
        return json.loads((self.out / "summary.json").read_text())

    def pids(self) -> list[int]:
        return [int(path.read_text()) for path in self.room.glob("*.pid") if path.read_text()]

    def assert_nothing_left(self) -> None:
        poll(lambda: not any(alive(pid) for pid in self.pids()), "processes are left running")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    # A directory of our own for sockets, with a name shorter than pytest's: socket paths are limited.
    with tempfile.TemporaryDirectory(prefix="rg-", dir="/tmp") as temp:
        world = World(tmp_path, Path(temp))
        yield world
        world.close()


def poll(condition: Callable[[], Any], complaint: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, complaint
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Running, that is: a zombie that init has not collected yet does no harm."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


# -- a run that goes well ---------------------------------------------------------------------------------


def test_clean_run(world: World) -> None:
    summary = world.train()
    world.assert_nothing_left()
    assert len(world.pids()) == 6
    assert summary == world.summary()
    expected = {
        "status": "ok",
        "steps": 3,
        "steps_done": 6,
        "samples": 2 * 3 * 64,
        "auc": 0.75,
        "logloss": 0.5,
        "test_samples": 100,
        "model_sha256": "ab" * 32,
        "mode": "async",
        "protection": "none",
        "servers": 3,
        "workers": 2,
        "rows": 3000,
        "bytes_in": 3000,
        "bytes_out": 6000,
        "staleness_mean": 1.0,
        "lookups": 2 * 26 * 3,
        "distinct_rows": 2 * 10 * 3,
        "distinct_rows_per_step": 10.0,
    }
    assert {name: summary[name] for name in expected} == expected
    # Both workers say 0.5 s; they may have finished some time apart.
    assert 0.5 <= summary["seconds"] < DEADLINE_SECONDS
    assert summary["samples_per_s"] == pytest.approx(summary["samples"] / summary["seconds"], rel=0.01)
    for name in ("total", "coordinator", "server", "worker"):
        assert summary["cpu_seconds"][name] > 0
        assert summary["peak_rss_bytes"][name] > 1 << 20
    assert summary["peak_rss_bytes"]["total"] >= 6 * (1 << 20)


def test_run_directory(world: World) -> None:
    world.train()
    names = sorted(str(path.relative_to(world.out)) for path in world.out.rglob("*") if path.is_file())
    logs = [f"logs/{name}-{id}.log" for name, count in COUNTS.items() for id in range(count)]
    assert names == sorted(["config.toml", "metrics.jsonl", "summary.json", *logs])
    again = TrainConfig.from_toml(world.out / "config.toml", {"out": str(world.out)})
    assert again == world.config()
    lines = [json.loads(line) for line in (world.out / "metrics.jsonl").read_text().splitlines()]
    assert lines
    assert set(lines[0]) >= {"t", "step", "samples", "samples_per_s", "loss", "auc", "servers_alive"}
    # What is no event is not lost either.
    assert "a library prints this" in (world.out / "logs/worker-0.log").read_text()


COUNTS = {"coordinator": 1, "server": 3, "worker": 2}


def test_assignments(world: World) -> None:
    world.train(threads_per_server=2)
    told = {path.stem: json.loads(path.read_text()) for path in world.room.glob("*.json")}
    assert len(told) == 6
    assert len({assignment["token"] for assignment in told.values()}) == 1
    assert len(told["worker-0"]["token"]) == 64
    listens = [assignment["listen"] for assignment in told.values()]
    assert len(set(listens)) == 6
    assert all(listen.startswith("unix:/") and len(listen) < 100 for listen in listens)
    assert told["coordinator-0"]["coordinator"] is None
    assert told["server-1"]["coordinator"] == told["coordinator-0"]["listen"]
    assert [told[name]["threads"] for name in ("coordinator-0", "server-0")] == [1, 2]
    assert TrainConfig.from_dict(told["worker-1"]["config"]) == world.config(threads_per_server=2)
    # The private directory of the sockets is gone, with what was in it.
    assert not Path(listens[0].removeprefix("unix:")).parent.exists()


def test_tcp(world: World) -> None:
    world.train(transport="tcp")
    told = json.loads((world.room / "worker-0.json").read_text())
    assert told["listen"] == "tcp:127.0.0.1:0"


# -- runs that fail ---------------------------------------------------------------------------------------

FAILURES = [
    ({"server 2": "is killed"}, "server 2 was killed by SIGKILL at step 3; its log: {out}/logs/server-2.log"),
    ({"worker 1": "exits"}, "worker 1 exited with code 7 at step 3; its log: {out}/logs/worker-1.log"),
    ({"server 0": "reports a mistake"}, "server 0: the file x.tsv has no rows"),
    ({"worker 0": "has a bug"}, "worker 0: ZeroDivisionError: division by zero"),
    (
        {"coordinator 0": "exits at once"},
        "coordinator exited with code 7 at step 0; its log: {out}/logs/coordinator-0.log",
    ),
    (
        # The victim speaks first; the dead server is named all the same.
        {"worker 1": "misses the dead", "server 1": "dies after the complaint"},
        "server 1 was killed by SIGKILL at step 3; its log: {out}/logs/server-1.log",
    ),
    ({"server 1": "talks nonsense"}, "server 1 sent a malformed 'ready' event: Expected `int`, got `str`"),
    ({"worker 0": "talks nonsense"}, "worker 0 sent a malformed 'trained' event: Object missing required field"),
]


@pytest.mark.parametrize("manners, message", FAILURES, ids=[str(failure[0]) for failure in FAILURES])
def test_failure(world: World, manners: dict[str, str], message: str) -> None:
    # Endless, so that nobody gets through before the one who is to fail does.
    world.plan(manners=manners, endless=True)
    with pytest.raises(ChildFailed) as caught:
        world.train()
    world.assert_nothing_left()
    assert caught.value.message.startswith(message.format(out=world.out))
    assert caught.value.exit_code == 1
    summary = world.summary()
    assert summary["status"] == "failed"
    assert summary["error"] == caught.value.message
    assert summary["auc"] is None


def test_last_words_are_the_hint(world: World) -> None:
    world.plan(manners={"server 1": "exits"}, endless=True)
    with pytest.raises(ChildFailed) as caught:
        world.train()
    assert caught.value.hint == "its last words: Boom: no luck"


def test_coordinator_that_never_listens(world: World) -> None:
    world.plan(manners={"coordinator 0": "mute"})
    with pytest.raises(ChildFailed, match="did not listen within 0 s"):
        world.train(patience=Patience(listen=0.2, abort=0.5, term=0.5))
    world.assert_nothing_left()


def test_command_that_cannot_be_started(world: World) -> None:
    with pytest.raises(Exception, match="cannot start coordinator 0: No such file"):
        local.train(world.config(), command=["/nonexistent"], memory_check=False)
    assert world.summary()["status"] == "failed"


@pytest.mark.parametrize("manner, words", [("deaf", "did not stop when asked"), ("fails to stop", "code 5")])
def test_child_that_does_not_stop_as_it_should(world: World, manner: str, words: str) -> None:
    world.plan(manners={"server 1": manner})
    with pytest.raises(ChildFailed, match=words):
        world.train(patience=Patience(stop=1.0, abort=0.3, term=0.3))
    world.assert_nothing_left()
    # The result was there already, and is kept.
    assert world.summary()["auc"] == 0.75


# -- runs that survive ------------------------------------------------------------------------------------

EC = {"protection": "ec", "k": 2, "r": 1}


def told(world: World, name: str) -> list[dict[str, Any]]:
    """Commands that this process got, in order."""
    path = world.room / f"told-{name}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def assignment(world: World, name: str) -> dict[str, Any]:
    return json.loads((world.room / f"{name}.json").read_text())


def only_failure(summary: dict[str, Any]) -> dict[str, Any]:
    (failure,) = summary["failures"]
    return failure


def test_killed_server_has_a_successor_and_training_goes_on(world: World) -> None:
    world.plan(manners={"server 1": "is killed"}, hold={"step": 2, "for": "back-server-1.1"})
    summary = world.train(**EC)
    world.assert_nothing_left()
    assert (summary["status"], summary["steps_done"], summary["samples"]) == ("ok", 6, 2 * 3 * 64)
    failure = only_failure(summary)
    expected = {"role": "server", "id": 1, "step": 2, "rows": 100, "bytes": 1000, "faults": 7}
    assert {name: failure[name] for name in expected} == expected
    assert failure["reason"] == "was killed by SIGKILL"
    assert 0 <= failure["detected_s"] <= failure["replaced_s"] <= failure["recovered_s"] < DEADLINE_SECONDS
    assert failure["resumed_s"] >= failure["replaced_s"]
    died = {"do": "died", "peer": {"role": "server", "id": 1, "incarnation": 0}}
    assert died in told(world, "coordinator-0")
    successor = assignment(world, "server-1.1")
    assert (successor["identity"]["incarnation"], successor["listen"][-5:]) == (1, "/s1.1")
    assert successor["coordinator"] == assignment(world, "coordinator-0")["listen"]
    # What the dead one had counted is not forgotten.
    assert summary["per_server"][1]["pulls"] == 1 + 7


def test_a_spare_takes_the_place_and_is_replaced_itself(world: World) -> None:
    # Killed by its successor's predecessor: the spare is there before the server dies.
    world.plan(manners={"server 1": "is killed after standby-0"}, hold={"step": 2, "for": "started-standby-1"})
    summary = world.train(**EC)
    world.assert_nothing_left()
    assert summary["status"] == "ok"
    assert (world.room / "standby-0.pid").read_text() == (world.room / "server-1.1.pid").read_text()
    assert assignment(world, "standby-0")["listen"] != assignment(world, "server-1.1")["listen"]
    assert (world.room / "became-server-1.1").exists()
    assert not (world.room / "started-standby-2").exists()


def test_kill_at_a_step(world: World) -> None:
    world.plan(hold={"step": 2, "for": "started-server-2.1"})
    failure = only_failure(world.train(**EC, kill=("server:2@step:2",)))
    assert (failure["id"], failure["step"]) == (2, 2)
    assert 0 < failure["detected_s"] < 5.0


def test_kill_without_protection_ends_the_run(world: World) -> None:
    world.plan(endless=True)
    with pytest.raises(ChildFailed, match="server 2 was killed by SIGKILL at step"):
        world.train(kill=("server:2@step:2",))
    world.assert_nothing_left()


def test_random_kills(world: World) -> None:
    world.plan(hold={"step": 2, "for": "started-worker-0.1"}, done=1)
    summary = world.train(**EC, workers=1, mtbf=0.1, mtbf_roles="worker")
    assert summary["status"] == "ok"
    assert {failure["role"] for failure in summary["failures"]} == {"worker"}


def test_restarted_worker_counts_no_step_twice(world: World) -> None:
    world.plan(manners={"worker 0": "is killed"}, hold={"step": 2, "for": "started-worker-0.1"}, done=1)
    summary = world.train(**EC)
    world.assert_nothing_left()
    failure = only_failure(summary)
    assert (failure["role"], failure["id"], failure["step"]) == ("worker", 0, 2)
    assert failure["recovered_s"] == failure["resumed_s"] > 0
    assert (summary["steps"], summary["steps_done"], summary["samples"]) == (3, 6, 2 * 3 * 64)
    assert summary["auc"] == 0.75
    assert assignment(world, "worker-0.1")["identity"]["incarnation"] == 1


def test_worker_that_gives_up_is_restarted(world: World) -> None:
    world.plan(manners={"worker 1": "gives up"}, hold={"step": 2, "for": "started-worker-1.1"})
    assert only_failure(world.train(**EC))["reason"] == "lost server 1"


def test_worker_that_dies_while_it_evaluates(world: World) -> None:
    world.plan(manners={"worker 0": "dies when asked to evaluate"}, done=3)
    summary = world.train(**EC)
    world.assert_nothing_left()
    assert (summary["auc"], summary["samples"]) == (0.75, 2 * 3 * 64)
    assert only_failure(summary)["role"] == "worker"


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_coordinator_is_restarted_at_the_same_address(world: World, transport: str) -> None:
    world.plan(manners={"coordinator 0": "is killed"}, hold={"step": 2, "for": "started-coordinator-0.1"})
    summary = world.train(**EC, transport=transport)
    world.assert_nothing_left()
    assert only_failure(summary)["role"] == "coordinator"
    first, second = (assignment(world, f"coordinator-0{suffix}") for suffix in ("", ".1"))
    assert first["listen"] == second["listen"]
    assert [found["identity"]["incarnation"] for found in (first, second)] == [0, 1]


def test_silent_server_is_ended_and_replaced_once(world: World) -> None:
    world.plan(manners={"coordinator 0": "misses server 1"}, hold={"step": 2, "for": "started-server-1.1"})
    failure = only_failure(world.train(**EC))
    world.assert_nothing_left()
    assert (failure["id"], failure["reason"]) == (1, "silent for 1.5 s")
    assert not (world.room / "started-server-1.2").exists()


def test_paused_server_comes_back_and_is_not_heard(world: World) -> None:
    manners = {"coordinator 0": "misses server 1", "server 1": "comes back"}
    world.plan(manners=manners, hold={"step": 2, "for": "came-back"})
    summary = world.train(**EC, pause=("server:1@step:2:4s",))  # long enough to be seen stopped by a slow machine
    world.assert_nothing_left()
    failure = only_failure(summary)
    assert (failure["id"], failure["reason"]) == (1, "silent for 1.5 s")
    assert failure["detected_s"] > 0
    assert summary["rows"] == 3000  # and not what the zombie said


def test_who_dies_again_and_again_is_given_up(world: World) -> None:
    world.plan(manners={"server 1 always": "is killed"}, endless=True)
    with pytest.raises(ChildFailed) as caught:
        world.train(**EC)
    world.assert_nothing_left()
    assert caught.value.message.startswith("server 1 died 6 times within 60 s; the last time it was killed by SIGKILL")
    # On a busy machine the first of them may be further back than those that count, and others may have died too.
    assert [(each["role"], each["id"]) for each in world.summary()["failures"]].count(("server", 1)) >= 5


@pytest.mark.parametrize("manner, words", [("reports a mistake", "x.tsv"), ("has a bug", "ZeroDivisionError")])
def test_errors_end_a_protected_run_too(world: World, manner: str, words: str) -> None:
    world.plan(manners={"worker 1": manner}, endless=True)
    with pytest.raises(ChildFailed, match=words):
        world.train(**EC)
    world.assert_nothing_left()


def test_data_loss(world: World) -> None:
    world.plan(manners={"worker 1": "reports data loss"}, endless=True)
    with pytest.raises(DataLoss, match="rows of 2 tables are gone") as caught:
        world.train(**EC)
    world.assert_nothing_left()
    assert caught.value.exit_code == 4
    assert "--r 2" in str(caught.value.hint)
    process = world.start_regrow("--protect=ec", "--k=1", "--quiet", "--overwrite", "--workers=2")
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, errors.splitlines()[0]) == (4, "error: rows of 2 tables are gone: t_cat_0 (12)")


def test_nothing_is_left_of_spares_and_stopped_processes(world: World) -> None:
    world.plan(endless=True, patience={"abort": 0.5, "term": 0.5})
    process = world.start_regrow("--protect=ec", "--k=1")
    poll(lambda: (world.room / "started-standby-0").exists(), "no spare is started")
    poll(lambda: len(world.pids()) == 5, "not all processes have started")
    os.kill(int((world.room / "server-1.pid").read_text()), signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 130
    world.assert_nothing_left()


def test_failure_is_shown(world: World) -> None:
    world.plan(hold={"step": 2, "for": "started-server-1.1"})
    process = world.start_regrow("--protect=ec", "--k=1", "--kill=server:1@step:2")
    output, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, errors
    assert "S1 died at step 2" in errors
    assert "survived" in output


# -- signals ----------------------------------------------------------------------------------------------


def start_endless(world: World, **plan: Any) -> subprocess.Popen[str]:
    """A run in the middle of training, which would go on for ever."""
    world.plan(endless=True, **plan)
    process = world.start_regrow()
    poll(lambda: (world.room / "trained-0").exists(), "training does not begin")
    poll(lambda: len(world.pids()) == 4, "not all processes have started")
    return process


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_stops_everything(world: World, number: int, code: int) -> None:
    process = start_endless(world)
    process.send_signal(number)
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == code
    world.assert_nothing_left()
    assert "Traceback" not in errors
    assert "at step 3" in errors
    assert world.summary()["status"] == "failed"
    assert list(world.temp.iterdir()) == []


def test_second_interrupt_does_not_wait(world: World) -> None:
    """Deaf children are waited for after the first Ctrl-C; the second one ends that."""
    manners = dict.fromkeys(["coordinator 0", "server 0", "server 1", "worker 0"], "deaf")
    process = start_endless(world, manners=manners, patience={"abort": 1000.0, "term": 1000.0})
    process.send_signal(signal.SIGINT)
    poll(lambda: (world.room / "stop-worker-0").exists(), "nobody is asked to stop")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 130
    world.assert_nothing_left()
    assert "Traceback" not in errors
    assert world.summary()["error"].startswith("interrupted")
    assert list(world.temp.iterdir()) == []


def test_killed_launcher_leaves_nothing_running(world: World) -> None:
    process = start_endless(world)
    process.kill()
    process.communicate(timeout=DEADLINE_SECONDS)
    world.assert_nothing_left()
    # It could not remove its sockets; whoever runs next does, once it is sure that nobody uses them.
    (abandoned,) = world.temp.iterdir()
    SocketDir.sweep(world.temp, age_seconds=3600.0)
    assert abandoned.exists()
    SocketDir.sweep(world.temp, age_seconds=0.0)
    assert not abandoned.exists()


def test_sockets_in_use_are_not_swept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(world.temp))
    with SocketDir() as sockets:
        SocketDir.sweep(world.temp, age_seconds=0.0)
        assert sockets.path.parent == world.temp
        assert sockets.path.stat().st_mode & 0o777 == 0o700
    assert list(world.temp.iterdir()) == []


# -- what the user sees -----------------------------------------------------------------------------------


def test_plain_output(world: World) -> None:
    process = world.start_regrow()
    output, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, errors
    phases = [line.split(":")[0] for line in errors.splitlines()]
    assert list(dict.fromkeys(phases)) == ["starting", "loading", "training", "evaluating", "stopping"]
    assert "AUC 0.7500, log loss 0.5000 on 100 samples" in output
    assert f"{world.out}/summary.json" in output


def test_quiet_output(world: World) -> None:
    process = world.start_regrow("--quiet")
    assert process.communicate(timeout=DEADLINE_SECONDS) == ("", "")
    assert process.returncode == 0


def test_failure_output(world: World) -> None:
    world.plan(manners={"server 0": "reports a mistake"}, endless=True)
    process = world.start_regrow("--quiet")
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 1
    assert errors == "error: server 0: the file x.tsv has no rows\n"


def test_terminal_output(world: World) -> None:
    """On a terminal the picture moves, and the cursor is there again at the end."""
    ours, theirs = pty.openpty()
    process = world.start_regrow(stderr=theirs, stdin=theirs)
    os.close(theirs)
    shown = bytearray()
    while True:
        try:
            chunk = os.read(ours, 4096)
        except OSError:  # how Linux says that nobody has the other end any more
            break
        if not chunk:
            break
        shown += chunk
    os.close(ours)
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 0, shown.decode()
    text = shown.decode()
    assert "servers" in text
    assert "training" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "AUC 0.7500" in output


# -- the run directory ------------------------------------------------------------------------------------


def test_directory_in_use_is_refused(world: World) -> None:
    world.out.mkdir()
    mine = world.out / "thesis.tex"
    mine.write_text("years of work")
    with pytest.raises(UserError, match="is not empty"):
        world.train()
    assert world.pids() == []
    world.train(overwrite=True)
    assert mine.read_text() == "years of work"


def test_overwrite_replaces_the_run(world: World) -> None:
    world.train(servers=4)
    world.train(servers=1, overwrite=True)
    assert world.summary()["servers"] == 1
    assert not (world.out / "logs/server-3.log").exists()


def test_missing_data_is_found_before_the_start(world: World) -> None:
    with pytest.raises(UserError, match=r"there is no file .*missing\.tsv"):
        world.train(data=f"criteo:{world.out}/missing.tsv", steps=None, epochs=1)
    assert not world.out.exists()


def test_ignored_signals_stay_ignored() -> None:
    """nohup, and shells for their background jobs, mean it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.SignalWatch(lambda: None) as watch:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        assert (watch.first, watch.count) == (signal.SIGTERM, 1)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
