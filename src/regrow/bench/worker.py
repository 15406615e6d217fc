"""One worker alone, on five servers, against FBGEMM embeddings in one process: both compute with every core.

With two workers one computes while the other waits (`train.py`). A single one has nobody to fill its waits but its own
pull ahead and the servers, so this is the plainer price of having rows elsewhere. All of its threads compete with the
servers for the cores; the peer competes with nobody.
"""

from __future__ import annotations

from regrow.bench import common, peer, train

SUMMARY = "One worker (5 servers) against FBGEMM in one process: samples per second."

MODEL = "kaggle"
WORKERS = 1
TARGET = 0.95

FULL = train.Size(
    pairs=5,
    rows_max={MODEL: train.FULL.rows_max[MODEL]},
    seconds=10.0,
    warmup_seconds=3.0,
    layouts=peer.LAYOUTS,
    waitings=train.WAITINGS,
)
QUICK = train.QUICK


def run(*, quick: bool, json_path: str | None) -> int:
    size = QUICK if quick else FULL
    return train.measure_all(common.Report.start("worker"), [make_comparison(size)], size=size, json_path=json_path)


def make_comparison(size: train.Size) -> train.Comparison:
    config = train.make_config(MODEL, size, workers=WORKERS)
    return train.Comparison(name=f"worker_{MODEL}", label=MODEL, config=config, target=TARGET)
