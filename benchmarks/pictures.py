"""Pictures of a benchmark: latency by engine, layers under the roofline, instructions and others."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.engines import ENGINES, OURS, TITLES, UNTUNED
from benchmarks.layers import KINDS, Layers, kind_of
from benchmarks.tables import milliseconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from benchmarks.hot_loops import Loop

# Okabe and Ito's palette, which people with any kind of colour vision can tell apart; ours stands out.
COLOURS: Final[Mapping[str, str]] = {
    OURS: "#D55E00",
    UNTUNED: "#F0B27A",
    "onnxruntime": "#0072B2",
    "openvino": "#56B4E9",
    "ncnn": "#009E73",
    "pytorch": "#8A8A8A",
    "litert": "#CC79A7",
}
KIND_COLOURS: Final = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#8A8A8A")
DPI: Final = 110
# A bar longer than this multiple of ours is cut, because otherwise all others would be too short to compare.
LONGEST: Final = 4.0
MANY_LAYERS: Final = 80


def latency(times: Mapping[str, Mapping[int, Mapping[str, float]]], path: Path, title: str) -> None:
    """Draw bars of latency: a panel for each model and number of threads, each with its own scale.

    Parameters
    ----------
    times
        Model -> threads -> engine -> milliseconds.
    """
    threads = sorted({count for each in times.values() for count in each})
    figure, axes = _figure(len(times), len(threads), (6.2 * len(threads), 1.75 * len(times) + 0.9))
    for row, (model, by_threads) in enumerate(times.items()):
        for column, count in enumerate(threads):
            panel = axes[row][column]
            _bars(panel, by_threads.get(count, {}))
            panel.set_title(f"{model}, {count} thread{'s' * (count > 1)}", fontsize=10, loc="left")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    _save(figure, path)


def _bars(panel: Axes, times: Mapping[str, float], unit: str = "ms") -> None:
    engines = [engine for engine in ENGINES if engine in times]
    own = times.get(OURS, min(times.values(), default=1.0))
    end = min(max(times.values(), default=1.0), own * LONGEST)
    for place, engine in enumerate(engines):
        value = times[engine]
        panel.barh(place, min(value, end), color=COLOURS[engine], height=0.78)
        cut = " »" if value > end else ""
        weight = "bold" if engine == OURS else "normal"
        panel.text(
            min(value, end) + end * 0.012,
            place,
            f"{milliseconds(value)} {unit}{cut}",
            va="center",
            fontsize=8.5,
            weight=weight,
            bbox={"facecolor": "white", "linewidth": 0, "pad": 0.6},
        )
    panel.set_yticks(range(len(engines)), [TITLES[engine] for engine in engines], fontsize=8.5)
    panel.invert_yaxis()
    panel.set_xlim(0, end * 1.2)
    panel.set_xticks([])
    panel.spines[["top", "right", "bottom"]].set_visible(False)
    panel.axvline(own, color=COLOURS[OURS], linewidth=0.8, linestyle=":", zorder=0)


def roofline(models: Mapping[str, Layers], path: Path, title: str) -> None:
    """Draw each layer under the machine's roofline, and then, in order, its share of the peak."""
    figure, axes = _figure(len(models), 2, (13, 3.3 * len(models) + 0.5), width_ratios=(1, 1.25))
    for (left, right), (name, model) in zip(axes, models.items(), strict=True):
        _under_the_roof(left, name, model)
        _shares(right, model)
    handles = [
        axes[0][0].scatter([], [], color=colour, label=kind)
        for kind, colour in zip(KINDS, KIND_COLOURS, strict=False)
        if any(layer.kind == kind for model in models.values() for layer in model.layers)
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9, frameon=False)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    _save(figure, path)


