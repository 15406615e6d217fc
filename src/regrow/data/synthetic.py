"""Made-up clicks that are skewed like real ones and can be learned.

Every sample is computed from (seed, sample number) alone, with a counter-based generator: no state, any batch
directly, the same samples whatever the batch size. Labels follow a planted truth, so a test AUC means
something. A sample is made in integer arithmetic: a float sum could round differently on another CPU and flip
a label there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from regrow.data.batch import Batch, Position, make_plan, start_index

# Distinct values per categorical column in the two public Criteo data sets (display advertising challenge;
# terabyte logs as used by MLPerf).
_KAGGLE = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10,
    5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
_TERABYTE = (
    45833188, 36746, 17245, 7413, 20243, 3, 7114, 1441, 62, 29275261, 1572176, 345138, 10, 2209, 11267, 128,
    4, 974, 14, 48937457, 11316796, 40094537, 452104, 12606, 104, 35,
)  # fmt: skip
CARDINALITIES = {"tiny": _KAGGLE, "kaggle": _KAGGLE, "terabyte": _TERABYTE, "mlperf": _TERABYTE}

ROWS_MAX_DEFAULT = 1_000_000
# At this skew and the sizes above cut at a million rows, the top 0.1 % of the ids take 90 % of the accesses
# and 2048 samples touch about 9,200 (kaggle) or 10,100 (terabyte) distinct rows.
SKEW_DEFAULT = 1.25

# The inverse distribution of each table is a list of this many equally likely ranges of ranks.
_SEGMENT_BITS = 12
_SEGMENTS = 1 << _SEGMENT_BITS
# Logits are integers in units of 2**-23; labels come from a table of the sigmoid over [-16, 16).
_LOGIT_BITS = 23
_SIGMOID_SHIFT = 14
_SIGMOID_ENTRIES = 1 << (_LOGIT_BITS - _SIGMOID_SHIFT + 5)
# A dense value is the sum of four 16-bit uniforms, centred: nearly normal, with this standard deviation.
_DENSE_CENTRE = 2 * 0xFFFF
_DENSE_DEVIATION = 65536 * math.sqrt(4 / 12)

# The planted truth: the relative weights of its parts, and the mean and deviation of the logits. So chosen
# that about a quarter of the labels are 1, that knowing the truth gives an AUC of about 0.84, and that most
# of it is in ids that come often enough to be learned.
_EFFECT, _PAIR, _SLOPE, _BEND = 2.2, 1.5, 2.0, 1.0
_LOGIT_MEAN = -1.6
_LOGIT_DEVIATION = 1.75
_CALIBRATION_ROWS = 4096
# When one id takes nearly every access, little varies and no scale helps; this keeps the sums within 32 bits.
_SCALE_MAX = 4.0

_TRAIN, _TEST, _TRUTH, _CALIBRATION = range(4)  # streams of random numbers that never meet


def table_rows(model: str, rows_max: int = ROWS_MAX_DEFAULT) -> list[int]:
    """The rows of the 26 tables of a published model, none larger than `rows_max`."""
    if model not in CARDINALITIES:
        raise ValueError(f"no table sizes are known for model {model!r}; choose one of {', '.join(CARDINALITIES)}")
    if rows_max < 1:
        raise ValueError(f"rows_max must be at least 1, not {rows_max}")
    return [min(rows, rows_max) for rows in CARDINALITIES[model]]


class SyntheticDataset:
    """Samples with one id per table, dense features, and labels from a planted truth.

    `skew` is the exponent of a bounded Zipf law over the ranks of each table: 0 is uniform, larger is
    steeper. `epochs` repeats the same `train_rows` samples.
    """

    skip_bad_lines = False  # there are none

    def __init__(
        self,
        *,
        rows: Sequence[int],
        seed: int = 0,
        skew: float = SKEW_DEFAULT,
        train_rows: int = 4_194_304,
        test_rows: int = 65_536,
        dense_features: int = 13,
        epochs: int = 1,
    ) -> None:
        if not rows or not all(1 <= size < 1 << 32 for size in rows):
            raise ValueError(f"rows must be one or more table sizes from 1 to {(1 << 32) - 1}, not {list(rows)}")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed must be from 0 to 2**64 - 1, not {seed}")
        if not 0.0 <= skew <= 4.0:
            raise ValueError(f"skew must be from 0 to 4, not {skew}")
        if min(train_rows, test_rows, dense_features, epochs) < 1:
            raise ValueError("train_rows, test_rows, dense_features and epochs must be at least 1")
        self.rows = list(rows)
        self.dense_features = dense_features
        self.seed = seed
        self.skew = skew
        self.train_rows = train_rows
        self.test_rows = test_rows
        self.epochs = epochs
        self._words = -(-(len(rows) + dense_features + 1) // 4) * 4  # random words per sample
        self._prepare_ids()
        self._prepare_truth()

    def __repr__(self) -> str:
        return (
            f"SyntheticDataset({len(self.rows)} tables, {sum(self.rows):,} rows, skew {self.skew}, "
            f"seed {self.seed}, {self.train_rows:,} x {self.epochs} training samples)"
        )

    def train_rows_total(self) -> int:
        return self.train_rows * self.epochs

    def train_batches(self, *, batch: int, worker: int, workers: int, start: Position | None = None) -> Iterator[Batch]:
        plan = make_plan(rows=self.train_rows, epochs=self.epochs, batch=batch, worker=worker, workers=workers)
        first_index = start_index(start, plan=plan, worker=worker, workers=workers)

        def generate() -> Iterator[Batch]:
            for index in range(first_index, plan.batch_count, workers):
                _, first, count = plan.span(index)
                epoch, line, _ = plan.span(index + workers)
                position = {"epoch": epoch, "batch": index + workers, "line": line}
                yield self._batch(first, count, stream=_TRAIN, position=position)

        return generate()

    def test_batches(self, *, batch: int) -> Iterator[Batch]:
        if batch < 1:
            raise ValueError(f"batch must be at least 1, not {batch}")
        for first in range(0, self.test_rows, batch):
            count = min(batch, self.test_rows - first)
            position = {"epoch": 0, "batch": first // batch + 1, "line": first + count}
            yield self._batch(first, count, stream=_TEST, position=position)

    # --- how a sample is made ---

    def _prepare_ids(self) -> None:
        """Per table: the ranges of ranks, and the bijection that scatters the ranks over the table."""
        starts = np.stack([_segment_starts(size, self.skew) for size in self.rows])
        self._segment_low = np.ascontiguousarray(starts[:, :-1]).reshape(-1)
        self._segment_width = np.maximum(np.diff(starts, axis=1), 1).reshape(-1).astype(np.uint64)
        size = np.array(self.rows, dtype=np.uint64)
        truth = self._generator(_TRUTH, 0).random_raw(2 * len(self.rows)).reshape(2, -1)
        self._size = size[:, None]
        self._multiplier = np.array(
            [_coprime_near(int(word), table) for word, table in zip(truth[0], self.rows, strict=True)],
            dtype=np.uint64,
        )[:, None]
        self._offset = (truth[1] % size)[:, None]
        self._segment_base = (np.arange(len(self.rows), dtype=np.int64) * _SEGMENTS)[:, None]

    def _prepare_truth(self) -> None:
        """The planted weights, as integers; see `_logits`."""
        tables, dense = len(self.rows), self.dense_features
        words = self._generator(_TRUTH, 1 << 32).random_raw(2 * tables + 2 * dense)
        spread = (words >> np.uint64(11)).astype(np.float64) / (1 << 53)  # uniform in [0, 1)
        self._salt = (words[:tables] & np.uint64(0xFFFFFFFF)).astype(np.uint32)[:, None]
        # An id's own effect matters more in some tables than in others.
        effect = (0.5 + spread[tables : 2 * tables]) * _EFFECT / math.sqrt(tables)
        pair = _PAIR / math.sqrt(max(tables // 2, 1))
        slope = (spread[2 * tables : 2 * tables + dense] - 0.5) * _SLOPE / math.sqrt(dense)
        bend = (spread[2 * tables + dense :] - 0.5) * _BEND / math.sqrt(dense)
        # The hottest ids decide how far the logits lie from zero and from each other, so both are measured
        # on a few samples and set right: the best AUC anyone can reach is then much the same for every seed
        # and size.
        scale = 1.0
        for _ in range(2):
            self._effect = np.round(scale * effect * (1 << (_LOGIT_BITS - 15))).astype(np.int32)
            self._pair = round(scale * pair * (1 << (_LOGIT_BITS - 15)))
            self._slope = np.round(scale * slope * (1 << _LOGIT_BITS) / _DENSE_DEVIATION).astype(np.int32)
            self._bend = np.round(scale * bend * (1 << _LOGIT_BITS) / _DENSE_DEVIATION).astype(np.int32)
            self._bias = np.int32(0)
            logits = self._samples(0, _CALIBRATION_ROWS, stream=_CALIBRATION)[2]
            wanted = scale * _LOGIT_DEVIATION * (1 << _LOGIT_BITS) / max(float(logits.std()), 1.0)
            scale = min(wanted, _SCALE_MAX)
        self._bias = np.int32(round(_LOGIT_MEAN * (1 << _LOGIT_BITS) - float(logits.mean())))
        grid = (np.arange(_SIGMOID_ENTRIES) + 0.5 - _SIGMOID_ENTRIES // 2) * 2.0 ** (_SIGMOID_SHIFT - _LOGIT_BITS)
        self._sigmoid = np.round(2.0**32 / (1.0 + np.exp(-grid))).clip(0, 2**32 - 1).astype(np.uint32)

    def _generator(self, stream: int, block: int) -> np.random.Philox:
        """Random words of `stream`, from the 4-word block `block` on."""
        return np.random.Philox(key=self.seed | stream << 64, counter=block)

    def _batch(self, first: int, count: int, *, stream: int, position: Position) -> Batch:
        dense, values, logits, uniform = self._samples(first, count, stream=stream)
        index = (logits >> _SIGMOID_SHIFT) + _SIGMOID_ENTRIES // 2
        likelihood = self._sigmoid.take(index, mode="clip")
        labels = (uniform < likelihood).astype(np.float32)
        features = dense.astype(np.float32)
        features *= np.float32(1 / _DENSE_DEVIATION)
        return Batch(
            dense=features,
            values=values.view(np.int64).reshape(-1),
            lengths=None,
            labels=labels,
            position=position,
        )

    def _samples(
        self, first: int, count: int, *, stream: int
    ) -> tuple[NDArray[np.int32], NDArray[np.uint64], NDArray[np.int32], NDArray[np.uint32]]:
        """Dense integers [count, D], ids [F, count], logits [count], and the draw that decides each label."""
        tables, dense_end = len(self.rows), len(self.rows) + self.dense_features
        words = self._generator(stream, first * (self._words // 4)).random_raw(count * self._words)
        words = words.reshape(count, self._words)
        values = self._ids(np.ascontiguousarray(words[:, :tables].T))
        dense = _sum_of_four(words[:, tables:dense_end])
        uniform = (words[:, dense_end] >> np.uint64(32)).astype(np.uint32)
        return dense, values, self._logits(dense, values), uniform

    def _ids(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Words [F, count] to ids: the upper bits choose a range of ranks, the lower a rank within it."""
        segment = (words >> np.uint64(64 - _SEGMENT_BITS)).view(np.int64)
        segment += self._segment_base
        words &= np.uint64(0xFFFFFFFF)
        words *= self._segment_width.take(segment)
        words >>= np.uint64(32)
        words += self._segment_low.take(segment)  # now the ranks, 0 the hottest
        words *= self._multiplier
        words += self._offset
        words %= self._size
        return words

    def _logits(self, dense: NDArray[np.int32], values: NDArray[np.uint64]) -> NDArray[np.int32]:
        """The truth: an effect of each id, products of traits of neighbouring tables' ids, a bent line."""
        mixed = _mix32(values.astype(np.uint32) ^ self._salt)
        effect = (mixed & np.uint32(0xFFFF)).view(np.int32)
        effect -= 0x8000
        trait = (mixed >> np.uint32(16)).view(np.int32)
        trait -= 0x8000
        effect *= self._effect[:, None]
        logits: NDArray[np.int32] = effect.sum(axis=0, dtype=np.int32)
        pairs = len(values) // 2
        product = trait[0 : 2 * pairs : 2] * trait[1 : 2 * pairs : 2]
        product >>= 15
        logits += self._pair * product.sum(axis=0, dtype=np.int32)
        logits += (dense * self._slope).sum(axis=1, dtype=np.int32)
        logits += (np.abs(dense) * self._bend).sum(axis=1, dtype=np.int32)
        logits += self._bias
        return logits


