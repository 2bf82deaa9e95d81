"""Draws memory, threads and file descriptors over time, and a year: what happened, and whether it served."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from PIL import Image, ImageDraw, ImageFont

from tests.nightly.soak.steady import Sample, SteadyResult
from tests.nightly.soak.timeline import Timeline

WIDTH, PANEL, LEFT, RIGHT, TOP, BOTTOM = 1000, 230, 80, 50, 34, 36
COLOURS: Final = {"agent": (209, 73, 91), "worker": (48, 99, 142)}
INK, GRID = (40, 40, 40), (225, 225, 225)
PANELS: Final = (
    ("resident memory, MiB", "rss_bytes", 1 / (1 << 20)),
    ("threads", "threads", 1.0),
    ("file descriptors", "descriptors", 1.0),
)


def draw(result: SteadyResult, path: Path) -> None:
    """Draw the samples of `result` as a PNG."""
    image = Image.new("RGB", (WIDTH, PANEL * len(PANELS)), "white")
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(15)
    for number, (title, what, scale) in enumerate(PANELS):
        _panel(pen, font, number * PANEL, title, what, scale, result)
    image.save(path)


def _panel(
    pen: ImageDraw.ImageDraw,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    top: int,
    title: str,
    what: str,
    scale: float,
    result: SteadyResult,
) -> None:
    values = [getattr(sample, what) * scale for sample in result.samples] or [0.0]
    highest = max(values) * 1.15 or 1.0
    longest_s = max(result.seconds, 1.0)
    high, low = top + TOP, top + PANEL - BOTTOM

    def place(sample: Sample) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * sample.at_s / longest_s
        return x, low - (low - high) * getattr(sample, what) * scale / highest

    pen.text((LEFT, top + 8), title, INK, font)
    for step in range(5):
        y = low - (low - high) * step / 4
        pen.line((LEFT, y, WIDTH - RIGHT, y), GRID)
        pen.text((LEFT - 8, y), f"{highest * step / 4:.3g}", INK, font, anchor="rm")
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / 4
        pen.text((x, low + 6), f"{longest_s * step / 240:.3g} min", INK, font, anchor="ma")
    for place_in_row, (process, colour) in enumerate(COLOURS.items()):
        samples: Sequence[Sample] = [sample for sample in result.samples if sample.process == process]
        if len(samples) > 1:
            pen.line([place(sample) for sample in samples], colour, 2)
        at_x = WIDTH - RIGHT - 150 + 80 * place_in_row
        pen.text((at_x, top + 8), process, colour, font)


ROW: Final = 22
SERVES, DARK, ABSENT, HAPPENS = (91, 163, 103), (209, 73, 91), (200, 200, 200), (48, 99, 142)


def draw_year(timeline: Timeline, path: Path) -> None:
    """Draw a year as a PNG: a row for each kind of event, one for the broker, and one for the device."""
    kinds = sorted({event.kind for event in timeline.events})
    height = TOP + ROW * (len(kinds) + 2) + BOTTOM
    image = Image.new("RGB", (WIDTH, height), "white")
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(13)
    left, length_s = 200, max(timeline.seconds, 1.0)

    def bar(row: int, began_s: float, ended_s: float, colour: tuple[int, int, int]) -> None:
        top = TOP + ROW * row + 4
        begin, end = (left + (WIDTH - left - RIGHT) * at / length_s for at in (began_s, ended_s))
        pen.rectangle((begin, top, max(end, begin + 1.5), top + ROW - 8), colour)

    pen.text((left, 8), "what happened, and whether the device served", INK, font)
    for row, kind in enumerate([*kinds, "broker away", "device serves"]):
        pen.text((left - 8, TOP + ROW * row + ROW / 2), kind, INK, font, anchor="rm")
        for event in timeline.events:
            if event.kind == kind:
                bar(row, event.began_s, event.began_s + event.lasted_s, HAPPENS)
    for began_s, ended_s in timeline.absences:
        bar(len(kinds), began_s, ended_s, ABSENT)
    last = len(kinds) + 1
    bar(last, 0.0, length_s, SERVES)
    for dark in timeline.darks:
        bar(last, dark.began_s, dark.ended_s, DARK)
    for began_s, ended_s in timeline.absences:
        bar(last, began_s, ended_s, ABSENT)
    for step in range(5):
        x = left + (WIDTH - left - RIGHT) * step / 4
        pen.text((x, height - BOTTOM + 8), f"{length_s * step / 240:.3g} min", INK, font, anchor="ma")
    image.save(path)