def _under_the_roof(panel: Axes, name: str, model: Layers) -> None:
    roof = model.roof
    low, high = 0.2, 300.0
    for style, (level, speed) in zip(("-", "--", ":"), roof.gbytes_per_s.items(), strict=False):
        ridge = roof.gflops / speed
        panel.plot([low, ridge], [low * speed, roof.gflops], style, color="#555555", linewidth=1)
        panel.text(
            low * 1.25, low * 1.25 * speed * 1.12, f"{level} {speed:.0f} GB/s", fontsize=7, color="#555555",
            rotation=38, rotation_mode="anchor",
        )  # fmt: skip
    fastest = max(roof.gbytes_per_s.values())
    panel.plot([roof.gflops / fastest, high], [roof.gflops] * 2, "-", color="#555555", linewidth=1)
    panel.text(
        high * 0.9, roof.gflops * 1.1, f"{roof.gflops:.0f} GFLOP/s", fontsize=8, ha="right", color="#333333"
    )
    whole = sum(layer.time_us for layer in model.layers)
    counted = [layer for layer in model.layers if layer.is_product]
    panel.scatter(
        [layer.intensity for layer in counted],
        [layer.gflops for layer in counted],
        s=[12 + 1200 * layer.time_us / whole for layer in counted],
        c=[_colour(layer.kind) for layer in counted],
        alpha=0.55,
        linewidths=0.4,
        edgecolors="white",
    )
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlim(low, high)
    panel.set_ylim(roof.gflops / 150, roof.gflops * 1.8)
    panel.grid(visible=True, which="major", linewidth=0.3)
    panel.set_xlabel("operations per byte (area: share of the time)", fontsize=8)
    panel.set_ylabel("GFLOP/s", fontsize=8)
    panel.set_title(f"{name}, {model.threads} thread{'s' * (model.threads > 1)}", fontsize=10, loc="left")
    panel.tick_params(labelsize=8)


def _shares(panel: Axes, model: Layers) -> None:
    at_ms = 0.0
    border = 0.3 if len(model.layers) < MANY_LAYERS else 0.0
    for layer in model.layers:
        width = layer.time_us / 1e3
        share = layer.gflops / model.roof.gflops if layer.is_product else 0.0
        panel.bar(
            at_ms, share, width, align="edge", color=_colour(layer.kind), linewidth=border, edgecolor="white"
        )
        at_ms += width
    panel.axhline(1.0, color="#555555", linewidth=1)
    panel.axhline(model.share_of_peak, color="#333333", linewidth=0.9, linestyle="--")
    panel.text(
        at_ms * 0.995,
        model.share_of_peak + 0.03,
        f"{model.share_of_peak:.0%} in all",
        ha="right",
        fontsize=8,
        bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1},
    )
    panel.set_xlim(0, at_ms)
    panel.set_ylim(0, 1.15)
    panel.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "peak"], fontsize=8)
    panel.set_xlabel("milliseconds, layer after layer", fontsize=8)
    panel.set_title("share of the peak", fontsize=10, loc="left")
    panel.tick_params(labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def _colour(kind: str) -> str:
    return KIND_COLOURS[KINDS.index(kind) if kind in KINDS else -1]


def instructions(counts: Mapping[str, Mapping[str, float]], path: Path, title: str) -> None:
    """Draw bars of executed instructions, a panel for each model.

    Parameters
    ----------
    counts
        Model -> engine -> millions.
    """
    figure, axes = _figure(len(counts), 1, (7.5, 1.25 * len(counts) + 0.8))
    for (panel,), (model, by_engine) in zip(axes, counts.items(), strict=True):
        _bars(panel, by_engine, "M")
        panel.set_title(model, fontsize=10, loc="left")
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    _save(figure, path)


def hot_loops(models: Mapping[str, Mapping[str, Sequence[Loop]]], path: Path, title: str) -> None:
    """Draw the share of the core's peak that each hot loop can reach, as wide as its share of the work.

    Parameters
    ----------
    models
        Model -> core -> loops, in the order of the kernels.
    """
    cores = list(next(iter(models.values())))
    figure, axes = _figure(len(models), len(cores), (6.5 * len(cores), 2.0 * len(models) + 0.6))
    for row, (model, by_core) in zip(axes, models.items(), strict=True):
        for panel, core in zip(row, cores, strict=True):
            at, whole = 0.0, sum(loop.flops for loop in by_core[core])
            for loop in by_core[core]:
                width = loop.flops / whole
                panel.bar(
                    at, loop.share, width, align="edge", color=_colour(kind_of(loop.kernel)), linewidth=0.3,
                    edgecolor="white",
                )  # fmt: skip
                at += width
            panel.axhline(1.0, color="#555555", linewidth=1)
            panel.set_xlim(0, 1)
            panel.set_ylim(0, 1.15)
            panel.set_xticks([])
            panel.set_yticks([0, 0.5, 1], ["0", "50 %", "peak"], fontsize=8)
            mean = whole / sum(loop.flops / loop.share for loop in by_core[core])
            panel.set_title(f"{model}, {core}: {mean:.0%} in all", fontsize=10, loc="left")
            panel.spines[["top", "right"]].set_visible(False)
    kinds = {kind_of(loop.kernel) for by in models.values() for loops in by.values() for loop in loops}
    handles = [axes[0][0].scatter([], [], color=_colour(kind), label=kind) for kind in KINDS if kind in kinds]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=9, frameon=False)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    _save(figure, path)


