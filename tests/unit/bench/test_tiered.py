"""Goal: what `regrow bench tiered` makes of its runs is right: what a cache should miss, what a disk allows, what was
written, and which runs are compared with which.

Method: figures with known answers, a cache that is played by hand, and stores of some thousand rows in this process. No
test here looks at speed; a whole run with processes is in tests/live/test_bench_tiered.py.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from regrow.bench import (
    checkpoint_store,
    common,
    tiered,
    tiered_cache,
    tiered_checkpoint,
    tiered_device,
    tiered_epochs,
    tiered_figures,
    tiered_live,
    tiered_recovery,
    tiered_store,
    tiered_time,
)
from regrow.bench.tiered_figures import Course, Look, Reuse
from regrow.cli.bench import BENCHES
from regrow.errors import UserError
from regrow.launch.tiers import Needs
from regrow.store.tiered import TieredStore


def make_report() -> common.Report:
    return common.Report(bench="tiered", facts={}, rows=[], ratios={})


def make_setting(directory: Path) -> tiered_live.Setting:
    device = tiered_device.Device(
        name="disk", direct=True, write_bytes_per_s=1.0, read_bytes_per_s=1.0, random_reads_per_s={1: 5.0}
    )
    place = tiered_live.Place(name="disk", label="a disk", directory=directory, device=device)
    return tiered_live.Setting(quick=True, places={"disk": place})


# -- the door ------------------------------------------------------------------------------------------------


def test_bench_has_the_door_of_the_others() -> None:
    assert "tiered" in BENCHES
    parameters = inspect.signature(tiered.run).parameters
    assert list(parameters) == ["quick", "json_path", "part"]
    for name in tiered.PARTS:
        assert list(inspect.signature(tiered.import_part(name).measure).parameters) == ["report", "setting"]
        assert name in (tiered.__doc__ or "")


def test_a_part_that_is_not_there() -> None:
    with pytest.raises(UserError, match="no part 'recovry'") as error:
        tiered.run(quick=True, json_path=None, part="recovry")
    assert "recovery" in (error.value.hint or "")


def test_without_a_part_all_are_measured_and_the_file_grows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, seen = tmp_path / "tiered.json", []

    def fake(name: str) -> Any:
        def measure(report: common.Report, setting: tiered_live.Setting) -> None:
            seen.append((name, len(json.loads(path.read_text())["rows"]) if path.exists() else 0))

        return SimpleNamespace(measure=measure)

    monkeypatch.setattr(tiered, "import_part", fake)
    monkeypatch.setattr(tiered, "measure_devices", lambda report, quick: make_setting(tmp_path))
    assert tiered.run(quick=True, json_path=str(path)) == 0
    assert seen == [(name, number) for number, name in enumerate(tiered.PARTS)]


def test_one_part_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come back from files bit by bit, and both ways back are timed."""
    monkeypatch.setattr(tiered_live.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(checkpoint_store, "FILESYSTEMS_IN_MEMORY", ())  # wherever the test's directory is
    monkeypatch.setattr(tiered, "DEVICE_BYTES_QUICK", 8 << 20)
    monkeypatch.setattr(tiered, "DEVICE_SECONDS_QUICK", 0.02)
    monkeypatch.setattr(tiered_recovery, "QUICK", tiered_recovery.Size(bytes=1_000_000, repetitions=2))
    path = tmp_path / "tiered.json"
    assert tiered.run(quick=True, json_path=str(path), part="recovery") == 0
    written = json.loads(path.read_text())
    assert [row["kind"] for row in written["rows"] if row["kind"] != "device"] == ["back", "back", "part"]
    back = next(row for row in written["rows"] if row["kind"] == "back")
    assert back["load_bytes"] > 60 * back["rows"], "a full checkpoint has every row"
    assert back["back_bytes"] > 0 and back["back_seconds"] > 0.0
    assert written["ratios"]["recovery_load_over_back"]["pairs"] == 2
    assert not [each for each in tmp_path.iterdir() if each.name != "tiered.json"], "nothing is left behind"


def test_a_directory_in_memory_is_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_store, "filesystem", lambda path: "tmpfs")
    with pytest.raises(UserError, match="there is no disk to measure") as error:
        tiered_live.find_places(size_bytes=1 << 22, seconds=0.01)
    assert "TMPDIR" in (error.value.hint or "")


