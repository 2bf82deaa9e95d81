"""Where channels come from: slices, gathers and concatenations of channels as one list.

Networks split channels, shuffle them and put them together again. Done one by one, each of these operators
copies whole tensors, mostly out of the packed layout and back. A route describes a value by the channels of
other values instead, and routes through routes are combined. Nothing is copied before a consumer asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from tvm import relax, tirx
from tvm.ir import Call

from builder.kernels.rewriter import constant_of, op_name, shape_of

OPERATORS: Final = ("relax.concat", "relax.strided_slice", "relax.take")


@dataclass(frozen=True, slots=True)
class Route:
    """A value `[N, C, H, W]` whose channels are those of other values.

    Attributes
    ----------
    sources
        The other values, `[N, any, H, W]`.
    picks
        For each channel, the number of a source and a channel of it.
    """

    sources: tuple[relax.Expr, ...]
    picks: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, call: Call, known: Mapping[relax.Expr, Route]) -> Route | None:
        """Return the route of a call, None if it does not only choose channels.

        Parameters
        ----------
        call
            A call of one of `OPERATORS`.
        known
            The routes of values before it.
        """
        if len(shape_of(call)) != 4:
            return None
        parts = list(call.args[0].fields) if isinstance(call.args[0], relax.Tuple) else [call.args[0]]
        if any(len(shape_of(part)) != 4 for part in parts):
            return None
        chosen = _chosen(call, [shape_of(part)[1] for part in parts])
        if chosen is None:
            return None
        sources: dict[relax.Expr, int] = {}
        picks = []
        for number, at in chosen:
            source, channel = parts[number], at
            before = known.get(source)
            if before is not None:
                origin, channel = before.picks[at]
                source = before.sources[origin]
            picks.append((sources.setdefault(source, len(sources)), channel))
        return cls(tuple(sources), tuple(picks))


def _chosen(call: Call, channels: list[int]) -> list[tuple[int, int]] | None:
    """Return for each channel of a call's result the number of an argument and a channel of it."""
    name = op_name(call)
    if name == "relax.concat":
        if int(call.attrs.axis) not in (1, -3):
            return None
        return [(number, channel) for number, count in enumerate(channels) for channel in range(count)]
    if name == "relax.take":
        indices = constant_of(call.args[1])
        if call.attrs.axis is None or int(call.attrs.axis) not in (1, -3) or indices is None:
            return None
        # As legalised: an index out of range takes the nearest channel.
        return [(0, int(channel)) for channel in np.clip(indices, 0, channels[0] - 1)]
    axes, begins, ends, *strides = (_integers(argument) for argument in call.args[1:])
    if axes not in ([1], [-3]) or len(begins) != 1 or len(ends) != 1 or strides not in ([], [[1]]):
        return None
    found = range(*slice(begins[0], ends[0]).indices(channels[0]))
    return [(0, channel) for channel in found] if len(found) == shape_of(call)[1] else None


def _integers(expr: relax.Expr) -> list[int]:
    """Return the integers of a tuple; an empty list if some are not known."""
    fields = list(expr.fields) if isinstance(expr, relax.Tuple) else []
    return [int(field) for field in fields] if all(isinstance(f, tirx.IntImm) for f in fields) else []