def factors(kinds: Mapping[str, Sequence[float]], path: Path, title: str, goal: float) -> None:
    """Draw each kind's factors over its smooth neighbours as points in a row, with their median as a line.

    Parameters
    ----------
    kinds
        Kind of operator -> factors, of which 1 is the best that is expected.
    goal
        The largest factor that is allowed.
    """
    figure, ((panel,),) = _figure(1, 1, (9.5, 0.38 * len(kinds) + 1.5))
    for place, values in enumerate(kinds.values()):
        # Points of a row are spread, in an order that does not depend on their value.
        heights = [place + 0.3 * ((number * 7) % 11 - 5) / 5 for number in range(len(values))]
        colours = [COLOURS[OURS] if value > goal else COLOURS["onnxruntime"] for value in values]
        panel.scatter(values, heights, s=12, c=colours, alpha=0.7, linewidths=0)
        middle = statistics.median(values)
        panel.plot([middle, middle], [place - 0.38, place + 0.38], color="#333333", linewidth=1.6)
    for factor, style in ((1.0, "-"), (goal, "--")):
        panel.axvline(factor, color="#555555", linewidth=0.8, linestyle=style, zorder=0)
    panel.set_yticks(range(len(kinds)), list(kinds), fontsize=8.5)
    panel.invert_yaxis()
    panel.set_xscale("log")
    ticks = [0.7, 1, goal, 2, 3, 5, 10, 20]
    last = max((max(values) for values in kinds.values()), default=goal)
    shown = [tick for tick in ticks if tick <= max(last, goal) * 1.1]
    panel.set_xticks(shown, [f"{tick:g}" for tick in shown], fontsize=8)
    panel.minorticks_off()
    panel.set_xlabel("factor (dashed: goal for the worst; orange: above it)", fontsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    _save(figure, path)


def ratios(models: Mapping[str, Mapping[int, float]], path: Path, title: str) -> None:
    """Draw our time over another engine's as bars from 1: to the left faster, to the right slower.

    Parameters
    ----------
    models
        Model -> threads -> ratio.
    """
    threads = sorted({count for each in models.values() for count in each})
    names = sorted(models, key=lambda name: models[name].get(threads[-1], 1.0))
    figure, (panels,) = _figure(1, len(threads), (5.2 * len(threads) + 1.2, 0.3 * len(names) + 1.4))
    for panel, count in zip(panels, threads, strict=True):
        for place, name in enumerate(names):
            if count not in models[name]:
                continue
            ratio = models[name][count]
            colour = COLOURS[OURS] if ratio > 1 else COLOURS["onnxruntime"]
            panel.barh(place, ratio - 1, left=1, color=colour, height=0.72)
            panel.text(
                ratio * (1.04 if ratio > 1 else 0.96), place, f"{ratio:.2f}", va="center", fontsize=8,
                ha="left" if ratio > 1 else "right",
            )  # fmt: skip
        values = [models[name][count] for name in names if count in models[name]]
        mean = statistics.geometric_mean(values)
        panel.axvline(1, color="#555555", linewidth=1)
        panel.axvline(mean, color="#333333", linewidth=0.9, linestyle="--")
        panel.set_xscale("log")
        panel.set_xlim(min(0.5, *values) * 0.75, max(2.0, *values) * 1.35)
        shown = [tick for tick in (0.5, 1, 2, 5, 10, 20) if tick <= max(2.0, *values)]
        panel.set_xticks(shown, [f"{tick:g}" for tick in shown], fontsize=8)
        panel.minorticks_off()
        panel.set_yticks(range(len(names)), names, fontsize=8.5)
        plural = "s" * (count > 1)
        panel.set_title(
            f"{count} thread{plural}: geometric mean {mean:.2f} (dashed)", fontsize=10, loc="left"
        )
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    _save(figure, path)


def publish(paths: Sequence[Path], folder: Path | None) -> None:
    """Copy the pictures that were drawn to `folder`, if one is given; it is made if it is not there."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        if path.exists():
            shutil.copy(path, folder / path.name)


def _figure(
    rows: int, columns: int, size: tuple[float, float], width_ratios: Sequence[float] | None = None
) -> tuple[Figure, Sequence[Sequence[Axes]]]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, figsize=size, squeeze=False, layout="constrained", width_ratios=width_ratios
    )
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    pyplot.close(figure)
