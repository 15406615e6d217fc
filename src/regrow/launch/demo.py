"""The demonstration: two short runs of the same synchronous training, one of them with a server killed half way. Both
must end with the same model, bit for bit."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from regrow.config import TrainConfig
from regrow.errors import EXIT_FAILED, EXIT_OK, UserError
from regrow.launch import display, local

VICTIM = 2


def run(*, out: str | None, steps: int, overwrite: bool = False, quiet: bool = False) -> int:
    """Shows both runs and compares; the exit code says whether the models are equal."""
    if steps < 2:
        raise UserError(f"steps = {steps}: half way needs at least 2")
    home = Path(out) if out is not None else Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-demo"
    config = TrainConfig(
        model="kaggle",
        rows_max=100_000,
        batch=1024,
        test_rows=16_384,
        mode="sync",
        protection="ec",
        steps=steps,
    )
    runs: dict[str, dict[str, Any]] = {}
    for name, kill in (("undisturbed", ()), ("killed", (f"server:{VICTIM}@step:{steps // 2}",))):
        _say(f"\n{_TITLES[name].format(server=VICTIM, step=steps // 2)}", quiet)
        runs[name] = local.train(
            config.replace(kill=kill, out=str(home / name)),
            overwrite=overwrite,
            display=display.choose(quiet=quiet),
        )
    print(result_text(runs["undisturbed"], runs["killed"]), flush=True)
    return EXIT_OK if _are_equal(runs["undisturbed"], runs["killed"]) else EXIT_FAILED


_TITLES = {
    "undisturbed": "1 of 2: an undisturbed run",
    "killed": "2 of 2: the same, with kill -9 of server {server} at step {step}",
}


def result_text(undisturbed: dict[str, Any], killed: dict[str, Any]) -> str:
    lines = ["", f"undisturbed     {undisturbed['model_sha256']}"]
    lines.append(
        f"server killed   {killed['model_sha256']}   {'equal' if _are_equal(undisturbed, killed) else 'DIFFERENT'}"
    )
    for failure in killed["failures"]:
        back = "never" if failure["recovered_s"] is None else f"after {failure['recovered_s']:.2f} s"
        lines.append(
            f"server {failure['id']} died at step {failure['step']}: training stood still for "
            f"{failure['stall_s']:.2f} s, its {failure['rows']:,} rows were back {back}; no checkpoint was read"
        )
    return "\n".join(lines)


def _are_equal(undisturbed: dict[str, Any], killed: dict[str, Any]) -> bool:
    """Equal models, and somebody did die."""
    return bool(killed["failures"]) and undisturbed["model_sha256"] == killed["model_sha256"]


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)
