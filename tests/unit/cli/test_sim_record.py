"""Goal: a long run is counted once and for all: whatever ends it, the record is whole, says what was run, and no seed
is run twice.

Method: the command as a user calls it, with few seeds and fractions of minutes; findings come from a bug in the core
that is planted around the command; the page of the repository is compared with its record.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from regrow.cli import sim as command
from regrow.cli import sim_record
from regrow.errors import UserError
from regrow.sim import planted
from regrow.sim.record import SEED_FIRST, Record, make_table, read_record, write_record
from regrow.sim.runner import ALL, run

ROOT = Path(__file__).parents[3]


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command.sim, [str(argument) for argument in arguments])


def read(path: Path) -> Record:
    return read_record(path.read_bytes())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "record.json"


def test_schedules_are_added_up(path: Path) -> None:
    assert call("--seeds", "3", "--profile", "async", "--record", path).exit_code == 0
    assert call("--seeds", "2", "--profile", "sync", "--record", path).exit_code == 0
    record = read(path)
    assert {name: tally.schedules for name, tally in record.profiles.items()} == {"async": 3, "sync": 2}
    runs = [run("async", seed=SEED_FIRST + index) for index in range(3)]
    assert record.profiles["async"].events == sum(result.events for result in runs)
    assert record.profiles["async"].probes["flush"] == sum(result.probes["flush"] for result in runs)
    assert [sitting.schedules for sitting in record.sittings] == [3, 2]
    assert all(sitting.processor_seconds > 0 for sitting in record.sittings)
    assert record.seed_next == SEED_FIRST + 5
    assert os.listdir(path.parent) == [path.name], "nothing else is left behind"


def test_a_run_in_the_middle_of_the_profiles_uses_its_seed_up(path: Path) -> None:
    count = len(ALL) + 1
    assert call("--seeds", str(count), "--jobs", "2", "--record", path).exit_code == 0
    record = read(path)
    assert (record.schedules, record.seed_next) == (count, SEED_FIRST + 2)


def test_a_run_ends_when_its_time_is_up(path: Path) -> None:
    started = time.monotonic()
    done = call("--minutes", "0.01", "--jobs", "2", "--record", path)
    assert done.exit_code == 0, done.output
    assert time.monotonic() - started < 60
    assert read(path).schedules >= 1
    assert f"now counts {read(path).schedules} schedules" in done.output


def test_findings_are_kept_and_the_run_goes_on(path: Path) -> None:
    with planted.plant("piecewise-flush"):
        done = call("--seeds", "12", "--profile", "async", "--record", path)
    assert done.exit_code == 1, done.output
    record = read(path)
    findings = record.profiles["async"].findings
    assert record.schedules == 12
    assert len(findings) >= 2
    assert {found.invariant for found in findings} <= set(planted.BUGS["piecewise-flush"].caught_by)
    again = f"regrow sim --profile async --seeds 1 --seed-first {findings[0].seed}"
    assert again in done.output
    assert again in make_table(record)


def test_a_run_that_finds_too_much_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_record, "FINDINGS_MAX", 2)
    with planted.plant("piecewise-flush"):
        assert call("--seeds", "500", "--profile", "async", "--record", path).exit_code == 1
    assert read(path).sittings[0].findings == 2


def wait_for_file(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.1)
    pytest.fail(f"{path} was not written")


def start(path: Path, *, save_seconds: float) -> subprocess.Popen[bytes]:
    # Whoever started the tests in the background of a shell has interrupts ignored, and so have its children.
    code = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from regrow.cli import sim_record\n"
        f"sim_record.SAVE_SECONDS = {save_seconds}\n"
        "from regrow.cli.main import main\n"
        "main()"
    )
    arguments = ["sim", "--minutes", "10", "--jobs", "2", "--record", str(path)]
    return subprocess.Popen([sys.executable, "-c", code, *arguments], start_new_session=True, stdout=subprocess.PIPE)


def test_an_interrupt_keeps_what_was_counted(path: Path) -> None:
    process = start(path, save_seconds=0.2)
    wait_for_file(path)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"stopped after {read(path).schedules} schedules" in output.decode()


def test_a_killed_run_leaves_a_whole_record_and_no_lock(path: Path) -> None:
    process = start(path, save_seconds=0.0)
    wait_for_file(path)
    with pytest.raises(UserError, match="another run adds to"), sim_record.open_record(path, jobs=1):
        pass
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    before = read(path)
    assert before.schedules >= 1
    assert call("--seeds", "1", "--profile", "async", "--record", path).exit_code == 0
    after = read(path)
    assert after.schedules == before.schedules + 1
    assert after.seed_next == before.seed_next + 1


def test_the_lock_of_a_run_that_just_ended_is_not_taken_for_ours(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening and locking, the other run removes its file: the lock is then of a file that nobody sees."""
    lock = path.with_name(f".{path.name}.lock")
    flock = fcntl.flock
    tries: list[int] = []

    def vanish(file: object, how: int) -> None:
        tries.append(how)
        if len(tries) == 1:
            lock.unlink()
        flock(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(sim_record.fcntl, "flock", vanish)
    with sim_record.open_record(path, jobs=1):
        assert lock.exists()
    assert len(tries) == 2


def test_a_record_is_shown(path: Path) -> None:
    call("--seeds", "2", "--profile", "async", "--record", path)
    shown = call("--record", path, "--show").output
    assert shown == make_table(read(path))
    assert "| `async` | 2 | " in shown
    assert "| all | 2 | " in shown


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--show"], "--show needs --record"),
        (["--show", "--record", "nothing.json"], "there is no record"),
        (["--minutes", "1", "--seeds", "3"], "--minutes and --seeds"),
        (["--record", "r.json", "--seed-first", "3"], "--record and --seed-first"),
        (["--record", "r.json", "--plant", "one-epoch"], "--record and --plant"),
        (["--record", "r.json", "--replay", "async:1"], "--record and --replay"),
        (["--minutes", "1", "--replay", "async:1"], "--replay and --minutes"),
        (["--record", "/nowhere/r.json", "--seeds", "1"], "cannot be written"),
    ],
)
def test_mistakes_are_answered(
    arguments: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(*arguments)
    assert isinstance(done.exception, UserError), done.output
    assert problem in str(done.exception)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"profiles": 3}'])
def test_a_file_that_is_no_record_is_left_alone(text: str, path: Path) -> None:
    path.write_text(text)
    done = call("--seeds", "1", "--record", path)
    assert isinstance(done.exception, UserError)
    assert path.read_text() == text


def test_a_record_is_written_and_read() -> None:
    record = Record()
    assert make_table(record).endswith("Nothing was run yet.\n")
    assert write_record(read_record(write_record(record))) == write_record(record)


def test_the_page_shows_the_record() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "sim_table.py", "--check"], check=False)
    assert done.returncode == 0, "run `make sim-table`"
