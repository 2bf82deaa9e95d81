"""Parity of models that are computed in float16: block by block, then as a whole.

A float16 model differs from its reference by rounding, and a deep model by more than a shallow one. So the
reference computes each tensor from the tensors that *we* stored before it (as in `block_parity`). What is
left is the rounding of one kernel, whose size is known: a wrong bias, a missing limit, a channel whose scale
is off by five percent or a chunk of products that is left out stand out in one channel.

Which of our tensors is which of the model's is found by its numbers, without the padding of its channels. A
tensor that is not found belongs to the next block. One of ours is often like several of the model's, such as
those before and after a ReLU or a layer norm. It is taken for the one that it is like most; and if it agrees
with that, it is not a wrong form of another, provided that the outputs which are computed from it agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx

from builder.compiling.block_parity import Cuts
from builder.compiling.parity import run_as_defined
from builder.errors import ParityError

Array = npt.NDArray[Any]

# Of a tensor, in decibels. One kernel's rounding leaves 60, with Winograd's algorithm 46.
LEAST_OF_BLOCK: Final = 38.0
# Of a single channel. A channel with few numbers beside zero is compared with a part of its tensor.
LEAST_OF_CHANNEL: Final = 28.0
_FLOOR: Final = 0.25
# Of the model's outputs: less is not a model that anybody would use.
LEAST_OF_OUTPUT: Final = 20.0
# A tensor is taken for one of the model's if they agree to this.
_SIMILAR: Final = 10.0
# Another tensor is taken instead if it agrees better by this many dB.
_CLEARLY: Final = 3.0
# Tensors that agree to this many dB count as the same one.
_SAME: Final = 120.0
_AT_ONCE: Final = 1 << 16  # numbers of each tensor that are compared at once, as float64
_PACKED: Final = 5  # axes of `[N, C/b, H, W, b]`


@dataclass(frozen=True, slots=True)
class HalfBlock:
    """A tensor of the model that one of ours was found to be.

    `decibels`: signal to noise, of the tensor.
    `worst_channel`: the same, of the channel with the most noise.
    """

    name: str
    decibels: float
    worst_channel: float

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains the noise."""
        return self.decibels >= LEAST_OF_BLOCK and self.worst_channel >= LEAST_OF_CHANNEL


@dataclass(frozen=True, slots=True)
class HalfParity:
    """The comparison of a model.

    `outputs`: signal to noise of the outputs, as the whole model computes them: name -> decibels.
    """

    blocks: tuple[HalfBlock, ...]
    outputs: Mapping[str, float]

    def summary(self) -> str:
        """Return the comparison as one line."""
        worst = min(self.blocks, key=lambda block: block.decibels, default=None)
        noisiest = "" if worst is None else f", each by itself to at least {worst.decibels:.0f} dB"
        return (
            f"{len(self.blocks)} tensors agree in 16 bits{noisiest}; "
            f"the outputs agree to {min(self.outputs.values()):.0f} dB"
        )

    def check(self) -> None:
        """Refuse a model that differs by more than rounding.

        Raises `ParityError` if it does, or if an output is not finite where the reference is.
        """
        for block in self.blocks:
            if not block.is_rounding:
                raise ParityError(
                    f"tensor {block.name[:80]}: expected a signal-to-noise ratio of at least "
                    f"{LEAST_OF_BLOCK:g} dB, and {LEAST_OF_CHANNEL:g} dB in each channel, got "
                    f"{block.decibels:.1f} and {block.worst_channel:.1f} dB",
                    hint="compile it in float32, and please report it with the model",
                )
        for name, ratio in self.outputs.items():
            if not ratio >= LEAST_OF_OUTPUT:
                raise ParityError(
                    f"output {name[:80]}: expected a signal-to-noise ratio of at least "
                    f"{LEAST_OF_OUTPUT:g} dB in 16 bits, got {ratio:.1f} dB",
                    hint="this model amplifies rounding: compile it in float32, or with weights-fp16",
                )


