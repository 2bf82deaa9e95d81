"""The block of MobileNetV3 and EfficientNet: an inverted residual whose channels may be gated.

The gate (squeeze and excitation, Hu et al. 2018) multiplies each channel by a number that two small layers
compute from the means of all channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

from benchmarks.architectures.network import Network

# He's scale assumes that a ReLU halves the variance, but none follows the linear bottleneck.
PROJECTION_GAIN: Final = 0.7

Activation: TypeAlias = Callable[[Network, str, str], str]


@dataclass(frozen=True, slots=True)
class Gate:
    """The gate of a block.

    Attributes
    ----------
    channels
        Channels between its two layers.
    inner, outer
        The activations after the first and the second layer.
    gain
        Of the convolution after it.
    """

    channels: int
    inner: Activation
    outer: Activation
    gain: float


@dataclass(frozen=True, slots=True)
class Block:
    """An inverted residual.

    Attributes
    ----------
    inward, width, outward
        Channels of its input, of its depthwise convolution, and of its output.
    kernel, stride
        Of the depthwise convolution.
    activate
        The activation after all convolutions but the last.
    gate
        The gate of the depthwise convolution's result, None if there is none.
    """

    inward: int
    width: int
    outward: int
    kernel: int
    stride: int
    activate: Activation
    gate: Gate | None


def inverted_residual(net: Network, x: str, scope: str, block: Block) -> str:
    """Append a block; return its output."""
    shortcut, layer = x, 0

    def normalised(y: str, channels: int, gain: float = 1.0) -> str:
        return net.batch_norm(y, f"{scope}.{layer}.1", channels, gain)

    if block.width != block.inward:
        x = net.conv(x, f"{scope}.{layer}.0", (block.inward, block.width), 1)
        x = block.activate(net, normalised(x, block.width), f"/{scope}.{layer}.2")
        layer += 1
    x = net.conv(
        x,
        f"{scope}.{layer}.0",
        (block.width, block.width),
        block.kernel,
        stride=block.stride,
        groups=block.width,
    )
    x = block.activate(net, normalised(x, block.width), f"/{scope}.{layer}.2")
    layer += 1
    if block.gate is not None:
        x = _gated(net, x, f"{scope}.{layer}", block.width, block.gate)
        layer += 1
    x = net.conv(x, f"{scope}.{layer}.0", (block.width, block.outward), 1)
    x = normalised(x, block.outward, PROJECTION_GAIN if block.gate is None else block.gate.gain)
    if block.stride == 1 and block.inward == block.outward:
        x = net.node("Add", x, shortcut, scope=f"/{scope}")
    return x


def _gated(net: Network, x: str, scope: str, channels: int, gate: Gate) -> str:
    y = net.node("GlobalAveragePool", x, scope=f"/{scope}/avgpool")
    y = net.conv(y, f"{scope}.fc1", (channels, gate.channels), 1, bias=True)
    y = gate.inner(net, y, f"/{scope}/activation")
    y = net.conv(y, f"{scope}.fc2", (gate.channels, channels), 1, bias=True)
    return net.node("Mul", gate.outer(net, y, f"/{scope}/scale_activation"), x, scope=f"/{scope}")


def relu(net: Network, x: str, scope: str) -> str:
    """Append a ReLU."""
    return net.node("Relu", x, scope=scope)


def hard_swish(net: Network, x: str, scope: str) -> str:
    """Append a hard swish, as PyTorch exports it from opset 14 on."""
    return net.node("HardSwish", x, scope=scope)


def hard_sigmoid(net: Network, x: str, scope: str) -> str:
    """Append PyTorch's hard sigmoid, `clip(x / 6 + 1 / 2, 0, 1)`."""
    return net.node("HardSigmoid", x, scope=scope, alpha=1 / 6, beta=0.5)


def sigmoid(net: Network, x: str, scope: str) -> str:
    """Append a sigmoid."""
    return net.node("Sigmoid", x, scope=scope)


def silu(net: Network, x: str, scope: str) -> str:
    """Append `x * sigmoid(x)`, as PyTorch exports it."""
    return net.node("Mul", x, net.node("Sigmoid", x, scope=scope), scope=scope)
