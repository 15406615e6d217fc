"""What the user sees of a run while it goes on, and at its end.

A terminal gets a picture that moves, anything else gets a line every few seconds, and `QuietDisplay` nothing.
Progress goes to stderr; the short summary, which is the result, to stdout. Displays only read a `RunStatus`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from regrow.launch.failures import Failure
from regrow.launch.status import RunStatus
from regrow.launch.tier_counts import describe_tiers
from regrow.protection import GIB, KIB, MIB
from regrow.runtime.streams import replace_redirected_streams

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PLAIN_SECONDS = 3.0
SERVERS_SHOWN_MAX = 64  # more do not fit a line; they are counted instead
SHORT_DIGEST = 16
FAILURES_SHOWN_MAX = 5  # the latest; the others are in the summary

NOTHING_LEFT = "nothing left to train: the checkpoint is of the last step"
SAVING_SECONDS_MIN = 2.0  # shorter ones are not worth a word
SERVER_MARKS = {
    "starting": ("○", "dim"),
    "allocating": ("◐", "yellow"),
    "loading": ("◐", "cyan"),
    "recovering": ("◐", "magenta"),
    "ready": ("●", "green"),
    "gone": ("✗", "red"),
}


class Display(Protocol):
    """The launcher calls these in this order; `update` about eight times a second."""

    def live(self) -> AbstractContextManager[None]: ...

    def update(self, status: RunStatus, now: float) -> None: ...

    def say(self, text: str) -> None:
        """A line that a script printed."""

    def finish(self, summary: dict[str, Any], path: Path) -> None: ...


class QuietDisplay:
    """Shows nothing: for programs."""

    def live(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def update(self, status: RunStatus, now: float) -> None:
        pass

    def say(self, text: str) -> None:
        print(text, flush=True)

    def finish(self, summary: dict[str, Any], path: Path) -> None:
        pass


class PlainDisplay:
    """A line every few seconds, and one whenever a new phase begins."""

    def __init__(self, progress: TextIO | None = None, result: TextIO | None = None) -> None:
        self._progress = progress or sys.stderr
        self._result = result or sys.stdout
        self._phase = ""
        self._due = 0.0
        self._stages: dict[int, str] = {}  # failure -> what was last said of it
        self._shown: set[str] = set()  # lines that are said once
        self._checkpoints, self._publications = _FirstFailures(), _FirstFailures()

    def live(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def update(self, status: RunStatus, now: float) -> None:
        for index, failure in enumerate(status.failures.all):
            stage = "settled" if failure.settled else "down"
            if self._stages.get(index) != stage:
                self._stages[index] = stage
                print(failure_line(failure, now), file=self._progress, flush=True)
        repeated = self._find_repeated(status)
        for news in news_lines(status):
            if news not in self._shown:
                self._shown.add(news)
                if news not in repeated:
                    print(news, file=self._progress, flush=True)
        if status.phase == self._phase and now < self._due:
            return
        self._phase, self._due = status.phase, now + PLAIN_SECONDS
        line = progress_line(status, now)
        if line is not None:
            print(line, file=self._progress, flush=True)

    def _find_repeated(self, status: RunStatus) -> set[str | None]:
        saved, published = status.checkpoints, status.publications
        return {
            None if self._checkpoints.is_first(saved["failed"], saved["saved"]) else failed_line(status),
            None if self._publications.is_first(published.failed, published.saved) else published.describe_failed(),
        }

    def say(self, text: str) -> None:
        print(text, file=self._result, flush=True)

    def finish(self, summary: dict[str, Any], path: Path) -> None:
        print(summary_text(summary, path), file=self._result, flush=True)


class _FirstFailures:
    """A storage that is full fails every checkpoint: the first is told, and then the first after one was stored."""

    def __init__(self) -> None:
        self._failed = 0  # as far as seen
        self._told_after = -1  # so many were stored when a failure was last told

    def is_first(self, failed: int, saved: int) -> bool:
        is_first = failed > self._failed and saved != self._told_after
        self._failed = failed
        if is_first:
            self._told_after = saved
        return is_first


class LiveDisplay:
    """A picture at the foot of the terminal that is drawn again and again, and removed at the end."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        self._console: Console = Console(stderr=True)
        self._spinner = Spinner("dots")
        # No refresh thread: the launcher's loop is the clock, and nothing draws while children are ended.
        self._live = Live(console=self._console, auto_refresh=False, transient=True)

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        with self._live:
            yield

    def update(self, status: RunStatus, now: float) -> None:
        self._live.update(self._picture(status, now), refresh=True)

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)  # above the picture

    def finish(self, summary: dict[str, Any], path: Path) -> None:
        print(summary_text(summary, path), flush=True)

    def _picture(self, status: RunStatus, now: float) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        rows: list[RenderableType] = []
        if status.phase == "training":
            total = status.steps_total
            bar = ProgressBar(
                total=total, completed=status.steps_done, width=40, pulse=total is None, animation_time=now
            )
            head = Table.grid(padding=(0, 1))
            head.add_row(Text("training", style="bold"), bar, Text(step_text(status)), Text(left_text(status, now)))
            rows.append(head)
            rows.append(Text("  ".join(figures(status, now))))
        else:
            self._spinner.update(text=Text(progress_line(status, now) or status.phase))
            rows.append(self._spinner)
        if status.phase not in ("stopping", "done"):
            rows.append(self._server_row(status))
        for failure in status.failures.all[-FAILURES_SHOWN_MAX:]:
            line = Text(failure_line(failure, now), style="dim" if failure.settled else "yellow")
            if failure.rows_total and failure.recovered_at is None:
                bar = ProgressBar(total=failure.rows_total, completed=failure.rows_back, width=20)
                grid = Table.grid(padding=(0, 1))
                grid.add_row(bar, line)
                rows.append(grid)
            else:
                rows.append(line)
        rows += [Text(news, style="yellow") for news in news_lines(status)]
        if status.checkpoints["last"] is not None:
            rows.append(Text(checkpoint_line(status), style="dim"))
        if (published := status.publications.describe(now)) is not None:
            rows.append(Text(published, style="dim"))
        if (lost := loss_text(status)) is not None:
            rows.append(Text(lost, style="dim"))
        rows += [Text(text, style="yellow") for text in waiting_texts(status, now)]
        quiet = status.stalled_seconds(now)
        if quiet is not None:
            rows.append(Text(f"nothing has moved for {quiet:.0f} s; see logs/", style="yellow"))
        return Group(*rows)

    def _server_row(self, status: RunStatus) -> RenderableType:
        from rich.text import Text

        row = Text("servers ")
        for server in status.servers[:SERVERS_SHOWN_MAX]:
            row.append(*SERVER_MARKS[server.state])
        row.append(f" {status.servers_alive}/{len(status.servers)} alive", style="dim")
        if status.bytes_in:
            row.append(f"  in {size_text(status.bytes_in)}, out {size_text(status.bytes_out)}", style="dim")
        return row


