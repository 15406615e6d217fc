"""`regrow ckpt ...` and `regrow merge`: options in, a table or a line out, and an exit code.

Exit codes are those of main.py; `verify` gives 1 if something is damaged. What is done is in `regrow.checkpoint`,
what is shown in ckpt_views.py; they load numpy and rich, and so are imported in the commands only.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from regrow.checkpoint import address
from regrow.cli.options import SECONDS
from regrow.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, UserError

if TYPE_CHECKING:
    from regrow.checkpoint.diff import Side
    from regrow.checkpoint.merge import PieceBroken
    from regrow.checkpoint.merger import Event
    from regrow.checkpoint.retention import Rules

INTERVAL = "10s"
GRACE = "15m"
UNFINISHED = "1d"
KEEP_LAST = 3
KEEP_FULL_EVERY = "1d"


@click.group(short_help="Look at checkpoints, check, copy, merge and prune them.", invoke_without_command=True)
@click.pass_context
def ckpt(ctx: click.Context) -> None:
    """Look at checkpoints, check, copy, merge and prune them.

    \b
    regrow ckpt ls s3://bucket/run                 all cuts, and what restoring each needs
    regrow ckpt verify s3://bucket/run             read everything, name all damage
    regrow ckpt export s3://bucket/run@latest --to model.safetensors

    URL is a directory, or what fsspec knows: s3://..., file://...; a cut behind the @ is its id, the beginning of
    one, a step, or latest, which is the newest that can be restored.
    """
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        ctx.exit(EXIT_USAGE)


@ckpt.command("ls", short_help="All cuts as a tree, and what restoring each needs.")
@click.argument("url")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def list_cuts(url: str, as_json: bool) -> None:
    """All cuts as a tree, oldest first, and what restoring each needs. A branch begins where training was rolled back.
    Below them, the newest save of each server that saves by itself.

    Only manifests are read: whether files are damaged, `verify` tells.
    """
    from regrow.checkpoint.listing import read_listing
    from regrow.checkpoint.merger import read_wanted_full
    from regrow.checkpoint.saves_list import list_saves
    from regrow.cli import ckpt_views as views

    listing = read_listing(address.whole_url(url, "regrow ckpt ls"), may_be_empty=True)
    wanted, unfinished = read_wanted_full(listing.storage), listing.storage.look_at_unfinished()
    why, saves = None if wanted is None else wanted.why, list_saves(listing.storage)
    if as_json:
        views.say_json(views.list_json(listing, unfinished=unfinished, wanted=why, saves=saves))
    else:
        views.show_list(listing, unfinished=unfinished, wanted=why, saves=saves, now=time.time())


@ckpt.command(short_help="One cut in detail.")
@click.argument("where", metavar="URL[@CUT]")
@click.option("--chunks", is_flag=True, help="List the files too.")
@click.option("--graph", "picture", metavar="FILE.svg", help="Draw all cuts and pieces there, too.")
@click.option("--json", "as_json", is_flag=True, help="For programs; nothing is shortened.")
def show(where: str, chunks: bool, picture: str | None, as_json: bool) -> None:
    """One cut in detail: marks, job, tables, and the pieces that a restore reads."""
    from regrow.checkpoint.listing import read_listing
    from regrow.cli import ckpt_views as views

    url, wish = address.split_cut(where)
    listing = read_listing(url)
    cut = listing.find_cut(wish)
    if as_json:
        views.say_json(views.show_json(listing, cut))
    else:
        views.show_cut(listing, cut, chunks=chunks, now=time.time())
    if picture is not None:
        from regrow.checkpoint.picture import svg

        _write_file(Path(picture), svg(listing.graph, now=time.time(), title=url))
        views.note(f"drawn: {picture}")


@ckpt.command(short_help="Find all damage.")
@click.argument("url")
@click.option("--quick", is_flag=True, help="Look at names and sizes only; contents are not read.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def verify(url: str, quick: bool, as_json: bool) -> int:
    """Reads every chunk and names everything that is wrong. The exit code is 1 if something is damaged or a cut is
    lost; what only takes space is listed as harmless."""
    from regrow.checkpoint import load
    from regrow.checkpoint.listing import find_lost_cuts, read_listing
    from regrow.checkpoint.saves_list import list_saves, verify_saves
    from regrow.cli import ckpt_views as views

    listing = read_listing(address.whole_url(url, "regrow ckpt verify"), may_be_empty=True)
    with views.Bar("verifying") as bar:
        problems = load.verify(listing.storage, deep=not quick, progress=bar)
        saves = list_saves(listing.storage)
        problems += verify_saves(listing.storage, saves, deep=not quick)
    if not listing.graph.pieces and not problems and not saves:
        raise UserError(f"{url} has no checkpoints", hint="there is nothing to verify; is it the right URL?")
    lost = find_lost_cuts(listing, problems)
    if as_json:
        fields = ("piece", "file", "what", "harmful")
        found = [{name: getattr(problem, name) for name in fields} for problem in problems]
        views.say_json({"url": listing.url, "problems": found, "cuts_lost": lost})
    else:
        views.show_problems(listing, problems, lost, saves=saves, quick=quick)
    return EXIT_FAILED if lost or any(problem.harmful for problem in problems) else EXIT_OK


@ckpt.command(short_help="A verified copy of a cut, as one full, somewhere else.")
@click.argument("where", metavar="URL[@CUT]")
@click.option("--to", "target", metavar="URL2", required=True, help="Where the copy goes; it may hold other cuts.")
@click.option("--approximate", is_flag=True, help="Quantise exact rows if others on the way are quantised.")
def restore(where: str, target: str, approximate: bool) -> None:
    """Writes a cut as one full somewhere else and reads it back: to go back to it, to move it, to keep it.

    A copy that is there already is not touched. If a piece is damaged, another way to the same cut is taken. The
    directory of a run with --protect batch can be named too: its newest checkpoint becomes an ordinary one.
    """
    from regrow.checkpoint import maintain
    from regrow.checkpoint.guard import Stop
    from regrow.checkpoint.listing import read_listing
    from regrow.checkpoint.manifest import MANIFEST
    from regrow.checkpoint.storage import Storage
    from regrow.cli import ckpt_views as views
    from regrow.core.names import piece_name
    from regrow.launch import tiers
    from regrow.units import size_text

    url, wish = address.split_cut(where)
    if tiers.holds_epochs(url):
        from regrow.launch.tier_restore import restore_epochs

        with views.Bar("copying") as bar:
            made = restore_epochs(url, target, progress=bar)
        what = f"one full, {made.rows:,} rows, {size_text(made.bytes)}"
        views.say(f"{target}@{made.target.id}: {what}, read back and verified")
        return
    listing = read_listing(url)
    cut = listing.find_cut(wish)
    there = Storage.open(target)
    name = piece_name(None, cut.id)
    if target.rstrip("/") == url.rstrip("/"):
        hint = f"`regrow ckpt merge {url} --to {cut.id}` makes a full there"
        raise UserError(f"{target} is where the cut is already", hint=hint)
    if found := there.names(name):
        what = name if MANIFEST in found else f"an unfinished {name}: a copy that was killed, or goes on just now"
        raise UserError(f"{target} already has {what}", hint="nothing is overwritten: choose another URL, or delete it")
    with Stop() as stop, views.Bar("copying") as bar:
        made, broken = maintain.go_around(
            listing,
            cut,
            lambda plan: maintain.copy_cut(
                listing.storage, plan, there, stop=stop, approximate=approximate, progress=bar
            ),
        )
    _tell_broken(broken)
    exact = "" if made.exact else f", {made.bits} bits"
    views.say(
        f"{target}@{cut.id}: one full, {made.rows:,} rows, {size_text(made.bytes)}{exact}, read back and verified"
    )


@ckpt.command("merge", short_help="Fold pieces into one now.")
@click.argument("url")
@click.option("--from", "source", metavar="CUT", help="The merged piece begins there.  [nothing: it is a full]")
@click.option("--to", "target", metavar="CUT", help="... and ends there.  [latest]")
@click.option("--approximate", is_flag=True, help="Quantise exact rows if others on the way are quantised.")
def fold_now(url: str, source: str | None, target: str | None, approximate: bool) -> int:
    """Folds what the policy says is due, or the pieces between two cuts. Nothing is deleted.

    \b
    regrow ckpt merge URL                          what is due
    regrow ckpt merge URL --to latest              a full of the newest cut
    regrow ckpt merge URL --from 400 --to 480      one piece instead of those between
    """
    from regrow.checkpoint import maintain
    from regrow.checkpoint.guard import Stop
    from regrow.checkpoint.listing import read_listing
    from regrow.cli import ckpt_views as views
    from regrow.units import size_text

    listing = read_listing(address.whole_url(url, "regrow ckpt merge"))
    if source is None and target is None:
        if approximate:
            raise UserError("--approximate needs --from or --to", hint="the policy never mixes exact and quantised")
        return _one_round(url, grace_seconds=float("inf"), unfinished_seconds=float("inf"))
    begin, end = None if source is None else listing.find_cut(source).id, listing.find_cut(target).id
    with Stop() as stop, views.Bar("merging") as bar:
        made, there = maintain.fold_between(listing, begin, end, stop=stop, approximate=approximate, progress=bar)
    what = "was there already" if there else "written"
    views.say(f"{made.name} {what}: {made.rows:,} rows, {size_text(made.bytes)}")
    return EXIT_OK


def retention_options(function: Any) -> Any:
    """What stays, as retention.py has it."""
    every = "One full in so much time stays for going back, fewer with age; 0: none."
    for name, default, text in (
        ("--unfinished", UNFINISHED, "What is unfinished and was not written to for so long goes."),
        ("--keep-full-every", KEEP_FULL_EVERY, every),
    ):
        option = click.option(name, type=SECONDS, default=default, metavar="TIME", help=f"{text}  [{default}]")
        function = option(function)
    return click.option(
        "--keep-last", type=int, default=KEEP_LAST, metavar="N", help=f"The newest cuts stay restorable.  [{KEEP_LAST}]"
    )(function)


@ckpt.command(short_help="Delete pieces that no cut to be kept needs.")
@click.argument("url")
@retention_options
@click.option("--keep", metavar="CUT", multiple=True, help="This cut stays restorable. Repeatable.")
@click.option("--saves", metavar="RUN", multiple=True, help="This run is over: its servers' own saves go. Repeatable.")
@click.option("--dry-run", is_flag=True, help="Show it, delete nothing.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def prune(
    url: str,
    keep_last: int,
    keep_full_every: float,
    unfinished: float,
    keep: tuple[str, ...],
    saves: tuple[str, ...],
    dry_run: bool,
    yes: bool,
) -> int:
    """Shows what stays and what goes, and why; asks; and deletes.

    Saves of single servers stay, whatever their age: a run that goes on may need them, and nobody can tell from outside
    whether it does. With --saves RUN (as `ls` shows it) you say that it is over.

    It deletes at once: a restore that is reading at this moment may lose pieces under its hands. `regrow merge --watch`
    waits before it deletes.
    """
    from regrow.checkpoint import maintain
    from regrow.checkpoint.guard import Stop
    from regrow.checkpoint.listing import read_listing
    from regrow.checkpoint.saves_list import find_run, list_saves
    from regrow.checkpoint.saves_write import delete_run
    from regrow.cli import ckpt_views as views
    from regrow.units import size_text

    listing = read_listing(address.whole_url(url, "regrow ckpt prune"), may_be_empty=bool(saves))
    own = list_saves(listing.storage) if saves else []
    runs = sorted({find_run(own, wish) for wish in saves})
    over = [each for each in own if each.found.owner.run in runs]
    pinned = frozenset(listing.find_cut(wish).id for wish in keep)
    rules = _rules(keep_last, keep_full_every, pinned)
    plan = maintain.plan_prune(listing, rules, now=time.time(), unfinished_seconds=unfinished)
    if plan.why:
        views.show_prune(listing, plan)
    size = size_text(plan.bytes(listing) + sum(each.bytes for each in over))
    what = f"{views.count_text(len(plan.doomed), 'piece')}, {size}"
    if runs:
        servers = views.count_text(len(over), "server")
        what = f"{views.count_text(len(plan.doomed), 'piece')} and the saves of {servers} of {', '.join(runs)}, {size}"
    if dry_run or not (plan.doomed or runs):
        views.say(f"would delete {what}" if plan.doomed or runs else "nothing to delete")
        return EXIT_OK
    if not yes:
        if not sys.stdin.isatty():
            raise UserError(f"this would delete {what}, and there is nobody to ask", hint="add --yes to delete them")
        if not click.confirm(f"delete {what}?", err=True):
            views.say("nothing was deleted")
            return EXIT_FAILED
    with Stop() as stop:
        for name in maintain.delete_pieces(listing, plan.doomed, stop=stop):
            views.say(f"deleted {name}")
        for run in runs:
            stop.check("interrupted; what was not listed as deleted is still there")
            for name in delete_run(listing.storage, run):
                views.say(f"deleted {name}")
    views.say(f"deleted {what}")
    return EXIT_OK


@ckpt.command(short_help="A cut as an ordinary state_dict.")
@click.argument("where", metavar="URL[@CUT]")
@click.option("--to", "target", metavar="PATH", required=True, help="A file, for dcp a directory; not there yet.")
@click.option(
    "--format", "format_", type=click.Choice(["safetensors", "dcp"]), default="safetensors", help="[safetensors]"
)
@click.option("--prefix", default="", metavar="P", help="In front of every name.")
def export(where: str, target: str, format_: Any, prefix: str) -> None:
    """Writes the weights of a cut as tensors with TorchRec's names, for those who serve the model."""
    import warnings

    from regrow.checkpoint.export import export as write_export
    from regrow.checkpoint.listing import read_listing
    from regrow.cli import ckpt_views as views
    from regrow.units import size_text

    url, wish = address.split_cut(where)
    listing = read_listing(url)
    cut = listing.find_cut(wish)
    try:
        with warnings.catch_warnings(), views.Bar("exporting") as bar:
            warnings.simplefilter("ignore")  # torch's about itself
            plan = listing.graph.restore_plan(cut.id)[0]
            done = write_export(listing.storage, plan, target, format=format_, prefix=prefix, progress=bar)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    for problem in done.report.broken:
        views.note(f"gone around: {problem}")
    views.say(f"{done.path}: {views.count_text(len(done.tensors), 'tensor')}, {size_text(done.bytes)}, cut {cut.id}")


