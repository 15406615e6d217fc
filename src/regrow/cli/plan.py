"""`regrow plan ...`: what a run would decide, without a run. Options in, a table and a sentence out.

What is decided is in `regrow.planner`; here is only what is asked, refused and shown.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from regrow.cli.options import SECONDS
from regrow.errors import EXIT_USAGE

if TYPE_CHECKING:
    from regrow.planner.partial import Plan, Request

# The published job: 56 hours, saves of 0.10 h, loading and rescheduling near 0.
TOTAL, SAVE, LOAD, RESCHEDULE = "56h", "6m", "0s", "0s"
TARGET_PLS, SERVERS = 0.1, 5


@click.group(short_help="What a run would decide, without a run.", invoke_without_command=True)
@click.pass_context
def plan(ctx: click.Context) -> None:
    """What a run would decide, without a run."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        ctx.exit(EXIT_USAGE)


@plan.command(short_help="How often to save for partial recovery, and whether it is worth it.")
@click.option("--target-pls", type=float, default=TARGET_PLS, metavar="X", help=f"What may be lost.  [{TARGET_PLS:g}]")
@click.option("--servers", type=int, default=SERVERS, metavar="N", help=f"That share the rows.  [{SERVERS}]")
@click.option("--lost-together", type=int, default=1, metavar="N", help="So many die in one failure.  [1]")
@click.option("--expect-mtbf", type=SECONDS, metavar="TIME", help="Between two failures.  [14h, a first guess]")
@click.option("--total", type=SECONDS, default=TOTAL, metavar="TIME", help=f"Of the job.  [{TOTAL}]")
@click.option("--save", type=SECONDS, default=SAVE, metavar="TIME", help=f"That one save costs.  [{SAVE}]")
@click.option("--load", type=SECONDS, default=LOAD, metavar="TIME", help=f"... one load after a failure.  [{LOAD}]")
@click.option("--reschedule", type=SECONDS, default=RESCHEDULE, metavar="TIME", help=f"... and others.  [{RESCHEDULE}]")
@click.option("--json", "as_json", is_flag=True, help="For programs; times in seconds.")
def partial(as_json: bool, **options: Any) -> None:
    """How often to save for partial recovery, and whether it costs less than full recovery.

    \b
    regrow plan partial --servers 4 --expect-mtbf 28h
    regrow plan partial --target-pls 0.02 --servers 64 --lost-together 8 --save 40s --load 2m

    PLS is the portion of lost samples: 0.1 allows a tenth of what was learned to be lost by the end. Defaults are those
    of the published job. docs/partial-recovery.md explains the numbers.
    """
    check_options(options)
    from regrow.planner.measured import choose_fail_time
    from regrow.planner.overhead import Costs
    from regrow.planner.partial import Request, decide

    fail_time = choose_fail_time(expected_seconds=options["expect_mtbf"])
    request = Request(
        target_pls=options["target_pls"],
        servers=options["servers"],
        lost_together=options["lost_together"],
        work_seconds=options["total"],
        fail_seconds=fail_time.seconds,
        fail_reason="" if options["expect_mtbf"] is not None else fail_time.reason,
    )
    costs = Costs(save_seconds=options["save"], load_seconds=options["load"], reschedule_seconds=options["reschedule"])
    found = decide(request, costs=costs)
    if as_json:
        shown = {**found.to_dict(), "fail_seconds": fail_time.seconds, "fail_reason": fail_time.reason}
        print(json.dumps(shown, indent=2))
    else:
        show_plan(found, request)


def check_options(options: dict[str, Any]) -> None:
    """What no formula could answer is refused, with the option and a way out."""
    pls, servers, together = options["target_pls"], options["servers"], options["lost_together"]
    if not 0.0 < pls <= 1.0:  # NaN fails too
        refuse("--target-pls", pls, "is not above 0 and at most 1; for no loss at all use --protect ec or delta")
    if servers < 1:
        refuse("--servers", servers, "is not a number of servers; 1 is the least")
    if not 1 <= together <= servers:
        refuse("--lost-together", together, f"is not between 1 and the {servers} of --servers; give more of those")
    for name in ("expect_mtbf", "total", "save"):
        if options[name] is not None and not options[name] > 0.0:
            flag = "--" + name.replace("_", "-")
            refuse(flag, f"{options[name]:g}s", "is no time; give one above 0, such as 90s, 5m, 12h or 7d")


def refuse(flag: str, value: object, problem: str) -> None:
    raise click.BadParameter(f"{value} {problem}", param_hint=f"'{flag}'")


def show_plan(found: Plan, request: Request) -> None:
    """Both ways side by side, and the sentence."""
    from rich.console import Console
    from rich.table import Table

    from regrow.units import brief_text, percent_text

    ways = {"partial": found.partial, "full": found.full}
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("of all time")
    for name in ways:
        table.add_column(f"{name} <-" if name == found.decision else name, justify="right")
    for label, attribute in (
        ("saves", "save"),
        ("loads", "load"),
        ("lost work", "lost_work"),
        ("rescheduling", "reschedule"),
        ("overhead", "share"),
    ):
        table.add_row(label, *(percent_text(getattr(way.overhead, attribute)) for way in ways.values()))
    table.add_row("a save every", *(brief_text(way.interval_seconds) for way in ways.values()))
    totals = (brief_text(way.all_seconds) if way.overhead.ends else "never ends" for way in ways.values())
    table.add_row(f"{brief_text(request.work_seconds)} of work take", *totals)
    table.add_row("PLS to expect", *(f"{way.pls:.3g}" for way in ways.values()))
    table.add_row("updates lost", *(percent_text(way.lost) for way in ways.values()))
    console = Console(highlight=False)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    print(f"\n{found.reason}")
