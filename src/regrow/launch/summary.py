"""What a run leaves behind in summary.json: what its processes said, and what it was asked to do."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from datetime import datetime
from typing import Any, Protocol

from regrow.config import TrainConfig
from regrow.errors import NotSaved, RegrowError
from regrow.launch.backend import Backend
from regrow.launch.replan import Replanner
from regrow.launch.sabotage import Saboteur
from regrow.launch.status import RunStatus
from regrow.launch.usage import sum_usage
from regrow.launch.version import version


class Finished(Protocol):
    """A run that is over, well or not."""

    config: TrainConfig
    status: RunStatus
    replanner: Replanner | None
    saboteur: Saboteur

    @property
    def backend(self) -> Backend: ...

    started_at: datetime


def make_summary(run: Finished, error: BaseException | None) -> dict[str, Any]:
    """After all processes were reaped, so that their usage is known."""
    config = run.config
    run.status.failures.finish(time.monotonic())
    status = "ok" if error is None else "not saved" if isinstance(error, NotSaved) else "failed"
    summary: dict[str, Any] = {"status": status}
    if error is not None:
        summary["error"] = error.message if isinstance(error, RegrowError) else repr(error)
    return {
        **summary,
        **run.status.totals(),
        "mode": config.mode,
        "protection": config.protection,
        "code": None if config.code is None else dataclasses.asdict(config.code),
        "plan": None if run.replanner is None else run.replanner.describe(),
        "sabotage_unreached": [dataclasses.asdict(sabotage) for sabotage in run.saboteur.unreached],
        "sabotage_random": run.saboteur.done,
        "servers": config.servers,
        "workers": config.workers,
        **(
            {"script": list(config.script)}
            if config.script
            else {name: getattr(config, name) for name in ("model", "data", "batch", "optimizer")}
        ),
        "seed": config.seed,
        **sum_usage(run.backend.handles),
        "run_seconds": round(time.monotonic() - run.status.started_at, 3),
        "started_at": run.started_at.isoformat(timespec="seconds"),
        "command": shlex.join(sys.argv),
        "version": version(),
    }