@ckpt.command("diff", short_help="What differs between two cuts.")
@click.argument("cuts", nargs=-1, required=True, metavar="URL@A URL@B")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def differences(cuts: tuple[str, ...], as_json: bool) -> None:
    """For each table: rows that changed, rows that only one cut has stored, the largest and the mean change of weights.

    \b
    regrow ckpt diff URL@400 URL@480
    regrow ckpt diff URL 400 480                   the same
    regrow ckpt diff runs/a@latest runs/b@latest   of two runs
    """
    import dataclasses

    from regrow.checkpoint import diff as diffs
    from regrow.cli import ckpt_views as views

    left, right = _two_cuts(cuts)
    with views.Bar("comparing") as bar:
        found = diffs.diff(left, right, bar)
    _tell_broken([*left.broken, *right.broken])
    origin = diffs.same_origin(left, right)
    names = left.plan.target.id, right.plan.target.id
    if as_json:
        tables = [{**dataclasses.asdict(each), "equal": each.equal} for each in found]
        views.say_json({"left": names[0], "right": names[1], "tables": tables, "note": origin})
    else:
        views.say(f"1st {names[0]} (step {left.plan.target.step:,}), 2nd {names[1]} (step {right.plan.target.step:,})")
        views.show_diff(found, origin)


def _two_cuts(cuts: tuple[str, ...]) -> tuple[Side, Side]:
    """URL@A URL@B, URL@A @B, or URL A B."""
    from regrow.checkpoint import diff as diffs
    from regrow.checkpoint.listing import read_listing

    if len(cuts) == 3:
        url = address.whole_url(cuts[0], "regrow ckpt diff URL A B")
        cuts = f"{url}@{cuts[1].removeprefix('@')}", f"{url}@{cuts[2].removeprefix('@')}"
    if len(cuts) != 2:
        raise UserError("two cuts are compared", hint="URL@A URL@B, or URL A B")
    first, wish = address.split_cut(cuts[0])
    second, other_wish = address.split_cut(cuts[1])
    one = read_listing(first)
    other = one if second in ("", first) else read_listing(second)
    sides = [
        diffs.Side(listing.storage, listing.graph, listing.find_cut(cut).id)
        for listing, cut in ((one, wish), (other, other_wish))
    ]
    return sides[0], sides[1]


