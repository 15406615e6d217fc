"""Goal: what the packages offer by name is there, is what type checkers are told it is, and costs nothing until used.

Method: the imports under TYPE_CHECKING are read and compared with what the names give.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import regrow


def promised(package: str) -> dict[str, str]:
    """Name -> module, as type checkers read it."""
    path = importlib.import_module(package).__file__
    assert path is not None
    found: dict[str, str] = {}
    for node in ast.parse(Path(path).read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for each in node.body:
                assert isinstance(each, ast.ImportFrom) and each.module is not None
                found |= {alias.name: each.module for alias in each.names}
    return found


@pytest.mark.parametrize("package", ["regrow", "regrow.checkpoint"])
def test_names_are_what_they_promise(package: str) -> None:
    module = importlib.import_module(package)
    homes = promised(package)
    assert sorted(homes) == sorted(module.__all__)
    for name, home in homes.items():
        found = getattr(module, name)
        assert found is getattr(importlib.import_module(home), name)
        assert found.__module__ == home, "not by way of another module"
    if package == "regrow":
        assert homes == module._HOMES
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


def test_torch_is_loaded_on_first_use() -> None:
    code = "import sys, regrow, regrow.checkpoint, regrow.config; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_python_m_and_the_version() -> None:
    done = subprocess.run([sys.executable, "-m", "regrow", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"regrow {regrow.__version__}\n"
    assert regrow.__version__ == importlib.metadata.version("regrow")


def test_types_are_offered() -> None:
    """A type checker reads our annotations only where this file is."""
    assert (Path(str(regrow.__file__)).parent / "py.typed").is_file()
