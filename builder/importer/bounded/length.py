"""The length of an axis that is only known at run time, and small integer tensors made of such lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Length:
    """A length that is computed at run time.

    `name`: the value in the graph that holds it, INT64 of shape [1]; equal names are equal lengths.
    `capacity`: its largest value: the extent of the padded axis.
    """

    name: str
    capacity: int


# A dimension, or an element of a shape.
Entry: TypeAlias = int | Length
