"""Progress that tells no more than a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

SILENT_S: Final = 2.0  # between two lines of progress


def now_and_then(progress: Callable[[str], None]) -> Callable[[str], None]:
    """Pass on a line only if the last one was `SILENT_S` ago."""
    last_s = time.monotonic()

    def report(text: str) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= SILENT_S:
            last_s = now_s
            progress(text)

    return report