def _segment_starts(size: int, skew: float) -> NDArray[np.uint64]:
    """Where the equally likely ranges of ranks start, for P(rank < x) ~ integral of (1 + t)**-skew to x."""
    share = np.linspace(0.0, 1.0, _SEGMENTS + 1)
    if abs(skew - 1.0) < 1e-6:
        ranks = np.exp(share * math.log(size + 1.0)) - 1.0
    else:
        power = 1.0 - skew
        ranks = (1.0 + share * ((size + 1.0) ** power - 1.0)) ** (1.0 / power) - 1.0
    starts = np.floor(ranks + 1e-9).clip(0, size - 1).astype(np.uint64)
    starts[-1] = size
    return starts


def _coprime_near(word: int, size: int) -> int:
    """A multiplier without common factor with `size`: rank * multiplier % size then visits every id once."""
    # Near the golden section, so that neighbouring ranks land far apart.
    multiplier = max(1, int(size * (0.55 + 0.15 * (word / 2**64))))
    while math.gcd(multiplier, size) != 1:
        multiplier += 1
    return multiplier


def _sum_of_four(words: NDArray[np.uint64]) -> NDArray[np.int32]:
    """The centred sum of the four 16-bit parts of each word."""
    lanes = np.uint64(0x0000FFFF0000FFFF)
    pairs = (words & lanes) + ((words >> np.uint64(16)) & lanes)
    sums = (pairs & np.uint64(0xFFFFFFFF)) + (pairs >> np.uint64(32))
    return sums.astype(np.int32) - np.int32(_DENSE_CENTRE)


def _mix32(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A bijective hash of 32-bit integers, in place: two rounds of multiply and fold."""
    values ^= values >> np.uint32(16)
    values *= np.uint32(0x7FEB352D)
    values ^= values >> np.uint32(15)
    values *= np.uint32(0x846CA68B)
    values ^= values >> np.uint32(16)
    return values
