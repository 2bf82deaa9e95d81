"""Texts of agents that are safe to print: an agent must not control the terminal, nor fill it."""

from __future__ import annotations

from typing import Final

from agent import terminal

MAX_CHARACTERS: Final = 200


def printable(text: str) -> str:
    """Return the first `MAX_CHARACTERS` of a text, as `agent.terminal` prints them."""
    return terminal.printable(text[:MAX_CHARACTERS])
