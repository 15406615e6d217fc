"""Goal: any r lost members of a stripe come back bit for bit, and every kernel of the code equals its twin.

Method: small codes are enumerated, every pattern of losses; the field is checked whole against long multiplication;
kernels and twins are given arrays of odd sizes, in every mode.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from kernel_modes import MODES, Mode, running

from regrow import _kernels
from regrow.core import coding, twins
from regrow.core.coding import coefficient, decode, encode, inverse, product, reciprocal

# ---- the field


def long_product(a: int, b: int) -> int:
    result = 0
    for bit in range(8):
        if b >> bit & 1:
            result ^= a << bit
    for bit in range(14, 7, -1):
        if result >> bit & 1:
            result ^= coding.POLYNOMIAL << bit - 8
    return result


def test_products_are_long_multiplication() -> None:
    assert all(product(a, b) == long_product(a, b) for a in range(256) for b in range(256))
    assert all(product(a, reciprocal(a)) == 1 for a in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        reciprocal(0)


# ---- the matrix


def test_coefficients_are_pinned() -> None:
    """Two servers that disagree about them would corrupt each other's parities: so they are written down."""
    assert coding.coefficients(6, 1) == ((1,) * 6,)
    assert coding.coefficients(1, 4) == ((1,),) * 4
    assert coding.coefficients(4, 3) == PINNED


PINNED = ((1, 1, 1, 1), (1, 196, 143, 210), (1, 83, 211, 142))


def test_every_square_part_is_invertible() -> None:
    """For codes as wide as a large ring, up to parts of three; any larger part is a Cauchy matrix like these."""
    for k, r in [(6, 4), (16, 2), (250, 2), (9, 3)]:
        matrix = coding.coefficients(k, r)
        assert all(row[0] == 1 for row in matrix)
        assert set(matrix[0]) == {1}
        for size in range(1, min(r, 3) + 1):
            for rows in combinations(range(r), size):
                for columns in combinations(range(k), size) if k < 20 else [(0, k - 1)[:size], (k - 2, k - 1)[:size]]:
                    inverse([[matrix[q][j] for j in columns] for q in rows])


def test_inverses() -> None:
    matrix = coding.coefficients(4, 4)
    inverted = inverse(matrix)
    for i in range(4):
        for j in range(4):
            total = 0
            for m in range(4):
                total ^= product(matrix[i][m], inverted[m][j])
            assert total == (i == j)
    with pytest.raises(ValueError, match="no inverse"):
        inverse([[1, 2], [2, 4]])
    with pytest.raises(ValueError, match="square"):
        inverse([[1, 2]])
    assert inverse([]) == ()


def test_codes_too_wide_for_the_field_are_named() -> None:
    assert coding.invalid_reason(k=254, r=2) is None
    assert coding.invalid_reason(k=4000, r=1) is None
    assert coding.invalid_reason(k=1, r=300) is None
    assert coding.invalid_reason(k=255, r=2) == "k + r must be at most 256 where both are above 1, not 257"


# ---- losses


@pytest.mark.parametrize("r", [1, 2, 3, 4])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 6])
def test_every_loss_of_up_to_r_members_is_decoded(k: int, r: int) -> None:
    rng = np.random.default_rng(k * 10 + r)
    data = [rng.integers(0, 256, 7).astype(np.uint8) for _ in range(k)]
    members = data + encode(data, r=r)
    for losses in range(r + 1):
        for lost in combinations(range(k + r), losses):
            present = {m: members[m] for m in range(k + r) if m not in lost}
            decoded = decode(present, k=k, r=r)
            assert all((a == b).all() for a, b in zip(decoded, members, strict=True)), lost


def test_one_loss_too_many_is_an_error() -> None:
    data = [np.arange(5, dtype=np.uint8)] * 3
    members = dict(enumerate(data + encode(data, r=2)))
    for lost in (0, 2, 4):
        del members[lost]
    with pytest.raises(ValueError, match="3 of 5 members are lost; at most 2 can be recovered"):
        decode(members, k=3, r=2)


