"""`regrow serve-rows`: a process that follows what a run publishes, and answers look-ups over HTTP."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import click

from regrow.errors import UserError
from regrow.units import parse_seconds

if TYPE_CHECKING:
    from regrow.serving.replica import Replica

STATUS_SECONDS = 1.0  # between two looks whether there is something to say


@click.command("serve-rows", short_help="Answer look-ups with what a run publishes.")
@click.argument("url")
@click.option("--listen", default="127.0.0.1:8470", show_default=True, metavar="HOST:PORT", help="Port 0: any.")
@click.option("--poll", default="1s", show_default=True, metavar="T", help="How often to look for something newer.")
@click.option("--wait", default="60s", show_default=True, metavar="T", help="For the first publication.")
@click.option("--dir", "directory", type=Path, default=None, help="Where tables are mapped.  [default: TMPDIR]")
@click.option("--table", "tables", multiple=True, metavar="NAME", help="Only these tables; may be repeated.")
@click.option("--row-by-row", is_flag=True, help="Half the space; rows of two versions may be seen together.")
@click.option("--name", default=None, metavar="NAME", help="Tell the run which step this process is at.")
def serve_rows(
    url: str,
    listen: str,
    poll: str,
    wait: str,
    directory: Path | None,
    tables: tuple[str, ...],
    row_by_row: bool,
    name: str | None,
) -> None:
    """Answers look-ups with the weights that `regrow train --publish URL` publishes.

    \b
    curl http://127.0.0.1:8470/status
    curl -d '{"table": "t_cat_0", "ids": [3, 1]}' http://127.0.0.1:8470/lookup
    """
    from regrow.serving.http import RowServer
    from regrow.serving.replica import Replica

    address = parse_listen(listen)
    replica = Replica(
        url,
        tables=tables or None,
        consistent=not row_by_row,
        directory=directory,
        poll_seconds=parse_time("--poll", poll),
        wait_seconds=parse_time("--wait", wait),
        name=name,
    )
    with replica, RowServer(address, replica) as server:
        host, port = server.server_address[:2]
        print(f"http://{host!s}:{port} answers with {replica.cut}, step {replica.step:,}", flush=True)
        over = threading.Event()
        threading.Thread(target=lambda: say_versions(replica, over), daemon=True).start()
        try:
            server.serve_forever()
        finally:
            over.set()


def say_versions(replica: Replica, over: threading.Event) -> None:
    """One line for each version, and for each new problem."""
    said: tuple[str, str | None] = (replica.cut, None)
    while not over.wait(STATUS_SECONDS):
        now = (replica.cut, replica.problem)
        if now[0] != said[0]:
            print(f"now with {now[0]}", flush=True)
        if now[1] is not None and now[1] != said[1]:
            print(f"{now[1]}; answers stay as they are", file=sys.stderr, flush=True)
        said = now


def parse_listen(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"--listen {text}: must be like 127.0.0.1:8470")
    return host.strip("[]"), int(port)


def parse_time(option: str, text: str) -> float:
    try:
        seconds = parse_seconds(text)
    except ValueError as error:
        raise UserError(f"{option} {text}: {error}") from None
    if seconds <= 0.0:
        raise UserError(f"{option} {text}: must be above 0")
    return seconds
