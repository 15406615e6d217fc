"""`regrow bench NAME`: finds the benchmark among the modules of `regrow.bench` and runs it.

A benchmark is a module with SUMMARY, a line for the help, and `run(quick, json_path, ...)`, which returns an exit code.
Options that only some of them take are arguments of those `run`s.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from typing import Any

import click

from regrow.errors import UserError

BENCHES = (
    "kernels",
    "train",
    "models",
    "worker",
    "accuracy",
    "overhead",
    "scale",
    "auth",
    "recovery",
    "checkpoint",
    "publish",
    "balance",
    "soak",
    "cpr",
    "read",
    "tiered",
    "cluster",
)


class BenchCommand(click.Command):
    """Lists the benchmarks, in their own words."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Names"):
            formatter.write_dl([(name, read_summary(name)) for name in BENCHES])


@click.command(cls=BenchCommand, short_help="Measure one thing on this machine.")
@click.argument("name", type=click.Choice(BENCHES))
@click.option("--json", "json_path", metavar="FILE", help="Write the figures there too.")
@click.option("--quick", is_flag=True, help="About a minute or less, smaller; the figures are rough.")
@click.option("--data", metavar="PATH", help="Real clicks in Criteo's format (accuracy, balance, cpr).")
@click.option("--minutes", type=float, metavar="X", help="How long it goes on, about (soak).  [10]")
@click.option("--mtbf", type=float, metavar="X", help="Mean seconds between random failures (soak).  [20]")
@click.option("--r", type=int, metavar="1|2", help="Parities, and servers that may be down together (soak).  [1]")
@click.option("--store", metavar="memory|tiered", help="Where rows are (soak).  [memory]")
@click.option("--cluster", metavar="local|ray", help="ray: nodes are lost (soak).  [local]")
@click.option("--losses", type=int, metavar="N", help="Nodes to lose, one after the other (soak).  [100]")
@click.option("--sweep", metavar="NAME", help="What grows (scale): servers, workers, rows, k, r or all.  [servers]")
@click.option("--part", metavar="NAME", help="Only this part (checkpoint, cpr, recovery, tiered, cluster).")
@click.option("--profile", is_flag=True, default=None, help="Where processor time goes, by part (recovery, overhead).")
@click.option("--docs", metavar="DIR", help="Draw the picture there too (overhead, recovery, checkpoint, cpr).")
def bench(name: str, json_path: str | None, quick: bool, **further: Any) -> int:
    """Measure one thing on this machine."""
    try:
        module = import_bench(name)
    except ImportError as error:
        raise UserError(f"bench {name} cannot be run: {error}") from error
    options = {option: value for option, value in further.items() if value is not None}
    for option in options.keys() - inspect.signature(module.run).parameters.keys():
        raise UserError(f"bench {name} takes no --{option}")
    return int(module.run(quick=quick, json_path=json_path, **options))


def import_bench(name: str) -> Any:
    return importlib.import_module(f"regrow.bench.{name}")


def read_summary(name: str) -> str:
    """The module's SUMMARY, read and not run: help must not load torch."""
    spec = importlib.util.find_spec(f"regrow.bench.{name}")
    if spec is None or spec.origin is None:
        return "(not installed)"
    with open(spec.origin, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["SUMMARY"]:
            return str(ast.literal_eval(node.value))
    return ""