def choose(*, quiet: bool) -> Display:
    """The display that suits where stderr goes. From here on, a file that it goes to may be on a full disk."""
    replace_redirected_streams()
    if quiet:
        return QuietDisplay()
    if sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return LiveDisplay()
    return PlainDisplay()


# -- the words of both -------------------------------------------------------------------------------------


def progress_line(status: RunStatus, now: float) -> str | None:
    """The state of the run in one line; None for a phase that needs no words."""
    since = f"{now - status.phase_at:.0f} s"
    if status.checking is not None:
        done, whole = status.checking
        return f"looking for a checkpoint without damage: {size_text(done)} of {size_text(whole)} read"
    if status.phase == "starting":
        return "starting"
    if status.phase == "loading":
        ready = sum(server.state == "ready" for server in status.servers)
        held = sum(server.bytes for server in status.servers)
        rows = f" ({size_text(held)})" if held else ""
        stored = sum(server.load_total for server in status.servers)
        if stored:
            read = sum(server.load_done for server in status.servers)
            rows += f", {size_text(read)} of {size_text(stored)} read from the checkpoint"
        return f"loading: workers start, {ready}/{len(status.servers)} servers have their rows{rows}, {since}"
    if status.phase == "training":
        parts = [
            step_text(status),
            *figures(status, now),
            f"{status.servers_alive}/{len(status.servers)} servers",
        ]
        parts.append(left_text(status, now))
        parts.append(loss_text(status) or "")
        parts += waiting_texts(status, now)
        quiet = status.stalled_seconds(now)
        if quiet is not None:
            parts.append(f"nothing has moved for {quiet:.0f} s")
        return "training: " + ", ".join(part for part in parts if part)
    if status.phase == "evaluating":
        tested = f" {status.test_samples_done:,} samples," if status.test_samples_done else ""
        return f"evaluating:{tested} {since}"
    if status.phase == "stopping":
        return "stopping"
    return None


def waiting_texts(status: RunStatus, now: float) -> list[str]:
    """Whom or what everybody waits for, and for how long yet."""
    texts = [
        f"waiting for server {server}, without which rows are lost ({reason}): {max(0.0, until - now):.0f} s more"
        for server, (reason, until) in status.waiting.items()
    ]
    if status.ending is not None:
        what, until = status.ending
        texts.append(f"waiting for {what}, {clock_text(max(0.0, until - now))} at most")
    return texts


