"""The project's own text, for tests that read it: modules, functions, names, prose.

Nothing here judges; `test_tidy.py` and `test_glossary.py` do.
"""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "regrow"
MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
# Modules that pages may speak of before they are there. Empty when nothing is under way.
COMING: set[str] = set()
Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def functions(path: Path) -> Iterator[Function]:
    """Every function and method of a file, those inside others too."""
    for node in ast.walk(parse(path)):
        if isinstance(node, Function):
            yield node


def decorators(node: Function | ast.ClassDef) -> set[str]:
    """The last names of what decorates a function: `click.group(...)` is "group"."""
    found = set()
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        found.add(called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", ""))
    return found


def union_members(module: str, name: str) -> set[str]:
    """The classes of `name = A | B | ...`; a member that is such a union itself counts as its members."""
    tree = parse(MODULES[module])
    unions = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.BinOp)
    }

    def spread(value: ast.expr) -> set[str]:
        if isinstance(value, ast.BinOp):
            return spread(value.left) | spread(value.right)
        last = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
        return spread(unions[last]) if last in unions else {last}

    return spread(unions[name]) if name in unions else set()


def names_tested(path: Path) -> set[str]:
    """The classes that a file asks for with `isinstance` or `match`."""
    found: set[str] = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            asked: list[ast.AST] = list(ast.walk(node.args[1]))
        elif isinstance(node, ast.MatchClass):
            asked = [node.cls]
        else:
            continue
        found |= {part.id for part in asked if isinstance(part, ast.Name)}
        found |= {part.attr for part in asked if isinstance(part, ast.Attribute)}
    return found


def identifiers(path: Path) -> set[str]:
    """Every name that a file's code uses or defines: variables, attributes, functions, classes, arguments."""
    found: set[str] = set()
    for node in ast.walk(parse(path)):
        for field in ("id", "attr", "name", "arg", "asname"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                found.update(value.split("."))
        if isinstance(node, ast.ImportFrom) and node.module:
            found.update(node.module.split("."))
    return found


def prose(path: Path) -> str:
    """What a file says to its readers: all of a page; the docstrings and comments of a Python file."""
    if path.suffix != ".py":
        return path.read_text()
    said = [
        ast.get_docstring(node) or ""
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Module | ast.ClassDef | Function)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    said += [token.string for token in tokens if token.type == tokenize.COMMENT]
    return "\n".join(said)
