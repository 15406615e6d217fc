"""What servers with rows on disk have counted, put together for the display, metrics.jsonl and the summary.

Counters of servers that were replaced go on in those of their successors; sizes are those of now. The rule to keep:
every name that is shown is explained in docs/tiered-use.md, and a test compares.
"""

from __future__ import annotations

from collections.abc import Sequence

from regrow.units import size_text

# What only grows, and so is summed over all processes that were in a place.
COUNTERS = (
    *("hits", "misses", "waits", "wait_seconds", "rows_named", "reads"),
    *("log_rows_read", "log_bytes_read", "log_bytes_written"),
    *("home_rows_read", "home_bytes_read", "home_rows_written", "home_bytes_written"),
    *("rows_evicted", "rows_evicted_dirty", "rows_flushed"),
)
# What is as it is now.
SIZES = ("rows_to_flush", "file_bytes", "log_bytes_used", "log_bytes_max", "frames", "frames_free", "frames_pinned")

Tiers = dict[str, float]


def add_counts(report: Tiers, carried: Tiers) -> Tiers:
    """What a server says, on top of what its predecessors have counted."""
    found = {name: report.get(name, 0) + carried.get(name, 0) for name in COUNTERS}
    return found | {name: report.get(name, 0) for name in (*SIZES, "full")}


def sum_tiers(servers: Sequence[Tiers], *, lookups: int) -> Tiers | None:
    """Of all servers; None: none has rows on disk. Of the look-ups of workers, those are hits whose rows did not have
    to be read."""
    known = [tiers for tiers in servers if tiers]
    if not known:
        return None
    total: Tiers = {name: sum(tiers[name] for tiers in known) for name in (*COUNTERS, *SIZES)}
    total["wait_seconds"] = round(total["wait_seconds"], 3)
    asked = total["hits"] + total["misses"]
    total["hit_rate_rows"] = round(total["hits"] / asked, 5) if asked else 1.0
    total["hit_rate_lookups"] = round(max(0.0, 1.0 - total["misses"] / lookups), 5) if lookups else 1.0
    total["servers_full"] = sum(bool(tiers["full"]) for tiers in known)
    return total


def describe_tiers(total: Tiers) -> str:
    """In a line, for the display."""
    text = f"cache {100 * total['hit_rate_rows']:.1f} % of rows, waited {total['wait_seconds']:.1f} s"
    text += f", files {size_text(int(total['file_bytes']))}"
    if total["rows_to_flush"]:
        text += f", {total['rows_to_flush']:,.0f} rows to write"
    return text + (", no space left" if total["servers_full"] else "")
