"""Other models: DCN-v2 and DeepFM on five servers and two workers, against the same networks in one process.

Two peers. Plain PyTorch is what most people have: a table per feature, sparse gradients, torch's optimizers. FBGEMM's
tables are what the quickest have. Ours keeps and updates the same state as the peer at hand: Adagrad for every float
against the first, row-wise Adagrad against the second. Pairs, turns and rates are those of `train.py`.

The sketch: a sample is multiplied with the 0.9 million weights of DCN-v2 or the 0.3 million of DeepFM, three times with
the backward pass, and looks up 26 rows in both. So DCN-v2 is mostly network on either side, as kaggle's DLRM (0.5
million) is, and DeepFM shows more of what rows and messages cost.
"""

from __future__ import annotations

from regrow.bench import common, peer, train

SUMMARY = "DCN-v2 and DeepFM (5 servers, 2 workers) against plain PyTorch and FBGEMM: samples per second."

MODELS = ("dcn", "deepfm")
# Of rows, as the peer has it, and what is to be reached.
OPTIMIZERS = {"torch": "adagrad", "fbgemm": "rowwise_adagrad"}
TARGETS = {"torch": 1.0, "fbgemm": 0.9}

FULL = train.Size(
    pairs=3,
    # Tables of 1.1 GiB, and as much again of state with Adagrad: far beyond any cache, and quickly filled.
    rows_max={"dcn": 4_000_000, "deepfm": 4_000_000},
    seconds=7.0,
    warmup_seconds=2.0,
    layouts=peer.LAYOUTS,
    waitings=train.WAITINGS,
)
QUICK = train.Size(
    pairs=1,
    rows_max={"dcn": 200_000, "deepfm": 200_000},
    seconds=2.0,
    warmup_seconds=0.5,
    layouts=("merged",),
)


def run(*, quick: bool, json_path: str | None) -> int:
    size = QUICK if quick else FULL
    report = common.Report.start("models")
    comparisons = make_comparisons(size)
    if (missing := peer.missing_reason()) is not None:
        common.console.print(f"[yellow]{missing}[/]\nComparing with plain PyTorch alone.")
        comparisons = [each for each in comparisons if each.system != "fbgemm"]
    return train.measure_all(report, comparisons, size=size, json_path=json_path)


def make_comparisons(size: train.Size) -> list[train.Comparison]:
    """Every model against every peer."""
    return [
        train.Comparison(
            name=f"models_{model}_{system}",
            label=f"{model}, {optimizer}",
            config=train.make_config(model, size, optimizer=optimizer),
            target=TARGETS[system],
            system=system,
        )
        for model in MODELS
        for system, optimizer in OPTIMIZERS.items()
    ]
