"""What does TLS cost beside that? Bytes per second between two endpoints over TCP, with and without, in turns; both are
in one thread, so a figure is the time of both ends together. Samples per second are measured in `auth.py`."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

import numpy as np

from regrow.bench import common
from regrow.core.identity import Identity
from regrow.core.messages import Message, Rows
from regrow.runtime.client import new_event_loop
from regrow.runtime.transport import Endpoint

FORMS = ("off", "auto")
FRAME_BYTES = 1 << 20
AHEAD = 8  # frames on their way
SECONDS_MAX = 120.0  # for all frames of a turn
SERVER, WORKER = Identity(role="server", id=0), Identity(role="worker", id=0)


def measure_bytes(*, rounds: int, frames: int) -> list[dict[str, Any]]:
    rows = []
    for turn in range(rounds):
        for form in FORMS if turn % 2 == 0 else FORMS[::-1]:
            loop = new_event_loop()
            try:
                seconds = loop.run_until_complete(asyncio.wait_for(_send_frames(form, frames), SECONDS_MAX))
            finally:
                loop.close()
            rate = frames * FRAME_BYTES / seconds
            rows.append({"kind": "bytes", "tls": form, "round": turn, "bytes_per_second": rate})
    return rows


def print_bytes(rows: list[dict[str, Any]]) -> None:
    plain, hidden = ([row["bytes_per_second"] for row in rows if row["tls"] == form] for form in FORMS)
    common.print_table(
        f"frames of {FRAME_BYTES >> 20} MiB over TCP, both ends in one thread",
        ("", "MB/s, each turn"),
        [
            (name, ", ".join(f"{rate / 1e6:,.0f}" for rate in rates))
            for name, rates in (("plain", plain), ("TLS 1.3", hidden))
        ],
    )


async def _send_frames(form: str, count: int) -> float:
    """Seconds of the processor."""
    token = secrets.token_bytes(32)
    heard = asyncio.Semaphore(0)

    def hear(peer: Identity, message: Message) -> None:
        heard.release()

    def make(local: Identity) -> Endpoint:
        return Endpoint(
            local=local,
            token=token,
            section_bytes_max=2 * FRAME_BYTES,
            on_open=lambda peer: None,
            on_message=hear,
            on_lost=lambda peer, reason: None,
            tls=form,
        )

    sender, receiver = make(WORKER), make(SERVER)
    rows = np.zeros(FRAME_BYTES // 4, np.float32)
    try:
        await sender.connect(await receiver.listen("tcp:127.0.0.1:0"), SERVER)
        began = time.process_time()
        for number in range(count):
            if number >= AHEAD:
                await heard.acquire()
            sender.send(SERVER, Rows(request=number, durable=0, clock=0, rows=rows))
        for _ in range(min(AHEAD, count)):
            await heard.acquire()
        return time.process_time() - began
    finally:
        await sender.close()
        await receiver.close()
