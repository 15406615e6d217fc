"""Where the processor time of a recovery goes: a table by part, per GB of lost rows (`bench recovery --profile`).

Servers measure it themselves (`runtime/costs.py`), from the view that names the replacement until all is back. What
they did for training meanwhile is not counted. Sockets serve both: their time is shared out by bytes. Pages that are
touched for the first time are counted where it happens, and cost what one costs in this run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regrow.bench import common
from regrow.errors import RegrowError

READS, SUMS, SOCKETS, PUTS = "members and parities read", "sums", "sockets and frames", "rows put"
FAULTS, STREAMS, PAGES, PYTHON = "faults", "parity streams", "first touches of pages", "interpreter"
PARTS = (READS, SUMS, SOCKETS, PUTS, FAULTS, STREAMS, PAGES, PYTHON)
# Of messages that there are only while rows come back: who asks the store for what.
MOVED = ("SnapAsk", "Snap", "SyndromeAsk", "Syndrome", "Restored", "RestoredAck", "Fault", "Expect")
STREAMED = ("Stream", "StreamAck", "StreamEnd", "StreamAsk", "StreamBegin", "Mended")
LEARNED = ("Have", "Undo", "Tail", "TailEnd", "View")
KERNELS = {"published": READS, "parity_read": READS, "parity_add": SUMS, "put": PUTS, "fill": PUTS, "prepare": FAULTS}
HANDLERS = {"Snap": SUMS, "Syndrome": SUMS, "adjust": SUMS, "Fault": FAULTS, "Expect": FAULTS, "missing": FAULTS}


def find_part(name: str) -> str | None:
    """What a part of a server is called in the table; None: it is training's."""
    if name in ("loop", "send"):
        return SOCKETS
    asked_by, _, kernel = name.partition("/")
    if asked_by == "stream" or asked_by in STREAMED:
        return STREAMS if kernel else PYTHON
    if asked_by not in (*MOVED, *LEARNED, "sweep", "missing", "adjust", "retry", "fill"):
        return None
    if kernel:
        return KERNELS.get(kernel, None if asked_by == "retry" else PYTHON)
    return HANDLERS.get(asked_by, PYTHON)


def make_table(servers: Sequence[dict[str, list[float]]], *, gigabytes: float, page_seconds: float) -> dict[str, Any]:
    """Processor seconds per GB, from what all servers measured."""
    if not any(servers):
        raise RegrowError("no server has measured what the recovery cost it")
    seconds, pages = dict.fromkeys(PARTS, 0.0), 0.0
    for costs in servers:
        share = find_share(costs)
        for name, (spent, _, touched) in ((n, v) for n, v in costs.items() if not n.startswith("bytes/")):
            part = find_part(name)
            if part is None:
                continue
            factor = share if part == SOCKETS else 1.0
            first_touches = min(spent, touched * page_seconds)
            seconds[part] += factor * (spent - first_touches)
            seconds[PAGES] += factor * first_touches
            pages += factor * touched
    per_gb = {part: round(value / gigabytes, 4) for part, value in seconds.items()}
    messages = sum(costs.get(kind, [0, 0])[1] for costs in servers for kind in (*MOVED, *STREAMED))
    return {
        "processor_s_per_gb": round(sum(per_gb.values()), 4),
        "parts_s_per_gb": per_gb,
        "pages_per_gb": round(pages / gigabytes),
        "messages_per_gb": round(messages / gigabytes),
        "moved_per_lost": round(count_moved(servers) / 2 / gigabytes / 1e9, 3),
    }


def find_share(costs: dict[str, list[float]]) -> float:
    """How much of what went through the sockets of one server was the recovery's."""
    every = sum(values[0] for name, values in costs.items() if name.startswith("bytes/"))
    return count_moved([costs]) / every if every else 0.0


def count_moved(servers: Sequence[dict[str, list[float]]]) -> float:
    """Bytes of the recovery, where they were sent and where they came."""
    kinds = [f"bytes/{kind}" for kind in (*MOVED, *STREAMED, *LEARNED)]
    return sum(costs[kind][0] for costs in servers for kind in kinds if kind in costs)


def sketch_processor_seconds(k: int, *, links: float, copy: float) -> float:
    """Per GB: k + 1 bytes for each lost one, each sent and received, and read and written at both ends."""
    return (k + 1) * 1e9 * (2 / links + 2 / copy)


def add_arithmetic(report: common.Report, *, links: float, copy: float) -> None:
    for row in [row for row in report.rows if row["kind"] == "run" and "parts_s_per_gb" in row]:
        row["sketch_processor_s_per_gb"] = round(sketch_processor_seconds(row["k"], links=links, copy=copy), 4)


def print_tables(report: common.Report) -> None:
    rows = [row for row in report.rows if row["kind"] == "run" and "parts_s_per_gb" in row]
    if not rows:
        return
    common.print_table(
        "processor seconds per GB of lost rows, all servers together",
        ("part", *(f"k = {row['k']}" for row in rows)),
        [
            *((part, *(f"{row['parts_s_per_gb'][part]:.2f}" for row in rows)) for part in PARTS),
            ("all", *(f"{row['processor_s_per_gb']:.2f}" for row in rows)),
            ("by arithmetic", *(f"{row['sketch_processor_s_per_gb']:.2f}" for row in rows)),
            ("messages", *(f"{row['messages_per_gb']:,}" for row in rows)),
            ("bytes moved for each lost", *(f"{row['moved_per_lost']:.2f}" for row in rows)),
            ("pages", *(f"{row['pages_per_gb']:,}" for row in rows)),
        ],
    )
