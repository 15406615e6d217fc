"""The code that protects rows: r parities over k members, in GF(2^8) on the bytes of records.

Parity q of a stripe is the sum over its members j of coefficient(q, j) times the member's bytes; the sum is XOR. Any
r lost members, data or parity, follow from the others. The matrices are made here and are part of the protocol;
`encode`, `decode` and the rest are slow twins: the loops that run are in cpp/src/gf.inl.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
Matrix = tuple[tuple[int, ...], ...]

POLYNOMIAL = 0x11D  # x^8 + x^4 + x^3 + x^2 + 1: the powers of 2 are all elements but 0
MEMBERS_MAX = 256  # k + r, where both are above 1: the matrix needs as many different elements


def _tables() -> tuple[list[int], list[int]]:
    exps, logs = [0] * 510, [0] * 256
    power = 1
    for i in range(255):
        exps[i] = exps[i + 255] = power
        logs[power] = i
        power <<= 1
        if power & 256:
            power ^= POLYNOMIAL
    return exps, logs


EXPS, LOGS = _tables()


def product(a: int, b: int) -> int:
    """a * b in the field."""
    return EXPS[LOGS[a] + LOGS[b]] if a and b else 0


def reciprocal(a: int) -> int:
    """1 / a in the field."""
    if a == 0:
        raise ZeroDivisionError("0 has no reciprocal")
    return EXPS[255 - LOGS[a]]


def product_bytes(coefficient: int, data: U8) -> U8:
    """Every byte times the coefficient."""
    table = np.array([product(coefficient, byte) for byte in range(256)], np.uint8)
    multiplied: U8 = table[data]
    return multiplied


# ---- the matrix


def coefficient(q: int, j: int, r: int) -> int:
    """What data member j is multiplied by in parity q of r.

    A Cauchy matrix, 1 / (x_q + y_j) with x_q = q and y_j = r + j, its rows and columns scaled so that the first of
    each are ones: every square part of it stays invertible, and one parity, or one member, needs no multiplication.
    """
    assert 0 <= q < r
    assert j >= 0
    if q == 0 or j == 0:
        return 1
    assert r + j < MEMBERS_MAX
    y, first = r + j, r
    return product(product(y, q ^ first), reciprocal(product(q ^ y, first)))


def invalid_reason(*, k: int, r: int) -> str | None:
    """Says why r parities over k members cannot be coded, or None."""
    if k > 1 and r > 1 and k + r > MEMBERS_MAX:
        return f"k + r must be at most {MEMBERS_MAX} where both are above 1, not {k + r}"
    return None


@cache
def coefficients(k: int, r: int) -> Matrix:
    """coefficient(q, j, r) as [q][j]."""
    return tuple(tuple(coefficient(q, j, r) for j in range(k)) for q in range(r))


def inverse(matrix: Sequence[Sequence[int]]) -> Matrix:
    """The inverse of a square matrix. ValueError if it has none."""
    size = len(matrix)
    rows = [[*row, *(int(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    if any(len(row) != 2 * size for row in rows):
        raise ValueError("only a square matrix has an inverse")
    for i in range(size):
        pivot = next((row for row in range(i, size) if rows[row][i]), None)
        if pivot is None:
            raise ValueError("this matrix has no inverse")
        rows[i], rows[pivot] = rows[pivot], rows[i]
        scale = reciprocal(rows[i][i])
        rows[i] = [product(scale, number) for number in rows[i]]
        for other in range(size):
            factor = rows[other][i]
            if other != i and factor:
                rows[other] = [a ^ product(factor, b) for a, b in zip(rows[other], rows[i], strict=True)]
    return tuple(tuple(row[size:]) for row in rows)


@cache
def decoding_matrix(k: int, r: int, lost: tuple[int, ...], parities: tuple[int, ...]) -> Matrix:
    """How lost data members follow from as many parities: [lost][what remains of each parity].

    What remains of parity q is its value plus, for each data member j that is there, coefficient(q, j) times it.
    """
    assert len(lost) == len(parities)
    return inverse([[coefficient(q, j, r) for j in lost] for q in parities])


# ---- whole stripes


def encode(data: Sequence[U8], *, r: int) -> list[U8]:
    """The r parities of a stripe's data members."""
    parities = []
    for q in range(r):
        parity = np.zeros_like(data[0])
        for j, member in enumerate(data):
            parity ^= product_bytes(coefficient(q, j, r), member)
        parities.append(parity)
    return parities


def decode(present: Mapping[int, U8], *, k: int, r: int) -> list[U8]:
    """All k + r members of a stripe from those present: data members are 0 .. k - 1, parities follow.

    ValueError if more than r are lost.
    """
    lost = tuple(j for j in range(k) if j not in present)
    parities = tuple(q for q in range(r) if k + q in present)[: len(lost)]
    if len(parities) < len(lost):
        raise ValueError(f"{k + r - len(present)} of {k + r} members are lost; at most {r} can be recovered")
    remains = []
    for q in parities:
        remain = present[k + q].copy()
        for j in range(k):
            if j in present:
                remain ^= product_bytes(coefficient(q, j, r), present[j])
        remains.append(remain)
    data = dict(present)
    for j, row in zip(lost, decoding_matrix(k, r, lost, parities), strict=True):
        data[j] = np.zeros_like(next(iter(present.values())))
        for factor, remain in zip(row, remains, strict=True):
            data[j] ^= product_bytes(factor, remain)
    members = [data[j] for j in range(k)]
    return members + encode(members, r=r)