def test_a_device_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    device = tiered_device.measure("disk", str(tmp_path), size_bytes=12 << 20, seconds=0.02)
    assert device.write_bytes_per_s > 0 and device.read_bytes_per_s > 0
    assert list(device.random_reads_per_s) == list(tiered_device.DEPTHS)
    assert device.random_reads_best == max(device.random_reads_per_s.values()) > 0
    assert not list(tmp_path.iterdir())
    assert json.loads(json.dumps(device.to_dict()))["random_reads_per_second"].keys() == {"1", "16", "64"}


# -- what a cache should miss --------------------------------------------------------------------------------


def play_lru(batches: list[Any], cache_rows: int) -> float:
    """Misses per row of the second half, of a cache that forgets the row that was not used for longest."""
    cache: OrderedDict[int, None] = OrderedDict()
    misses = rows = 0
    for number, batch in enumerate(batches):
        for row in batch.tolist():
            is_counted = number >= len(batches) // 2
            rows += is_counted
            misses += is_counted and row not in cache
            cache[row] = None
            cache.move_to_end(row)
        while len(cache) > cache_rows:
            cache.popitem(last=False)
    return misses / rows


def test_the_sketch_of_a_cache_is_close_to_one_that_is_played() -> None:
    workload = tiered_live.Workload(rows_max=2_000, batch=64)
    batches = list(workload.list_batches(400))
    sketch = Reuse(iter(batches), rows=workload.rows)
    assert sketch.rows_per_batch == pytest.approx(np.mean([len(batch) for batch in batches[200:]]))
    for cache_rows in (1_000, 3_000, 6_000):
        assert sketch.miss_rate(cache_rows) == pytest.approx(play_lru(batches, cache_rows), abs=0.01)


def test_a_cache_for_a_share_of_misses_and_back() -> None:
    workload = tiered_live.Workload(rows_max=2_000, batch=64)
    sketch = workload.sketch(batches=400)
    rows = sketch.cache_rows(0.13)
    assert rows is not None and sketch.miss_rate(rows) == pytest.approx(0.13, abs=0.002)
    assert sketch.miss_rate(1e9) is None, "that was not looked at"
    assert sketch.cache_rows(0.0) is None
    assert sketch.miss_rate(0) == 1.0


def test_batches_are_rows_of_all_tables() -> None:
    workload = tiered_live.Workload(rows_max=500, batch=32)
    batch = next(workload.list_batches(1))
    assert len(batch) == len(set(batch.tolist())) <= 32 * 26
    assert batch.max() >= sum(workload.tables[:-1]), "the last table is behind all others"
    assert batch.max() < workload.rows


def test_a_cache_has_room_for_the_rows_that_were_asked_for() -> None:
    workload = tiered_live.Workload(rows_max=200_000)
    few, many = (tiered_live.find_cache_bytes(workload, rows) for rows in (1, 200_000))
    assert few == Needs(workload.make_config()).cache_bytes_min
    assert many - few > 80 * 50_000
    config = workload.make_config(store="tiered", store_dir="/nowhere", cache_bytes=few)
    assert Needs(config).cache_bytes_min <= config.cache_bytes


# -- what a run is held against ------------------------------------------------------------------------------


def test_a_fast_device_is_held_against_memory() -> None:
    known: dict[str, Any] = {"memory_rate": 1000.0, "tiered_rate": 800.0, "reads_per_sample": 2.0, "overhead_max": 0.08}
    verdict = tiered_figures.judge_time(**known, device_reads_per_s=4000.0)
    assert (verdict.figure, verdict.target, verdict.is_bound) == (pytest.approx(0.25), 0.08, False)
    assert verdict.reads_per_s_needed == 2000.0


def test_a_slow_device_is_held_against_its_own_reads() -> None:
    known: dict[str, Any] = {"memory_rate": 1000.0, "reads_per_sample": 2.0, "overhead_max": 0.08}
    # 2 reads at 1000 a second: 2 ms a sample at best, and it took 2.5.
    slow = tiered_figures.judge_time(**known, tiered_rate=400.0, device_reads_per_s=1000.0)
    assert (slow.figure, slow.target, slow.is_bound) == (pytest.approx(1.25), 1.1, True)
    # 0.67 ms of reads are hidden behind 1 ms of training.
    near = tiered_figures.judge_time(**known, tiered_rate=800.0, device_reads_per_s=3000.0)
    assert near.is_bound and near.figure == pytest.approx(1.25)


def make_time(variant: str, turn: int, rate: float, work: float = 0.01, **more: Any) -> dict[str, Any]:
    known = {"kind": "time", "variant": variant, "round": turn, "samples_per_second": rate, "servers": 2}
    known |= {"worker_seconds_per_sample": work, "server_rss_bytes": 100 << 20, "server_bytes": 40 << 20}
    return {**known, "rows_per_server": 1000, "cache_bytes": 10 << 20, "file_bytes": 3e9, **more}


