"""Goal: the shape of the project stays as it was meant: a pure core, imports in one direction, files one can
read.

Method: every source file is parsed and its imports, wherever they stand, are compared with the table below.
To add an edge means to change the table, where it is seen.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "regrow"
MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}
LINES_MAX = 600

# What core may use besides itself: values in, values out. No clock, file, socket, thread, chance, torch.
CORE_MAY_IMPORT = {
    "abc",
    "__future__",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "hmac",
    "itertools",
    "math",
    "msgspec",
    "numpy",
    "regrow._kernels",
    "regrow.errors",
    "regrow.store.interface",
    "struct",
    "typing",
}

# Some modules belong elsewhere than their package: `presets` is a table of numbers, what a store has to be is said
# below core, which uses stores, `orders` is what a launcher and its processes say to each other, and the main of a
# child process stands above whatever role it starts.
UNITS = {
    "regrow.nn.presets": "presets",
    "regrow.store.interface": "interface",
    "regrow.launch.orders": "orders",
    "regrow.launch.child": "mains",
    "regrow.launch.pipes": "mains",
}

# Names of types, for type checking only: nothing is loaded, and a test below sees to it.
TYPES_ONLY = {"regrow.store.interface": {"regrow.core.job"}}

# Who may import whom. Everybody may import errors, the extension, and what a store has to be.
MAY_IMPORT = {
    "errors": set[str](),
    "interface": set(),
    "units": set(),
    "presets": set(),
    "protection": {"units"},
    "config": {"presets", "protection", "units"},
    "metrics": set(),
    "core": set(),
    "store": {"core"},
    "checkpoint": {"core", "store", "units"},
    "sim": {"core", "store"},
    "data": {"config", "presets"},
    "orders": {"core"},
    "runtime": {"core", "store", "checkpoint", "orders"},
    "nn": {"core", "orders", "runtime", "checkpoint", "data", "config", "metrics", "presets", "protection"},
    "mains": {"core", "orders", "runtime", "nn"},
    "launch": {
        "core",
        "orders",
        "runtime",
        "store",
        "checkpoint",
        "data",
        "config",
        "metrics",
        "presets",
        "protection",
    },
    "bench": {"core", "orders", "runtime", "store", "checkpoint", "data", "nn", "launch"}
    | {"config", "metrics", "presets", "protection"},
    "cli": {"launch", "bench", "sim", "checkpoint", "core", "config", "presets", "data", "units"},
    "regrow": {"core", "runtime", "nn", "launch", "config", "protection"},
}


def unit(module: str) -> str:
    """The part of the project that a module belongs to."""
    if module in UNITS:
        return UNITS[module]
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "regrow"


def imported(path: Path) -> Iterator[str]:
    """Everything a file imports, as full names, also inside functions and for type checking only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES or full == "regrow._kernels" else node.module


def test_there_is_something_to_check() -> None:
    assert {"regrow", "regrow.core.server", "regrow.runtime.serve"} <= set(MODULES)
    assert {unit(module) for module in MODULES} <= set(MAY_IMPORT)


def test_the_table_has_no_circle() -> None:
    done: list[str] = []
    while len(done) < len(MAY_IMPORT):
        free = [name for name, below in MAY_IMPORT.items() if name not in done and below <= set(done)]
        assert free, f"these depend on each other: {set(MAY_IMPORT) - set(done)}"
        done += free


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    own = unit(module)
    allowed = {own, "errors", "_kernels", "interface", *MAY_IMPORT[own]}
    if own in ("errors", "interface"):
        allowed = {own}
    wrong = [
        name
        for name in set(imported(MODULES[module])) - TYPES_ONLY.get(module, set())
        if name.split(".")[0] == "regrow" and unit(name) not in allowed and name != "regrow"
    ]
    assert wrong == []


@pytest.mark.parametrize("module", [module for module in MODULES if unit(module) == "core"])
def test_core_is_pure(module: str) -> None:
    for name in imported(MODULES[module]):
        in_core = name.startswith("regrow.core.")
        assert in_core or name in CORE_MAY_IMPORT or name.split(".")[0] in CORE_MAY_IMPORT, name
    tree = ast.parse(MODULES[module].read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not used & {"random", "ctypeslib", "memmap", "fromfile", "tofile"}
    called = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not called & {"open", "print", "input", "exec", "eval", "__import__", "globals"}


@pytest.mark.parametrize("module", MODULES)
def test_every_file_says_what_it_is(module: str) -> None:
    source = MODULES[module].read_text()
    assert ast.get_docstring(ast.parse(source)), "a module needs an opening paragraph"


@pytest.mark.parametrize("module", MODULES)
def test_environment_variables_are_read_at_the_top_only(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert unit(module) in {"cli", "launch", "bench"} or not used & {"environ", "getenv", "putenv"}


def test_no_file_is_too_long_to_read() -> None:
    suffixes = {".py", ".pyi", ".cpp", ".hpp", ".inl"}
    files = [path for folder in ("src", "cpp", "tests") for path in (ROOT / folder).rglob("*")]
    counted = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files if path.suffix in suffixes
    }
    assert len(counted) > 50
    assert {name: lines for name, lines in counted.items() if lines > LINES_MAX} == {}


def test_servers_run_without_torch() -> None:
    """Hundreds of megabytes and seconds of start-up for each server, for nothing."""
    code = "import sys, regrow.runtime.serve, regrow.launch.child; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_whoever_reads_the_interface_of_stores_loads_nothing_else() -> None:
    """So core can use it, and stays without what stores are made of."""
    code = "import sys, regrow.store.interface; print(*(name for name in sys.modules if name.startswith('regrow')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["regrow", "regrow.store", "regrow.store.interface"]
