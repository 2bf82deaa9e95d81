"""How one of our tensors agrees with a quantised tensor of the model.

Layouts and byte types of kernels are their own: a tensor of ours is plain or packed, in either byte type,
dequantised or not. It is read in the form and layout that is closest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Floats = npt.NDArray[np.float64]

BYTES: Final = ("uint8", "int8")
WORDS: Final = ("uint16", "int16")
# How far from halfway between two steps, in steps, a number may be that is rounded to the other one.
HALFWAY: Final = 0.01
# 65536 steps are so fine that rounding of float32 moves a number by some of them: 1e-4 of the range.
STEPS_OF_WORDS: Final = 6.5
# The largest share of other differences, and how many a small tensor may have: a tensor that was rounded
# inside a kernel, where it cannot be compared, may have been rounded to the other step there.
LARGEST_SHARE: Final = 1e-4
FEWEST: Final = 2
# In a tensor of few numbers, fewer may be steps away.
_MOST_UNLIKE: Final = 0.5
# Differences up to this many steps count as close: of bytes, and of 16-bit words.
_NEAR: Final = 1.5
_NEAR_OF_WORDS: Final = 2 * STEPS_OF_WORDS
_PACKED: Final = 5  # axes of `[N, C/b, H, W, b]`


@dataclass(frozen=True, slots=True)
class Block:
    """A tensor of bytes and how it agrees with the reference, which computed it from our tensors.

    `share`: the share of elements that differ.
    `unexplained`: the share of those that differ and are not halfway between two steps.
    `largest`: the largest difference in steps of its scale.
    `near`: how many steps of its scale are near.
    """

    name: str
    share: float
    unexplained: float
    largest: float
    elements: int
    near: float = _NEAR

    @property
    def is_rounding(self) -> bool:
        """Whether the difference is explained by rounding.

        Of a tensor of one number or two, `FEWEST` forgives all: then they must be near. A NaN, whose distance
        is infinite, is never rounding.
        """
        if math.isinf(self.largest) or self.unexplained > max(LARGEST_SHARE, FEWEST / self.elements):
            return False
        return self.unexplained < _MOST_UNLIKE or self.largest <= self.near


def is_halfway(source: Array, dtype: str, scale: Floats) -> npt.NDArray[np.bool_] | bool:
    """Return where numbers are halfway between two steps of `dtype`; nowhere without one constant scale."""
    if scale.size != 1 or dtype not in BYTES:
        return False
    steps = source.astype(np.float64) / scale.item()
    halfway: npt.NDArray[np.bool_] = np.abs(steps - np.floor(steps) - 0.5) <= HALFWAY
    return halfway


def block_of(name: str, steps: Floats, halfway: npt.NDArray[np.bool_] | bool, dtype: str) -> Block:
    """Return how a tensor of type `dtype` agrees that differs by `steps`, given where a tie is possible.

    A step that is not a number is infinitely far.
    """
    if not steps.size:
        return Block(name, 0.0, 0.0, 0.0, 1)
    distance = np.where(np.isnan(steps), np.inf, np.abs(steps))
    differs = distance > 0.5
    is_word = dtype in WORDS
    unexplained = distance > STEPS_OF_WORDS if is_word else differs & ~(halfway & (distance < 1.5))
    return Block(
        name,
        float(differs.mean()),
        float(unexplained.mean()),
        float(distance.max()),
        int(steps.size),
        _NEAR_OF_WORDS if is_word else _NEAR,
    )


@dataclass(frozen=True, slots=True)
class Step:
    """A tensor that a kernel of ours computed.

    `array`: the tensor, in any layout.
    `nodes`: names of the model's nodes that the kernel computes; none if they are not known.
    """

    array: Array
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers that a quantised tensor may have.

    `scale`, `zero`: its parameters; empty if they are not constant.
    `dtype`: of its bytes.
    `is_real`: whether the tensor has real numbers, `(bytes - zero) * scale`.
    """

    scale: Floats
    zero: Floats
    dtype: str
    is_real: bool = False

    @property
    def is_one(self) -> bool:
        """Whether all numbers have the same scale and zero point."""
        return self.scale.size == 1 and self.zero.size == 1

    def steps_of(self, values: Array) -> Floats:
        """Return a tensor of the model in steps."""
        wide = values.astype(np.float64)
        return wide / (self.scale.item() or 1.0) + self.zero.item() if self.is_real else wide

    def values_of(self, steps: Floats) -> Array:
        """Return the tensor of the model that has these steps."""
        info = np.iinfo(self.dtype)
        whole = np.clip(np.rint(np.nan_to_num(steps)), info.min, info.max)
        if not self.is_real:
            return whole.astype(self.dtype)
        offset = (whole - self.zero.item()).astype(np.float32)
        return np.asarray(offset * np.float32(self.scale.item()), np.float32)

    def equals(self, other: Grid) -> bool:
        """Whether two grids are the same."""
        return (self.dtype, self.is_real) == (other.dtype, other.is_real) and all(
            np.array_equal(a, b) for a, b in ((self.scale, other.scale), (self.zero, other.zero))
        )