def test_times_are_compared_within_a_round() -> None:
    report = make_report()
    reads = {"reads_per_sample": 1.0, "miss_rate": 0.13, "disk_rate": 0.12}
    for turn, scale in enumerate((1.0, 2.0)):
        report.rows += [
            make_time("memory", turn, 1000.0 * scale),
            # A tenth more time, and all of it because the processors were slower by a tenth.
            make_time("disk", turn, 1000.0 * scale / 1.1, work=0.011, server_rss_bytes=90 << 20, **reads),
            make_time("disk_self", turn, 500.0 * scale, **reads),
        ]
    tiered_time.compare(report, {"disk": 1e6})
    found = {name: ratio.value for name, ratio in report.ratios.items()}
    assert found["time_disk"] == pytest.approx(0.1) and not report.ratios["time_disk"].met
    assert found["time_equal_speed_disk"] == pytest.approx(0.0, abs=1e-9)
    assert found["time_disk_of_self"] == pytest.approx(0.55)
    # 90 MiB, of which 10 are the cache and 60 what every server takes: 20 of 64 MiB and a byte per row.
    assert found["memory_beside_cache_of_allowed"] == pytest.approx((20 << 20) / ((64 << 20) + 1000))
    assert "time_shm" not in found
    prices = {row["variant"]: row for row in report.rows if row["kind"] == "price"}
    assert prices["disk"]["disk_gb"] == 3.0
    assert prices["memory"]["memory_gb"] == pytest.approx(2 * (100 << 20) / 1e9, abs=1e-4)
    assert prices["memory"]["epoch_hours"] == pytest.approx(45_840_617 / 1500 / 3600, abs=1e-4)


def test_rounds_that_are_judged_in_another_way_are_left_out() -> None:
    rows = [make_time("memory", 0, 1000.0), make_time("disk", 0, 900.0, reads_per_sample=1.0)]
    rows += [make_time("memory", 1, 1000.0), make_time("disk", 1, 900.0, reads_per_sample=900.0)]
    found = tiered_time.judge_rounds(rows, "disk", 10_000.0, equal_speed=False)
    assert [verdict.is_bound for verdict in found] == [False]


def test_every_round_begins_with_another_variant() -> None:
    first, second = (tiered_live.choose_order(tiered_time.VARIANTS, turn) for turn in (0, 1))
    assert sorted(each.name for each in first) == sorted(each.name for each in tiered_time.VARIANTS)
    assert [each.name for each in second] == ["shm", "disk", "disk_self", "memory"]


def test_checkpoints_are_held_against_none() -> None:
    report = make_report()
    for variant, rate in (("none", 1000.0), ("batch", 990.0), ("delta", 800.0)):
        report.rows.append({**make_time(variant, 0, rate), "kind": "batch", "checkpoints": 4})
    tiered_checkpoint.compare(report)
    assert report.ratios["checkpoints"].value == pytest.approx(1000 / 990 - 1)
    assert not report.ratios["checkpoints"].met
    assert set(report.ratios) == {"checkpoints", "checkpoints_equal_speed"}


def test_a_part_alone_has_more_rounds(tmp_path: Path) -> None:
    setting = make_setting(tmp_path)
    rounds = [
        tiered_checkpoint.choose_size(dataclasses.replace(setting, quick=quick, alone=alone)).rounds
        for quick, alone in ((True, True), (False, False), (False, True))
    ]
    assert rounds == [1, 1, 3]


def spend(at: float, samples: int, worker: float, server: float, **tiers: float) -> tiered_figures.Spent:
    written = dict.fromkeys(tiered_figures.WRITTEN, 0.0) | tiers
    return tiered_figures.Spent(at=at, samples=samples, seconds={"worker": worker, "server": server}, tiers=written)


def test_what_a_sample_takes_between_two_times() -> None:
    spent = [spend(0.0, 100, 1.0, 1.0), spend(1.0, 200, 3.0, 1.5, rows_flushed=4.0), spend(2.0, 400, 7.0, 2.5)]
    spent += [spend(3.0, 600, 13.0, 4.5, rows_flushed=24.0), spend(9.0, 900, 99.0, 99.0)]
    found = tiered_figures.share_out(spent, 1.0, 3.5)
    assert found["seconds_per_sample"] == pytest.approx({"worker": 0.025, "server": 0.0075})
    assert found["written_per_sample"]["rows_flushed"] == pytest.approx(0.05)
    assert tiered_figures.share_out(spent, 1.5, 2.5) == {}


