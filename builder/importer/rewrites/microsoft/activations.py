"""Activations of com.microsoft, some of them behind a bias.

Source: ONNX Runtime's operator documentation, ContribOperators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from numpy.typing import DTypeLike

from builder.importer.rewrites.replacement import Nodes, Replacement

# tanh's argument in the approximation of GELU: sqrt(2 / pi) (x + 0.044715 x^3).
_TANH_SCALE: Final = math.sqrt(2 / math.pi)
_TANH_CUBIC: Final = 0.044715


def gelu(new: Replacement, x: str, dtype: DTypeLike, to: str = "") -> str:
    """GELU by the error function: 0.5 x (1 + erf(x / sqrt(2)))."""
    error = new.op("Erf", new.op("Mul", x, new.constant(math.sqrt(0.5), dtype)))
    gate = new.op("Mul", new.op("Add", error, new.constant(1, dtype)), new.constant(0.5, dtype))
    return new.op("Mul", x, gate, to=to)


def fast_gelu(new: Replacement, x: str, dtype: DTypeLike, to: str = "") -> str:
    """GELU by tanh."""
    square = new.op("Mul", new.op("Mul", x, x), new.constant(_TANH_SCALE * _TANH_CUBIC, dtype))
    inner = new.op("Mul", x, new.op("Add", square, new.constant(_TANH_SCALE, dtype)))
    gate = new.op("Add", new.op("Tanh", inner), new.constant(1, dtype))
    return new.op("Mul", x, new.op("Mul", gate, new.constant(0.5, dtype)), to=to)


_PLAIN: Final = frozenset({"Relu", "Sigmoid", "Tanh", "Softplus", "Softsign"})
# Activation -> its attributes, in the order of the parameters that a fused node has.
_WITH_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "LeakyRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "Elu": ("alpha",),
    "ThresholdedRelu": ("alpha",),
}


def activate(
    new: Replacement, x: str, activation: str, parameters: Sequence[float], dtype: DTypeLike, to: str = ""
) -> str | None:
    """Add the activation of a fused node.

    `activation`: the operator's name; empty for none.
    `parameters`: its parameters, as many as the file has.
    `to`: the result's name, or empty for a new one.
    Result: the result's name, or None if the activation is not known.
    """
    if not activation:
        return new.op("Identity", x, to=to)
    if activation in _PLAIN:
        return new.op(activation, x, to=to)
    if activation in _WITH_PARAMETERS:
        names = _WITH_PARAMETERS[activation]
        return new.op(activation, x, to=to, **dict(zip(names, map(float, parameters), strict=False)))
    if activation == "Clip" and len(parameters) == 2:
        return new.op("Clip", x, *(new.constant(bound, dtype) for bound in parameters), to=to)
    if activation == "HardSwish":
        gate = new.op("HardSigmoid", x, alpha=1 / 6, beta=0.5)
        return new.op("Mul", x, gate, to=to)
    if activation in ("Gelu", "FastGelu"):
        return (gelu if activation == "Gelu" else fast_gelu)(new, x, dtype, to)
    return None


def gelu_node(new: Replacement) -> Nodes | None:
    """Gelu, BiasGelu: x, and for the latter a bias along the last axis."""
    return _biased(new, gelu)


def fast_gelu_node(new: Replacement) -> Nodes | None:
    """FastGelu: x, and optionally a bias along the last axis."""
    return _biased(new, fast_gelu)


def _biased(new: Replacement, form: Callable[[Replacement, str, DTypeLike, str], str]) -> Nodes | None:
    found = new.type_of(new.inputs[0])
    x = new.inputs[0]
    if bias := new.input(1):
        x = new.op("Add", x, bias)
    form(new, x, found.dtype, new.outputs[0])
    return new.nodes


def quick_gelu(new: Replacement) -> Nodes | None:
    """QuickGelu: x sigmoid(alpha x), by default with alpha = 1.702."""
    found = new.type_of(new.inputs[0])
    alpha = new.constant(float(new.attributes.get("alpha", 1.702)), found.dtype)
    gate = new.op("Sigmoid", new.op("Mul", new.inputs[0], alpha))
    return new.result("Mul", new.inputs[0], gate)
