"""What a verb prints with `--json`."""

from __future__ import annotations

import json


def print_json(value: object) -> None:
    """Print a value as JSON, indented for people who look at it."""
    print(json.dumps(value, indent=2))
