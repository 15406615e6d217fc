"""The version that is installed, for `--version` and for summaries."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    try:
        return importlib.metadata.version("regrow")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a source tree that was never installed