def failure_line(failure: Failure, now: float) -> str:
    """What is known of a failure, in one line: S2 died at step 100; rows back 1.2 M / 3.4 M, 310 faults served, 1.8 s;
    throughput 0.94 of before."""
    parts = [f"{failure.name} died at step {failure.step:,}"]
    if failure.role == "server":
        total = count_text(failure.rows_total) if failure.rows_total else "?"
        if failure.replaced_at is None and not failure.rows_total:
            parts[0] += f" ({failure.reason})"
        else:
            seconds = (failure.recovered_at or now) - failure.at
            faults = failure.faults
            back = f"rows back {count_text(failure.rows_back)} / {total}"
            parts.append(f"{back}, {faults:,} faults served, {seconds:.1f} s")
    elif failure.resumed_at is not None:
        parts.append(f"its successor at work after {failure.resumed_at - failure.at:.1f} s")
    else:
        parts[0] += f" ({failure.reason})"
    if failure.loss is not None:
        parts.append(f"{count_text(failure.loss.updates)} updates lost ({count_text(failure.loss.samples)} samples)")
    if failure.ratio is not None:
        parts.append(f"throughput {failure.ratio:.2f} of before")
    if failure.pace:
        parts.append(f"rows came back with {failure.pace}")
    return "; ".join(parts)


def loss_text(status: RunStatus) -> str | None:
    """With partial recovery: what was saved, and what was lost so far."""
    losses = status.losses
    if losses is None:
        return None
    found = losses.to_dict()
    pls = "?" if found["pls"] is None else f"{found['pls']:.3g}"
    expected = status.expect_pls()
    told = "" if expected is None else f" ({expected:.3g} to expect at the end)"
    failed = f", {found['saves_failed']} failed" if found["saves_failed"] else ""
    waits = found["rows_left_by_priority"]
    left = f", {count_text(waits)} rows wait" if waits else ""
    lost = f"{count_text(found['updates_lost'])} updates lost" if found["updates_lost"] else "nothing lost"
    return f"PLS {pls} of {status.config.target_pls:g}{told}, {lost}; {found['saves']} saves{failed}{left}"


def news_lines(status: RunStatus) -> list[str]:
    """What the user should be told of checkpoints, most of all: that one could not be made, or had to be used."""
    lines = [*status.notes, *([] if status.plan_reason is None else [status.plan_reason])]
    if status.is_complete:
        lines.append(NOTHING_LEFT)
    for restore in status.restores:
        place = f"checkpoint {restore['cut']} (step {restore['cut_step']:,})" if restore["cut"] else "the start"
        lines += [f"damaged: {what}" for what in restore["damage"]]
        lines.append(f"{restore['reason']}; all begin again from {place}, {restore['steps_lost']:,} steps back")
    lines += [f"damaged, and gone around: {what}" for what in status.gone_around]
    published = status.publications
    lines += filter(None, [failed_line(status), published.describe_failed(), published.describe_slow()])
    if (tiers := status.tiers) is not None and tiers["servers_full"]:
        lines.append("no space left for rows on disk: training goes on with what fits, without new checkpoints")
    return lines


def failed_line(status: RunStatus) -> str | None:
    failed = status.checkpoints["failed"]
    return (
        f"{failed} checkpoint{'s' if failed > 1 else ''} failed: {status.checkpoints['last_error']}" if failed else None
    )


def checkpoint_line(status: RunStatus) -> str:
    last = status.checkpoints["last"]
    merged = f", {status.merges['folded']} merged" if status.merges["folded"] else ""
    return f"{status.checkpoints['saved']} checkpoints{merged}, the last: {last['cut']}"


def count_text(count: int) -> str:
    """312, 4.1 k, 1.2 M."""
    for unit, name in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return str(count)


def figures(status: RunStatus, now: float) -> list[str]:
    """What training is like just now; figures not known yet are left out."""
    found = []
    speed = status.samples_per_s(now)
    if speed is not None:
        found.append(f"{speed:,.0f} samples/s")
    if status.loss is not None:
        found.append(f"loss {status.loss:.4f}")
    if status.auc is not None:
        found.append(f"AUC {status.auc:.4f}")
    if (tiers := status.tiers) is not None:
        found.append(describe_tiers(tiers))
    if status.saving is not None and now - status.saving[1] >= SAVING_SECONDS_MIN:
        found.append(f"storing checkpoint {status.saving[0]} for {now - status.saving[1]:.0f} s")
    return found


