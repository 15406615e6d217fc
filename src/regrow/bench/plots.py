"""Pictures of what was measured: throughput through a failure, and what protection and checkpoints cost.

Drawn from what a benchmark writes with --json, or from a run directory, so they can be drawn again at any time:

    python -m regrow.bench.plots recovery.json overhead.json runs/20260101-120000-kaggle

matplotlib is wanted and not required (the extra `plots`): without it figures are still measured, and a line says how
to have pictures too.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regrow.bench import common
from regrow.errors import UserError

INSTALL = "pip install 'regrow[plots]' (or: pip install matplotlib)"
DPI = 144
SMALL = 8
# Ink for text and axes, a quiet grey for what is only compared with, and one colour per code.
INK, QUIET, GRID = "#333333", "#9a9a9a", "#e6e6e6"
COLOURS = {"none": QUIET, "k4": "#1f5fa8", "k2": "#d9822b"}
LABELS = {"none": "no protection, no failure", "k4": "ec, k = 4", "k2": "ec, k = 2"}
CHECKPOINT_COLOURS = {"none": QUIET, "pausing": "#d9822b", "full": "#a9c1dc", "delta": "#1f5fa8"}
# Partial recovery: what overhead is made of, and which rows are saved.
CPR_PARTS = {
    "save": ("saves", "#1f5fa8"),
    "load": ("loads", "#a9c1dc"),
    "lost_work": ("work done again", "#d9822b"),
    "reschedule": ("rescheduling", QUIET),
}
CPR_SAVES = {"none": ("all rows every T", "#d9822b"), "ssu": ("SSU, an eighth every T/8", "#1f5fa8")}
PLS_NAMES = ("0.02", "0.1", "0.2")  # of projected overheads: those of a target
BAR_COLOURS = {True: "#1f5fa8", False: "#a9c1dc"}


def missing_reason() -> str | None:
    """Why there are no pictures, or None."""
    if importlib.util.find_spec("matplotlib") is None:
        return f"no pictures: matplotlib is not installed; {INSTALL}"
    return None


def save(content: Mapping[str, Any], *, json_path: str | None, docs: str | None) -> list[Path]:
    """Draws a benchmark's picture beside its JSON file and into `docs`; says so, or why not."""
    targets = [Path(json_path).with_suffix(".png")] if json_path is not None else []
    if docs is not None:
        folder = Path(docs)
        folder.mkdir(parents=True, exist_ok=True)
        targets.append(folder / f"{content['bench']}.png")
    if not targets:
        return []
    reason = missing_reason()
    if reason is not None:
        common.console.print(reason, style="yellow", markup=False)
        return []
    for target in targets:
        draw(content, target)
        common.console.print(f"drew {target}")
    return targets


def draw(content: Mapping[str, Any], path: Path) -> None:
    """The picture of what a benchmark wrote."""
    rows = content.get("rows", [])
    if content.get("bench") == "recovery":
        traces = [row for row in rows if row["kind"] == "trace"]
        draw_throughput(traces, path, title="Training through the loss of a server")
    elif content.get("bench") == "overhead":
        draw_overhead([row for row in rows if row["kind"] == "overhead"], path)
    elif content.get("bench") == "cpr":
        draw_cpr(rows, path)
    elif content.get("bench") == "checkpoint":
        costs = [row for row in rows if row["kind"] == "cost"]
        draw_checkpoints(costs, [row for row in rows if row["kind"] == "trace"], path)
    else:
        hint = "recovery, overhead, checkpoint and cpr have one"
        raise UserError(f"bench {content.get('bench')} has no picture", hint=hint)