# ---- kernels


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_gf_xor_equals_twin(mode: Mode) -> None:
    """Every coefficient, with every length of what remains behind whole vectors, at odd addresses."""
    rng = np.random.default_rng(1)
    for factor in range(256):
        floats = factor % 21
        memory = rng.integers(0, 2**32, floats + 3, np.uint32).view(np.float32)
        source = rng.integers(0, 2**32, floats + 1, np.uint32).view(np.float32)[1:]
        expected = memory.copy()
        twins.gf_xor(expected[1 : floats + 1], source, factor)
        with running(mode):
            _kernels.gf_xor(memory[1 : floats + 1], source, factor)
        assert memory.tobytes() == expected.tobytes()


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_product_of_bytes(mode: Mode) -> None:
    every = np.arange(256, dtype=np.uint8)
    with running(mode):
        for factor in range(256):
            target = np.zeros(64, np.float32)
            _kernels.gf_xor(target, every.view(np.float32), factor)
            assert (target.view(np.uint8) == coding.product_bytes(factor, every)).all()


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("count", "floats"), [(0, 4), (1, 1), (40, 12), (300, 20)])
def test_xor_matching_equals_twin(count: int, floats: int, mode: Mode) -> None:
    rng = np.random.default_rng(count)
    for factor in (0, 1, 77):
        slots_sorted = np.sort(rng.permutation(3 * count + 1)[:count]).astype(np.uint32)
        slots = rng.integers(0, 3 * count + 1, 2 * count).astype(np.uint32)  # some twice, some not there
        records = rng.integers(0, 2**32, count * floats, np.uint32).view(np.float32)
        deltas = rng.integers(0, 2**32, len(slots) * floats, np.uint32).view(np.float32)
        expected = records.copy()
        matches = twins.xor_matching(slots_sorted, expected, floats, slots, deltas, factor)
        with running(mode):
            assert _kernels.xor_matching(slots_sorted, records, floats, slots, deltas, factor) == matches
        assert records.tobytes() == expected.tobytes()


def test_kernels_decode_what_they_encoded() -> None:
    """Two of four members lost, both recovered with the kernel and the matrix of `decoding`."""
    rng = np.random.default_rng(3)
    data = [rng.standard_normal(24).astype(np.float32) for _ in range(4)]
    remains = []
    for q in (0, 2):
        parity = np.zeros(24, np.float32)
        for j in (0, 1, 2, 3):
            _kernels.gf_xor(parity, data[j], coefficient(q, j, 3))
        for j in (0, 2):
            _kernels.gf_xor(parity, data[j], coefficient(q, j, 3))
        remains.append(parity)
    for j, row in zip((1, 3), coding.decoding_matrix(4, 3, (1, 3), (0, 2)), strict=True):
        decoded = np.zeros(24, np.float32)
        for factor, remain in zip(row, remains, strict=True):
            _kernels.gf_xor(decoded, remain, factor)
        assert decoded.tobytes() == data[j].tobytes()


F = np.float32
U = np.uint32
WRONG: list[tuple[str, Any, str]] = [
    ("gf_xor", lambda a: (a, np.ones(3, F), 1), "target has 4 floats; source has 3"),
    ("gf_xor", lambda a: (a, np.ones(4, F), 256), "coefficient must be between 0 and 255, not 256"),
    ("gf_xor", lambda a: (a, np.ones(4, F), -1), "coefficient must be between 0 and 255"),
    ("gf_xor", lambda a: (a[1:], a[:3], 1), "target and source must not overlap"),
    ("gf_xor", lambda a: (a, np.ones(4, np.int32), 1), "source must be an array of float32"),
    ("xor_matching", lambda a: (np.array([1, 1], U), a, 2, np.array([1], U), a[:2], 1), "strictly rising"),
    ("xor_matching", lambda a: (np.array([2, 1], U), a, 2, np.array([1], U), a[:2], 1), "strictly rising"),
    ("xor_matching", lambda a: (np.array([1, 2], U), a, 0, np.array([1], U), a[:2], 1), "floats must be at least 1"),
    ("xor_matching", lambda a: (np.array([1, 2], U), a, 4, np.array([1], U), a, 1), "must have 4 floats per slot"),
    ("xor_matching", lambda a: (np.array([1, 2], U), a, 2, np.array([1], U), a, 1), "must have 2 floats per slot"),
    ("xor_matching", lambda a: (np.array([1, 2], U), a, 2, np.array([1], U), a[:2], 300), "coefficient"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), WRONG)
def test_wrong_calls_change_nothing(function: str, arguments: Any, message: str) -> None:
    array = np.ones(4, F)
    with pytest.raises(ValueError, match=message):
        getattr(_kernels, function)(*arguments(array))
    assert (array == 1).all()
