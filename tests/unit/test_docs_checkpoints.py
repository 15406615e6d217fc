"""Goal: what docs/checkpoints.md shows of the commands is what they print.

Method: a store is made as the page has it, always the same one. Every line with a $ is run, each block on a fresh copy,
and what follows it must be the output; only the time of day and durations may differ. The picture is compared too.
After a change of the output

    python tests/unit/test_docs_checkpoints.py

writes the page anew, to be read as a diff.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from regrow.checkpoint.chunks import Rows, split, write_chunk
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.manifest import Cut, Manifest, TableInfo, chunk_name, shard_name
from regrow.checkpoint.merge import fold
from regrow.checkpoint.storage import Storage
from regrow.cli import main as cli
from regrow.core.names import cut_id, piece_name

DOCS = Path(__file__).parents[2] / "docs"
PAGE, PICTURE = DOCS / "checkpoints.md", DOCS / "img" / "lineage.svg"
NOW = datetime.datetime(2026, 11, 16, 2, 54, 26, tzinfo=datetime.UTC).timestamp()
MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
TABLES = tuple(
    TableInfo(name=name, rows=rows, dim=16, states=(("momentum1", 1),), init_bound=0.05, index=index)
    for index, (name, rows) in enumerate((("user", 200_000), ("item", 50_000), ("context", 50)))
)
SHARDS = 2
# Step, age, and how many rows are touched on the way there. Then somebody goes back to 4,000 and trains on.
LINE = (
    (1000, 3.3 * HOUR, 100_000),
    (2000, 3.2 * HOUR, 12_000),
    (3000, 3.0 * HOUR, 12_000),
    (4000, 2.8 * HOUR, 12_000),
    (5000, 2.6 * HOUR, 12_000),
    (6000, 2.4 * HOUR, 12_000),
)
BRANCH = ((5010, 1.0 * HOUR, 12_000), (6010, 50 * MINUTE, 12_000), (7010, 40 * MINUTE, 12_000))


class Trainer:
    """Touches rows at random, and stores what changed."""

    def __init__(self, url: Path) -> None:
        self.storage = Storage.open(str(url))
        self.random = np.random.default_rng(7)
        # Weights and state of every row; the first ones are made up, as nobody looks at rows that were not touched.
        self.records = {table.name: np.zeros((table.rows, table.dim + 1), np.float32) for table in TABLES}
        self.cut: str | None = None

    def train(self, step: int, age: float, touched: int) -> str:
        source, self.cut = self.cut, cut_id(step, f"docs {age}")
        job = {"optimizer": "rowwise_adagrad", "servers": SHARDS, "workers": 2}
        extra = {"samples": step * 2 * 2048}
        target = Cut(id=self.cut, step=step, marks=(step, step), created=NOW - age, job=job, extra=extra)
        rows = {table.name: self.touch(table, touched * table.rows // 250_000 + 1) for table in TABLES}
        chunks = []
        for shard in range(SHARDS):
            label = shard_name(shard, SHARDS, "by number")
            own = [{name: self.rows(name, ids[ids % SHARDS == shard])} for name, ids in rows.items()]
            for number, chunk in enumerate(split(own, 1 << 20)):
                name = chunk_name(label, number, "raw")
                piece = piece_name(source, target.id)
                chunks.append(write_chunk(self.storage, piece, name, chunk, encoding="raw", bits=32, shard=label))
        self.storage.write_manifest(
            Manifest(source=source, target=target, tables=TABLES, seed=1, chunks=tuple(chunks), made_by="regrow 0.1.0")
        )
        return self.cut

    def touch(self, table: TableInfo, count: int) -> np.ndarray:
        ids = np.unique(self.random.integers(0, table.rows, count))
        self.records[table.name][ids] += self.random.random((len(ids), table.dim + 1), np.float32) * 0.1 - 0.05
        return ids

    def rows(self, table: str, ids: np.ndarray) -> Rows:
        records = self.records[table][ids]
        return Rows(ids.astype(np.uint32), records[:, :-1].copy(), {"momentum1": records[:, -1:].copy()})


def make(url: Path) -> None:
    """The store of the page: two branches, a shortcut, and what a process that died left behind."""
    trainer = Trainer(url)
    cuts = [trainer.train(*each) for each in LINE]
    trainer.cut = cuts[3]
    for each in BRANCH:
        trainer.train(*each)
    fold(trainer.storage, Graph(trainer.storage.manifests()[0]), cuts[0], cuts[3])
    left = url / piece_name(None, cut_id(500, "docs"))
    left.mkdir()
    (left / "s0of2-00000.safetensors").write_bytes(bytes(1 << 20))
    for path in (left / "s0of2-00000.safetensors", left):
        os.utime(path, (NOW - 2 * DAY, NOW - 2 * DAY))


def damage(url: Path) -> None:
    """Of runs/c: a file of the delta to 3,000 is lost, and one of the delta to 6,010 flipped."""
    lost, flipped = (next(url.glob(f"{step:010d}-*.00000?????-*")) for step in (3000, 6010))
    (lost / "s0of2-32b06847-00000.safetensors").unlink()
    file = flipped / "s1of2-32b06847-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")


# -- the page ----------------------------------------------------------------------------------------------


def blocks(text: str) -> Iterator[re.Match[str]]:
    """Code blocks in which commands are shown with what they print."""
    return re.finditer(r"^```\n(\$ .*?)^```$", text, re.MULTILINE | re.DOTALL)


def shown(block: str) -> str:
    """The same block with what its commands print now, run here."""
    lines = []
    for line in block.splitlines():
        if line.startswith("$ "):
            lines.append(line)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), mock.patch.object(time, "time", lambda: NOW):
                cli.run(line.partition("  #")[0].split()[2:])
            lines += printed.getvalue().splitlines()
    return "\n".join(lines) + "\n"


def page(text: str, store: Path, work: Path) -> str:
    """The page with what its commands print now."""

    def run(match: re.Match[str]) -> str:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(store, work / "runs" / "a")
        shutil.copytree(store, work / "runs" / "c")
        damage(work / "runs" / "c")
        with contextlib.chdir(work):
            return f"```\n{shown(match[1])}```"

    return re.sub(r"^```\n(\$ .*?)^```$", run, text, flags=re.MULTILINE | re.DOTALL)


def timeless(text: str) -> str:
    return re.sub(r"^\d\d:\d\d:\d\d ", "HH:MM:SS ", re.sub(r" in \d+\.\d s", " in N s", text), flags=re.MULTILINE)


def picture(store: Path, work: Path) -> str:
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(store, work / "runs" / "a")
    with contextlib.chdir(work), contextlib.redirect_stdout(io.StringIO()):
        with mock.patch.object(time, "time", lambda: NOW):
            cli.run(["ckpt", "show", "runs/a", "--graph", "a.svg"])
        return Path("a.svg").read_text()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    url = tmp_path_factory.mktemp("docs") / "store"
    make(url)
    return url


@pytest.fixture(autouse=True)
def greenwich(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_the_page_shows_what_the_commands_print(store: Path, tmp_path: Path) -> None:
    text = PAGE.read_text()
    assert sum(1 for _ in blocks(text)) >= 8
    assert timeless(text) == timeless(page(text, store, tmp_path / "work"))


def test_the_picture_is_of_the_same_store(store: Path, tmp_path: Path) -> None:
    assert PICTURE.read_text() == picture(store, tmp_path / "work")


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"
    time.tzset()
    with tempfile.TemporaryDirectory() as directory:
        make(Path(directory) / "store")
        text = page(PAGE.read_text(), Path(directory) / "store", Path(directory) / "work")
        PICTURE.write_text(picture(Path(directory) / "store", Path(directory) / "work"))
    PAGE.write_text(text)
    sys.exit(0)
