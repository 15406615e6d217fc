"""Goal: a run with rows on disk is refused before it starts if it cannot go well, with the arithmetic; files of others
are left alone, and checkpoints are deleted on the user's word only.

Method: directories as other runs leave them, and configurations that do not fit them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from regrow.config import TrainConfig
from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.errors import ConfigError, UserError
from regrow.launch import tiers
from regrow.launch.tier_counts import COUNTERS, SIZES, add_counts, describe_tiers, sum_tiers
from regrow.launch.tiers import FOLDER, Needs, StoreDir
from regrow.store.tiered import TieredStore
from regrow.units import MIB

DOCS = Path(__file__).parents[3] / "docs"


def make_config(path: Path, **options: Any) -> TrainConfig:
    given = {"model": "tiny", "batch": 64, "servers": 3, "store": "tiered", "store_dir": str(path), "steps": 5}
    return TrainConfig.from_dict({**given, "cache_bytes": 64 * MIB, **options})


def open_and_close(config: TrainConfig, *, overwrite: bool = False) -> None:
    StoreDir.open(config, overwrite=overwrite).close()


def fill(path: Path) -> None:
    """As a run leaves it that was killed."""
    for server in range(3):
        (path / f"server-{server}").mkdir()
        (path / f"server-{server}" / "home").write_bytes(b"rows")
    (path / FOLDER).mkdir()
    (path / FOLDER / "0000000001-0000000040-abcdef.json").write_text("{}")


def test_a_cache_must_hold_twice_what_is_needed_at_once(tmp_path: Path) -> None:
    config = make_config(tmp_path, batch=2048, cache_bytes=MIB)
    with pytest.raises(ConfigError) as caught:
        open_and_close(config)
    rows = Needs(config).rows_at_once
    assert f"2048 samples, and dense parameters, name up to {rows:,} distinct rows of a server at once" in str(
        caught.value
    )
    least = -(-Needs(config).cache_bytes_min // MIB)
    assert caught.value.hint == f"--cache-bytes {least}M or more, or a smaller --batch"
    tiers.check_cache(config.replace(cache_bytes=least * MIB))


def test_of_a_script_nothing_is_counted_that_is_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables are declared while it runs; those of the default model are not its own."""
    free = dataclasses.make_dataclass("Usage", ["free"])(1000)
    monkeypatch.setattr(tiers.shutil, "disk_usage", lambda path: free)
    given = {"store": "tiered", "store_dir": str(tmp_path), "cache_bytes": MIB, "servers": 3, "script": ("train.py",)}
    config = TrainConfig.from_dict(given)
    open_and_close(config)
    assert tiers.make_identity(config) == {"servers": 3, "seed": config.seed}


def test_synchronous_steps_need_the_rows_of_all_workers(tmp_path: Path) -> None:
    one = Needs(make_config(tmp_path, mode="sync", workers=1, rows_max=100_000))
    two = Needs(make_config(tmp_path, mode="sync", workers=2, rows_max=100_000))
    free = Needs(make_config(tmp_path, mode="async", workers=2, rows_max=100_000))
    assert one.rows_at_once == free.rows_at_once < two.rows_at_once


def test_there_must_be_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = dataclasses.make_dataclass("Usage", ["free"])(1000)
    monkeypatch.setattr(tiers.shutil, "disk_usage", lambda path: free)
    with pytest.raises(UserError, match=r"not enough space: 3 servers need .* each, 1000 B are free"):
        open_and_close(make_config(tmp_path))


def test_a_node_of_a_cluster_needs_space_for_its_own_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path)
    needs = Needs(config)
    each = needs.home_bytes + needs.count_log_bytes(least=False)
    free = dataclasses.make_dataclass("Usage", ["free"])(2 * each)
    monkeypatch.setattr(tiers.shutil, "disk_usage", lambda path: free)
    StoreDir.open(config, overwrite=False, servers=2).close()
    with pytest.raises(UserError, match="3 servers need"):
        open_and_close(config)


def test_a_node_may_have_its_id_in_the_directory() -> None:
    assert tiers.name_directory("/nvme/{node}/run", "ab12") == "/nvme/ab12/run"
    assert tiers.name_directory("/nvme/run", "ab12") == "/nvme/run"


def test_a_cache_for_more_rows_than_there_are_needs_no_more_log(tmp_path: Path) -> None:
    """As in the store itself, which has no frames for rows that do not exist: the default cache is one of a GiB."""
    options = {"servers": 1, "rows_max": 10_000}
    large = make_config(tmp_path, cache_bytes=1 << 34, **options)
    needs = Needs(large)
    assert needs.count_log_bytes(least=False) == Needs(
        make_config(tmp_path, cache_bytes=needs.cache_bytes_max, **options)
    ).count_log_bytes(least=False)
    bytes_max = needs.home_bytes + needs.count_log_bytes(least=True)
    open_and_close(large.replace(store_bytes_max=bytes_max))
    table = TableSpec(
        name="t", rows=10_000, dim=8, init_bound=0.5, optimizer=OptimizerSpec(kind="sgd", learning_rate=1.0)
    )
    with contextlib.closing(
        TieredStore(
            JobSpec(tables=(table,), servers=1, workers=1, seed=1), 0, directory=tmp_path / "one", cache_bytes=1 << 34
        )
    ) as store:
        assert store.tier_report()["frames"] == 10_000
        assert store.tier_report()["log_bytes_max"] < 1 << 27


