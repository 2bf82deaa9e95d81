"""The flag `--pad`: what the inputs of a model whose shapes change are padded with. Needs no compiler."""

from __future__ import annotations

import re
from typing import Final

from agent.bundle.buckets import CONSTANT, EDGE
from builder.errors import ShapeError

PAD_HINT: Final = 'write --pad "ids=1 audio=edge"'
_NUMBER: Final = re.compile(r"[+-]?\d{1,19}(\.\d{0,17})?", re.ASCII)


def parse_pads(text: str) -> dict[str, tuple[str, float]]:
    """Read `"ids=1 audio=edge"`: input name -> `constant` or `edge`, and the constant.

    Raises
    ------
    ShapeError
        If the text is malformed.
    """
    pads: dict[str, tuple[str, float]] = {}
    for part in text.split():
        name, _, value = part.rpartition("=")
        if not name or name in pads or (value != EDGE and not _NUMBER.fullmatch(value)):
            raise ShapeError(f"--pad: expected NAME=NUMBER or NAME=edge, got {part[:60]!r}", hint=PAD_HINT)
        pads[name] = (EDGE, 0.0) if value == EDGE else (CONSTANT, float(value))
    return pads