def compare_halves(
    model: onnx.ModelProto,
    inputs: Mapping[str, Array],
    ours: Iterable[Array],
    outputs: Sequence[Array],
    reference: Sequence[Array],
) -> HalfParity:
    """Compare a compiled model with the reference.

    `ours`: the tensors that our kernels stored, in order, in whichever layout they are.
    Raises `ModelError` if ONNX Runtime refuses a part of the model.
    """
    graph = Cuts(model)
    known: dict[str, Array] = dict(inputs)
    stored = [np.asarray(array) for array in ours]
    names = [value.name for value in model.graph.output]
    values = _values(model, inputs)
    ends = {**inputs, **dict(zip(names, reference, strict=True))}
    likeness = _likeness(values | {name: each for name, each in ends.items() if _is_comparable(each)}, stored)
    most: dict[int, float] = {}
    for like in likeness.values():
        for place, ratio in like.items():
            most[place] = max(ratio, most.get(place, ratio))
    blocks: list[HalfBlock] = []
    doubtful: list[tuple[HalfBlock, Array]] = []
    is_another = False
    for name in values:
        like = likeness[name]
        clearest = [place for place, ratio in like.items() if ratio > most[place] - _CLEARLY]
        is_another |= len(clearest) < len(like)
        similar = [a for place in clearest if (a := _as(stored[place], values[name].shape)) is not None]
        if not similar:
            continue
        (expected,) = graph.compute([name], known)
        found = [(HalfBlock(name, decibels(a, expected), _worst_channel(a, expected)), a) for a in similar]
        block, own = max(found, key=lambda each: (each[0].is_rounding, each[0].decibels))
        if block.is_rounding:
            blocks.append(block)
            known[name] = own
        else:
            doubtful.append((block, own))
    agreed = [known[block.name] for block in blocks]
    wrong = [block for block, own in doubtful if not any(_is_the_same(own, each) for each in agreed)]
    if is_another or len(wrong) < len(doubtful):
        # One of ours was like two of the model's. If a kernel reads it as the wrong one, an output shows it.
        computed = graph.compute(names, known)
        wrong += [
            HalfBlock(name, decibels(a, b), _worst_channel(a, b))
            for name, a, b in zip(names, outputs, computed, strict=True)
            if b.dtype.kind == "f"
        ]
    blocks += wrong
    ratios = {n: decibels(a, b) for n, a, b in zip(names, outputs, reference, strict=True)}
    return HalfParity(tuple(blocks), ratios)


def _likeness(values: Mapping[str, Array], stored: Sequence[Array]) -> dict[str, dict[int, float]]:
    """Return how much our tensors are like each of the model's: name -> place among ours -> decibels.

    Those that are not similar are left out.
    """
    names_of: dict[tuple[int, ...], list[str]] = {}
    for name, value in values.items():
        names_of.setdefault(value.shape, []).append(name)
    likeness: dict[str, dict[int, float]] = {name: {} for name in values}
    for shape, names in names_of.items():
        ours = {place: own for place, array in enumerate(stored) if (own := _as(array, shape)) is not None}
        if not ours:
            continue
        ratios = _ratios([*ours.values()], [values[name] for name in names])
        for name, row in zip(names, ratios, strict=True):
            found = {place: float(ratio) for place, ratio in zip(ours, row, strict=True)}
            likeness[name] = {place: ratio for place, ratio in found.items() if ratio >= _SIMILAR}
    return likeness


