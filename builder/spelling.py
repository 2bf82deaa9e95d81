"""Guess what a misspelt word was meant to be."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

_LONGEST: Final = 80  # of a word that is compared: comparing takes quadratic time


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most like `word`, None if none is like it."""
    words = {each.lower(): each for each in known}
    found = get_close_matches(word[:_LONGEST].lower(), words, n=1, cutoff=0.6)
    return words[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str) -> str:
    """Return a hint that names the known word that is most like `word`, or the hint `otherwise`."""
    found = closest(word, known)
    return otherwise if found is None else f"did you mean {found}? Otherwise {otherwise}"