# -- the merger --------------------------------------------------------------------------------------------


@click.command("merge", short_help="Keep restores cheap while training goes on: merge and prune checkpoints.")
@click.argument("url")
@click.option("--watch", is_flag=True, help="Go on until Ctrl-C.")
@click.option("--once", is_flag=True, help="One round, for cron.  [without --watch]")
@click.option("--interval", type=SECONDS, default=INTERVAL, metavar="TIME", help=f"Between rounds.  [{INTERVAL}]")
@retention_options
@click.option(
    "--grace",
    type=SECONDS,
    default=GRACE,
    metavar="TIME",
    help=f"A piece was unneeded for so long: delete it.  [{GRACE}]",
)
def merge(
    url: str,
    watch: bool,
    once: bool,
    interval: float,
    keep_last: int,
    keep_full_every: float,
    unfinished: float,
    grace: float,
) -> int:
    """Merges deltas into larger pieces and fulls, deletes what is not needed any more, and says why.

    How many at a time (s) and when a full is made (N) is chosen from what is measured. It may run on any machine that
    reaches the storage, be stopped at any time, and run twice.

    \b
    regrow merge --watch s3://bucket/run
    regrow merge --once s3://bucket/run            a round now and then
    """
    from regrow.checkpoint.listing import read_listing
    from regrow.units import seconds_text

    url = address.whole_url(url, "regrow merge")
    options: dict[str, Any] = {
        "rules": _rules(keep_last, keep_full_every),
        "grace_seconds": grace,
        "unfinished_seconds": unfinished,
    }
    if once or not watch:
        read_listing(url)
        return _one_round(url, **options)
    print(f"watching {url} every {seconds_text(interval)}; Ctrl-C ends it", file=sys.stderr, flush=True)
    _watch(url, once=False, interval_seconds=interval, **options)
    return EXIT_OK


