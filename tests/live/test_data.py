"""Goal: `regrow train` on somebody's own data survives what it survives on ours, to the bit, and refuses what it cannot
read before it starts a process.

Method: whole runs with real processes on a small CSV file with bags, gaps and quotes, and on the same rows in the
other formats; digests are compared with an undisturbed run without protection.
"""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from regrow.config import TrainConfig
from regrow.errors import UserError
from regrow.launch import local

pytestmark = pytest.mark.live

STEPS = 12
COLUMNS = ["liked", "price", "user", "genres"]
SCHEMA = """
[label]
column = "liked"
[[dense]]
column = "price"
transform = "log1p"
[[categorical]]
column = "user"
id = "hash"
rows = 500
[[categorical]]
column = "genres"
id = "vocabulary"
words = ["War", "Drama", "Film, noir"]
many = true
"""


def make_rows(count: int = 1400) -> list[list[Any]]:
    chance = random.Random(6)
    genres = ["War", "Drama", "Film, noir", "Jazz"]
    return [
        [
            i % 2,
            chance.choice([None, chance.randrange(5000)]),
            f"user {chance.randrange(300)}",
            chance.sample(genres, chance.randrange(4)),
        ]
        for i in range(count)
    ]


def write_csv(path: Path, rows: list[list[Any]]) -> None:
    lines = [",".join(COLUMNS)]
    for liked, price, user, genres in rows:
        price = "" if price is None else price
        lines.append(f'{liked},{price},{user},"{"|".join(genres)}"')
    text = ("\n".join(lines) + "\n").encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


@pytest.fixture
def schema(tmp_path: Path) -> str:
    (tmp_path / "schema.toml").write_text(SCHEMA)
    return str(tmp_path / "schema.toml")


def train(out: Path, **options: Any) -> dict[str, Any]:
    small = {"model": "tiny", "batch": 32, "mode": "sync", "steps": STEPS, "train_rows": 1200, "workers": 2}
    return local.train(TrainConfig(out=str(out), **{**small, **options}))


def test_a_worker_and_a_server_die_and_the_model_is_the_same(tmp_path: Path, schema: str) -> None:
    write_csv(tmp_path / "rows.csv.gz", make_rows())
    data = {"data": f"csv:{tmp_path}/rows.csv.gz", "schema": schema}
    undisturbed = train(tmp_path / "undisturbed", servers=2, **data)
    struck = train(
        tmp_path / "struck",
        **{"protection": "ec", "k": 2, "servers": 3, "check_parity": True, **data},
        kill=("worker:1@step:4", "server:1@step:7"),
    )
    assert sorted(failure["role"] for failure in struck["failures"]) == ["server", "worker"]
    assert (struck["steps"], struck["samples"]) == (STEPS, 2 * STEPS * 32)
    assert struck["parity_wrong"] == 0
    assert struck["test_samples"] == undisturbed["test_samples"] == 200
    assert struck["model_sha256"] == undisturbed["model_sha256"]
    assert struck["auc"] == undisturbed["auc"]


def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_never_ended(tmp_path: Path, schema: str) -> None:
    """In the second epoch, with servers that are others."""
    write_csv(tmp_path / "rows.csv", make_rows(300))
    data = {"data": f"csv:{tmp_path}/rows.csv", "schema": schema, "train_rows": 250}
    whole = train(tmp_path / "whole", servers=1, **data)
    saved = {"protection": "full", "ckpt": str(tmp_path / "checkpoints"), "every": "5steps"}
    train(tmp_path / "begun", servers=2, **{**data, **saved, "steps": 5})
    ended = train(tmp_path / "ended", servers=1, resume=str(tmp_path / "checkpoints"), **data)
    assert ended["samples_trained"] < ended["samples"] == whole["samples"]
    assert ended["model_sha256"] == whole["model_sha256"]


def test_every_format_trains_the_same_model(tmp_path: Path, schema: str) -> None:
    rows = make_rows()
    write_csv(tmp_path / "rows.csv", rows)
    columns = dict(zip(COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet", row_group_size=100)
    np.savez(
        tmp_path / "rows.npz",
        liked=columns["liked"],
        price=np.array([np.nan if price is None else price for price in columns["price"]]),
        user=columns["user"],
        genres=["|".join(genres) for genres in columns["genres"]],
    )
    digests = {
        kind: train(tmp_path / kind, servers=1, workers=1, data=f"{kind}:{tmp_path}/rows.{kind}", schema=schema)
        for kind in ("csv", "parquet", "npz")
    }
    assert len({(summary["model_sha256"], summary["auc"]) for summary in digests.values()}) == 1


def test_a_data_set_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_live_data.py").write_text(
        "from regrow.data import SyntheticDataset\n"
        "def make():\n"
        "    return SyntheticDataset(rows=[70, 30], dense_features=2, train_rows=256, test_rows=64, epochs=2)\n"
    )
    monkeypatch.chdir(tmp_path)
    summary = train(
        tmp_path / "run", data="own_live_data:make", train_rows=None, steps=None, servers=1, workers=1, batch=32
    )
    assert (summary["steps"], summary["samples"], summary["test_samples"]) == (16, 512, 64)


def test_what_cannot_be_read_is_said_before_anything_starts(tmp_path: Path, schema: str) -> None:
    (tmp_path / "rows.csv").write_text("liked,price,user\n1,2,3\n")
    with pytest.raises(UserError, match="there is no column 'genres' in the header of"):
        train(tmp_path / "run", data=f"csv:{tmp_path}/rows.csv", schema=schema)
    assert not (tmp_path / "run").exists()
