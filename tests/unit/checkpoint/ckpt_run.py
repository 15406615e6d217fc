"""A small store of checkpoints in a directory, and the commands on it: eight cuts, a shortcut, two fulls, a branch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from worlds import Model, World

from regrow.checkpoint.manifest import MANIFEST, Manifest
from regrow.checkpoint.merge import fold
from regrow.cli import ckpt as ckpt_cli
from regrow.cli import main as cli

NOW = 1_000_000.0


class Run:
    """A store, its cuts by a short name, and the commands on it."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path.mkdir()
        self.world = World(str(path), seed=3)
        self.path, self.url = path, str(path)
        self._capsys = capsys

    def save(self, step: int, **options: Any) -> str:
        self.world.update()
        self.world.step = step
        return self.world.save(**options).target.id

    def __call__(self, line: str, *, code: int = 0) -> str:
        """What a command prints; URL stands for this store."""
        found = cli.run(line.replace("URL", self.url).split())
        self.out, self.err = (text.replace(self.url, "URL") for text in self._capsys.readouterr())
        assert found == code, self.out + self.err
        return self.out

    def fails(self, line: str, *, code: int) -> list[str]:
        """Its error, in one line or two."""
        self(line, code=code)
        lines = self.err.splitlines()
        assert 1 <= len(lines) <= 2 and lines[0].startswith("error: "), self.err
        assert "a bug in regrow" not in self.err
        return lines

    def piece(self, name: str) -> Manifest:
        return self.world.storage.read_manifest(name)

    def files(self) -> dict[str, bytes]:
        return {str(p.relative_to(self.path)): p.read_bytes() for p in sorted(self.path.rglob("*")) if p.is_file()}


def fill(run: Run) -> Run:
    """100 to 600 in a line, with a shortcut 100 -> 400 and a full at 300; then back to 500, and 610, 710."""
    world = run.world
    world.now = NOW - 5 * 3600
    cuts = [run.save(100 * index) for index in range(1, 7)]
    fold(world.storage, world.graph(), cuts[0], cuts[3])
    fold(world.storage, world.graph(), None, cuts[2])
    world.go_back(cuts[4])
    run.save(610)
    run.save(710)
    return run


def make_run(path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Without cuts, at a time that stands still."""
    monkeypatch.delenv("REGROW_DEBUG", raising=False)
    monkeypatch.setattr(ckpt_cli.time, "time", lambda: NOW)
    return Run(path, capsys)


def cut(run: Run, step: int) -> str:
    return next(found for found in run.world.history if int(found[:10]) == step)


def name(run: Run, target: int, source: int | None = None) -> str:
    return f"{cut(run, target)}.{'full' if source is None else cut(run, source)}"


def flip(run: Run, piece: str) -> str:
    """A bit of the last chunk; its name."""
    info = run.piece(piece).chunks[-1].name
    path = run.path / piece / info
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    return info


def tear(run: Run, piece: str) -> None:
    path = run.path / piece / MANIFEST
    path.write_bytes(path.read_bytes()[:100])


def state(url: str | Path, wish: str | None = None) -> Model:
    return World(str(url)).restore_rows(wish)[0]