def _one_round(url: str, **options: Any) -> int:
    told: list[Event] = []
    well = _watch(url, once=True, told=told, **options)
    if not well:
        return EXIT_FAILED
    if not any(event.kind in ("folded", "deleted") for event in told):
        print("nothing is due")
    return EXIT_OK


def _watch(url: str, *, told: list[Event] | None = None, **options: Any) -> bool:
    """Rounds of the merger, one line per event."""
    from regrow.checkpoint import merger
    from regrow.checkpoint.guard import Guard, Stop
    from regrow.checkpoint.storage import Storage

    last = ""

    def tell(event: Event) -> None:
        nonlocal last
        text = event.text.replace("\n", "; ")
        if event.kind != "error" or text != last:  # an outage is one line, however many rounds it lasts
            print(f"{time.strftime('%H:%M:%S')} {event.kind:8}{text}", flush=True)
        last = text
        if told is not None:
            told.append(event)

    storage = Storage.open(url)
    with Stop() as stop:
        with Guard(storage, storage, stop) as guarded:
            well = merger.watch(guarded, on_event=tell, stop=stop, **options)
        stop.check()
    return well


# -- small things ------------------------------------------------------------------------------------------


def _rules(keep_last: int, keep_full_every: float, pinned: frozenset[str] = frozenset()) -> Rules:
    from regrow.checkpoint.retention import Rules

    if keep_last < 1:
        raise UserError(f"--keep-last {keep_last}: at least the newest cut has to stay")
    return Rules(keep_last=keep_last, keep_full_every_seconds=keep_full_every, pinned=pinned)


def _tell_broken(broken: list[PieceBroken]) -> None:
    for error in broken:
        print(f"gone around: {error.message}", file=sys.stderr)


def _write_file(path: Path, text: str) -> None:
    """Whole or not at all."""
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        try:
            scratch.write_text(text, encoding="utf-8")
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