def step_text(status: RunStatus) -> str:
    """Steps of all workers together are what fills the bar; a user thinks in steps of one."""
    total = status.steps_total
    if total is None:
        return f"step {status.step:,}"
    workers = len(status.workers)
    share = min(100, 100 * status.steps_done // max(1, total))
    return f"step {status.steps_done // workers:,}/{-(-total // workers):,} ({share} %)"


def left_text(status: RunStatus, now: float) -> str:
    """How long it may still take, by the steps done so far."""
    left = status.estimate_seconds_left(now)
    return "" if left is None else f"{clock_text(left)} left"


def summary_text(summary: dict[str, Any], path: Path) -> str:
    """The result, as a table of two columns."""
    rows: list[tuple[str, str]] = []
    if summary.get("nothing_left"):
        rows.append(("trained", f"{NOTHING_LEFT}, {summary['steps']:,}"))
    elif summary.get("seconds"):
        trained = f"{summary['steps']:,} steps x {summary['workers']} workers, {summary['samples']:,} samples"
        rows.append(("trained", f"{trained} in {clock_text(summary['seconds'])}"))
        rows.append(("speed", f"{summary['samples_per_s']:,.0f} samples/s"))
    if summary.get("auc") is not None:
        tested = f" on {summary['test_samples']:,} samples" if summary.get("test_samples") else ""
        loss = f", log loss {summary['logloss']:.4f}" if summary.get("logloss") is not None else ""
        rows.append(("test", f"AUC {summary['auc']:.4f}{loss}{tested}"))
    if summary.get("model_sha256"):
        rows.append(("model", f"sha256 {summary['model_sha256'][:SHORT_DIGEST]}..., {summary['rows']:,} rows"))
    rows += survival_rows(summary.get("failures") or [], summary.get("restores") or [])
    saved = summary.get("checkpoints") or {}
    if saved.get("last"):
        failed = f", {saved['failed']} failed" if saved["failed"] else ""
        rows.append(("checkpoints", f"{saved['saved']}{failed}; the last is {saved['last']['cut']}"))
    elif saved.get("failed"):
        rows.append(("checkpoints", f"none! {saved['failed']} failed: {saved['last_error']}"))
    if (published := summary.get("publications")) and published["last"]:
        failed = f", {published['failed']} failed" if published["failed"] else ""
        last = f"the last is {published['last']['cut']}"
        if published["has_end"] is False:
            last += f", and not of the trained model: {published['last_error'] or 'no answer'}"
        rows.append(("publications", f"{published['saved']}{failed}, {size_text(published['bytes'])} in all; {last}"))
    elif published and published["failed"]:
        rows.append(("publications", f"none! {published['failed']} failed: {published['last_error']}"))
    if summary.get("partial"):
        lost = summary["partial"]
        pls = "?" if lost["pls"] is None else f"{lost['pls']:.3g}"
        share = "" if lost["share_lost"] is None else f", {100 * lost['share_lost']:.3g} % of all"
        rows.append(
            (
                "lost",
                f"PLS {pls} of {lost['pls_target']:g}; {lost['updates_lost']:,} row updates{share}; "
                f"{lost['saves']} saves",
            )
        )
    if summary.get("tiers"):
        tiers = summary["tiers"]
        text = f"{100 * tiers['hit_rate_rows']:.2f} % of rows, {100 * tiers['hit_rate_lookups']:.2f} % of look-ups"
        rows.append(("cache", f"{text}; {tiers['wait_seconds']:.1f} s of waits for the disk"))
        log = f"log {size_text(int(tiers['log_bytes_used']))} of at most {size_text(int(tiers['log_bytes_max']))}"
        rows.append(("disk", f"{size_text(int(tiers['file_bytes']))} of files; {log}; {tiers['reads']:,.0f} reads"))
    if summary.get("sabotage_unreached"):
        steps = ", ".join(str(sabotage["step"]) for sabotage in summary["sabotage_unreached"])
        rows.append(("not reached", f"sabotage at step {steps}: the data ended before"))
    peak = summary["peak_rss_bytes"]
    rows.append(
        (
            "memory",
            f"{size_text(peak['total'])} in all, at most {size_text(peak['server'])} a server, "
            f"{size_text(peak['worker'])} a worker",
        )
    )
    rows.append(("results", f"{path}/summary.json"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def survival_rows(failures: list[dict[str, Any]], restores: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What was survived, and how long training stood still for it. A failure that a fall back ended has no end of its
    own."""
    rows = []
    if failures:
        stalls = max((each["stall_s"] or 0.0) for each in (*failures, *restores))
        count = f"{len(failures)} failure{'s' if len(failures) > 1 else ''}"
        rows.append(("survived", f"{count}, training stood still for {stalls:.2f} s at most"))
    for restore in restores:
        place = f"checkpoint {restore['cut']}" if restore["cut"] else "the start"
        still = "" if restore["stall_s"] is None else f"; training stood still for {restore['stall_s']:.2f} s"
        rows.append(("restored", f"from {place} at step {restore['step']:,}: {restore['reason']}{still}"))
    return rows


def size_text(count: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"


def clock_text(seconds: float) -> str:
    """3.2 s, 1:05, 2:00:07."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"
