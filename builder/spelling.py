"""Guess what a misspelt word, or the name of a file, was meant to be."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Final

_LONGEST: Final = 80  # of a word that is compared: comparing takes quadratic time
READABLE: Final = "see with `ls -l` that it is there, and that you may read it"
_MOST_FILES: Final = 2000  # of a folder; comparing each takes some ten microseconds


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that is most like `word`, None if none is like it."""
    words = {each.lower(): each for each in known}
    found = get_close_matches(word[:_LONGEST].lower(), words, n=1, cutoff=0.6)
    return words[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str) -> str:
    """Return a hint that names the known word that is most like `word`, or the hint `otherwise`."""
    found = closest(word, known)
    return otherwise if found is None else f"did you mean {found}? Otherwise {otherwise}"


def similar_file(path: str | os.PathLike[str], *, otherwise: str = READABLE) -> str:
    """Return a hint for a path at which nothing is: the file of that folder whose name is most like it.

    Parameters
    ----------
    path
        What the user gave.
    otherwise
        The hint if there is something, or if no name there is like it.
    """
    wanted = Path(path)
    try:
        if wanted.exists():
            return otherwise
        names = [each.name for each in itertools.islice(wanted.parent.iterdir(), _MOST_FILES)]
    except (OSError, ValueError):  # no such folder; a name that is too long, or with a null character
        return otherwise
    found = closest(wanted.name, names)
    return otherwise if found is None else f"did you mean {wanted.parent / found}?"
