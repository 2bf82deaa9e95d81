"""A question that needs a yes."""

from __future__ import annotations

import sys

from agent.terminal import prompt


def confirmed(question: str) -> bool:
    """Ask on a terminal; without one, the answer is no."""
    if not sys.stdin.isatty():
        return False
    prompt(question)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
