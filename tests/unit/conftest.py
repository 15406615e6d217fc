"""The small store of ckpt_run.py, without cuts and with them, for commands on checkpoints and what is behind them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ckpt_run import Run


@pytest.fixture
def empty(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    from ckpt_run import make_run  # late: other tests do without

    return make_run(tmp_path / "run", capsys, monkeypatch)


@pytest.fixture
def run(empty: Run) -> Run:
    from ckpt_run import fill

    return fill(empty)
