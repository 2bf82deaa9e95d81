"""The terminal: the only writer to stdout and stderr of `edgebundle` and `edge-agent`.

Promises: a text that a model, a device, a broker or a file chose can neither control the terminal nor begin a
line of its own, and no spreadsheet takes it for a formula. Leaves to others: whether a text is worth a line,
and how long it may be.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import IO, Final, TypeAlias

Cell: TypeAlias = float | int | str | bool | None

# Some scripts need them between letters, and emoji are joined by one. They move nothing.
_JOINERS: Final = "\u200c\u200d"
_NUMBER: Final = re.compile(r"[+-]?(?:[\d.]+(?:[eE][+-]?\d+)?|inf)", re.ASCII)
# What begins a formula, also behind spaces, and in the wide forms of East Asian keyboards.
_FORMULAS: Final = tuple("=+-@＝＋－＠")


def printable(text: str) -> str:
    """Return a text as one line without control: any kind of space is a space, and the rest is `?`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in _JOINERS else " " if c.isspace() else "?" for c in text)


def say(*lines: object, file: IO[str] | None = None, flush: bool = False) -> None:
    """Print lines to stdout, or to another stream.

    Parameters
    ----------
    lines
        What to print, as `str` gives it: one line for each.
    file
        The stream; None means stdout.
    flush
        Whether a reader of the stream must have the lines at once.
    """
    print(*(printable(str(line)) for line in lines), sep="\n", file=file, flush=flush)


def say_text(text: object) -> None:
    """Print a text of several lines to stdout, in which no value of others has a line break."""
    say(*str(text).rstrip("\n").split("\n"))


def say_json(value: object, *, indent: int | None = None, file: IO[str] | None = None) -> None:
    """Print a value as JSON, on one line or indented, for a reader who must have it at once.

    A number that JSON does not have, such as NaN, is null.
    """
    text = json.dumps(finite(value), indent=indent, allow_nan=False)
    text = text.replace("\x7f", "\\u007f")  # the rest is escaped
    say(*text.split("\n"), file=file, flush=True)


def cell_of(value: Cell) -> Cell:
    """Return a cell of a CSV table that no spreadsheet takes for a formula: a model's file chose the text."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return value
    text = value.replace("\r", " ")  # would begin a row: before Python 3.13, `csv` puts no quotes around it
    return f"'{text}" if text.lstrip()[:1] in _FORMULAS and not _NUMBER.fullmatch(text) else text


def finite(value: object) -> object:
    """Return a value for JSON, with None for each number that JSON does not have, such as NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return list(map(finite, value)) if isinstance(value, list | tuple) else value


def note(*lines: object) -> None:
    """Print lines to stderr at once."""
    say(*lines, file=sys.stderr, flush=True)


def redraw(line: object = "") -> None:
    """Replace the unfinished line of stderr if that is a terminal; without an argument, clear it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{printable(str(line))}", end="", file=sys.stderr, flush=True)  # noqa: T201


def prompt(question: str) -> None:
    """Show a question on stderr, and leave the cursor behind it."""
    print(printable(question), end="", file=sys.stderr, flush=True)  # noqa: T201
