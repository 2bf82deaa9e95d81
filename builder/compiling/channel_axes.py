"""Which axis of an output has the channels of the convolution that made it.

Promises an axis only where the graph shows it: behind the last convolution are operators that work
element by element, and transpositions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

# Operator -> the axis of its channels, by the names of ONNX and of TensorFlow Lite.
_CHANNELS: Final = {
    **dict.fromkeys(("Conv", "ConvTranspose", "QLinearConv", "BatchNormalization"), 1),
    **dict.fromkeys(("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV"), 3),
}
_TRANSPOSE: Final = "transpose"
# By their names in small letters, without underscores.
_ELEMENTWISE: Final = re.compile(
    "add|cast|clip|dequantize(linear)?|div|elu|gelu|hardsigmoid|hardswish|identity|leakyrelu|logistic|mul|prelu|"
    "quantize(linear)?|relu6?|sigmoid|silu|softplus|sub|swish|tanh"
)
# Between an output and its convolution; activations are written with a few operators.
_MOST_STEPS: Final = 64


class Made(NamedTuple):
    """The operator that makes a value: its name, its inputs, and how it permutes axes, if that is known."""

    operator: str
    inputs: Sequence[str]
    permutation: Sequence[int] = ()


def channel_axis(output: str, makers: Callable[[str], Made | None]) -> int | None:
    """Return the axis of a map of four dimensions that has the channels, or None if it is not known.

    `makers`: returns what makes a value; None for inputs and constants.
    """
    name = output
    permutations: list[Sequence[int]] = []
    for _ in range(_MOST_STEPS):
        made = makers(name)
        if made is None:
            return None
        if made.operator in _CHANNELS:
            axis = _CHANNELS[made.operator]
            for permutation in reversed(permutations):
                axis = list(permutation).index(axis)
            return axis
        kind = made.operator.replace("_", "").lower()
        if kind == _TRANSPOSE:
            if sorted(made.permutation) != [0, 1, 2, 3]:
                return None
            permutations.append(made.permutation)
        elif not _ELEMENTWISE.fullmatch(kind):
            return None
        computed = next((each for each in made.inputs if makers(each) is not None), None)
        if computed is None:
            return None
        name = computed
    return None
