"""Goal: nothing waits that is not declared, with a bound, an owner and a verdict; and what is declared is there.

Method: the sources are read. Every constant of time, every state of every life, and every function that calls something
which may block must be named in `regrow/waits.py`, once; every name there must exist; and the table on the page must be
the one that the file makes.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from regrow import waits_table
from regrow.core import states
from regrow.paces import PACED, PACES
from regrow.waits import WAITS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "regrow"
PAGE = ROOT / "docs" / "failure-model.md"
# What only developers run, on purpose and with their eyes on it.
LEFT_OUT = ("sim", "bench", "cli")
CONSTANT = re.compile(r"_SECONDS(_MAX|_MIN|_PROTECTED)?$")
BLOCKING = {"wait", "wait_for", "result", "join", "select", "communicate", "wait_closed", "sleep", "get"}
# Only of these modules, and of anything: sockets without a loop.
BLOCKING_OF = {("ray", "get"), ("ray", "wait"), ("ray", "init"), ("subprocess", "run"), ("socket", "create_connection")}
BLOCKING_ANYWHERE = {"recv_into", "sendall", "recv", "urlopen"}
# Objects whose methods of these names do not block.
HARMLESS = re.compile(r"^(b?['\"].*|.*\bpath|shlex|self\.requests)$", re.S)
FINAL = {"CUT.IDLE", "OWN_SAVE.IDLE", "ATTEMPT.OVER", "WAY.WHOLE", "SESSION.FAILED"}


def files() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if not name.startswith(LEFT_OUT):
            yield name, ast.parse(path.read_text())


def constants() -> set[str]:
    """Of whole modules; by address."""
    found: set[str] = set()
    for name, tree in files():
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if _is_annotated(node) else []
            names = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
            found |= {f"{module}:{each}" for each in names if CONSTANT.search(each)}
    return found


def _is_annotated(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign)


def blocks(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    on = ast.unparse(call.func.value)
    if call.func.attr == "flock":
        return "LOCK_NB" not in ast.unparse(call)
    if (re.sub(r".*_", "", on), call.func.attr) in BLOCKING_OF or call.func.attr in BLOCKING_ANYWHERE:
        return True
    if call.func.attr not in BLOCKING:
        return False
    if call.func.attr == "get":  # of queues, not of dictionaries
        return "queue" in on or on.endswith("_commands")
    return not HARMLESS.match(on)


def functions_that_block() -> set[str]:
    found: set[str] = set()

    def visit(node: ast.AST, stack: list[str], name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                visit(child, [*stack, child.name], name)
                continue
            if isinstance(child, ast.Call) and blocks(child):
                found.add(f"{name}:{'.'.join(stack)}")
            visit(child, stack, name)

    for name, tree in files():
        visit(tree, [], name)
    return found


def lives() -> set[str]:
    tables = {name: value for name, value in vars(states).items() if isinstance(value, states.Moves)}
    assert len(tables) == len(states.ALL)
    return {f"{name}.{state.name}" for name, moves in tables.items() for state in moves.states}


def declared(field: str) -> list[str]:
    return [value for wait in WAITS for value in getattr(wait, field)]


def test_there_is_something_to_find() -> None:
    """Searches that find nothing agree with everything."""
    assert {"core.coordinator:LOST_SECONDS", "runtime.client:ANSWER_SECONDS_MAX"} <= constants()
    blocking = {"runtime/client.py:Client.wait_for", "launch/backend.py:end", "runtime/board.py:_receive"}
    assert blocking <= functions_that_block()
    assert {"MEMBER.AWAITED", "WAY.LEARNING"} <= lives()


def test_every_constant_of_time_bounds_a_wait_or_is_a_pace() -> None:
    bounds = {bound for bound in declared("bounds") if ":" in bound and not bound.startswith("wait: ")}
    plain = {bound for bound in bounds if CONSTANT.search(bound)}
    special = {"hanging:SILENT_SECONDS"}  # shown as the option that changes it
    assert constants() - plain - set(PACES) - special == set()
    assert (plain | set(PACES)) - constants() == set()
    assert plain & set(PACES) == set()


@pytest.mark.parametrize("bound", sorted({bound for bound in declared("bounds") if "." in bound and ":" in bound}))
def test_a_bound_is_a_number(bound: str) -> None:
    assert 0.0 < waits_table.find_constant(bound) < 86400.0 * 7


def test_bounds_by_another_name_are_there() -> None:
    names = {wait.name for wait in WAITS}
    assert len(names) == len(WAITS)
    assert {bound.removeprefix("wait: ") for bound in declared("bounds") if bound.startswith("wait: ")} <= names
    from regrow.cli.train import KNOBS

    flags = {knob.flag for knobs in KNOBS.values() for knob in knobs}
    assert {bound for bound in declared("bounds") if bound.startswith("--")} <= flags
    assert all(wait.bounds and wait.notices and wait.then for wait in WAITS)


def test_every_state_is_somebodys_to_end() -> None:
    assert lives() - set(declared("states")) == FINAL
    assert set(declared("states")) - lives() == set()
    assert [state for state, count in Counter(declared("states")).items() if count > 1] == []


def test_every_function_that_blocks_is_declared() -> None:
    named = [*declared("calls"), *PACED]
    assert functions_that_block() - set(named) == set()
    assert set(named) - functions_that_block() == set()
    assert [name for name, count in Counter(named).items() if count > 1] == []


def test_the_page_has_this_table() -> None:
    begin, end = "<!-- waits: made by `make diagrams` -->\n", "<!-- end of waits -->"
    table = PAGE.read_text().partition(begin)[2].partition(end)[0]
    assert table.strip() == "\n".join(waits_table.render()), "`make diagrams` writes it anew"


def test_a_module_of_every_address_can_be_imported() -> None:
    for address in [*PACES, *(bound for bound in declared("bounds") if re.match(r"[a-z_.]+:[A-Z]", bound))]:
        module, _, name = address.partition(":")
        assert hasattr(importlib.import_module(f"regrow.{module}"), name.partition(".")[0]), address