def _ratios(ours: Sequence[Array], theirs: Sequence[Array]) -> Array:
    """Return `decibels` of each of `ours`, columns, against each of `theirs`, rows; at most `_SAME`.

    The noise is `|a|^2 + |b|^2 - 2 a b`, so that one product of matrices has all pairs. What is not finite
    counts as 0: a tensor in which a fault makes some NaN is still found, and then refused.
    """
    products = np.zeros((len(theirs), len(ours)))
    own, signal = np.zeros(len(ours)), np.zeros((len(theirs), 1))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        for start in range(0, theirs[0].size, _AT_ONCE):
            a, b = (
                np.array([each.ravel()[start : start + _AT_ONCE] for each in side], np.float64)
                for side in (ours, theirs)
            )
            a[~np.isfinite(a)], b[~np.isfinite(b)] = 0, 0
            products += b @ a.T
            own += np.square(a).sum(axis=1)
            signal += np.square(b).sum(axis=1, keepdims=True)
        noise = np.maximum(own + signal - 2 * products, signal * 10 ** (-_SAME / 10))
        return 10 * np.log10(signal / noise)


def decibels(ours: Array, theirs: Array) -> float:
    """Return the ratio of a signal to its noise; negative infinity if one side has an infinity or NaN."""
    signal, noise = _signal_and_noise(ours, theirs)
    return _ratio(float(np.square(signal).sum()), float(np.square(noise).sum()))


def _signal_and_noise(ours: Array, theirs: Array) -> tuple[Array, Array]:
    """Return the reference's numbers, and how far ours are from them; 0 and 0 where neither is finite."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    both = ~np.isfinite(b) & ((a == b) | (np.isnan(a) & np.isnan(b)))
    a[both], b[both] = 0, 0
    with np.errstate(invalid="ignore"):
        return b, a - b


def _ratio(signal: float, noise: float) -> float:
    """Return a ratio of squares in decibels."""
    if noise == 0:
        return math.inf
    if not math.isfinite(signal) or not math.isfinite(noise) or signal == 0:
        return -math.inf
    return 10 * math.log10(signal / noise)


def _worst_channel(ours: Array, theirs: Array) -> float:
    """Return the ratio of the noisiest channel; axis 1 counts channels, for matrices the last one."""
    axis = 1 if theirs.ndim >= 4 else theirs.ndim - 1
    rest = tuple(a for a in range(theirs.ndim) if a != axis)
    if not theirs.size or np.prod([theirs.shape[a] for a in rest]) < 8:
        return float("inf")
    b, difference = _signal_and_noise(ours, theirs)
    noise = np.square(difference).mean(axis=rest)
    signal = np.maximum(np.square(b).mean(axis=rest), _FLOOR**2 * np.square(b).mean())
    return min(_ratio(float(s), float(n)) for s, n in zip(signal, noise, strict=True))


def _values(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return the float32 tensors inside a model, in its order."""
    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    ends = {value.name for value in model.graph.output}
    names = [name for node in model.graph.node for name in node.output if name]
    del tapped.graph.output[:]
    tapped.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    values = dict(zip(names, run_as_defined(tapped, inputs), strict=True))
    return {name: value for name, value in values.items() if name not in ends and _is_comparable(value)}


def _is_comparable(value: Array) -> bool:
    return bool(value.dtype == np.float32 and value.ndim > 1 and value.any())


def _as(array: Array, shape: tuple[int, ...]) -> Array | None:
    """Return a tensor of ours in the model's shape; None if it has another number of elements."""
    if array.dtype.kind != "f":
        return None
    if array.ndim == _PACKED and len(shape) == _PACKED - 1:
        n, blocks, height, width, block = array.shape
        whole, channels = blocks * block, shape[1]
        if (n, height, width) == (shape[0], *shape[2:]) and whole - block < channels <= whole:
            plain = array.transpose(0, 1, 4, 2, 3).reshape(n, whole, height, width)
            return np.ascontiguousarray(plain[:, :channels], np.float32)
    return array.reshape(shape).astype(np.float32) if array.size == np.prod(shape) else None


def _is_the_same(a: Array, b: Array) -> bool:
    """Whether two of our tensors are one, or copies that were rounded."""
    return a.size == b.size and decibels(a.ravel(), b.ravel()) >= LEAST_OF_BLOCK
