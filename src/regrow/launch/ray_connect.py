"""The way to a Ray cluster. Light, so that whoever only asks for something waits for Ray alone."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from regrow.errors import UserError

NAMESPACE = "regrow"
REACH_SECONDS_MAX = 5.0  # from one node to another


def load_ray() -> Any:
    """The library, or an error that says how to get it."""
    try:
        import ray
    except ImportError:
        raise UserError("--cluster ray: Ray is not installed here", hint="pip install 'regrow[ray]'") from None
    return ray


def connect(address: str) -> Any:
    """Ray, connected to a cluster that runs. Raises UserError where there is none."""
    ray = load_ray()
    if ray.is_initialized():
        return ray
    # Its reports about usage of memory and lost nodes would come into the middle of the display.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        _look_for_head(address)
        ray.init(
            address=address,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=True,
        )
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        words = str(error).strip().splitlines()
        raise UserError(
            f"no Ray cluster answers at {address!r}: {words[0] if words else type(error).__name__}",
            hint="start one with `ray start --head`, or name one with --address HOST:PORT",
        ) from None
    return ray


def _look_for_head(address: str) -> None:
    """Raises ConnectionError where nobody listens: Ray itself would try for minutes."""
    from ray._private.services import canonicalize_bootstrap_address

    head = canonicalize_bootstrap_address(address)
    if head is not None:  # else Ray looks for one on this machine, and says so at once
        host, _, port = head.rpartition(":")
        if not reach(host.strip("[]"), int(port)):
            raise ConnectionError(f"nobody listens at {head}")


def reach(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=REACH_SECONDS_MAX):
            return True
    except OSError:
        return False
