"""The rule by which an output's axis follows a dimension, from a few sizes.

Promises a rule that gives the right size for every size within the bounds, if any rule of `OutputAxis` with a
divisor up to `MAX_DIVIDE` does: while two rules remain that differ, the model is asked at the size that tells
most of them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from agent.bundle.buckets import OutputAxis
from builder.errors import ShapeError

# Strides of a network together: a detector's largest is 64, speech models' 320.
MAX_DIVIDE: Final = 512
# Rules that agree on a whole period at both ends of the bounds agree between them.
_WINDOW: Final = 2 * MAX_DIVIDE

Integers = npt.NDArray[np.int64]


def find_rule(
    like: OutputAxis, known: Mapping[int, int], bounds: tuple[int, int], at: Callable[[int], int]
) -> OutputAxis:
    """Find the rule of an axis.

    `like`: the axis; its rule is not read.
    `known`: size of the dimension -> size of the axis, at least two that differ.
    `bounds`: the smallest and the largest size of the dimension.
    """
    sizes = dict(known)
    low, high = bounds
    tried = np.union1d(
        np.arange(low, min(high, low + _WINDOW) + 1), np.arange(max(low, high - _WINDOW), high + 1)
    )
    rules = _rules(sizes)
    while True:
        for size, got in sizes.items():
            rules = rules[_values(rules, np.array([size]))[:, 0] == got]
        if not len(rules):
            listed = ", ".join(f"{got} at {like.dimension}={n}" for n, got in sorted(sizes.items())[:4])
            raise ShapeError(
                f"output '{like.tensor}': axis {like.axis} has sizes that no rule gives: {listed}",
                hint="give that dimension one size in --input-shapes",
            )
        ask = _best_question(rules, tried)
        if ask is None:
            multiply, add, divide, offset = (int(number) for number in rules[0])
            return OutputAxis(like.tensor, like.axis, like.dimension, multiply, add, divide, offset)
        sizes[ask] = at(ask)


def _values(rules: Integers, sizes: Integers) -> Integers:
    """Return what each rule (a row of multiply, add, divide, offset) gives for each size."""
    multiply, add, divide, offset = (rules[:, column, None] for column in range(4))
    values: Integers = (sizes + add) // divide * multiply + offset
    return np.maximum(values, 0)


def _best_question(rules: Integers, tried: Integers) -> int | None:
    """Return the size at which the rules differ most; None if they agree everywhere."""
    best, rest = None, len(rules)
    for start in range(0, len(tried), 64):  # in parts: there may be thousands of rules
        part = tried[start : start + 64]
        values = np.sort(_values(rules, part), axis=0)
        for column, size in enumerate(part):
            largest = int(np.unique(values[:, column], return_counts=True)[1].max())
            if largest < rest:
                best, rest = int(size), largest
        if best is not None and rest <= len(rules) // 2:
            break
    return best


def _rules(known: Mapping[int, int]) -> Integers:
    """Return rules that may give these sizes, the simplest first."""
    (low, first), (high, last) = min(known.items()), max(known.items())
    slope = (last - first) / (high - low)
    found = [np.zeros((0, 4), np.int64)]
    for divide in range(1, MAX_DIVIDE + 1):
        multiply = round(slope * divide)
        # A floor may add or take up to one part at each end.
        is_near = abs(slope * divide - multiply) * (high - low) <= multiply * divide
        if multiply < 1 or not is_near or (divide > 1 and divide % multiply):
            continue
        add = np.arange(divide)
        offset = last - (high + add) // divide * multiply
        rest = np.stack([np.full(divide, multiply), add, np.full(divide, divide), offset], axis=1)
        found.append(rest.astype(np.int64))
    return np.concatenate(found)
