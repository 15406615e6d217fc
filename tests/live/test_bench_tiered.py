"""Goal: a run of `regrow bench tiered` measures what it says: the rows of a real training are on disk, and looked for
there.

Method: the smallest such run, by the function that all parts use. No test here looks at speed.
"""

from __future__ import annotations

from pathlib import Path

from regrow.bench import tiered_device, tiered_live


def test_a_run_with_rows_on_disk(tmp_path: Path) -> None:
    device = tiered_device.Device(
        name="disk", direct=True, write_bytes_per_s=1.0, read_bytes_per_s=1.0, random_reads_per_s={1: 1.0}
    )
    place = tiered_live.Place(name="disk", label="a disk", directory=tmp_path, device=device)
    setting = tiered_live.Setting(quick=True, places={"disk": place})
    workload = tiered_live.Workload(rows_max=5_000, batch=64, servers=2, workers=1, model="tiny")
    row = tiered_live.run(
        workload,
        tiered_live.Variant(
            name="disk", label="disk", place="disk", changes={"protection": "batch", "every": "40steps"}
        ),
        setting,
        times=tiered_live.Times(seconds=2.0, warmup_seconds=1.0),
        rate=tiered_live.find_rate(workload),
        cache_bytes=tiered_live.find_cache_bytes(workload, 4_000),
    )
    assert row["samples_per_second"] > 0
    assert row["checkpoints"] > 2
    assert row["seconds_per_sample"]["worker"] > 0 and row["seconds_per_sample"]["server"] > 0
    assert row["written_per_sample"]["log_bytes_written"] > 0 and row["written_per_sample"]["rows_flushed"] > 0
    assert row["file_bytes"] > 0 and row["io"]
    assert 0 < row["frames"] < row["rows"]
    assert row["server_rss_bytes"] > row["server_bytes"] > 0
    assert not list(tmp_path.iterdir()), "nothing is left behind"