def test_files_must_be_allowed_to_hold_all_rows(tmp_path: Path) -> None:
    config = make_config(tmp_path, rows_max=1_000_000, model="kaggle", store_bytes_max=MIB)
    with pytest.raises(ConfigError, match=r"store_bytes_max = 1048576: the [\d,]+ rows of a server need"):
        open_and_close(config)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    first = StoreDir.open(config, overwrite=False)
    with pytest.raises(UserError, match="is in use by another run"):
        StoreDir.open(config, overwrite=True)
    first.close()
    open_and_close(config)


def test_files_of_others_stay(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"has other files in it \(thesis.txt\)"):
        open_and_close(make_config(tmp_path), overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_rows_that_nobody_can_go_on_with_are_cleared(tmp_path: Path) -> None:
    open_and_close(make_config(tmp_path))
    fill(tmp_path)
    open_and_close(make_config(tmp_path, seed=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "store.json"]


def test_checkpoints_are_deleted_on_the_users_word_only(tmp_path: Path) -> None:
    config = make_config(tmp_path, protection="batch")
    open_and_close(config)
    fill(tmp_path)
    with pytest.raises(UserError, match="has a checkpoint of a run in it") as caught:
        open_and_close(config)
    assert caught.value.hint is not None and f"--resume {tmp_path} goes on with it" in caught.value.hint
    assert (tmp_path / "server-1" / "home").exists()
    open_and_close(config, overwrite=True)
    assert not (tmp_path / "server-1").exists()


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"servers": 4}, "was made with servers 3; this run has servers 4"),
        ({"seed": 2}, "was made with seed 1; this run has seed 2"),
        ({"optimizer": "adam"}, "was made with optimizer rowwise_adagrad; this run has optimizer adam"),
        ({"rows_max": 17}, "was made with other tables; this run has those of its model"),
    ],
)
def test_only_the_same_job_goes_on(tmp_path: Path, options: dict[str, Any], problem: str) -> None:
    open_and_close(make_config(tmp_path, protection="batch"))
    fill(tmp_path)
    config = make_config(tmp_path, protection="batch", resume=str(tmp_path), **options)
    with pytest.raises(UserError, match=problem):
        open_and_close(config)
    assert (tmp_path / "server-1" / "home").exists()


def test_a_format_that_is_not_known_is_refused(tmp_path: Path) -> None:
    open_and_close(make_config(tmp_path, protection="batch"))
    text = (tmp_path / "store.json").read_text()
    (tmp_path / "store.json").write_text(text.replace('"format": 1', '"format": 9'))
    with pytest.raises(UserError, match="is of format 9, this Regrow reads format 1"):
        open_and_close(make_config(tmp_path, protection="batch", resume=str(tmp_path)))


def test_a_run_goes_on_in_its_own_directory_only(tmp_path: Path) -> None:
    open_and_close(make_config(tmp_path / "a", protection="batch"))
    with pytest.raises(UserError, match="only a run in that directory can go on with"):
        tiers.holds_epochs(str(tmp_path / "a"), make_config(tmp_path / "b", protection="batch"))
    with pytest.raises(UserError, match="has checkpoints in its files"):
        tiers.holds_epochs(str(tmp_path / "a"), make_config(tmp_path / "a"))
    assert not tiers.holds_epochs(str(tmp_path), make_config(tmp_path / "a"))


@pytest.mark.parametrize("protection, stays", [("none", False), ("batch", True)])
def test_rows_stay_behind_a_run_only_with_checkpoints(tmp_path: Path, protection: str, stays: bool) -> None:
    directory = StoreDir.open(make_config(tmp_path, protection=protection), overwrite=False)
    fill(tmp_path)
    directory.finish()
    directory.close()
    assert [(tmp_path / name).exists() for name in ("server-0", "store.json")] == [stays, stays]


# --- What is counted ---


def test_counts_go_on_in_a_successor_and_sizes_do_not() -> None:
    first = add_counts({"hits": 3, "misses": 1, "file_bytes": 100}, {})
    second = add_counts({"hits": 4, "misses": 2, "file_bytes": 50}, first)
    assert (second["hits"], second["misses"], second["file_bytes"]) == (7, 3, 50)


def test_hit_rates_of_all_servers() -> None:
    one = add_counts({"hits": 90, "misses": 10, "rows_to_flush": 5}, {})
    total = sum_tiers([one, {}, add_counts({"hits": 100, "full": 1}, {})], lookups=1000)
    assert total is not None
    assert (total["hit_rate_rows"], total["hit_rate_lookups"], total["servers_full"]) == (0.95, 0.99, 1)
    assert describe_tiers(total) == ("cache 95.0 % of rows, waited 0.0 s, files 0 B, 5 rows to write, no space left")
    assert sum_tiers([{}, {}], lookups=5) is None


def test_every_name_of_the_summary_is_explained() -> None:
    page = (DOCS / "tiered-use.md").read_text()
    names = [*COUNTERS, *SIZES, "hit_rate_rows", "hit_rate_lookups", "servers_full"]
    assert [name for name in names if f"`{name}`" not in page] == []
