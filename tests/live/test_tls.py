"""Goal: with TLS an observer sees nothing of what is said, and only who holds the token gets in; frames stay sealed.

Method: two endpoints over TCP, as in test_transport.py, with a relay between them that keeps all bytes; strangers with
other tokens, without TLS, with certificates of their own, and with random bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_transport import S0, TOKEN, W0, Side, run, until  # noqa: F401

from regrow.core.messages import Rows
from regrow.errors import ConnectionLost, UserError
from regrow.runtime import tls
from regrow.runtime.tls import make_tls
from regrow.runtime.transport import parse_address

PATTERN = np.frombuffer(b"a row that others may not read.." * 64, np.float32)
ANYWHERE = "tcp:127.0.0.1:0"


async def relay(target: str, seen: bytearray) -> tuple[asyncio.Server, str]:
    _, host, port = parse_address(target)

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                seen.extend(data)
                writer.write(data)
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, port)
        await asyncio.gather(pump(reader, back), pump(there, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    return server, f"tcp:127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("wish", ["off", "auto"])
def test_an_observer_sees_rows_only_without_it(run: Any, wish: str) -> None:  # noqa: F811
    async def main() -> None:
        seen = bytearray()
        left, right = Side(W0, tls=wish), Side(S0, tls=wish)
        server, address = await relay(await right.endpoint.listen(ANYWHERE), seen)
        left.endpoint.dial(S0, address)
        await until(lambda: right.opened)
        rows = np.concatenate([PATTERN, np.arange(1_000_000, dtype=np.float32)])
        for number in range(3):
            left.endpoint.send(S0, Rows(request=number, durable=0, clock=0, rows=rows))
        await until(lambda: right.requests() == [0, 1, 2])
        assert all(np.array_equal(message.rows, rows) for _, message in right.heard)  # type: ignore[attr-defined]
        assert (PATTERN.tobytes() in bytes(seen)) == (wish == "off")
        (connection,) = left.endpoint.connections
        assert connection._seal_out is not None, "what is hidden is authenticated below that all the same"
        left.cut()
        left.endpoint.send(S0, Rows(request=3, durable=0, clock=0, rows=PATTERN))
        await until(lambda: right.requests() == [0, 1, 2, 3])  # a link is resumed as ever
        await left.endpoint.close()
        await right.endpoint.close()
        server.close()

    run(main())


def test_nobody_without_the_token_gets_in(run: Any, tmp_path: Path) -> None:  # noqa: F811
    """Not with another token, not without TLS, not with an older one."""

    async def main() -> None:
        right = Side(S0, tls="auto")
        address = await right.endpoint.listen(ANYWHERE)
        _, host, port = parse_address(address)
        for options in ({"token": b"x" * 32, "tls": "auto"}, {"tls": "off"}):
            stranger = Side(W0, **options)
            with pytest.raises(ConnectionLost):
                await stranger.endpoint.connect(address, S0)
            await stranger.endpoint.close()
        own = make_tls("auto", TOKEN)
        assert own is not None
        nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
        old = make_tls("auto", TOKEN)
        assert old is not None
        old.dialing.minimum_version = ssl.TLSVersion.TLSv1_2
        old.dialing.maximum_version = ssl.TLSVersion.TLSv1_2
        for context in (nobody, old.dialing):
            with contextlib.suppress(OSError):  # TLS 1.3 says so only when something is read
                reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname="")
                assert await reader.read(1) == b""
                writer.close()
        chance = random.Random(7)
        for _ in range(60):
            reader, writer = await asyncio.open_connection(host, port)
            with contextlib.suppress(OSError):
                writer.write(b"\x16\x03\x01" * chance.randrange(2) + chance.randbytes(chance.randrange(600)))
                await writer.drain()
            writer.close()
        left = Side(W0, tls="auto")  # meanwhile, whoever belongs here is served
        await left.endpoint.connect(address, S0)
        await until(lambda: right.opened == [W0])
        await left.endpoint.close()
        await right.endpoint.close()

    run(main())


def test_a_server_with_another_certificate_is_not_believed(run: Any) -> None:  # noqa: F811
    async def main() -> None:
        false = Side(S0, token=b"x" * 32, tls="auto")
        address = await false.endpoint.listen(ANYWHERE)
        left = Side(W0, tls="auto")
        with pytest.raises(ConnectionLost, match=r"certificate|verify"):
            await left.endpoint.connect(address, S0)
        await left.endpoint.close()
        await false.endpoint.close()

    run(main())


def test_a_directory_holds_a_certificate_of_ones_own(run: Any, tmp_path: Path) -> None:  # noqa: F811
    tls._write_own(tmp_path, b"another secret")
    assert (tmp_path / tls.KEY).stat().st_mode & 0o077 == 0

    async def main() -> None:
        left, right = Side(W0, tls=str(tmp_path)), Side(S0, tls=str(tmp_path))
        await left.endpoint.connect(await right.endpoint.listen(ANYWHERE), S0)
        await until(lambda: right.opened == [W0])
        await left.endpoint.close()
        await right.endpoint.close()

    run(main())
    (tmp_path / tls.KEY).unlink()
    with pytest.raises(UserError, match=r"--tls .*: No such file"):
        make_tls(str(tmp_path), TOKEN)


def test_both_make_the_same_certificate() -> None:
    """And nothing is left of it on disk."""
    assert make_tls("off", TOKEN) is None
    for _ in range(2):
        made = make_tls("auto", TOKEN)
        assert made is not None
        assert made.dialing.verify_mode is made.accepting.verify_mode is ssl.CERT_REQUIRED
        assert made.dialing.minimum_version is ssl.TLSVersion.TLSv1_3
