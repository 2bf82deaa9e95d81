"""Measured figures with their limits, and how they are printed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number.

    Attributes
    ----------
    part, name
        The part of the benchmark, and what was measured in it.
    value, unit
        The number and its unit.
    most, least
        The upper and the lower limit, None if there is none.
    note
        How it was measured.
    """

    part: str
    name: str
    value: float
    unit: str = ""
    most: float | None = None
    least: float | None = None
    note: str = ""

    @property
    def good(self) -> bool | None:
        """Whether the value is within its limits; None if it has none."""
        if self.most is None and self.least is None:
            return None
        above = self.most is None or self.value <= self.most
        return above and (self.least is None or self.value >= self.least)

    @property
    def wanted(self) -> str:
        """The limits as text, such as `<= 0.4`."""
        parts = [f"<= {self.most:g}"] if self.most is not None else []
        parts += [f">= {self.least:g}"] if self.least is not None else []
        return ", ".join(parts)


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the `q` quantile of values in ascending order, by the nearest rank; NaN if there are none."""
    if not ordered:
        return math.nan
    return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]


def show(figures: Sequence[Figure]) -> None:
    """Print the figures as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="the agent as a service")
    for column, justify in (("", "left"), ("figure", "left"), ("value", "right"), ("wanted", "right")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    table.add_column("")
    table.add_column("from", style="dim")
    part = ""
    for figure in figures:
        if part and figure.part != part:
            table.add_section()
        mark = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[figure.good]
        table.add_row(
            figure.part if figure.part != part else "",
            figure.name,
            f"{figure.value:.4g} {figure.unit}".strip(),
            figure.wanted,
            mark,
            figure.note,
        )
        part = figure.part
    console = Console()
    # A log has no width: let its lines be long.
    (console if console.is_terminal else Console(width=150)).print(table)