def _figure(width: float, height: float, columns: int = 1) -> tuple[Any, list[Any]]:
    """Without pyplot: no window system is asked for, and nothing outlives the file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    axes = [figure.add_subplot(1, columns, column + 1) for column in range(columns)]
    for axis in axes:
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axis.spines[side].set_color(INK)
        axis.tick_params(colors=INK, labelsize=SMALL)
        axis.set_axisbelow(True)
        axis.grid(axis="y", color=GRID, linewidth=0.8)
    return figure, axes


# -- throughput through a failure ----------------------------------------------------------------------------


def draw_throughput(traces: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """One panel per run with a failure, the undisturbed run behind it. Time 0 is the death."""
    quiet = [trace for trace in traces if not trace["marks"]]
    struck = [trace for trace in traces if trace["marks"]] or list(traces)
    figure, axes = _figure(4.6 * len(struck), 3.4, columns=len(struck))
    # Room above the lines for the marks' texts.
    top = 1.3 * max((max(trace["samples_per_second"], default=0.0) for trace in traces), default=1.0) / 1000
    for axis, trace in zip(axes, struck, strict=True):
        for other in quiet:
            if other is not trace:
                _line(axis, other)
        _line(axis, trace)
        _marks(axis, trace, top)
        axis.set_ylim(0, top)
        axis.set_xlim(trace["t"][0], trace["t"][-1])
        axis.set_xlabel("seconds from the death of a server" if trace["marks"] else "seconds", color=INK)
        axis.legend(loc="lower right", frameon=False, fontsize=SMALL, labelcolor=INK)
    axes[0].set_ylabel("thousand samples per second", color=INK)
    figure.suptitle(title, color=INK, fontsize=11, x=0.01, ha="left")
    figure.savefig(path)


def _line(axis: Any, trace: Mapping[str, Any]) -> None:
    name = trace["name"]
    axis.plot(
        trace["t"],
        [value / 1000 for value in trace["samples_per_second"]],
        color=COLOURS.get(name, COLOURS["k4"]),
        linewidth=1.0 if name == "none" else 1.6,
        label=LABELS.get(name, name),
        zorder=1 if name == "none" else 3,
    )


def _marks(axis: Any, trace: Mapping[str, Any], top: float) -> None:
    """Each mark has a line of its own height: a death and the first step after it lie close together."""
    for height, (what, at) in enumerate(sorted(trace["marks"].items(), key=lambda mark: mark[1])):
        axis.axvline(at, color=INK, linewidth=0.8, linestyle=(0, (3, 3)), zorder=2)
        level = top * (0.98 - 0.07 * height)
        late = at > trace["t"][0] + 0.7 * (trace["t"][-1] - trace["t"][0])
        axis.annotate(
            f"{what} {at:.2f} s" if at else what,
            (at, level),
            xytext=(-4 if late else 4, 0),
            textcoords="offset points",
            fontsize=SMALL,
            color=INK,
            ha="right" if late else "left",
            va="top",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
            zorder=4,
        )


# -- what protection costs -----------------------------------------------------------------------------------


def draw_overhead(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Bars of overhead with their spread, a panel per model; lines at our target and at the paper's figure."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    if not models:
        raise UserError("there is nothing to draw: no overhead was measured")
    figure, axes = _figure(4.8 * len(models), 3.0, columns=len(models))
    for axis, model in zip(axes, models, strict=True):
        mine = [row for row in rows if row["model"] == model][::-1]
        values = [100 * row["overhead"]["value"] for row in mine]
        low = [max(0.0, value - 100 * row["overhead"]["low"]) for value, row in zip(values, mine, strict=True)]
        high = [max(0.0, 100 * row["overhead"]["high"] - value) for value, row in zip(values, mine, strict=True)]
        axis.barh(
            [row["label"] for row in mine],
            values,
            height=0.6,
            color=[BAR_COLOURS[row["judged"]] for row in mine],
            xerr=[low, high],
            error_kw={"ecolor": INK, "elinewidth": 0.9, "capsize": 2},
        )
        axis.grid(axis="y", visible=False)
        axis.grid(axis="x", color=GRID, linewidth=0.8)
        axis.axvline(0, color=INK, linewidth=0.8)
        # Their texts lean away from each other: on a long axis the lines are close.
        for at, text, side in ((5.0, "target", "right"), (18.2, "the paper", "left")):
            axis.axvline(at, color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
            axis.annotate(
                f"{text} {at:g} %",
                (at, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(0, 2),
                textcoords="offset points",
                ha=side,
                fontsize=SMALL,
                color=INK,
            )
        axis.set_title(model, color=INK, fontsize=10, loc="left", pad=14)
        axis.set_xlabel("time per sample, % more than without protection", color=INK, fontsize=9)
    figure.savefig(path)


# -- what checkpoints cost -----------------------------------------------------------------------------------


def draw_checkpoints(costs: Sequence[Mapping[str, Any]], traces: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Throughput of one run each way, a tick where a checkpoint was complete; and the share of training time lost."""
    judged = [row for row in costs if row["variant"] != "none" and row["lost"] is not None][::-1]
    if not judged or not traces:
        raise UserError("there is nothing to draw: no training with checkpoints was measured")
    order = [row["variant"] for row in costs]
    figure, (left, right) = _figure(10.4, 3.2, columns=2)
    for trace in traces:
        colour = CHECKPOINT_COLOURS.get(trace["name"], INK)
        speeds = [value / 1000 for value in trace["samples_per_second"]]
        left.plot(trace["t"], speeds, color=colour, linewidth=1.2)
        cuts = [at for at in trace["cuts"] if trace["t"][0] <= at <= trace["t"][-1]]
        # Longer ones lie behind shorter ones.
        size = 14 - 3 * order.index(trace["name"]) if trace["name"] in order else 14
        left.plot(cuts, [0.0] * len(cuts), "|", color=colour, markersize=size, clip_on=False)
    left.set_ylim(0, None)
    left.set_xlabel("seconds", color=INK, fontsize=9)
    left.set_ylabel("thousand samples per second", color=INK, fontsize=9)
    left.set_title("grey: no checkpoints; other colours as on the right", color=INK, fontsize=9, loc="left")
    even = all(row["lost_equal_speed"] is not None for row in judged)
    lost = [row["lost_equal_speed" if even else "lost"] for row in judged]
    values = [100 * found["value"] for found in lost]
    low = [max(0.0, value - 100 * found["low"]) for value, found in zip(values, lost, strict=True)]
    high = [max(0.0, 100 * found["high"] - value) for value, found in zip(values, lost, strict=True)]
    right.barh(
        [row["label"] for row in judged],
        values,
        height=0.6,
        color=[CHECKPOINT_COLOURS.get(row["variant"], INK) for row in judged],
        xerr=[low, high],
        error_kw={"ecolor": INK, "elinewidth": 0.9, "capsize": 2},
    )
    right.grid(axis="y", visible=False)
    right.grid(axis="x", color=GRID, linewidth=0.8)
    right.axvline(0, color=INK, linewidth=0.8)
    right.axvline(1.0, color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
    what = "training time lost at equal speed" if even else "training time lost"
    right.set_xlabel(f"{what}, % (dashes: target)", color=INK, fontsize=9)
    figure.savefig(path)


# -- partial recovery ----------------------------------------------------------------------------------------


def has_picture(content: Mapping[str, Any]) -> bool:
    """Whether a part was measured that has one."""
    return any(row["kind"] in ("pls", "projected") for row in content.get("rows", []))


def draw_cpr(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Those of these that were measured: overheads of ways back by what they are made of, overheads by PLS, which way
    is the cheaper one, and PLS against AUC lost."""
    ours = [row for row in rows if row["kind"] == "projected" and row["constants"] == "ours"]
    panels = [
        (_projected_bars, [row for row in ours if row["shown"]]),
        (
            _pls_bars,
            [each for name in PLS_NAMES for each in rows if (each["kind"], each.get("name")) == ("projected", name)],
        ),
        (_grid_cells, [row for row in rows if row["kind"] == "grid" and row["constants"] == "published"]),
        (_pls_points, [row for row in rows if row["kind"] == "pls"]),
    ]
    found = [(panel, mine) for panel, mine in panels if mine]
    if not found:
        raise UserError("there is nothing to draw: neither overheads nor PLS were measured")
    figure, axes = _figure(4.8 * len(found), 3.2, columns=len(found))
    for axis, (draw_panel, mine) in zip(axes, found, strict=True):
        draw_panel(axis, mine)
    figure.savefig(path)


def _pls_bars(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Overhead by target (figure 9): as published, and by the formulas with the published constants and with ours."""
    series = {
        "published": ([row["published"] for row in rows if row["constants"] == "published"], QUIET),
        "formulas": ([row["overhead"]["share"] for row in rows if row["constants"] == "published"], "#a9c1dc"),
        "our constants": ([row["overhead"]["share"] for row in rows if row["constants"] == "ours"], "#1f5fa8"),
    }
    names = list(dict.fromkeys(row["name"] for row in rows))
    drawn = [(text, values, colour) for text, (values, colour) in series.items() if len(values) == len(names)]
    for index, (text, values, colour) in enumerate(drawn):
        places = [at + 0.8 * (index + 0.5) / len(drawn) - 0.4 for at in range(len(names))]
        axis.bar(places, [100 * (value or 0.0) for value in values], width=0.8 / len(drawn), color=colour, label=text)
    axis.set_xticks(range(len(names)), names)
    axis.set_xlabel("target PLS", color=INK, fontsize=9)
    axis.set_ylabel("overhead, %", color=INK, fontsize=9)
    axis.legend(loc="upper right", frameon=False, fontsize=SMALL, labelcolor=INK)


def _grid_cells(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Failures of a job and the part of the servers that each takes (figure 10): which way the planner chooses, and
    what both cost when jobs are played."""
    failures = sorted({row["failures"] for row in rows})
    portions = sorted({row["portion"] for row in rows})
    for row in rows:
        x, y = failures.index(row["failures"]), portions.index(row["portion"])
        agrees = row["decision"] == row["cheaper"]
        axis.add_patch(_rectangle((x - 0.47, y - 0.47), 0.94, 0.94, BAR_COLOURS[row["decision"] == "partial"], agrees))
        told = f"{row['decision']}\n{100 * row['partial']:.1f} / {100 * row['full']:.1f} %"
        axis.text(
            x, y, told, ha="center", va="center", fontsize=7, color="white" if row["decision"] == "partial" else INK
        )
    axis.set_xticks(range(len(failures)), [str(count) for count in failures])
    axis.set_yticks(range(len(portions)), [f"{100 * portion:g} %" for portion in portions])
    axis.set_xlim(-0.5, len(failures) - 0.5)
    axis.set_ylim(-0.5, len(portions) - 0.5)
    axis.grid(visible=False)
    axis.set_xlabel("failures; in cells: partial / full, played (red: it was not the cheaper)", color=INK, fontsize=8)


def _rectangle(corner: tuple[float, float], width: float, height: float, colour: str, agrees: bool) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, facecolor=colour, edgecolor="none" if agrees else "#c0392b", linewidth=2)


def _projected_bars(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    mine = list(rows)[::-1]
    left = [0.0] * len(mine)
    for part, (text, colour) in CPR_PARTS.items():
        values = [100 * row["overhead"][part] for row in mine]
        axis.barh([row["label"] for row in mine], values, left=left, height=0.6, color=colour, label=text)
        left = [before + value for before, value in zip(left, values, strict=True)]
    axis.grid(axis="y", visible=False)
    axis.grid(axis="x", color=GRID, linewidth=0.8)
    axis.axvline(0.5, color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
    axis.set_xlabel("overhead of a 56-hour job, % (dashes: target)", color=INK, fontsize=9)
    axis.legend(loc="lower right", frameon=False, fontsize=SMALL, labelcolor=INK)


def _pls_points(axis: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for name, (text, colour) in CPR_SAVES.items():
        found = [row[name] for row in rows if name in row]
        axis.plot(
            [point["pls"] for point in found],
            [point["auc_lost"] for point in found],
            "o",
            color=colour,
            markersize=3.5,
            alpha=0.8,
            label=text,
        )
    axis.axhline(0, color=INK, linewidth=0.8)
    axis.set_xlabel("PLS", color=INK, fontsize=9)
    axis.set_ylabel("AUC lost", color=INK, fontsize=9)
    axis.legend(loc="upper left", frameon=False, fontsize=SMALL, labelcolor=INK)


# -- a run directory -----------------------------------------------------------------------------------------


def run_trace(directory: Path) -> dict[str, Any]:
    """Throughput of one run from its metrics; time 0 is its first failure, or its start."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((directory / "summary.json").read_text())
    training = [line for line in lines if line["samples_per_s_now"] is not None]
    if not training:
        raise UserError(f"{directory}: this run has no throughput to draw")
    begin, marks = training[0]["t"], {}
    first = next((failure for failure in summary.get("failures", [])), None)
    noticed = next((line["t"] for line in lines if line.get("failures", 0) > 0), None)
    if first is not None and noticed is not None:
        # A line of metrics is written as soon as a failure is noticed.
        begin = noticed - first["detected_s"]
        found = {"death": 0.0, "resumed": first["resumed_s"], "recovered": first["recovered_s"]}
        marks = {name: at for name, at in found.items() if at is not None}
    return {
        "kind": "trace",
        "name": summary.get("model", directory.name),
        "t": [round(line["t"] - begin, 3) for line in training],
        "samples_per_second": [line["samples_per_s_now"] for line in training],
        "marks": marks,
    }


def draw_file(path: Path) -> Path:
    """A benchmark's JSON file, or a run directory: its picture lies beside it, or in it."""
    if path.is_dir():
        target = path / "throughput.png"
        draw_throughput([run_trace(path)], target, title=f"Throughput of {path.name}")
    else:
        target = path.with_suffix(".png")
        draw(json.loads(path.read_text()), target)
    return target


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        print("usage: python -m regrow.bench.plots FILE.json|RUN_DIRECTORY ...", file=sys.stderr)
        return 2
    if reason := missing_reason():
        print(f"error: {reason}", file=sys.stderr)
        return 1
    for argument in arguments:
        try:
            print(draw_file(Path(argument)))
        except (UserError, OSError, ValueError, KeyError) as error:
            print(f"error: {argument}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
