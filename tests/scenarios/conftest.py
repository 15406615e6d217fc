"""`pytest tests/scenarios --rewrite` writes what the scenarios print now into their files; read the diff."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="write the outputs of scenarios into their files")
