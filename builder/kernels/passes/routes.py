"""Where channels come from: slices, gathers and concatenations of channels as one list.

Networks split channels, shuffle them and put them together again, and make pixels of them. Done one by one,
each of these operators copies whole tensors, mostly out of the packed layout and back. A route describes a
value by the channels of other values instead, and routes through routes are combined. Nothing is copied
before a consumer asks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from tvm import relax
from tvm.ir import Call

from builder.kernels.rewriter import constant_of, integers_of, op_name, shape_of
from builder.kernels.spaces.channels import Pick, Spread


@dataclass(frozen=True, slots=True)
class Route:
    """A value `[N, C, H, W]` whose channels are those of other values.

    `sources`: the other values, `[N, any, H, W]`.
    `picks`: for each channel, the number of a source and a channel of it; a list for each phase of `spread`.
    `spread`: how channels become pixels; None if the value has the pixels of the sources.
    """

    sources: tuple[relax.Expr, ...]
    picks: tuple[tuple[Pick, ...], ...]
    spread: Spread | None = None

    @classmethod
    def of(
        cls, call: Call, known: Mapping[relax.Expr, Route], bound: Mapping[relax.Expr, Call]
    ) -> Route | None:
        """Return the route of a call, None if it does not only move channels.

        `call`: a concatenation, a slice, a choice or a reshape.
        """
        if len(shape_of(call)) != 4:
            return None
        if op_name(call) == "relax.reshape":
            return cls._spread(call, known, bound)
        parts = list(call.args[0].fields) if isinstance(call.args[0], relax.Tuple) else [call.args[0]]
        if any(len(shape_of(part)) != 4 for part in parts):
            return None
        if (cut := cls._cut(call, known)) is not None:
            return cut
        chosen = _chosen(call, [shape_of(part)[1] for part in parts])
        return None if chosen is None else cls._through(known, parts, [chosen])

    def over(self, made: Mapping[relax.Var, Route]) -> Route:
        """Return the same route with values that exist already in place of their sources.

        A layer of DenseNet reads a concatenation of all layers before, and so does the layer before it. So
        each is a concatenation of two: the one before, and one more layer.

        `made`: values and their routes, without spread.
        """
        if len(self.picks) != 1:
            return self
        own = [(self.sources[number], channel) for number, channel in self.picks[0]]
        # By where they begin, the longest first.
        known: dict[tuple[relax.Expr, int], list[tuple[relax.Var, list[tuple[relax.Expr, int]]]]] = {}
        for value, route in sorted(made.items(), key=lambda item: -len(item[1].picks[0])):
            if len(route.sources) > 1:
                picked = [(route.sources[number], channel) for number, channel in route.picks[0]]
                known.setdefault(picked[0], []).append((value, picked))
        sources: dict[relax.Expr, int] = {}
        picks: list[Pick] = []
        at = 0
        while at < len(own):
            value, channels = own[at][0], [own[at][1]]
            for other, picked in known.get(own[at], ()):
                if own[at : at + len(picked)] == picked:
                    value, channels = other, list(range(len(picked)))
                    break
            number = sources.setdefault(value, len(sources))
            picks += [(number, channel) for channel in channels]
            at += len(channels)
        return Route(tuple(sources), (tuple(picks),), self.spread)

    @classmethod
    def _through(
        cls,
        known: Mapping[relax.Expr, Route],
        parts: Sequence[relax.Expr],
        chosen: Sequence[Sequence[Pick]],
        spread: Spread | None = None,
    ) -> Route:
        """Return the route to channels of `parts`, through the routes of `parts` if they have any."""
        sources: dict[relax.Expr, int] = {}

        def pick(number: int, at: int) -> Pick:
            source, channel = parts[number], at
            before = known.get(source)
            if before is not None and before.spread is None:
                origin, channel = before.picks[0][at]
                source = before.sources[origin]
            return sources.setdefault(source, len(sources)), channel

        picks = tuple(tuple(pick(*each) for each in phase) for phase in chosen)
        return cls(tuple(sources), picks, spread)

    @classmethod
    def _spread(
        cls, call: Call, known: Mapping[relax.Expr, Route], bound: Mapping[relax.Expr, Call]
    ) -> Route | None:
        """Return the route of channels that become pixels, as in ONNX's DepthToSpace.

        It is a reshape of `[N, C * s * t, H, W]` to `[N, ..., H, W]`, with C, s and t in any order, a
        transpose to `[N, C, H, s, W, t]`, and a reshape to `[N, C, H * s, W * t]`.
        """
        transpose = bound.get(call.args[0])
        view = bound.get(transpose.args[0]) if transpose is not None and transpose.args else None
        if transpose is None or view is None or op_name(transpose) != "relax.permute_dims":
            return None
        if op_name(view) != "relax.reshape" or len(shape_of(view.args[0])) != 4 or len(shape_of(view)) != 6:
            return None
        n, *inner, h, w = shape_of(view)
        axes = [int(axis) for axis in transpose.attrs.axes or ()]
        own = [axes[place] for place in (1, 3, 5)] if len(axes) == 6 else []
        if sorted(own) != [1, 2, 3] or [axes[place] for place in (0, 2, 4)] != [0, 4, 5]:
            return None
        order = np.arange(math.prod(inner)).reshape(inner).transpose([axis - 1 for axis in own])
        channels, s, t = order.shape
        if shape_of(call) != (n, channels, h * s, w * t) or shape_of(view.args[0])[2:] != (h, w):
            return None
        chosen = [[(0, int(c)) for c in order[:, i, j]] for i in range(s) for j in range(t)]
        return cls._through(known, [view.args[0]], chosen, Spread((s, t), (0, 0), (h * s, w * t)))

    @classmethod
    def _cut(cls, call: Call, known: Mapping[relax.Expr, Route]) -> Route | None:
        """Return the route of a slice of a larger image's pixels, None if `call` is no such slice."""
        before = known.get(call.args[0])
        if op_name(call) != "relax.strided_slice" or before is None or before.spread is None:
            return None
        axes, begins, ends, *strides = (integers_of(argument) for argument in call.args[1:])
        if sorted(axes) != [2, 3] or any(set(each) != {1} for each in strides):
            return None
        found = {
            axis: slice(b, e).indices(shape_of(call.args[0])[axis])
            for axis, b, e in zip(axes, begins, ends, strict=True)
        }
        first = [found[axis][0] + old for axis, old in zip((2, 3), before.spread.cut, strict=True)]
        extents = shape_of(call)[2:]
        if tuple(found[axis][1] - found[axis][0] for axis in (2, 3)) != extents:
            return None
        return replace(
            before, spread=Spread(before.spread.strides, (first[0], first[1]), (extents[0], extents[1]))
        )


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
    axes, begins, ends, *strides = (integers_of(argument) for argument in call.args[1:])
    if axes not in ([1], [-3]) or len(begins) != 1 or len(ends) != 1 or strides not in ([], [[1]]):
        return None
    found = range(*slice(begins[0], ends[0]).indices(channels[0]))
    return [(0, channel) for channel in found] if len(found) == shape_of(call)[1] else None