def test_stores_take_turns_and_one_of_them_makes_checkpoints(tmp_path: Path) -> None:
    workload = tiered_live.Workload(rows_max=2_000, batch=64, workers=1, model="tiny")
    size = tiered_epochs.Size(steps=8, turns=3, warmup_turns=1, seconds_max=60.0)
    cache_bytes = tiered_live.find_cache_bytes(workload, 4_000)
    found = tiered_epochs.measure(workload, str(tmp_path), size, cache_bytes=cache_bytes)
    assert len(found.plain) == len(found.saving) == len(found.more) == 3
    assert min(*found.plain, *found.saving) > 0
    assert found.counts["plain"]["rows_flushed"] == 0 < found.counts["saving"]["rows_flushed"]
    assert found.counts["plain"]["log_bytes_written"] < found.counts["saving"]["log_bytes_written"]
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_what_one_server_is_asked_for_is_its_part_of_a_batch() -> None:
    workload = tiered_live.Workload(rows_max=2_000, batch=64, workers=1, model="tiny")
    job = tiered_epochs.make_job(workload)
    (counts, slots, grads), *_ = tiered_epochs.list_pushes(job, workload, 1)
    whole = len(next(iter(workload.list_batches(1))))
    assert counts.sum() == len(slots)
    assert 0 < counts[:-1].sum() < whole
    assert counts[-1] * workload.servers == job.tables[-1].rows, "all dense parameters"
    assert len(grads) == sum(n * table.dim for n, table in zip(counts, job.tables, strict=True))


def test_the_mean_of_pairs_has_an_error() -> None:
    found = tiered_figures.mean_of_pairs([0.01, 0.03])
    assert found == pytest.approx({"value": 0.02, "low": 0.0, "high": 0.04})
    assert tiered_figures.mean_of_pairs([0.01])["high"] == float("inf")


def test_what_checkpoints_take_and_write() -> None:
    report = make_report()
    for turn in range(2):
        for name, coordinator in (("none", 0.5), ("batch", 0.6)):
            written = {
                "log_bytes_written": 4.0,
                "home_bytes_written": 2.0,
                "rows_flushed": 0.0,
                "rows_evicted_dirty": 1.0,
            }
            if name == "batch":
                written |= {"log_bytes_written": 5.0, "home_bytes_written": 2.5, "rows_flushed": 0.1}
            seconds = {"worker": 7.0, "server": 2.5, "coordinator": coordinator}
            work = {"seconds_per_sample": seconds, "written_per_sample": written}
            report.rows.append({**make_time(name, turn, 1000.0), "kind": "batch", "checkpoints": 4, **work})
    tiered_checkpoint.compare(report)
    tiered_checkpoint.compare_work(report, [0.2, 0.4])
    tiered_checkpoint.compare_written(report, 1e6)
    found = report.ratios["checkpoints_work"]
    assert (found.value, found.low, found.high) == pytest.approx((0.04, 0.02, 0.06))
    assert report.ratios["checkpoints_work"].spread == "twice the error of the mean of pairs"
    row = report.rows[-1]
    assert row["more"]["log_bytes_written"] == pytest.approx(1.0)
    assert row["device_share"] == pytest.approx(1.5e-6 * 1000.0)
    tiered_store.compare(report)  # all parts share one report: rows of this one are none of its own
    assert "written_of_record" not in report.ratios


def test_variants_can_be_configured(tmp_path: Path) -> None:
    workload = tiered_live.Workload(rows_max=1000)
    for variant in (*tiered_time.VARIANTS, *tiered_store.VARIANTS, *tiered_checkpoint.make_variants(100)):
        tiers = {} if variant.place is None else {"store": "tiered", "store_dir": str(tmp_path)}
        assert workload.make_config(**tiers, **variant.changes).store == (
            "memory" if variant.place is None else "tiered"
        )


def test_the_small_model_has_the_usual_tables() -> None:
    with tiered_cache.make_model() as model:
        workload = tiered_live.Workload(rows_max=450_000, batch=64, servers=1, model=model)
        assert list(workload.make_config().load_model().rows) == tiered_live.Workload(rows_max=1 << 31).tables
        smallest = min(tiered_cache.SHARES) * workload.rows
        wanted, allowed = (tiered_live.find_cache_bytes(workload, rows) for rows in (smallest, 0))
    assert wanted >= allowed, "a thousandth of the rows may be a cache"
    assert wanted < 1.5 * allowed


