"""Is the work shared evenly? Rows updated by each server, with parities and without.

The load of a server is the rows it changed: its own, and the parities of others that it keeps. Hot rows make some
servers busier than others; parities of a server's rows lie elsewhere, so coding spreads its work. The paper
saw the most loaded server do 2.28 times the work of the least loaded one without coding, and 1.58 with it.
A row counts once per push, however often its batch names it. These are counts, not times: one run of each is enough,
and a busy machine does not matter.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow.bench import common, train
from regrow.config import TrainConfig
from regrow.errors import RegrowError, UserError
from regrow.launch import local

SUMMARY = "Rows updated per server, most to least loaded, with parities and without."

PAPER_WITHOUT, PAPER_WITH = 2.28, 1.58  # on other clusters and other data: what to stay below, no more
MODEL, R = "kaggle", 1
CODES: tuple[int | None, ...] = (None, 4, 2)  # k
COUNTER = "rows_updated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is counted."""

    steps: int
    rows_max: int
    skews: tuple[float, ...]


# 1.25 is the published skew of click data; at 2 a handful of rows take nearly all accesses.
FULL = Size(steps=200, rows_max=1_000_000, skews=(1.25, 2.0))
QUICK = Size(steps=20, rows_max=50_000, skews=(1.25,))


def run(*, quick: bool, json_path: str | None, data: str | None = None) -> int:
    if data is not None and not Path(data).is_file():
        raise UserError(f"there is no file {data}", hint="give a Criteo TSV (plain or .gz) with --data PATH")
    size = QUICK if quick else FULL
    report = common.Report.start("balance")
    streams = [f"synthetic, skew {skew:g}" for skew in size.skews] + (["criteo"] if data is not None else [])
    for stream in streams:
        for k in CODES:
            row = measure(stream, k=k, size=size, data=data)
            report.rows.append(row)
            common.console.print(f"{stream}, {label(k)}: most / least loaded {row['imbalance']:.3f}")
        report.ratios.update(compare(report.rows, stream))
    if data is None:
        common.console.print("real clicks were not counted: give a file in Criteo's format with --data PATH")
    print_rows(report.rows)
    return report.finish(json_path)


def label(k: int | None) -> str:
    return "no protection" if k is None else f"ec, k = {k}"


def measure(stream: str, *, k: int | None, size: Size, data: str | None) -> dict[str, Any]:
    real = stream == "criteo"
    config = TrainConfig(
        data=f"criteo:{data}" if real else "synthetic",
        model=MODEL,
        rows_max=size.rows_max,
        steps=size.steps,
        batch=train.BATCH if not real else 256,
        servers=train.SERVERS,
        workers=train.WORKERS,
        seed=train.SEED,
        test_rows=train.BATCH,
        digest=False,
    )
    if not real:
        config = config.replace(skew=float(stream.rpartition(" ")[2]))
    if k is not None:
        config = config.replace(protection="ec", k=k, r=R)
    with tempfile.TemporaryDirectory(prefix="regrow-bench-") as directory:
        summary = local.train(config.replace(out=f"{directory}/run"))
    return {"kind": "run", "stream": stream, "k": k, **loads(summary["per_server"])}


def loads(servers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows changed per server, own and parity, and how unevenly."""
    if any(COUNTER not in server for server in servers):
        raise RegrowError(f"the servers of this run did not count {COUNTER}, so their load is unknown")
    own = [int(server[COUNTER]) for server in servers]
    parity = [int(server.get("parity_rows_applied", 0)) for server in servers]
    total = [mine + others for mine, others in zip(own, parity, strict=True)]
    return {
        "rows_updated": own,
        "parity_rows_applied": parity,
        "load": total,
        "imbalance_own": imbalance(own),
        "imbalance": imbalance(total),
    }


def imbalance(loads: Sequence[int]) -> float:
    """Most / least loaded."""
    if not loads or min(loads) <= 0:
        raise RegrowError(f"a server without any load: {list(loads)}; train for longer")
    return max(loads) / min(loads)


def compare(rows: Sequence[dict[str, Any]], stream: str) -> dict[str, common.Ratio]:
    """Most / least loaded for each code, held against the paper's."""
    short = stream.replace(", skew ", "_")
    return {
        f"balance_{short}_{'none' if row['k'] is None else 'k' + str(row['k'])}": common.Ratio.of(
            [row["imbalance"]], target=paper(row["k"]), better="lower"
        )
        for row in rows
        if row["stream"] == stream
    }


def paper(k: int | None) -> float:
    return PAPER_WITHOUT if k is None else PAPER_WITH


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    common.print_table(
        "rows updated per server, its own and parities of others",
        ("stream", "protection", "least", "most", "most / least", "own rows only", "the paper"),
        [
            (
                row["stream"],
                label(row["k"]),
                f"{min(row['load']):,}",
                f"{max(row['load']):,}",
                f"{row['imbalance']:.3f}",
                f"{row['imbalance_own']:.3f}",
                f"{paper(row['k'])}",
            )
            for row in rows
        ],
    )
