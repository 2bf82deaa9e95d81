"""Pictures of a benchmark as SVG, drawn by hand: bars and labels need no library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#d1495b", "#30638e", "#7fb069", "#edae49", "#6b6b83", "#a37c40")
ROW_HEIGHT, GROUP_GAP, LEFT, WIDTH, TOP = 16, 14, 190, 860, 34


def latency(groups: Mapping[str, Mapping[str, float]], engines: Sequence[str]) -> str:
    """Bars of latency by engine, a group for each model; each group has a scale of its own.

    Parameters
    ----------
    groups
        Label -> engine -> milliseconds.
    engines
        Order and colours.
    """
    parts: list[str] = []
    y = TOP
    for i, engine in enumerate(engines):
        x = LEFT + i * 120
        parts.append(f'<rect x="{x}" y="10" width="10" height="10" fill="{COLOURS[i % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 14}" y="19">{escape(engine)}</text>')
    for label, times in groups.items():
        longest = max(times.values(), default=1.0)
        middle = y + ROW_HEIGHT * len(times) / 2 + 4
        parts.append(f'<text x="{LEFT - 10}" y="{middle:.0f}" text-anchor="end">{escape(label)}</text>')
        for i, engine in enumerate(engines):
            if engine not in times:
                continue
            width = (WIDTH - LEFT - 70) * times[engine] / longest
            colour = COLOURS[i % len(COLOURS)]
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{ROW_HEIGHT - 3}" fill="{colour}"/>'
            )
            parts.append(f'<text x="{LEFT + width + 5:.1f}" y="{y + 11}">{times[engine]:.1f} ms</text>')
            y += ROW_HEIGHT
        y += GROUP_GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
        + "".join(parts)
        + "</svg>\n"
    )