@dataclass(frozen=True, slots=True)
class Match:
    """One of our tensors, read as a tensor of the model.

    `mean`: how far it is on average, in steps.
    `own`: its numbers in the model's layout and datatype.
    `block`: how it agrees.
    """

    mean: float
    own: Array
    block: Block


def read_as(
    array: Array, name: str, expected: Array, halfway: npt.NDArray[np.bool_] | bool, grid: Grid
) -> Match | None:
    """Read one of our tensors as a tensor of the model, in the form and layout that is closest.

    `name`, `expected`: the tensor in the model, and what the reference computes.
    `halfway`: where its number is halfway between two steps.
    Result: None if ours cannot be that tensor.
    """
    if not _may_be(array.shape, expected.shape):
        return None
    wide = grid.steps_of(expected)
    best: tuple[float, Floats] | None = None
    for form in _forms(array, grid):
        for plain in _unpacked(form, expected.shape):
            mean = _mean(np.abs(plain - wide))
            if best is None or mean < best[0]:
                best = mean, plain
    if best is None:
        return None
    mean, plain = best
    return Match(mean, grid.values_of(plain), block_of(name, plain - wide, halfway, grid.dtype))


def _mean(distances: Floats) -> float:
    """Return the mean of those that are finite: a tensor in which a fault makes some NaN is still close."""
    mean = float(distances.mean()) if distances.size else 0.0
    if math.isfinite(mean):
        return mean
    finite = distances[np.isfinite(distances)]
    return float(finite.mean()) if finite.size else math.inf


def _may_be(have: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a tensor of one shape may be one of another, packed or not."""
    if math.prod(have) == math.prod(shape):
        return True
    return (
        len(have) == _PACKED
        and len(shape) >= 2
        and (have[0], have[2] * have[3]) == (shape[0], math.prod(shape[2:]))
    )


def has_order_of(have: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a tensor of one shape has its elements in the order of another, or packed.

    Then axes are only split or joined. A transposed tensor has as many elements, but others side by side.
    """
    if math.prod(have) != math.prod(shape):
        return len(have) == _PACKED
    ends, others = ({math.prod(each[:axis]) for axis in range(len(each) + 1)} for each in (have, shape))
    return len(have) == _PACKED or ends <= others or others <= ends


def _forms(array: Array, grid: Grid) -> Iterator[Floats]:
    """Yield what one of our tensors may say about bytes: in steps, with the model's zero point."""
    dtype = str(array.dtype)
    if dtype in WORDS and dtype == grid.dtype:
        yield array.astype(np.float64)
    elif dtype in BYTES and grid.dtype in BYTES:
        shift = 0 if dtype == grid.dtype else (128 if dtype == "int8" else -128)
        yield array.astype(np.float64) + shift
    elif dtype == "float32" and grid.is_one:
        numbers, info = array.astype(np.float64), np.iinfo(grid.dtype)
        for steps in (numbers / (grid.scale.item() or 1.0), numbers):
            # Real numbers may still be beyond the bytes: the kernel that rounds them limits them, too.
            limited = np.clip(steps + grid.zero.item(), info.min, info.max)
            yield np.where(np.isfinite(numbers), limited, numbers)


def _unpacked(array: Floats, shape: tuple[int, ...]) -> Iterator[Floats]:
    """Yield a tensor in the model's layout: reshaped, or with packed channels, with gaps or without."""
    if array.size == np.prod(shape) and (array.ndim != _PACKED or array.shape[1] == 1 or array.shape[4] == 1):
        yield array.reshape(shape)
    if array.ndim != _PACKED or len(shape) < 2:
        return
    n, blocks, height, width, block = array.shape
    channels = shape[1]
    if (shape[0], int(np.prod(shape[2:]))) != (n, height * width):
        return
    flat = array.transpose(0, 1, 4, 2, 3).reshape(n, blocks * block, height, width)
    for groups in range(1, channels + 1):
        group = channels // groups
        padded = -(-group // block) * block
        if channels % groups == 0 and groups * padded == blocks * block:
            parts = flat.reshape(n, groups, padded, height, width)[:, :, :group]
            yield parts.reshape(shape)
