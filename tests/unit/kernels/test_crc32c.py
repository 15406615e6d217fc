"""Goal: the checksum is CRC-32C, in every instruction set and for every length.

Method: the vectors of RFC 3720 (appendix B.4), then the kernel against a bit-by-bit twin on lengths around
its block sizes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_modes import LEVELS, Mode, running

from regrow import _kernels
from regrow.core import twins

KNOWN = [
    (b"", 0),
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
]
DATA = np.random.default_rng(1).integers(0, 256, 7000, np.uint8).tobytes()


@pytest.mark.parametrize("simd", LEVELS)
@pytest.mark.parametrize(("data", "checksum"), KNOWN)
def test_known_vectors(data: bytes, checksum: int, simd: str) -> None:
    assert twins.crc32c(data) == checksum
    with running(Mode(simd, 1)):
        assert _kernels.crc32c(data) == checksum


@pytest.mark.parametrize("simd", LEVELS)
@pytest.mark.parametrize("size", [*range(40), 1023, 1024, 1025, 3071, 3072, 3073, 3080, 6144, 6500])
def test_kernel_equals_twin(size: int, simd: str) -> None:
    with running(Mode(simd, 1)):
        for start in (0, 1, 7):
            data = DATA[start : start + size]
            assert _kernels.crc32c(data) == twins.crc32c(data)


@pytest.mark.parametrize("simd", LEVELS)
def test_checksums_chain(simd: str) -> None:
    with running(Mode(simd, 1)):
        whole = _kernels.crc32c(DATA)
        for cut in (0, 1, 100, 3072, 5000, len(DATA)):
            assert _kernels.crc32c(DATA[cut:], seed=_kernels.crc32c(DATA[:cut])) == whole


@pytest.mark.parametrize("block", [1, 7, 1000, len(DATA), len(DATA) + 1])
def test_each_block_by_itself(block: int) -> None:
    expected = [_kernels.crc32c(DATA[start : start + block]) for start in range(0, len(DATA), block)]
    assert _kernels.crc32c_blocks(DATA, block).tolist() == expected
    assert _kernels.crc32c_blocks(b"", block).tolist() == []
    with pytest.raises(ValueError):
        _kernels.crc32c_blocks(DATA, 0)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_will_do(kind: type) -> None:
    assert _kernels.crc32c(kind(b"123456789")) == 0xE3069283
    assert _kernels.crc32c(np.frombuffer(b"123456789", np.uint8)) == 0xE3069283
    assert _kernels.crc32c(np.frombuffer(b"12345678", np.float32)) == _kernels.crc32c(b"12345678")


def test_what_is_no_buffer_is_refused() -> None:
    text: Any = "text"
    with pytest.raises(TypeError):
        _kernels.crc32c(text)
    with pytest.raises((BufferError, ValueError)):
        _kernels.crc32c(np.arange(10)[::2])
    with pytest.raises(TypeError):
        _kernels.crc32c(b"", seed=-1)
