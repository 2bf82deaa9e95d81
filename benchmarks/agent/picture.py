"""Draws the distribution of latencies, with logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 1400, 640
LEFT, RIGHT, TOP, BOTTOM = 110, 40, 90, 90
COLOURS: Final = ("#30638e", "#d1495b", "#7fb069", "#edae49")
FIRST_MS, LAST_MS = 0.1, 200.0
BINS_PER_DECADE: Final = 40
TICKS_MS: Final = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)
# Nagle's algorithm with delayed acknowledgements would cause a peak here.
DELAYED_MS: Final = 40.0


def draw(series: Mapping[str, Sequence[float]], path: Path, title: str) -> None:
    """Draw the latencies as a PNG.

    Parameters
    ----------
    series
        Label -> latencies in seconds.
    """
    decades = math.log10(LAST_MS / FIRST_MS)
    bins = round(decades * BINS_PER_DECADE)
    counts = {label: _count(values, bins) for label, values in series.items()}
    most = max((max(each) for each in counts.values()), default=1)
    top = 10 ** math.ceil(math.log10(max(most, 10)))

    def x_of(ms: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log10(ms / FIRST_MS) / decades

    def y_of(count: float) -> float:
        # Draw a single request a little above the axis: outliers must be visible.
        share = math.log10(max(count, 0.5) / 0.5) / math.log10(top / 0.5)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share

    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen = ImageDraw.Draw(image, "RGBA")
    small, large = ImageFont.load_default(20), ImageFont.load_default(26)
    pen.text((LEFT, 16), title, fill="black", font=large)
    for ms in TICKS_MS:
        pen.line([(x_of(ms), TOP), (x_of(ms), HEIGHT - BOTTOM)], fill="#dddddd")
        pen.text((x_of(ms), HEIGHT - BOTTOM + 8), f"{ms:g}", fill="black", font=small, anchor="ma")
    count = 1
    while count <= top:
        pen.line([(LEFT, y_of(count)), (WIDTH - RIGHT, y_of(count))], fill="#dddddd")
        pen.text((LEFT - 10, y_of(count)), f"{count}", fill="black", font=small, anchor="rm")
        count *= 10
    pen.text(
        (WIDTH / 2, HEIGHT - 34), "milliseconds, request to answer", fill="black", font=small, anchor="ma"
    )
    pen.line([(x_of(DELAYED_MS), TOP), (x_of(DELAYED_MS), HEIGHT - BOTTOM)], fill="#999999", width=2)
    pen.text((x_of(DELAYED_MS) - 6, TOP + 4), "40 ms: delayed ACK", fill="#777777", font=small, anchor="ra")
    for index, (label, each) in enumerate(counts.items()):
        colour = COLOURS[index % len(COLOURS)]
        for at, number in enumerate(each):
            if number:
                left = x_of(FIRST_MS * 10 ** (at / BINS_PER_DECADE))
                right = x_of(FIRST_MS * 10 ** ((at + 1) / BINS_PER_DECADE))
                pen.rectangle([left, y_of(number), right - 1, HEIGHT - BOTTOM], fill=f"{colour}90")
        pen.rectangle([LEFT + index * 300, 56, LEFT + index * 300 + 20, 76], fill=colour)
        pen.text((LEFT + index * 300 + 28, 54), label, fill="black", font=small)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.quantize(64).save(path, optimize=True)


def _count(values: Sequence[float], bins: int) -> list[int]:
    counts = [0] * bins
    for value in values:
        at = math.floor(math.log10(max(value * 1e3, FIRST_MS) / FIRST_MS) * BINS_PER_DECADE)
        counts[min(bins - 1, at)] += 1
    return counts
