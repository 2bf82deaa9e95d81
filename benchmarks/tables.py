"""Results as tables: on the terminal by rich, and as Markdown for docs/benchmarks.md."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.engines import OTHERS, OURS, TITLES, UNTUNED
from benchmarks.prepare import HEADLINE, INT8
from benchmarks.quantised import SUFFIX
from benchmarks.rounds import Measured, Ratio

MISSING: Final = "–"
BUSY: Final = "*"


def milliseconds(ms: float | None) -> str:
    """Format a time with three significant digits, or as missing."""
    if ms is None:
        return MISSING
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}" if ms >= 1 else f"{ms:.3f}"


def geometric_mean(
    results: Sequence[Measured], ours: str, models: Collection[str] = HEADLINE
) -> float | None:
    """Return the geometric mean of the ratios of `models`, None unless each that was measured has one."""
    ratios = [r.ratio(ours) for r in results if r.model in models]
    values = [ratio.value for ratio in ratios if ratio is not None]
    return statistics.geometric_mean(values) if values and len(values) == len(ratios) else None


def rows(results: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells: one row for each model and number of threads."""
    others = [name for name in OTHERS if any(name in r.turns_ms for r in results)]
    heads = ["model", "threads", TITLES[UNTUNED], TITLES[OURS], *(TITLES[name] for name in others)]
    heads += ["over the best, untuned", "over the best"]
    body = []
    for r in results:
        ms = r.median_ms
        cells = [r.model, str(r.threads) + (BUSY if r.noise.disturbed else "")]
        # If no record applies, one bundle counts as both.
        cells.append(milliseconds(ms.get(UNTUNED, ms.get(OURS))))
        cells += [milliseconds(ms.get(name)) for name in (OURS, *others)]
        cells += [
            _ratio(r.ratio(UNTUNED)),
            _ratio(r.ratio(OURS)) + f" ({TITLES.get(r.best_other or '', MISSING)})",
        ]
        body.append(cells)
    return heads, body


def _ratio(ratio: Ratio | None) -> str:
    return MISSING if ratio is None else f"{ratio.value:.2f}"


def markdown(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown; the first column is text, the others are numbers."""
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    return "\n".join(lines + ["| " + " | ".join(cells) + " |" for cells in body])


def show(console: Console, title: str, heads: Sequence[str], body: Sequence[Sequence[str]]) -> None:
    """Print a table on `console`."""
    table = Table(title=title, title_justify="left")
    for i, head in enumerate(heads):
        table.add_column(head, justify="right" if i else "left")
    for cells in body:
        table.add_row(*cells)
    console.print(table)


def spreads(results: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells: the spread of the ratios, and how busy the machine was."""
    heads = ["model", "threads", "over the best", "quartiles of the rounds", "of the fastest", "meanwhile"]
    body = []
    for r in results:
        ratio = r.ratio()
        spread = MISSING if ratio is None else f"{ratio.low:.2f} to {ratio.high:.2f}"
        least = MISSING if ratio is None else f"{ratio.least:.2f}"
        body.append([r.model, str(r.threads), _ratio(ratio), spread, least, str(r.noise)])
    return heads, body


def parities(results: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells: largest relative differences to the reference, by model and engine."""
    names = [name for name in (OURS, UNTUNED, *OTHERS) if any(name in r.parity for r in results)]
    worst: dict[str, dict[str, float]] = {}
    for r in results:
        for engine, error in r.parity.items():
            worst.setdefault(r.model, {})[engine] = max(error, worst.get(r.model, {}).get(engine, 0.0))
    body = [
        [model, *(f"{errors[name]:.1e}" if name in errors else MISSING for name in names)]
        for model, errors in worst.items()
    ]
    return ["model", *(TITLES[name] for name in names)], body


def costs(figures: Sequence[tuple[str, float, float]]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells: costs, and their limits if they have one."""
    body = [[what, f"{value:.3g}", f"{most:g}" if most else ""] for what, value, most in figures]
    return ["what", "measured", "at most"], body


def headline(results: Sequence[Measured]) -> Mapping[str, float]:
    """Return the headline figures: geometric means over the best engine, and MobileNetV2 over PyTorch.

    Networks in int8 have a mean of their own for each number of threads.
    """
    found = {}
    for ours, key in (
        (UNTUNED, "geometric mean over the best, untuned"),
        (OURS, "geometric mean over the best"),
    ):
        mean = geometric_mean(results, ours)
        if mean is not None:
            found[key] = mean
    for threads in sorted({r.threads for r in results}):
        mean = geometric_mean([r for r in results if r.threads == threads], OURS, INT8)
        if mean is not None:
            found[f"int8: geometric mean over the best, threads: {threads}"] = mean
    for r in results:
        ratio = r.ratio(other="pytorch")
        if r.model == "mobilenetv2" and ratio is not None:
            found[f"MobileNetV2 over PyTorch, threads: {r.threads}"] = ratio.value
    return found


def over_float32(
    values: Mapping[str, Mapping[str, float]], ours: str, suffix: str = SUFFIX
) -> dict[str, float]:
    """Return our times or counts in another precision over those in float32, by the model's name.

    Parameters
    ----------
    values
        Model -> engine -> time or count.
    ours
        The engine.
    suffix
        Of the models in the other precision; int8 without it.
    """
    found = {}
    for model, by_engine in values.items():
        before = values.get(model.removesuffix(suffix), {}).get(ours)
        if model.endswith(suffix) and before and ours in by_engine:
            found[model.removesuffix(suffix)] = by_engine[ours] / before
    return found


def print_file(path: Path) -> int:
    """Print the file that an earlier run wrote; return the exit status."""
    if not path.exists():
        print(f"error: {path}: no run has written it\nhint: run the benchmark first", file=sys.stderr)
        return 2
    print(path.read_text(), end="")
    return 0
