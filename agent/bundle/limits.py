"""What a text or a number of a signed document may be."""

from __future__ import annotations

import re
from typing import Final

WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
SENTENCE: Final = re.compile(r"[ -~]{1,256}")
SHA256: Final = re.compile(r"[0-9a-f]{64}")


def match(name: str, value: str, pattern: re.Pattern[str]) -> None:
    """Raise ValueError if a text does not match all of a pattern."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{name} must match {pattern.pattern:.120}, not {value!r:.80}")


def within(name: str, value: int, low: int, high: int) -> None:
    """Raise ValueError if a number is not from `low` to `high`, both taken."""
    if not low <= value <= high:
        raise ValueError(f"{name} is from {low} to {high}, not {value}")
