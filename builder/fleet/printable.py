"""Texts of agents that are safe to print: an agent must not control the terminal, nor fill it."""

from __future__ import annotations

from typing import Final

MAX_CHARACTERS: Final = 200


def printable(text: str) -> str:
    """Return the first `MAX_CHARACTERS` of a text, with `?` for what is not printable."""
    return "".join(character if character.isprintable() else "?" for character in text[:MAX_CHARACTERS])
