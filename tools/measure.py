"""What the sources look like in numbers: `python tools/measure.py [FOLDER]`, by default src/regrow.

Lines of modules and functions, the largest classes by attributes and methods, and prose (docstrings and comments) per
line of code. The table in docs/architecture.md was made with it.
"""

from __future__ import annotations

import ast
import io
import statistics
import sys
import tokenize
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def count_prose(text: str) -> tuple[int, int]:
    """(lines of prose, lines of code) of a module."""
    prose: set[int] = set()
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        lines = range(token.start[0], token.end[0] + 1)
        if token.type == tokenize.COMMENT:
            prose.update(lines)
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            code.update(lines)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node):
            prose.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(prose), len(code - prose)


def measure_class(node: ast.ClassDef) -> tuple[int, int]:
    """(attributes, methods)."""
    methods = [item for item in node.body if isinstance(item, FUNCTIONS)]
    attributes = {
        target.attr
        for method in methods
        for item in ast.walk(method)
        if isinstance(item, ast.Assign | ast.AnnAssign)
        for target in (item.targets if isinstance(item, ast.Assign) else [item.target])
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }
    return len(attributes), len(methods)


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "src" / "regrow"
    texts = {path: path.read_text() for path in sorted(root.rglob("*.py"))}
    modules = sorted(len(text.splitlines()) for text in texts.values() if len(text.splitlines()) > 1)
    functions: list[int] = []
    classes: list[tuple[int, int, str]] = []
    prose = code = 0
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, FUNCTIONS):
                functions.append((node.end_lineno or 0) - node.lineno + 1)
            elif isinstance(node, ast.ClassDef):
                attributes, methods = measure_class(node)
                classes.append((attributes, methods, f"{path.relative_to(root)}: {node.name}"))
        mine = count_prose(text)
        prose, code = prose + mine[0], code + mine[1]
    print(f"modules {len(modules)}, lines: median {statistics.median(modules):.0f}, largest {modules[-1]}")
    print(f"functions {len(functions)}, lines: median {statistics.median(functions):.0f}, largest {max(functions)}")
    for attributes, methods, name in sorted(classes, reverse=True)[:5]:
        print(f"class {name}: {attributes} attributes, {methods} methods")
    print(f"prose per line of code {prose / code:.3f}")


if __name__ == "__main__":
    main()
