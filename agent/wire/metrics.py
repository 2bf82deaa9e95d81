"""The metrics document: one flat JSON object, each key a sample's name and labels in Prometheus' notation."""

from __future__ import annotations

import math
from collections.abc import Mapping

from agent.errors import FormatError
from agent.wire import document


def format_metrics(values: Mapping[str, float]) -> bytes:
    """Write the document; NaN and infinity, which JSON does not have, are left out."""
    return document.encode({key: value for key, value in values.items() if math.isfinite(value)})


def parse_metrics(raw: bytes) -> Mapping[str, float]:
    """Read the document: printable names and finite numbers.

    Raises
    ------
    EndlessDataError
        If it is too long.
    FormatError
        If it is anything else.
    """
    values: dict[str, float] = {}
    for name, value in document.parse_object(raw, "the metrics document").items():
        number = document.number(value)
        if number is None:
            raise FormatError(
                f"metric {document.shown(name)}: expected a number, got {document.shown(value)}"
            )
        if not name.isprintable():
            raise FormatError(f"expected a printable metric name, got {document.shown(name)}")
        values[name] = number
    return values
