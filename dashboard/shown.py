"""Untrusted texts and numbers from the broker, bounded before they are stored or sent to a page.

The page shows every text as plain text, never as markup. Here, control characters and those that change the
direction of writing are replaced, and long texts are cut.
"""

from __future__ import annotations

import json
import math
from typing import Final

from agent.terminal import finite, printable

# A refusal's reason has 500 characters at most (`agent.wire.job`); names and versions are shorter.
MAX_CHARACTERS: Final = 500
# Larger numbers are mistakes: no counter of a device gets there, and JavaScript is exact up to here.
MAX_NUMBER: Final = 2.0**53


def shown(text: str | None, limit: int = MAX_CHARACTERS) -> str:
    """Return a text that is safe to show: at most `limit` characters, as `agent.terminal` prints them."""
    return printable((text or "")[:limit])


def as_json(document: object) -> str:
    """Return a document as JSON that every browser reads: a number such as NaN is null."""
    try:
        return json.dumps(document, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(finite(document), separators=(",", ":"), allow_nan=False)


def number(value: float | None) -> float | None:
    """Return a finite number of sensible size, or None."""
    if value is None or not math.isfinite(value) or abs(value) > MAX_NUMBER:
        return None
    return value
