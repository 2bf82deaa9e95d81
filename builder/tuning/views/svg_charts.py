"""Charts as SVG text: curves, paired bars, stacked bars. Numbers in, markup out; no external resources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

# Okabe and Ito's palette, which people with any kind of colour vision can tell apart
# (jfly.uni-koeln.de/color).
PALETTE: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B3A100", "#7A7A7A")
REST: Final = "#B8BEC6"


@dataclass(frozen=True, slots=True)
class Bar:
    """An operator's time before and after, in microseconds, and a short note."""

    label: str
    before_us: float
    after_us: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Slice:
    """A labelled part of a stacked bar."""

    label: str
    value: float


def curve(
    seconds: Sequence[float | None], before_s: float, after_s: float, width: int = 300, height: int = 120
) -> str:
    """Draw measured times in seconds (dots), and the times before (dashed) and after (solid line)."""
    ran = [s for s in seconds if s is not None]
    if not ran:
        return _svg(width, height, [_text(width / 2, height / 2, "nothing ran", anchor="middle")])
    left, right, top, bottom = 64, 8, 10, 22
    # Clip very slow points: they would squeeze all others into one line.
    ceiling = min(max(ran), 4 * sorted(ran)[len(ran) // 2], 6 * min(ran))
    ceiling = max(ceiling, before_s * 1.05, min(ran) * 1.05)
    floor = min(*ran, after_s) * 0.9
    low, high = math.log(floor), math.log(ceiling)

    def x(i: float) -> float:
        return left + (width - left - right) * (i / max(1, len(seconds) - 1))

    def y(s: float) -> float:
        return top + (height - top - bottom) * (high - math.log(min(s, ceiling))) / (high - low)

    parts = []
    for value in (min(ran), ceiling):
        parts.append(
            f'<line x1="{left}" x2="{width - right}" y1="{y(value):.1f}" y2="{y(value):.1f}" class="grid"/>'
        )
        parts.append(_text(left - 5, y(value) + 4, _us(value), anchor="end"))
    for value, css in ((before_s, "dash"), (after_s, "best")):
        parts.append(
            f'<line x1="{left}" x2="{width - right}" y1="{y(value):.1f}" y2="{y(value):.1f}" class="{css}"/>'
        )
    for i, s in enumerate(seconds):
        if s is None:
            parts.append(_text(x(i), height - bottom + 2, "×", anchor="middle", css="bad"))
            continue
        parts.append(f'<circle cx="{x(i):.1f}" cy="{y(s):.1f}" r="2" class="dot"/>')
    parts.append(_text(left, height - 6, "1"))
    parts.append(
        _text(
            width - right, height - 6, f"{len(seconds)} point{'s' if len(seconds) != 1 else ''}", anchor="end"
        )
    )
    return _svg(width, height, parts)


def paired_bars(bars: Sequence[Bar], width: int = 940) -> str:
    """Draw two bars per operator: before above after."""
    row, label, note = 34, 330, 120
    most = max((max(b.before_us, b.after_us) for b in bars), default=1.0) or 1.0
    scale = (width - label - note - 70) / most
    parts = []
    for i, bar in enumerate(bars):
        y = i * row + 4
        parts.append(_text(label - 8, y + 17, bar.label, anchor="end"))
        for value, offset, css in ((bar.before_us, 0, "before"), (bar.after_us, 13, "after")):
            parts.append(
                f'<rect x="{label}" y="{y + offset}" width="{max(1.0, value * scale):.1f}" '
                f'height="11" rx="2" class="{css}"/>'
            )
            parts.append(_text(label + value * scale + 6, y + offset + 10, f"{value:,.1f} us", css="small"))
        parts.append(_text(width - 4, y + 17, bar.note, anchor="end", css="small"))
    return _svg(width, len(bars) * row + 8, parts)


def stacked(rows: Sequence[tuple[str, Sequence[Slice]]], width: int = 940) -> str:
    """Draw one stacked bar per row, all on one scale; equal labels have equal colours."""
    labels = list(dict.fromkeys(share.label for _, shares in rows for share in shares))
    colours = {label: PALETTE[i] if i < len(PALETTE) else REST for i, label in enumerate(labels)}
    most = max((sum(s.value for s in shares) for _, shares in rows), default=1.0) or 1.0
    left, height = 80, 34
    scale = (width - left - 90) / most
    parts = []
    for i, (name, shares) in enumerate(rows):
        y, x = i * (height + 10) + 2, float(left)
        parts.append(_text(left - 10, y + 22, name, anchor="end"))
        for share in shares:
            wide = share.value * scale
            title = f"<title>{escape(share.label)}: {share.value:,.1f} us</title>"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(wide, 0.5):.1f}" height="{height}" '
                f'fill="{colours[share.label]}" stroke="Canvas">{title}</rect>'
            )
            x += wide
        parts.append(_text(x + 8, y + 22, f"{sum(s.value for s in shares):,.0f} us"))
    y = len(rows) * (height + 10) + 8
    x = float(left)
    for label in labels:
        wide = 24 + 7.2 * len(label)
        if x + wide > width:
            x, y = float(left), y + 20
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" fill="{colours[label]}"/>')
        parts.append(_text(x + 17, y + 11, label, css="small"))
        x += wide
    return _svg(width, y + 22, parts)


def _svg(width: int, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height:.0f}" width="{width}" height="{height:.0f}" role="img">'
        + "".join(parts)
        + "</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{css}">{escape(text)}</text>'


def _us(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:,.0f} us" if us >= 100 else f"{us:.1f} us"
