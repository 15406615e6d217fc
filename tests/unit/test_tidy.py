"""Goal: the shape of the project stays as it was meant: a pure core, imports in one direction, files and functions one
can read, no name that nobody uses, no effect that nobody carries out, no mention of a file that is not there.

Method: every source file is parsed, and what it does is compared with the tables below. To make an exception means to
change a table, where it is seen, with its reason.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import (
    COMING,
    MODULES,
    ROOT,
    SOURCE,
    Function,
    decorators,
    functions,
    names_tested,
    parse,
    prose,
    python_files,
    union_members,
)

LINES_MAX = 600
FUNCTION_LINES_MAX = 70

# What core may use besides itself: values in, values out. No clock, file, socket, thread, chance, torch.
CORE_MAY_IMPORT = {
    "abc",
    "__future__",
    "collections",
    "contextlib",
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

# Some modules belong elsewhere than their package: `presets` is a table of numbers, `schema` and `own` say what shape
# somebody's data has, which a configuration asks before anything is read, what a store has to be is said
# below core, which uses stores, `orders`, `reports` and `lines` are what a launcher and its processes say to each
# other, and the main of a child process stands above whatever role it starts. `python -m regrow` is the command line.
UNITS = {
    "regrow.nn.presets": "presets",
    "regrow.data.schema": "described",
    "regrow.data.own": "described",
    "regrow.store.interface": "interface",
    "regrow.launch.orders": "orders",
    "regrow.launch.reports": "orders",
    "regrow.launch.lines": "orders",
    "regrow.launch.saving": "orders",
    "regrow.launch.supervisor": "supervision",
    "regrow.launch.events": "supervision",
    "regrow.launch.watch": "supervision",
    "regrow.launch.legacy": "supervision",
    "regrow.launch.backend": "supervision",
    "regrow.launch.placement": "supervision",
    "regrow.launch.child": "mains",
    "regrow.launch.pipes": "mains",
    "regrow.launch.parents": "mains",
    "regrow.__main__": "cli",
}

# Names of types, for type checking only: nothing is loaded, and a test below sees to it.
TYPES_ONLY = {"regrow.store.interface": {"regrow.core.job"}}

# Who may import whom. Everybody may import errors, the extension, and what a store has to be.
MAY_IMPORT = {
    "errors": set[str](),
    "interface": set(),
    "units": set(),
    "presets": set(),
    "protection": {"units", "fields"},
    "tiers": {"units", "protection"},
    "defaults": {"protection"},
    "hanging": {"units"},
    "clusters": {"protection"},
    "wait": set(),
    "waits": {"wait", "waits_storage"},
    "waits_storage": {"wait"},
    "waits_table": {"waits"},
    "paces": set(),
    "fields": set(),
    "described": {"fields", "protection"},
    "inputs": {"presets", "protection", "described"},
    "checks": {"clusters", "protection", "units", "hanging", "fields", "tiers", "inputs"},
    "config": {"checks", "presets", "protection", "units", "hanging", "fields", "tiers", "defaults", "inputs"},
    "metrics": set(),
    "planner": {"units"},
    "core": set(),
    "store": {"core"},
    "checkpoint": {"core", "store", "units"},
    "serving": {"checkpoint", "units"},
    "supervision": {"core", "orders", "hanging"},
    "sim": {"core", "store", "supervision", "orders", "checkpoint"},
    "data": {"config", "presets", "inputs", "described"},
    "orders": {"core"},
    "runtime": {"core", "store", "checkpoint", "orders", "protection", "units"},
    "nn": {"core", "orders", "runtime", "checkpoint", "data", "config", "metrics", "presets", "protection"},
    "mains": {"core", "orders", "runtime", "nn"},
    "launch": {
        "supervision",
        "core",
        "orders",
        "runtime",
        "store",
        "checkpoint",
        "data",
        "config",
        "clusters",
        "hanging",
        "metrics",
        "planner",
        "presets",
        "protection",
        "tiers",
        "units",
    },
    "bench": {"supervision", "core", "orders", "runtime", "store", "checkpoint", "data", "nn", "launch"}
    | {"config", "metrics", "planner", "presets", "protection", "described", "serving"},
    "cli": {"launch", "bench", "sim", "checkpoint", "core", "config", "planner", "presets", "data", "units"}
    | {"protection", "tiers", "serving", "clusters", "checks"},
    "regrow": {"checkpoint", "core", "runtime", "nn", "launch", "config", "protection"},
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


@pytest.mark.parametrize("module", [module for module in MODULES if unit(module) == "planner"])
def test_plans_are_made_of_values(module: str) -> None:
    """No clock, no chance, no file: the same numbers give the same plan."""
    own = {"regrow.units", "__future__", "collections.abc", "dataclasses", "math", "typing"}
    assert {name for name in imported(MODULES[module]) if not name.startswith("regrow.planner.")} <= own


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


RAY_MAY_BE_IMPORTED_IN = {
    f"regrow.launch.{name}" for name in ("ray", "ray_connect", "ray_files", "ray_nodes", "ray_posts", "ray_job")
}


@pytest.mark.parametrize("module", MODULES)
def test_ray_stays_at_its_place(module: str) -> None:
    """Whatever is not about nodes runs without it, and nothing loads it before it is asked for."""
    names = {name for name in imported(MODULES[module]) if name.split(".")[0] == "ray"}
    assert not names or module in RAY_MAY_BE_IMPORTED_IN or unit(module) == "bench"
    at_the_top = [node for node in ast.parse(MODULES[module].read_text()).body if isinstance(node, ast.Import)]
    assert not [alias for node in at_the_top for alias in node.names if alias.name.split(".")[0] == "ray"]


def test_whoever_reads_the_interface_of_stores_loads_nothing_else() -> None:
    """So core can use it, and stays without what stores are made of."""
    code = "import sys, regrow.store.interface; print(*(name for name in sys.modules if name.startswith('regrow')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["regrow", "regrow.store", "regrow.store.interface"]


# --- Functions ---

LONG_ON_PURPOSE = {
    "test_a_new_holder_ends_with_the_parity_of_one_that_was_never_replaced": "a machine made of inner functions",
}


def test_no_function_is_too_long_for_a_screen() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {function.name}": lines
        for path in python_files("src", "tests", "examples")
        for function in functions(path)
        if (lines := (function.end_lineno or 0) - function.lineno + 1) > FUNCTION_LINES_MAX
        and function.name not in LONG_ON_PURPOSE
    }
    assert found == {}


# A participle names a value ("the rows that are touched"), a verb what is done. Properties name values.
PARTICIPLE_ENDINGS = ("ed", "ing")
PARTICIPLES = {
    *("begun", "born", "borne", "broken", "built", "chosen", "dealt", "done", "drawn", "felt", "found", "given"),
    *("gone", "grown", "heard", "held", "hidden", "kept", "known", "laid", "led", "lost", "made", "meant", "met"),
    *("paid", "said", "seen", "sent", "shown", "sold", "spent", "spoken", "taken", "thrown", "told", "torn", "won"),
    *("worn", "written"),
}
NOT_PARTICIPLES = {
    *("embed", "feed", "need", "proceed", "ring", "seed", "shed", "speed", "string", "succeed"),
    *("recording", "missing", "fitting", "pending", "rising", "tracking"),  # things that are done
    *("published", "touched"),  # as kernels and stores name them
}
# Where the rule holds. A package that is not here has some left.
PARTICIPLE_FREE = set(MAY_IMPORT) - {"interface"}


def is_participle(name: str) -> bool:
    word = name.strip("_")
    return word not in NOT_PARTICIPLES and (
        word in PARTICIPLES or (word.isalpha() and word.endswith(PARTICIPLE_ENDINGS))
    )


def test_participles_are_known() -> None:
    assert [name for name in ("_told", "loaded", "reading", "seed", "load", "on_loaded") if is_participle(name)] == [
        "_told",
        "loaded",
        "reading",
    ]


@pytest.mark.parametrize("package", sorted(PARTICIPLE_FREE))
def test_functions_are_verbs(package: str) -> None:
    found = [
        f"{module}: {function.name}"
        for module, path in MODULES.items()
        if unit(module) == package
        for function in functions(path)
        if is_participle(function.name) and not decorators(function) & {"property", "cached_property"}
    ]
    assert found == []


# --- Names that nobody uses ---

# Called by others than this project's code: by the names a library looks for, or by our users.
USED_ELSEWHERE = {
    "connection_made": "asyncio calls it",
    "get_buffer": "asyncio calls it",
    "buffer_updated": "asyncio calls it",
    "pause_writing": "asyncio calls it",
    "resume_writing": "asyncio calls it",
    "eof_received": "asyncio calls it",
    "connection_lost": "asyncio calls it",
    "handle_error": "socketserver calls it",
    "do_GET": "http.server calls it",
    "do_POST": "http.server calls it",
    "log_message": "http.server calls it",
    "format_options": "click calls it",
    "extra_repr": "torch calls it",
    "format_epilog": "click calls it",
    "_save_to_state_dict": "torch calls it",
    "_load_from_state_dict": "torch calls it",
    "Adapter": "for users who bring one: what TorchAdapter and TorchRecAdapter have in common",
}
# Looked up by a name that is put together, here and with this in front of it.
LOOKED_UP = {
    "regrow.sim.sabotage": "_",
    "regrow.sim.hangs": "inject_",
    "regrow.sim.followed": "inject_",
    "regrow.sim.forever": "inject_",
    "regrow.sim.moving": "inject_",
    "regrow.sim.vanishing": "inject_",
    "regrow.sim.parted": "inject_",
}


@functools.cache
def names_used() -> frozenset[str]:
    """Names that are read somewhere; the definition itself, an import and a keyword argument do not count. Names in
    strings do where they are alone in them: `getattr`, `monkeypatch`, `__init__._HOMES`."""
    used = set()
    for path in python_files("src", "tests", "examples"):
        if path == Path(__file__):
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                used.add(node.id)
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                used.add(node.value)
    return frozenset(used)


def names_defined(module: str) -> Iterator[str]:
    """Functions, methods, classes and constants, but not what Python or click find by themselves."""
    tree = parse(MODULES[module])
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef) and not decorators(node) & {"command", "group"}:
            yield node.name
    for owner in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]:
        for node in owner.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            yield from (target.id for target in targets if isinstance(target, ast.Name) and target.id.isupper())


@pytest.mark.parametrize("module", MODULES)
def test_every_name_is_used_by_somebody(module: str) -> None:
    looked_up = LOOKED_UP.get(module)
    unused = [
        name
        for name in names_defined(module)
        if name not in names_used()
        and name not in USED_ELSEWHERE
        and not name.startswith("__")
        and not (looked_up and name.startswith(looked_up))
    ]
    assert unused == []


def test_exceptions_are_still_needed() -> None:
    defined = {name for module in MODULES for name in names_defined(module)}
    assert set(USED_ELSEWHERE) <= defined
    assert not set(USED_ELSEWHERE) & names_used()


# --- Effects ---

# Who carries out the effects of a machine. A worker's session has drivers of its own.
DRIVERS = {
    "sockets": ["runtime/serve.py"],
    "one process": ["runtime/inprocess.py"],
    "simulator": ["sim/driver.py"],
}
SESSION_DRIVERS = {
    "sockets": ["runtime/client.py"],
    "one process": ["runtime/client.py"],
    "simulator": ["sim/driver.py", "sim/workers.py"],
}
NOT_CARRIED_OUT = {
    ("simulator", "ReadAnswered"): "a simulated worker reads no records, so no answer comes",
    ("simulator", "WriteAnswered"): "a simulated worker writes no records, so no answer comes",
}


def effects_of(module: str) -> set[str]:
    return union_members(module, "Effect")


MACHINES = [module for module in MODULES if unit(module) == "core" and effects_of(module)]


def test_machines_are_found() -> None:
    assert {"regrow.core.session", "regrow.core.server", "regrow.core.coordinator"} <= set(MACHINES)
    assert "Replace" in effects_of("regrow.core.coordinator")
    unneeded = [key for key in NOT_CARRIED_OUT if key[1] not in effects_of("regrow.core.session")]
    assert unneeded == []


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("driver", DRIVERS)
def test_every_effect_is_carried_out_by_every_driver(machine: str, driver: str) -> None:
    """By name: an effect that is dropped is dropped on purpose, in a place that says so."""
    files = (SESSION_DRIVERS if machine == "regrow.core.session" else DRIVERS)[driver]
    tested = set[str]().union(*(names_tested(SOURCE / file) for file in files))
    missing = {effect for effect in effects_of(machine) if (driver, effect) not in NOT_CARRIED_OUT}
    assert missing - tested == set()


# --- Mentions ---

# Files that are the reader's own, or that a run makes.
NOT_OURS = {"FILE.toml", "config.toml"}
PATH_MENTIONED = re.compile(r"(?<![\w./:-])((?:[\w.-]+/)*[\w-]+\.(?:py|pyi|cpp|hpp|inl|md|toml))\b(?!\()")
MODULE_MENTIONED = re.compile(r"(?<![\w./-])regrow((?:\.\w+)+)")
READ_FROM = [
    *("", "src", "src/regrow", "tests", "tests/unit", "docs"),
    *("cpp", "cpp/include", "cpp/include/regrow", "cpp/src"),
]


def texts() -> list[Path]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(pages) + python_files("src", "tests", "examples")


@functools.cache
def file_names() -> frozenset[str]:
    folders = ("src", "tests", "docs", "cpp", "examples")
    inside = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    return frozenset(path.name for path in [*inside, *ROOT.iterdir()])


def is_there(mention: str, *, said_in: Path) -> bool:
    """A path is one from a place where people read; a name alone is that of any file."""
    if mention.removeprefix("src/regrow/") in COMING or mention.rpartition("/")[2] in NOT_OURS:
        return True
    if "/" not in mention:
        return mention in file_names()
    return any((base / mention).exists() for base in [said_in.parent, *(ROOT / folder for folder in READ_FROM)])


def is_a_name(mention: str) -> bool:
    """Modules and then a name: the modules are there, and the last of them has such a name."""
    parts = ["regrow", *mention.strip(".").split(".")]
    count = max(n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in MODULES)
    if count == len(parts) or parts[count].startswith("_kernels"):
        return True
    return re.search(rf"\b{parts[count]}\b", MODULES[".".join(parts[:count])].read_text()) is not None


@pytest.mark.parametrize("path", texts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_and_module_that_is_mentioned_exists(path: Path) -> None:
    text = prose(path)
    gone = [mention for mention in PATH_MENTIONED.findall(text) if not is_there(mention, said_in=path)]
    gone += [f"regrow{mention}" for mention in MODULE_MENTIONED.findall(text) if not is_a_name(mention)]
    assert gone == []
