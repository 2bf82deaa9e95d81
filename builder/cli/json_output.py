"""What a verb prints with `--json`."""

from __future__ import annotations

from agent.terminal import say_json


def print_json(value: object) -> None:
    """Print a value as JSON, indented for people who look at it."""
    say_json(value, indent=2)
