"""The sizes at which a changing dimension is compiled.

The default is at most eight sizes: powers of two from the largest size down to its 32nd part, and 1.5 times
these, the largest first. So no request is computed at more than twice its size, and most at no more than 1.5
times. Several dimensions share the number of buckets that a bundle may have.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from agent.bundle.buckets import MAX_BUCKETS
from builder.errors import ShapeError

MAX_SIZES: Final = 8
# Smaller requests take little time in any case.
_SMALLEST_PART: Final = 32
# Ranges of up to so many sizes are compiled for each of them, if padding would change the answer.
MAX_EXACT: Final = 16
_SIZE: Final = re.compile(r"[0-9]{1,10}")

BUCKETS_HINT: Final = "write --buckets 16,64,128, or --buckets NAME=16,64,128 for one of several dimensions"


def ladder(low: int, high: int, dimensions: int = 1) -> tuple[int, ...]:
    """Return the sizes for a dimension, in increasing order."""
    limit = MAX_SIZES if dimensions == 1 else max(1, int(MAX_BUCKETS ** (1 / dimensions)))
    least = max(low, high // _SMALLEST_PART)
    halves = {high}
    power = 1
    while power < high:
        if power >= least:
            halves.add(power)
        power *= 2
    chosen = set(sorted(halves, reverse=True)[:limit])
    between = [3 * power // 4 for power in sorted(halves, reverse=True) if power % 4 == 0]
    for size in between:
        if len(chosen) == limit:
            break
        if size > min(chosen) and all(not 4 / 5 < size / other < 5 / 4 for other in chosen):
            chosen.add(size)
    return tuple(sorted(chosen))


def parse_buckets(text: str) -> dict[str, tuple[int, ...]]:
    """Read `"16,64,128"` or `"batch=1,4 sequence=16,64"`: sizes by dimension, "" for the only one.

    Raises
    ------
    ShapeError
        If the text is malformed or sizes are not positive.
    """
    found: dict[str, tuple[int, ...]] = {}
    for part in text.split():
        name, _, sizes = part.rpartition("=")
        numbers = sizes.split(",")
        if name in found or not all(_SIZE.fullmatch(n) and 0 < int(n) < 1 << 31 for n in numbers):
            raise ShapeError(f"expected sizes of buckets, got {part[:60]!r}", hint=BUCKETS_HINT)
        found[name] = tuple(sorted({int(number) for number in numbers}))
    if not found:
        raise ShapeError("expected sizes of buckets, got nothing", hint=BUCKETS_HINT)
    return found


def chosen_sizes(
    given: Sequence[int] | None, low: int, high: int, name: str, dimensions: int
) -> tuple[int, ...]:
    """Return the sizes for a dimension: the user's, with the upper bound added, or the default."""
    if given is None:
        return ladder(low, high, dimensions)
    for size in given:
        if not low <= size <= high:
            raise ShapeError(
                f"--buckets: expected sizes of {name} from {low} to {high}, got {size}",
                hint=f"give sizes within the bounds, or wider bounds for {name} in --input-shapes",
            )
    return tuple(sorted({*given, high}))
