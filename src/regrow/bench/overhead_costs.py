"""Where protection costs processor time: a table by role and by part of the servers (`bench overhead --profile`).

Servers charge themselves part by part from their first push on (`--step-profile`, `runtime/costs.py`), the rest are the
clocks of whole processes, with what it takes to start them, so that only differences between columns mean anything.
Runs are short, one of each kind: processor time is less sensitive to others on the machine than time, but not immune.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

from regrow.bench import common
from regrow.config import TrainConfig
from regrow.errors import RegrowError
from regrow.launch import local

SOCKETS, UPDATES, DELTAS, PARITIES, MESSAGES, OTHERS = (
    "sockets and frames",
    "updates, records kept as they were",
    "deltas",
    "parities",
    "flushes and what answers them",
    "pulls, pushes, ticks",
)
PARTS = (SOCKETS, UPDATES, DELTAS, PARITIES, MESSAGES, OTHERS)
KERNELS = {"update": UPDATES, "take_flush": DELTAS, "parity_apply": PARITIES}
ROLES = ("server", "worker")


def find_part(name: str) -> str:
    """What a part of a server is called in the table."""
    if name in ("loop", "send"):
        return SOCKETS
    asked_by, _, kernel = name.partition("/")
    if kernel in KERNELS:
        return KERNELS[kernel]
    return MESSAGES if asked_by in ("Flush", "FlushAck", "adjust") or kernel.startswith("pending") else OTHERS


def measure(config: TrainConfig, *, steps: int) -> dict[str, Any]:
    """One short run, and what it took."""
    with tempfile.TemporaryDirectory(prefix="regrow-bench-") as directory:
        return make_row(local.train(config.replace(steps=steps, out=f"{directory}/run", step_profile=True)))


def make_row(summary: dict[str, Any]) -> dict[str, Any]:
    """Processor milliseconds per 1000 samples, and what moved per push, of a run's summary."""
    servers = summary["per_server"]
    if not any(server["costs"] for server in servers):
        raise RegrowError("no server has measured what its steps cost")
    thousands, pushes = summary["samples_trained"] / 1000, summary["steps_done"]
    parts, moved, pages, messages = dict.fromkeys(PARTS, 0.0), 0.0, 0.0, 0.0
    for server in servers:
        for name, values in server["costs"].items():
            if name.startswith("bytes/"):
                moved += values[0]
                continue
            parts[find_part(name)] += values[0] * 1000 / thousands
            pages += values[2]
            messages += values[1] if name == "send" else 0
    return {
        "parts_ms_per_1000": {part: round(value, 3) for part, value in parts.items()},
        "roles_ms_per_1000": {role: round(summary["cpu_seconds"][role] * 1000 / thousands, 2) for role in ROLES},
        "moved_bytes_per_push": round(moved / pushes),
        "flushed_bytes_per_push": round(sum(server["flush_bytes"] for server in servers) / pushes),
        "flushes_per_push": round(sum(server["flushes"] for server in servers) / pushes, 2),
        "messages_per_push": round(messages / pushes, 1),
        "pages_per_push": round(pages / pushes, 1),
        "samples_per_second": summary["samples_per_s"],
    }


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        common.print_table(
            f"{model}: processor milliseconds per 1000 samples, all processes of a role together",
            ("part", *(row["label"] for row in mine)),
            [
                *((part, *(f"{row['parts_ms_per_1000'][part]:.2f}" for row in mine)) for part in PARTS),
                ("servers while they train", *(f"{sum(row['parts_ms_per_1000'].values()):.2f}" for row in mine)),
                *((f"{role}s, whole", *(f"{row['roles_ms_per_1000'][role]:.1f}" for row in mine)) for role in ROLES),
                ("bytes sent and received per push", *(f"{row['moved_bytes_per_push'] / 1e6:.2f} MB" for row in mine)),
                ("of them flushed, as sent", *(f"{row['flushed_bytes_per_push'] / 1e6:.2f} MB" for row in mine)),
                ("flushes per push", *(f"{row['flushes_per_push']:.2f}" for row in mine)),
                ("messages sent per push", *(f"{row['messages_per_push']:.1f}" for row in mine)),
                ("pages first touched per push", *(f"{row['pages_per_push']:.1f}" for row in mine)),
            ],
        )
