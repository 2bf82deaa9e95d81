"""The name of the input that holds the length of caches that grow: it has their capacity."""

from __future__ import annotations

import re
from typing import Final

_LENGTH: Final = re.compile(r"edgebundle/cache/(\d{1,10})")


def length_input(capacity: int) -> str:
    """Return the name of the input; the output for the next run has `/next` behind it."""
    return f"edgebundle/cache/{capacity}"


def capacity_of(name: str) -> int | None:
    """Return the capacity of the caches whose length an input holds; None if it holds none."""
    match = _LENGTH.fullmatch(name)
    return None if match is None else int(match[1])


def length_state(capacity: int) -> str:
    """Return the state that holds the length of caches, as `builder.compiling.states` takes it."""
    name = length_input(capacity)
    return f"{name}:{name}/next"
