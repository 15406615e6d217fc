"""Goal: a config is whole and legal once it exists, survives JSON and TOML, and names what is wrong with it.

Method: tables of bad options with the words the user gets to see; round trips compared as wholes.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regrow import protection
from regrow.checks import OPTIMIZERS
from regrow.clusters import CLUSTER_OPTIONS
from regrow.config import RENAMED, ErasureCode, Sabotage, TrainConfig
from regrow.defaults import LEARNING_RATES, STEPS_DEFAULT
from regrow.errors import ConfigError, UserError
from regrow.inputs import FORMS
from regrow.units import MIB

FAULT_HINT = "for a server, a worker (with their numbers) or the coordinator (without)"

BAD_OPTIONS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"servers": 0}, "servers = 0: must be at least 1", None),
    ({"servers": 100_000}, "servers = 100000: must be at most 1024", None),
    ({"spare_workers": -1}, "spare_workers = -1: must be at least 0", None),
    ({"servers": True}, "servers = True: must be a whole number", None),
    ({"servers": 2.0}, "servers = 2.0: must be a whole number", None),
    ({"servers": None}, "servers = None: must be a whole number", None),
    ({"workers": -1}, "workers = -1: must be at least 1", None),
    ({"workers": "2"}, "workers = '2': must be a whole number", None),
    ({"batch": 0}, "batch = 0: must be at least 1", None),
    ({"steps": 0}, "steps = 0: must be at least 1", None),
    ({"seed": -1}, "seed = -1: must be at least 0", None),
    ({"rows_max": 0}, "rows_max = 0: must be at least 1", None),
    ({"rows_max": 1 << 32}, "rows_max = 4294967296: must be at most 4294967295", None),
    ({"prefetch": -1}, "prefetch = -1: must be at least 0", None),
    ({"frame_bytes_max": 1}, "frame_bytes_max = 1: must be at least 65536", None),
    ({"redo_bytes_max": 1}, "redo_bytes_max = 1: must be at least 65536", None),
    ({"digest": 1}, "digest = 1: must be true or false", None),
    ({"prefill": 1}, "prefill = 1: must be true or false", None),
    ({"check_parity": 1}, "check_parity = 1: must be true or false", None),
    ({"step_digests": 1}, "step_digests = 1: must be true or false", None),
    ({"recovery_profile": 1}, "recovery_profile = 1: must be true or false", None),
    ({"step_profile": 1}, "step_profile = 1: must be true or false", None),
    ({"mode": "snyc"}, "mode = 'snyc': must be one of: async, sync", "did you mean 'sync'?"),
    ({"mode": 1}, "mode = 1: must be text", None),
    ({"optimizer": "lion"}, f"optimizer = 'lion': must be one of: {', '.join(OPTIMIZERS)}", None),
    (
        {"dense_optimizer": "adams"},
        "dense_optimizer = 'adams': must be one of: sgd, momentum, adagrad, adam",
        "did you mean 'adam'?",
    ),
    (
        {"protection": "raid"},
        "protection = 'raid': must be one of: none, ec, full, delta, ec+delta, partial, ec+partial, batch",
        None,
    ),
    (
        {"protection": "ec+partial", "ckpt": "x", "servers": 5, "commit": "2pc"},
        "commit = '2pc': protection \"ec+partial\" always commits exactly once",
        None,
    ),
    (
        {"protection": "ec+partial", "ckpt": "x", "servers": 4, "k": 4, "r": 1},
        "k = 4: k + r = 5 members need as many servers in a ring; 4 servers in 1 ring",
        "k = 3 fits",
    ),
    (
        {"protection": "ec+partial", "ckpt": "x", "servers": 2, "k": 1, "r": 1},
        "r = 1: r + 1 = 2 copies of dense parameters need 3 servers in a ring, not 2",
        "more servers, fewer rings, or a smaller r",
    ),
    (
        {"protection": "ec+partial", "servers": 5},
        "protection = 'ec+partial': needs a place for checkpoints",
        "--ckpt DIRECTORY, or a URL such as s3://bucket/run",
    ),
    ({"script": ("-m",)}, "script = '-m': -m needs the name of a module", None),
    (
        {"script": ("train.py",), "model": "tiny"},
        "model = 'tiny': is the script's own business",
        "say it to the script",
    ),
    ({"store": "disk"}, "store = 'disk': must be one of: memory, tiered", None),
    ({"store": "tiered"}, "store = 'tiered': needs a directory for its files", "--store-dir DIR"),
    ({"store_dir": "d"}, "store_dir = 'd': store \"memory\" does not use it", "--store tiered"),
    ({"cache_bytes": 4 * MIB}, 'cache_bytes = 4194304: store "memory" does not use it', "--store tiered"),
    ({"cache_bytes": 1}, "cache_bytes = 1: must be at least 65536", None),
    ({"store_threads": 0}, "store_threads = 0: must be at least 1", None),
    ({"store_bytes_max": 1}, "store_bytes_max = 1: must be at least 65536", None),
    ({"store_io": "fast"}, "store_io = 'fast': must be one of: auto, direct, mmap, threads", None),
    ({"cache_policy": "fifo"}, "cache_policy = 'fifo': must be one of: lru, none, self", None),
    (
        {"store": "tiered", "store_dir": "d", "protection": "ec"},
        "store = 'tiered': parities and copies of rows are in memory only; "
        'protection "ec" does not go with rows on disk',
        "protect none, full, delta or batch; parities on the disk would need more than twice the reads",
    ),
    (
        {"protection": "batch"},
        "protection = 'batch': keeps checkpoints in the files of tiered rows",
        '--store tiered --store-dir DIR, or protect "full" or "delta" with --ckpt',
    ),
    (
        {"store": "tiered", "store_dir": "d", "protection": "batch", "ckpt": "c"},
        "ckpt = 'c': protection \"batch\" keeps checkpoints in store_dir",
        "leave ckpt out; `regrow ckpt restore DIR --to URL` makes a checkpoint elsewhere of it",
    ),
    (
        {"protection": "delta"},
        "protection = 'delta': needs a place for checkpoints",
        "--ckpt DIRECTORY, or a URL such as s3://bucket/run",
    ),
    (
        {"ckpt": "x"},
        "ckpt = 'x': protection \"none\" makes no checkpoints",
        'protect "full", "delta", "ec+delta", "partial" or "ec+partial"',
    ),
    ({"every": "auto"}, 'every = \'auto\': goes with protection "partial" or "ec+partial" only', "60s, or 500steps"),
    (
        {"target_pls": 0.0},
        "target_pls = 0.0: must be above 0 and at most 1",
        "0.1: a tenth of the training may be lost, expected over the whole run",
    ),
    (
        {"priority_share": 1.5},
        "priority_share = 1.5: must be above 0 and at most 1",
        "0.125: an eighth of the rows, eight times as often",
    ),
    ({"priority": "lru"}, "priority = 'lru': must be one of: none, scar, mfu, ssu", None),
    ({"priority": "mfu"}, "priority = 'mfu': protection \"none\" does not use it", 'protect "partial" or "ec+partial"'),
    ({"ssu_period": 0}, "ssu_period = 0: must be at least 1", None),
    ({"expect_mtbf": "0s"}, "expect_mtbf = '0s': must be above 0", "14h, or 30m"),
    (
        {"priority_tables": "t_cat_99", "protection": "partial", "ckpt": "x"},
        "priority_tables = 't_cat_99': there is no table 't_cat_99'",
        "did you mean 't_cat_9'?",
    ),
    (
        {"protection": "partial"},
        "protection = 'partial': needs a place for checkpoints",
        "--ckpt DIRECTORY, or a URL such as s3://bucket/run",
    ),
    (
        {"protection": "partial", "ckpt": "x", "servers": 1, "r": 1},
        "r = 1: so many copies need more than 1 servers",
        "2 servers",
    ),
    ({"every": "soon"}, 'every = \'soon\': is not an interval; "60s", "5m" and "500steps" are', None),
    ({"every": "1.5steps"}, 'every = \'1.5steps\': is not an interval; "60s", "5m" and "500steps" are', None),
    ({"full_every": 0}, "full_every = 0: must be at least 1", None),
    ({"ckpt_bytes_per_s": 0}, "ckpt_bytes_per_s = 0: must be at least 1", None),
    ({"ckpt_keep_last": 0}, "ckpt_keep_last = 0: must be at least 1", None),
    ({"ckpt_pause": 1}, "ckpt_pause = 1: must be true or false", None),
    ({"resume": 1}, "resume = 1: must be text", None),
    ({"ckpt_bits": 16}, "ckpt_bits = 16: is not 32, 8 or 4", None),
    ({"ckpt_encoding": "gzip"}, "ckpt_encoding = 'gzip': must be one of: raw, zstd", None),
    ({"k": 0}, "k = 0: must be at least 1", None),
    ({"r": 0}, "r = 0: must be at least 1", None),
    ({"rings": 0}, "rings = 0: must be at least 1", None),
    ({"flush_pushes": 0}, "flush_pushes = 0: must be at least 1", None),
    ({"flush_bytes": 1}, "flush_bytes = 1: must be at least 4096", None),
    ({"sweep_bytes_per_s": -1}, "sweep_bytes_per_s = -1: must be at least 0", None),
    ({"recovery_cost": 1.5}, "recovery_cost = 1.5: must be between 0 and 1", None),
    ({"recovery_seconds_max": 0}, "recovery_seconds_max = 0: must be at least 1", None),
    ({"commit": "twice"}, "commit = 'twice': must be one of: exactly-once, 2pc, none", None),
    (
        {"protection": "ec", "servers": 3, "k": 4},
        "k = 4: k + r = 5 members need as many servers in a ring; 3 servers in 1 ring",
        "k = 2 fits",
    ),
    (
        {"protection": "ec", "servers": 6, "rings": 2, "k": 2, "r": 3},
        "k = 2: k + r = 5 members need as many servers in a ring; 6 servers in 2 rings",
        "r = 3 needs more servers",
    ),
    ({"protection": "ec", "rings": 2}, "rings = 2: 5 servers cannot be divided so", None),
    (
        {"protection": "ec", "mode": "sync", "commit": "2pc"},
        "commit = '2pc': mode \"sync\" always commits exactly once",
        None,
    ),
    (
        {"protection": "ec", "commit": "2pc", "flush_pushes": 8},
        'flush_pushes = 8: commit "2pc" stages every push',
        "leave flush_pushes out, or set it to 1",
    ),
    ({"kill": "server:1@step:5"}, "kill = 'server:1@step:5': must be a list of texts", None),
    ({"kill": ["server@step:5"]}, "kill = 'server@step:5': must be like server:2@step:100", FAULT_HINT),
    ({"kill": ["server:1@step:5:3s"]}, "kill = 'server:1@step:5:3s': must be like server:2@step:100", FAULT_HINT),
    ({"kill": ["server:5@step:5"]}, "kill = 'server:5@step:5': there is no server 5, only 5", None),
    ({"kill": ["coordinator:1@step:5"]}, "kill = 'coordinator:1@step:5': there is no coordinator 1, only 1", None),
    ({"kill": ["worker:0@step:301"]}, "kill = 'worker:0@step:301': steps are 1 to 300", None),
    ({"kill": ["worker:0@step:0"]}, "kill = 'worker:0@step:0': steps are 1 to 300", None),
    ({"pause": ["server:1@step:5"]}, "pause = 'server:1@step:5': must be like server:1@step:80:5s", FAULT_HINT),
    ({"mtbf_hangs": 1.5}, "mtbf_hangs = 1.5: must be between 0 and 1", None),
    ({"mtbf": 0.0}, "mtbf = 0.0: must be between 0.1 and 10**9 seconds", None),
    ({"mtbf_shape": 0.0}, "mtbf_shape = 0.0: must be between 0.1 and 100", None),
    ({"mtbf_shape": float("nan")}, "mtbf_shape = nan: must be between 0.1 and 100", None),
    ({"mtbf_kill": 0}, "mtbf_kill = 0: must be at least 1", None),
    ({"mtbf_kill": 6}, "mtbf_kill = 6: must be at most 5", None),
    (
        {"mtbf": 9.0, "mtbf_kill": 2, "protection": "ec"},
        'mtbf_kill = 2: protection "ec" survives the loss of 1 together',
        'protect "ec" with r = 2 or more, or with checkpoints: "ec+delta", "delta" or "full"',
    ),
    (
        {"mtbf": 9.0, "mtbf_kill": 2},
        'mtbf_kill = 2: protection "none" survives the loss of 0 together',
        'protect "ec" with r = 2 or more, or with checkpoints: "ec+delta", "delta" or "full"',
    ),
    (
        {"mtbf": 9.0, "mtbf_kill": 2, "mtbf_roles": "worker"},
        "mtbf_kill = 2: only servers die together",
        'add "server" to mtbf_roles',
    ),
    (
        {"mtbf_roles": "server,client"},
        "mtbf_roles = 'server,client': must be some of server, worker, coordinator, spare, with commas",
        None,
    ),
    ({"transport": "udp"}, "transport = 'udp': must be one of: unix, tcp", None),
    ({"authenticate": "yes"}, "authenticate = 'yes': must be one of: auto, always, never", None),
    (
        {"tls": "auto", "transport": "unix"},
        "tls = 'auto': Unix sockets leave no machine",
        "--transport tcp, or --tls off",
    ),
    ({"device": "gpu"}, 'device = \'gpu\': must be "cpu", "cuda" or "cuda:N"', None),
    ({"device": "cuda:"}, 'device = \'cuda:\': must be "cpu", "cuda" or "cuda:N"', None),
    ({"skew": 5.0}, "skew = 5.0: must be between 0 and 4", None),
    (
        {"learning_rate": 0.0},
        "learning_rate = 0.0: must be above 0 and at most 10000",
        "leave it out for the default of the optimizer",
    ),
    (
        {"dense_learning_rate": float("nan")},
        "dense_learning_rate = nan: must be above 0 and at most 10000",
        "leave it out for the default of the optimizer",
    ),
    (
        {"model": "kagle"},
        "model = 'kagle': must be one of tiny, kaggle, terabyte, mlperf, dcn, deepfm, two-tower, a FILE.toml or "
        "module:Class",
        "did you mean 'kaggle'?",
    ),
    (
        {"data": "train.tsv"},
        f"data = 'train.tsv': must be {FORMS}",
        "for a file in Criteo's format: criteo:train.tsv",
    ),
    (
        {"data": "criteo:"},
        f"data = 'criteo:': must be {FORMS}",
        "name the file: criteo:PATH",
    ),
    ({"data": "my data.csv"}, f"data = 'my data.csv': must be {FORMS}", "for a file in CSV format: csv:my data.csv"),
    ({"data": "synthetic:5"}, f"data = 'synthetic:5': must be {FORMS}", None),
    (
        {"data": "csv:a.csv"},
        "data = 'csv:a.csv': needs a schema that says what its columns mean",
        "name a FILE.toml as schema; docs/data.md shows some",
    ),
    (
        {"schema": "s.toml", "data": "criteo:a.tsv"},
        "schema = 's.toml': goes with data from a file (csv, parquet, npz), not with 'criteo:a.tsv'",
        None,
    ),
    (
        {"silent_seconds": "boss=3"},
        "silent_seconds = 'boss=3': 'boss' is none of server, worker, coordinator, spare",
        None,
    ),
    ({"silent_seconds": "soon"}, "silent_seconds = 'soon': is not a time, such as 90s, 5m, 12h or 7d", None),
    ({"patience": "ages"}, "patience = 'ages': is not a time, such as 90s, 5m, 12h or 7d", None),
    ({"publish_bits": 16, "publish": "p"}, "publish_bits = 16: is not 32, 8 or 4", None),
    ({"publish_bits": 8}, "publish_bits = 8: goes with publish", "--publish URL"),
    ({"publish_every": "60s"}, "publish_every = '60s': goes with publish", "--publish URL"),
    *(
        (
            {"publish": place, "protection": "delta", "ckpt": "s3://b/run"},
            f"publish = {place!r}: is inside ckpt = 's3://b/run', or around it",
            "give publications a place of their own: another run's look-ups must not find checkpoints there",
        )
        for place in ("s3://b/run", "s3://b/run/live/", "s3://b")
    ),
    ({"steps": 5, "epochs": 2}, "epochs = 2: steps = 5 is given too", "give only one of the two"),
    (
        {"epochs": 2},
        "epochs = 2: synthetic data has no end",
        "give steps instead, or train_rows to say how long an epoch is",
    ),
    (
        {"mode": "sync", "prefetch": 1},
        'prefetch = 1: mode "sync" cannot pull ahead',
        'set prefetch to 0, or mode to "async"',
    ),
]


@pytest.mark.parametrize("options, message, hint", BAD_OPTIONS, ids=[str(bad[0]) for bad in BAD_OPTIONS])
def test_bad_option(options: dict[str, Any], message: str, hint: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_dict(options)
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert caught.value.option in options
    assert caught.value.exit_code == 2


def test_every_bounded_field_is_in_the_table() -> None:
    """A new knob without a check here is a knob without a check."""
    free = {"test_rows", "train_rows", "out", "skip_bad_lines", "threads_per_worker", "threads_per_server"}
    free |= {"cluster", *CLUSTER_OPTIONS}  # in tests/unit/launch/test_clusters.py
    tested = {name for options, _, _ in BAD_OPTIONS for name in options}
    assert {field.name for field in dataclasses.fields(TrainConfig)} - free == tested


@pytest.mark.parametrize("name", ["test_rows", "train_rows", "threads_per_worker", "threads_per_server"])
def test_counts_are_positive(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = 0: must be at least 1"):
        TrainConfig.from_dict({name: 0})


def test_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        TrainConfig.from_dict({"learning-rates": 1.0})
    assert caught.value.message == "unknown option 'learning-rates'"
    assert caught.value.hint == "did you mean 'learning_rate'?"
    with pytest.raises(UserError) as caught:
        TrainConfig.from_dict({"xyzzy": 1.0})
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("known are: data, schema, model, ")


def test_defaults_are_filled_in() -> None:
    config = TrainConfig()
    assert config.steps == STEPS_DEFAULT
    assert config.epochs is None
    assert config.prefetch == 1
    assert config.threads_per_worker >= 1
    assert TrainConfig(mode="sync").prefetch == 0
    assert TrainConfig(data="criteo:x").epochs == 1
    assert TrainConfig(data="criteo:x").steps is None
    assert TrainConfig(train_rows=100).epochs == 1
    assert type(TrainConfig(learning_rate=1).learning_rate) is float
    for optimizer in OPTIMIZERS:
        assert TrainConfig(optimizer=optimizer).learning_rate == LEARNING_RATES[optimizer]


def test_no_field_is_left_open() -> None:
    """What is None afterwards means something: no limit, or the other one of steps and epochs."""
    none = {name for name, value in TrainConfig().to_dict().items() if value is None}
    limits = {"rows_max", "train_rows", "test_rows", "ckpt_bytes_per_s", "store_bytes_max"}
    limits |= {"servers_per_node", "server_memory", "job"}
    assert none == limits | {"epochs", "out", "mtbf", "ckpt", "resume", "expect_mtbf", "store_dir", "schema", "publish"}


@pytest.mark.parametrize(
    ("text", "interval"),
    [("60s", (60.0, None)), ("1.5m", (90.0, None)), ("2h", (7200.0, None)), ("500steps", (None, 500))],
)
def test_interval(text: str, interval: tuple[float | None, int | None]) -> None:
    assert TrainConfig(every=text).interval == interval


def test_protection() -> None:
    assert TrainConfig().code is None
    assert TrainConfig(protection="ec").code == ErasureCode(k=4, r=1)
    asked = ErasureCode(k=2, r=1, rings=2, flush_bytes=1 << 20, commit="2pc", sweep_bytes_per_s=5)
    assert asked.flush_pushes == 1
    config = TrainConfig(protection="ec", servers=6, **dataclasses.asdict(asked))
    assert config.code == asked
    assert TrainConfig(commit="none", protection="ec").flush_pushes == protection.FLUSH_PUSHES_DEFAULT
    with pytest.raises(ConfigError, match=r"k \+ r = 5 members need as many servers in a ring; 4 servers"):
        ErasureCode().check(servers=4, mode="async")
    with pytest.raises(ConfigError, match="must be at least 1"):
        ErasureCode(r=0)


def test_servers_may_die_together_where_that_is_survived() -> None:
    assert TrainConfig(protection="ec", k=2, r=2, mtbf=9.0, mtbf_kill=2).mtbf_kill == 2
    for kind in ("full", "delta", "ec+delta"):
        assert TrainConfig(protection=kind, ckpt="x", mtbf=9.0, mtbf_kill=5).mtbf_kill == 5
    # Without random kills it asks for nothing; with one at a time a run without protection shows what is lost.
    assert TrainConfig(mtbf_kill=2).mtbf is None
    assert TrainConfig(mtbf=9).mtbf_kill == 1
    assert type(TrainConfig(mtbf_shape=2).mtbf_shape) is float


def test_a_role_that_is_none_is_repeated_as_it_was_said() -> None:
    with pytest.raises(ConfigError, match="mtbf_roles = 'server,boss': must be some of server, "):
        TrainConfig(mtbf_roles="servers, boss")


def test_faults_by_step() -> None:
    assert TrainConfig(mtbf_roles="servers, workers,coordinator").mtbf_roles == "server,worker,coordinator"
    config = TrainConfig(
        kill=("server:2@step:100", "worker:0@step:50", "coordinator@step:60"), pause=("server:1@step:80:2.5s",)
    )
    assert config.sabotage == (
        Sabotage(role="worker", id=0, step=50),
        Sabotage(role="coordinator", id=0, step=60),
        Sabotage(role="server", id=1, step=80, pause_seconds=2.5),
        Sabotage(role="server", id=2, step=100),
    )


ODD = TrainConfig(
    data='criteo:/tmp/odd "name"\\ \x7f\n\t ümläut 😀.tsv',
    model="my/model.toml",
    rows_max=7,
    optimizer="adam",
    learning_rate=1e-05,
    dense_learning_rate=1e3,
    epochs=2,
    seed=(1 << 63) - 1,
    out="here",
    digest=False,
    skip_bad_lines=True,
    protection="ec",
    k=2,
    commit="2pc",
    kill=("server:1@step:9", "coordinator@step:2"),
    pause=("worker:1@step:9:0.5s",),
    mtbf=7,
)


@pytest.mark.parametrize("config", [TrainConfig(), ODD], ids=["default", "odd"])
def test_round_trips(config: TrainConfig, tmp_path: Path) -> None:
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    path = tmp_path / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    # The directory is not repeated: the file is for starting another run.
    assert TrainConfig.from_toml(path) == config.replace(out=None)


def test_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('servers = 3\nsteps = 10\nmodel = "tiny"\n')
    config = TrainConfig.from_toml(path, {"servers": 4, "epochs": 2, "train_rows": 1000})
    assert (config.servers, config.steps, config.epochs, config.model) == (4, None, 2, "tiny")
    path.write_text('epochs = 2\ndata = "criteo:x"\n')
    config = TrainConfig.from_toml(path, {"steps": 5})
    assert (config.steps, config.epochs) == (5, None)


def test_what_a_checkpoint_kept_is_read_by_todays_names() -> None:
    stored = {**TrainConfig(rings=1, servers=6, seed=7).to_dict(), "sweep_bytes_per_s": None}
    stored["groups"] = stored.pop("rings") + 1
    assert TrainConfig.from_stored(json.loads(json.dumps(stored))) == TrainConfig(rings=2, servers=6, seed=7)
    today = TrainConfig(sweep_bytes_per_s=5, kill=("server:1@step:3",))
    assert TrainConfig.from_stored(json.loads(json.dumps(today.to_dict()))) == today
    assert set(RENAMED.values()) <= set(today.to_dict()) and not set(RENAMED) & set(today.to_dict())
    with pytest.raises(UserError, match="unknown option 'serverz'"):
        TrainConfig.from_stored({"serverz": 3})


BAD_FILES = [
    ("servers: 3", "cannot read {path}: ", "it holds one `option = value` per line; text needs quotes"),
    ("servers = 0", "{path}: servers = 0: must be at least 1", None),
    ("serverz = 3", "{path}: unknown option 'serverz'", "did you mean 'servers'?"),
    ("groups = 2", "{path}: unknown option 'groups'", "it is called 'rings' now"),
    ("[train]\nservers = 3", "{path}: unknown option 'train'", "did you mean 'train_rows'?"),
    ('model = ["kaggle"]', "{path}: model = ['kaggle']: must be text", None),
]


@pytest.mark.parametrize("text, message, hint", BAD_FILES, ids=[bad[0] for bad in BAD_FILES])
def test_bad_file(text: str, message: str, hint: str | None, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        TrainConfig.from_toml(path)
    assert caught.value.message.startswith(message.format(path=path))
    assert caught.value.hint == hint


def test_bad_override_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("servers = 3")
    with pytest.raises(UserError) as caught:
        TrainConfig.from_toml(path, {"servers": 0})
    assert caught.value.message == "servers = 0: must be at least 1"


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*: No such file or directory"):
        TrainConfig.from_toml(tmp_path / "missing.toml")
    with pytest.raises(UserError, match=r"cannot read .*: Is a directory"):
        TrainConfig.from_toml(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"cannot read .*: it is not text"):
        TrainConfig.from_toml(tmp_path / "binary")


@pytest.mark.parametrize("name", ["train_rows", "test_rows", "skip_bad_lines"])
def test_a_data_set_of_ones_own_decides_what_is_in_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} = .*: is the business of mine:make itself"):
        TrainConfig.from_dict({"data": "mine:make", name: True if name == "skip_bad_lines" else 5})


@pytest.mark.parametrize(
    ("data", "kind", "path"),
    [
        ("csv:a.csv.gz", "csv", Path("a.csv.gz")),
        ("parquet:dir/", "parquet", Path("dir")),
        ("npz:a:b.npz", "npz", Path("a:b.npz")),
        ("package.module:make", "module", None),
        ("package.module:Maker.make", "module", None),
    ],
)
def test_data_of_ones_own(data: str, kind: str, path: Path | None) -> None:
    config = TrainConfig(data=data, schema=None if kind == "module" else "s.toml")
    assert (config.data_kind, config.data_path, config.epochs) == (kind, path, 1)


def test_readings() -> None:
    config = TrainConfig(data="criteo:/a:b.tsv", model="dir/small.toml")
    assert (config.data_kind, config.data_path, config.model_name) == ("criteo", Path("/a:b.tsv"), "small")
    config = TrainConfig()
    assert (config.data_kind, config.data_path, config.model_name) == ("synthetic", None, "kaggle")


def test_model_from_preset_and_file(tmp_path: Path) -> None:
    assert TrainConfig(model="tiny").load_model().dim == 8
    assert TrainConfig(model="tiny", rows_max=5).load_model().rows_max == 5
    path = tmp_path / "small.toml"
    path.write_text("dim = 4\nbottom = [8, 4]\ntop = [8, 1]\nrows_max = 100\n")
    model = TrainConfig(model=str(path)).load_model()
    assert (model.name, model.dim, model.bottom, model.top, model.rows_max) == (
        "small",
        4,
        (8, 4),
        (8, 1),
        100,
    )


BAD_MODELS = [
    ("dim = 4", "bottom is missing"),
    ("dim = 4\nbottom = [8, 3]\ntop = [1]", "model small: bottom [8, 3] must end with dim 4"),
    ("dim = 4\nbottom = 4\ntop = [1]", "bottom = 4 must be a list of whole numbers"),
    ("dims = 4", "unknown field 'dims'"),
]


@pytest.mark.parametrize("text, message", BAD_MODELS)
def test_bad_model_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        TrainConfig(model=str(path)).load_model()
    assert caught.value.message == f"{path}: {message}"


def test_config_is_cheap_to_import() -> None:
    """`regrow --help` and every server read this module."""
    code = "import sys, regrow.config as c; c.TrainConfig(); print({'torch', 'numpy', 'rich'} & {*sys.modules})"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ)
    ).stdout
    assert output.strip() == "set()"


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ({}, 2048),
        ({"data": "criteo:nowhere.tsv"}, 2048),
        ({"data": "criteo:nowhere.tsv", "train_rows": 117_335}, 128),
        ({"data": "criteo:nowhere.tsv", "train_rows": 1_000_000, "workers": 2}, 1024),
        ({"data": "criteo:nowhere.tsv", "train_rows": 50}, 128),
        ({"data": "criteo:nowhere.tsv", "train_rows": 50, "batch": 7}, 7),
    ],
)
def test_the_batch_leaves_a_small_file_enough_steps(options: dict[str, Any], batch: int) -> None:
    assert TrainConfig.from_dict(options).batch == batch


def test_the_batch_follows_the_size_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "clicks.tsv"
    line = b"x" * 240 + b"\n"
    path.write_bytes(line * 2 * 400 * 256)
    assert TrainConfig(data=f"criteo:{path}", workers=2).batch == 256
    assert TrainConfig(data=f"csv:{path}", schema="s.toml", workers=2).batch == 256
    packed = tmp_path / "clicks.csv.gz"
    packed.write_bytes(gzip.compress(b"".join(b"%d,%d\n" % (i, i * i % 997) for i in range(2 * 400 * 256))))
    assert TrainConfig(data=f"csv:{packed}", schema="s.toml", workers=2).batch == 256
    packed.write_bytes(b"\x1f\x8bno gzip")
    assert TrainConfig(data=f"csv:{packed}", schema="s.toml", workers=2).batch == 2048
