"""Changes to a parsed JSON document, for tables of documents that a reader must refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def put(*path: Any, to: Any) -> Callable[[Any], None]:
    """Return a change that puts a value at a place, such as `put("nodes", 2, "op", to="x")`."""

    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = to

    return change


def drop(*path: Any) -> Callable[[Any], None]:
    """Return a change that removes the value at a place."""

    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        del document[path[-1]]

    return change
