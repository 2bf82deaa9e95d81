"""Figures, what they should be, and how they are told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes
    ----------
    part, name
        Which measurement, and what of it.
    value, unit
        The number.
    most, least
        What it should be, where something is asked of it.
    note
        What it was taken from.
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
        """Whether it is as it should be; None where nothing is asked of it."""
        if self.most is None and self.least is None:
            return None
        above = self.most is None or self.value <= self.most
        return above and (self.least is None or self.value >= self.least)

    @property
    def wanted(self) -> str:
        """What is asked of it."""
        parts = [f"<= {self.most:g}"] if self.most is not None else []
        parts += [f">= {self.least:g}"] if self.least is not None else []
        return ", ".join(parts)


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the smallest value that a share of `q` of all does not exceed; they are in order of size."""
    if not ordered:
        return math.nan
    return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]


def show(figures: Sequence[Figure]) -> None:
    """Print a table."""
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
    # A log is no terminal: there the lines may be as long as they are.
    (console if console.is_terminal else Console(width=150)).print(table)
