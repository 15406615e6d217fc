"""Goal: what bench soak judges, it judges rightly: growth, a standstill, wrong parities.

Method: figures with known answers go through the bookkeeping; processes are files in a made-up /proc.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regrow.bench import common, soak, soak_watch
from regrow.config import TrainConfig
from regrow.errors import RegrowError, UserError
from regrow.launch.reports import Progress
from regrow.launch.status import RunStatus
from regrow.launch.tiers import FRAME_BYTES_BESIDE, Needs


def test_memory_of_servers_is_judged_from_when_their_logs_are_full() -> None:
    """What a log takes while it fills is bounded; what grows behind that is not."""
    watch = soak_watch.Watch()
    watch.resident = {"server": [(float(at), 100 + min(at, 40)) for at in range(160)]}
    report = common.Report.start("soak")
    assert soak.judge_growth(report, "async", watch)["memory_growth_server"][0] > soak.GROWTH_TARGET
    watch.logs_full_at = 40.0
    assert soak.judge_growth(report, "async", watch)["memory_growth_server"] == (1.0, soak.GROWTH_TARGET)
    watch.resident = {"server": [(float(at), 100 + at) for at in range(160)]}
    assert soak.judge_growth(report, "async", watch)["memory_growth_server"][0] > soak.GROWTH_TARGET


def test_a_spare_worker_that_imports_torch_has_not_grown() -> None:
    """It stands back for all others, so on a busy machine that is in the last third of a run."""
    watch = soak_watch.Watch()
    report = common.Report.start("soak")
    waits = [(float(at), 36) for at in range(100)]
    watch.resident = {"spare_worker": [*waits, *((100.0 + at, 317) for at in range(80))]}
    assert soak.judge_growth(report, "sync", watch)["memory_growth_spare_worker"] == (1.0, soak.GROWTH_TARGET)
    watch.resident = {"spare_worker": [*waits, *((100.0 + at, 317 + at) for at in range(80))]}
    assert soak.judge_growth(report, "sync", watch)["memory_growth_spare_worker"][0] > soak.GROWTH_TARGET


def test_growth_compares_the_last_third_with_the_first() -> None:
    assert soak_watch.compare_thirds([(float(at), 100) for at in range(90)]) == (100, 100)
    assert soak_watch.compare_thirds([(float(at), 100 + at) for at in range(91)]) == (115, 175)
    assert soak_watch.compare_thirds([(float(at), 1) for at in range(59)]) is None


def test_a_run_that_stands_still_is_ended() -> None:
    """Steps of any worker count; what is not training does not."""
    run = RunStatus(TrainConfig(servers=2, workers=2), started_at=0.0)
    watch = soak_watch.Watch(still_seconds_max=10.0)
    run.enter("training", 10.0)

    def step(worker: int, number: int, now: float) -> None:
        zeros = [0] * 64
        report = Progress(step=number, samples=64 * number, loss=0.5, hist_pos=zeros, hist_neg=zeros)
        run.receive("worker", worker, report, now)
        watch.update(run, now)

    step(0, 1, 11.0)
    watch.update(run, 20.5)
    step(1, 1, 20.9)
    watch.update(run, 30.5)
    assert watch.still_seconds_longest == pytest.approx(9.6)
    with pytest.raises(RegrowError, match="stuck: no worker has made a step for 11 s, at step 1"):
        watch.update(run, 31.9)
    run.enter("evaluating", 42.0)
    watch.update(run, 99.0)


def _failure(role: str, recovered_s: float | None) -> dict[str, Any]:
    return {"role": role, "id": 0, "detected_s": 0.1, "resumed_s": 0.2, "recovered_s": recovered_s}


@pytest.mark.parametrize(
    ("stripes", "wrong", "missed", "words"),
    [
        (7, 0, set(), "all 7 stripes agree"),
        (7, 2, {"wrong_stripes"}, "2 of 7 stripes have a wrong parity"),
        (None, None, {"stripes_checked"}, "its parities were not checked"),
    ],
)
def test_soak_verdict(
    stripes: int | None, wrong: int | None, missed: set[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = soak.make_config(Path("/nowhere"), mode="async", mtbf=20.0, r=2, rows_max=100)
    assert set(config.mtbf_roles.split(",")) == {"server", "worker", "coordinator", "spare"}
    watch = soak_watch.Watch()
    watch.resident = {"server": [(float(at), 100) for at in range(60)]}
    watch.files = {"sockets": [(float(at), 5 + at // 3) for at in range(60)]}
    summary = {
        "status": "ok",
        "seconds": 60.0,
        "steps_done": 5,
        "samples_per_s": 1.0,
        "redo_bytes_peak": config.redo_bytes_max // 2,
        "failures": [_failure("server", 1.0), _failure("server", 3.0), _failure("worker", None)],
        "parity_stripes": stripes,
        "parity_wrong": wrong,
        "sabotage_random": [
            {"role": "server", "kind": "kill", "count": 2},
            {"role": "spare", "kind": "late", "count": 1},
        ],
    }
    report = common.Report.start("soak")
    soak.judge(report, config, summary, watch)
    soak.print_rows(report)
    missed = {f"async_{name}" for name in {*missed, "more_files_sockets"}}
    assert {name for name, ratio in report.ratios.items() if not ratio.met} == missed
    assert report.ratios["async_redo_of_its_bound"].value == 0.5
    assert report.ratios["async_memory_growth_server"].value == 1.0
    roles = {row["role"]: row for row in report.rows if row["kind"] == "role"}
    assert roles["server"]["recovered_s"] == [2.0, 3.0]
    assert (roles["worker"]["open_at_the_end"], roles["coordinator"]["failures"]) == (1, 0)
    assert (roles["server"]["kill"], roles["spare"]["late"], roles["spare"]["hang"]) == (2, 1, 0)
    shown = capsys.readouterr().out
    assert "the run ended ok after 3 failures in 60 s" in shown
    assert words in shown


def test_processes_by_role(tmp_path: Path) -> None:
    def process(pid: int, parent: int, pages: int, name: str, files: int = 3) -> None:
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) S {parent} 1 1")
        (tmp_path / str(pid) / "statm").write_text(f"999 {pages} 3")
        for number in range(files):
            (tmp_path / str(pid) / "fd" / str(number)).touch()

    process(1, 0, 5, "init")
    process(7, 1, 50, "a) b", files=9)  # the launcher
    process(8, 7, 10, "rg server 0")
    process(9, 7, 30, "rg standby 3", files=4)
    process(10, 7, 4, "rg coordinator")
    process(11, 7, 9, "python")  # has only just begun
    process(13, 1, 99, "rg server 0")  # of somebody else
    (tmp_path / "meminfo").write_text("")
    page = soak_watch.os.sysconf("SC_PAGE_SIZE")
    found = {process.role: process for process in soak_watch.list_processes(tmp_path, own=7)}
    assert {role: (process.resident_bytes // page, process.files) for role, process in found.items()} == {
        "launcher": (50, 9),
        "server": (10, 3),
        "spare_server": (30, 4),
        "coordinator": (4, 3),
    }
    assert soak_watch.list_processes(tmp_path / "nothing") == []


def test_soak_says_what_minutes_may_be() -> None:
    with pytest.raises(UserError, match="must be between"):
        soak.run(quick=True, json_path=None, minutes=0.01)
    with pytest.raises(UserError, match="--store attic: must be memory or tiered"):
        soak.run(quick=True, json_path=None, store="attic")


def test_rows_on_disk_are_ten_times_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = soak.make_config(tmp_path, mode="sync", mtbf=20.0, r=1, rows_max=soak.ROWS_MAX)
    config = soak.put_on_disk(memory, tmp_path / "rows")
    needs = Needs(config)
    *tables, dense = (rows * (record + FRAME_BYTES_BESIDE) for rows, _, record in needs.list_tables())
    assert sum(tables) / (config.cache_bytes - dense) == pytest.approx(10.0, rel=0.01)
    assert config.cache_bytes >= needs.cache_bytes_min
    (tmp_path / "rows" / "server-0").mkdir(parents=True)
    (tmp_path / "rows" / "server-0" / "home").write_bytes(bytes(1000))
    assert soak_watch.measure_files(tmp_path / "rows") == 1000
    watch = soak_watch.Watch()
    watch.rows_bytes_max = 2 * soak.find_files_bound(config)
    summary = {
        **dict.fromkeys(("seconds", "samples_per_s"), 60.0),
        **{"status": "ok", "steps_done": 5, "redo_bytes_peak": 0, "failures": [], "sabotage_random": []},
        "restores": [{}, {}],
    }
    report = common.Report.start("soak")
    soak.judge(report, config, summary, watch)
    assert {name for name, ratio in report.ratios.items() if not ratio.met} == {"sync_files_of_their_bound"}
    assert "all went back to a checkpoint in the files of rows 2 times" in capsys.readouterr().out