def test_the_points_between_the_least_and_the_most_skewed_stream() -> None:
    """Each skew is held against rows in memory of its own."""
    report = make_report()
    rates = {"memory": (1000.0, 1200.0, 1500.0), "shm": (1000.0, 1200.0, 1500.0), "disk": (800.0, 1000.0, 1500.0)}
    for name, found in rates.items():
        for skew, published, rate in zip(tiered_cache.SKEWS, tiered_cache.MISS_RATES, found, strict=True):
            told = {"kind": "skew", "skew": skew, "round": skew, "variant": name, "published": published}
            report.rows.append({**told, "samples_per_second": rate, "worker_seconds_per_sample": 1e-5})
    tiered_cache.compare_skews(report)
    points = {name: ratio.value for name, ratio in report.ratios.items()}
    assert points["skew_points_disk"] == points["skew_points_disk_equal_speed"] == pytest.approx(0.25)
    assert points["skew_points_shm"] == pytest.approx(0.0)
    assert not report.ratios["skew_points_disk"].met and report.ratios["skew_points_shm"].met


# -- counters ------------------------------------------------------------------------------------------------


def look(at: float, asked: float, misses: float) -> Look:
    tiers = {"hits": asked - misses, "misses": misses, "log_rows_read": misses / 4, "home_rows_read": misses / 4}
    return Look(at=at, tiers={**tiers, "reads": misses / 2})


def test_misses_between_two_times() -> None:
    # A row of a batch is asked for twice; 50 of them to a sample.
    course = Course.of([look(0, 100, 50), look(1, 1100, 150), look(2, 2100, 200)], rows=1050, samples=21)
    found = course.between(1.0, 2.5)
    assert found["miss_rate"] == pytest.approx(0.1)
    assert found["disk_rate"] == pytest.approx(0.05)
    assert found["rows_per_sample"] == pytest.approx(50.0)
    assert found["reads_per_sample"] == pytest.approx(2.5)
    assert course.between(5.0, 6.0) == {}
    assert [(at, pytest.approx(rate)) for at, rate in course.by_time(bins=8)] == [(0.5, 0.2), (1.5, 0.1)]
    assert Course.of([], rows=0, samples=0).by_time(bins=8) == []


def test_bytes_written_by_where_they_went() -> None:
    names = (
        "rows_evicted_dirty",
        "log_bytes_written",
        "home_bytes_written",
        "state_bytes_written",
        "home_rows_written",
    )
    before = dict.fromkeys(names, 10.0)
    now = dict(zip(names, (110.0, 9610.0, 5130.0, 20.0, 60.0), strict=True))
    found = tiered_figures.count_written(now, before, record_bytes=80)
    assert (found["log_bytes"], found["home_bytes"], found["state_bytes"]) == (96.0, 51.2, 0.1)
    assert found["ratio"] == pytest.approx(147.3 / 80)
    assert found["home_rows"] == 0.5 and found["home_bytes_per_home_row"] == pytest.approx(102.4)
    with pytest.raises(ValueError, match="no row left"):
        tiered_figures.count_written(before, before, record_bytes=80)


# -- one store in this process -------------------------------------------------------------------------------


SMALL = tiered_store.Size(
    whole_rows_max=100,
    rounds=1,
    times=tiered_live.Times(seconds=1.0, warmup_seconds=1.0),
    hit_batches=4,
    written_bytes=2_000_000,
    written_seconds_max=4.0,
)


def test_costs_of_hits_and_of_what_is_written(tmp_path: Path) -> None:
    report = make_report()
    report.rows.append({"kind": "hits", **tiered_store.measure_hits(str(tmp_path / "hits"), SMALL)})
    report.rows.append({"kind": "written", **tiered_store.measure_written(str(tmp_path / "written"), SMALL)})
    tiered_store.compare(report)
    hits, written = report.rows
    assert hits["ratio"]["pairs"] == 4 and min(hits["nanoseconds"].values()) > 0
    assert written["record_bytes"] == 80
    assert written["log_bytes"] >= 0.9 * 96.0, "a header and a record; the last rows to leave may still be in a buffer"
    assert report.ratios["written_of_record"].value == written["ratio"] >= written["log_bytes"] / 80 - 0.01
    assert 0.0 < written["miss_rate"] < 1.0


def test_a_cache_for_all_rows_holds_all_rows(tmp_path: Path) -> None:
    job = checkpoint_store.make_job(1_000_000)
    store: Any = TieredStore(job, 0, directory=tmp_path, cache_bytes=tiered_store.find_cache_bytes(job, 1.1))
    assert store.tier_report()["frames"] >= sum(table.rows for table in job.tables)
    store.close()
