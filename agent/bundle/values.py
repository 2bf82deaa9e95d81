"""Rules for single values of a manifest. Each raises `ValueError` if its rule is broken."""

from __future__ import annotations

import math
import re
from typing import Final

_WORD: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_SENTENCE: Final = re.compile(r"[ -~]{1,256}")


def word(name: str, value: str) -> None:
    """Check a short name, such as that of a CPU feature."""
    match(name, value, _WORD, "1 to 64 letters, digits, '.', '_', '+' and '-', first a letter or digit")


def sentence(name: str, value: str) -> None:
    """Check one line of text."""
    match(name, value, _SENTENCE, "1 to 256 printable ASCII characters")


def match(name: str, value: str, pattern: re.Pattern[str], expected: str) -> None:
    """Check that a text matches a pattern, which `expected` describes."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{name}: expected {expected}, got {value!r:.80}")


def not_negative(name: str, value: float) -> None:
    """Check that a number is finite and at least 0."""
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}: expected a finite number of at least 0, got {value}")


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Check that a value is one of its choices."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(choices)}, got {value!r:.80}")


def within(name: str, value: int, low: int, high: int) -> None:
    """Check that a number is within its range."""
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low} to {high}, got {value}")
