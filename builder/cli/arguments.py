"""Types of arguments that more than one verb takes; what they refuse is a usage error."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Read a whole number from 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text[:40]!r}")
    return number
