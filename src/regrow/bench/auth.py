"""What do authenticated frames cost, and TLS? Training with them against the same without, over Unix sockets and TCP.

All five train the same model on the same data, in processes of their own, one after the other in rounds whose order
rotates; a figure is the ratio of two runs of one round. Before that, the tags alone: the form that is used against the
others that were considered, for frames from 100 bytes to a megabyte.

The sketch: a step of the kaggle model moves about 2.5 MB each way and worker, and every byte is tagged once by whoever
sends it and once by whoever gets it. At 15 GB/s that is 0.7 ms of processor time, of about 100 ms that a step takes.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from regrow.bench import auth_tls, common, train
from regrow.config import TrainConfig
from regrow.runtime.seal import Seal

SUMMARY = "What authenticated frames cost, over Unix sockets and TCP: samples per second; and tags alone."

TARGET = 0.99
MODEL = "kaggle"
FRAME_BYTES = (100, 4 << 10, 64 << 10, 1 << 20)
TAG_SECONDS = 0.05  # of each form and size, in each of several turns
TAG_TURNS = 5
RATE_GUESS = 8_000.0  # samples per second, before anything is known
TRANSPORTS = ("unix", "tcp")
WISHES = ("never", "always")
TLS = "always, TLS"  # over TCP, tags and TLS
TLS_TARGET = 0.9
TLS_FRAMES, TLS_FRAMES_QUICK = 1000, 200

SHOWN = {"never": "without tags", "always": "with tags", TLS: "with tags and TLS"}

Tag = Callable[[Any], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    rounds: int
    runs: train.Size


FULL = Size(
    rounds=6,
    runs=train.Size(pairs=1, rows_max={MODEL: 500_000}, seconds=5.0, warmup_seconds=1.5, layouts=()),
)
QUICK = Size(
    rounds=2,
    runs=train.Size(pairs=1, rows_max={MODEL: 100_000}, seconds=2.0, warmup_seconds=0.5, layouts=()),
)


def run(*, quick: bool, json_path: str | None) -> int:
    size = QUICK if quick else FULL
    report = common.Report.start("auth")
    report.rows += measure_tags()
    print_tags(report.rows)
    runs = measure_training(size)
    report.rows += runs
    compare(report, runs)
    print_runs(runs)
    found = auth_tls.measure_bytes(rounds=size.rounds, frames=TLS_FRAMES_QUICK if quick else TLS_FRAMES)
    report.rows += found
    auth_tls.print_bytes(found)
    return report.finish(json_path)


# -- tags alone ----------------------------------------------------------------------------------------------


def tag_forms() -> dict[str, Tag]:
    """What was considered, each with a key. BLAKE3 only where it is installed: it is not needed otherwise."""
    key = os.urandom(32)
    seal = Seal(key)

    def seal_frame(data: Any) -> bytes:
        seal.begin_frame()
        return seal.tag(1, data)

    forms: dict[str, Tag] = {
        "AES-GMAC": seal_frame,
        "HMAC-SHA256": lambda data: hmac.digest(key, data, "sha256"),
        "BLAKE2b": lambda data: hashlib.blake2b(data, key=key, digest_size=16).digest(),
    }
    try:
        blake3 = importlib.import_module("blake3").blake3
    except ImportError:
        return forms
    return {**forms, "BLAKE3": lambda data: blake3(data, key=key).digest(16)}


def measure_tags() -> list[dict[str, Any]]:
    """Seconds of processor time per tag: the least of several turns, which others disturbed least."""
    rows = []
    for size_bytes in FRAME_BYTES:
        data = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8).data
        forms = tag_forms()
        turns = {name: [_tag_seconds(form, data) for _ in range(TAG_TURNS)] for name, form in forms.items()}
        rows += [
            {"kind": "tag", "form": name, "bytes": size_bytes, "seconds": min(seconds)}
            for name, seconds in turns.items()
        ]
    return rows


def _tag_seconds(form: Tag, data: Any) -> float:
    count, started = 0, time.process_time()
    while (spent := time.process_time() - started) < TAG_SECONDS:
        for _ in range(10):
            form(data)
        count += 10
    return spent / count


# -- training ------------------------------------------------------------------------------------------------


def measure_training(size: Size) -> list[dict[str, Any]]:
    config = make_config(size)
    rate = train.run_ours(config, size=size.runs, rate=RATE_GUESS, seconds=2.0)["samples_per_second"]
    runs = []
    for turn in range(size.rounds):
        for transport, wish in order(turn):
            tls = "auto" if wish == TLS else "off"
            chosen = config.replace(transport=transport, authenticate=wish.partition(",")[0], tls=tls)
            row = train.run_ours(chosen, size=size.runs, rate=rate)
            runs.append({"kind": "run", "transport": transport, "authenticate": wish, "round": turn, **row})
            common.console.print(
                f"round {turn + 1} of {size.rounds}, {transport}, {wish}: {row['samples_per_second']:,.0f} samples/s"
            )
    return runs


def order(turn: int) -> list[tuple[str, str]]:
    """Each round begins one further on, and pairs change places, so that nobody is always first."""
    wishes = WISHES if turn % 2 == 0 else WISHES[::-1]
    pairs = [(transport, wish) for transport in TRANSPORTS for wish in wishes]
    start = 2 * (turn // 2 % 2)
    # Beside the one it is compared with, before or after it.
    beside = pairs.index(("tcp", "always")) + turn % 2
    pairs.insert(beside, ("tcp", TLS))
    return pairs[start:] + pairs[:start]


def make_config(size: Size) -> TrainConfig:
    return TrainConfig(
        model=MODEL,
        rows_max=size.runs.rows_max[MODEL],
        batch=train.BATCH,
        servers=train.SERVERS,
        workers=train.WORKERS,
        mode="async",
        seed=train.SEED,
        steps=1,
        test_rows=train.BATCH,
        digest=False,
    )


def compare(report: common.Report, runs: list[dict[str, Any]]) -> None:
    for transport in TRANSPORTS:
        without, with_tags = (_figures(runs, transport, wish, "samples_per_second") for wish in WISHES)
        ratios = common.pair_ratios(with_tags, without)
        report.ratios[f"auth_{transport}"] = common.Ratio.of(ratios, target=TARGET)
        cpu = [_figures(runs, transport, wish, "cpu_seconds_per_1000_samples") for wish in WISHES]
        if len(cpu[0]) == len(cpu[1]) > 0:
            ratios = common.pair_ratios(cpu[1], cpu[0])
            report.ratios[f"auth_{transport}_cpu"] = common.Ratio.of(ratios, target=1 / TARGET, better="lower")
    plain, hidden = (_figures(runs, "tcp", wish, "samples_per_second") for wish in ("always", TLS))
    report.ratios["tls_tcp"] = common.Ratio.of(common.pair_ratios(hidden, plain), target=TLS_TARGET)


def _figures(runs: list[dict[str, Any]], transport: str, wish: str, name: str) -> list[float]:
    mine = [row for row in runs if (row["transport"], row["authenticate"]) == (transport, wish) and name in row]
    return [row[name] for row in sorted(mine, key=lambda row: row["round"])]


# -- what is shown -------------------------------------------------------------------------------------------


def print_tags(rows: list[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["form"] for row in rows))
    found = {(row["form"], row["bytes"]): row["seconds"] for row in rows}
    common.print_table(
        "one tag: microseconds (GB/s)",
        ("bytes", *names),
        [
            (
                f"{size:,}",
                *(f"{found[name, size] * 1e6:.1f} ({size / found[name, size] / 1e9:.1f})" for name in names),
            )
            for size in FRAME_BYTES
        ],
    )


def print_runs(runs: list[dict[str, Any]]) -> None:
    rows = []
    for transport in TRANSPORTS:
        for wish in (*WISHES, *([TLS] if transport == "tcp" else ())):
            rates = _figures(runs, transport, wish, "samples_per_second")
            cpu = _figures(runs, transport, wish, "cpu_seconds_per_1000_samples")
            rows.append(
                (
                    f"{transport}, {SHOWN[wish]}",
                    f"{statistics.median(rates):,.0f}",
                    f"{min(rates):,.0f} to {max(rates):,.0f}",
                    f"{statistics.median(cpu):.4f}" if cpu else "-",
                )
            )
    common.print_table(
        f"{MODEL}, batches of {train.BATCH}", ("run", "samples/s", "spread", "CPU s per 1000 samples"), rows
    )
