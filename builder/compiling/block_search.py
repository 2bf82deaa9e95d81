"""Tells which of our tensors is which of a quantised model's, and how they agree.

Fusion, layouts and byte types leave no names, so tensors are found by their numbers: plain or packed, in
either byte type, dequantised or not.

If one of ours agrees, it is the one. If none agrees but one is close, there are two explanations. Either a
kernel is wrong, or no kernel wrote this tensor and ours is another one that resembles it: the tensor before
an activation and the one after it, or two in a network whose numbers hardly vary. In the second case, ours
agrees with that other tensor. So a close one is a fault unless it agrees with another tensor of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
# So many steps are near, and so many of a word.
_NEAR: Final = 1.5
_NEAR_OF_WORDS: Final = 2 * STEPS_OF_WORDS
# One tensor is taken for another if it is this close on average, in steps.
_CLOSE: Final = 4.0


@dataclass(frozen=True, slots=True)
class Block:
    """A tensor of bytes and how it agrees with the reference, which computed it from our tensors.

    Attributes
    ----------
    name
        The tensor in the model.
    share
        The share of elements that differ.
    unexplained
        The share of those that differ and are not halfway between two steps.
    largest
        The largest difference in steps of its scale.
    elements
        How many elements it has.
    near
        How many steps of its scale are near.
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


def is_halfway(source: Array, rounded: Array, scale: Floats) -> npt.NDArray[np.bool_] | bool:
    """Return where numbers are halfway between two steps; nowhere if the scale is not one constant."""
    if scale.size != 1 or str(rounded.dtype) not in BYTES:
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
class _Candidate:
    """One of our tensors that may be a tensor of the model.

    Attributes
    ----------
    at
        Its place among ours.
    mean
        How far it is on average, in steps.
    own
        Its bytes in the model's layout.
    block
        How it agrees.
    """

    at: int
    mean: float
    own: Array
    block: Block


class Search:
    """Finds the tensors of a model among ours, in the order of the model."""

    def __init__(self, ours: Sequence[Array]) -> None:
        self._ours = ours
        self._taken: set[int] = set()
        self._agreeing: set[int] = set()
        self._results: list[tuple[str, Block | None, list[_Candidate]]] = []
        self._suspects: dict[int, tuple[float, int]] = {}

    def find(self, name: str, source: Array, expected: Array, scale: Floats, zero: Floats) -> Array | None:
        """Return the bytes of our tensor that agrees with `expected`, None if none does.

        Parameters
        ----------
        name
            The tensor in the model.
        source
            What is rounded.
        expected
            What the reference rounds it to.
        scale, zero
            Its parameters; empty if they are not constant.
        """
        halfway = is_halfway(source, expected, scale)
        close = list(_candidates(name, expected, halfway, self._ours, scale, zero))
        agreeing = [candidate for candidate in close if candidate.block.is_rounding]
        self._agreeing |= {candidate.at for candidate in agreeing}
        free = [candidate for candidate in agreeing if candidate.at not in self._taken]
        best = min(free, key=lambda candidate: candidate.mean, default=None)
        if best is None:
            if scale.size == 1:
                self._suspects |= {candidate.at: (scale.item(), expected.size) for candidate in close}
            self._results.append((name, None, close))
            return None
        self._taken.add(best.at)
        self._results.append((name, best.block, []))
        return best.own

    def exclude(self, source: Array, expected: Array, scale: Floats, zero: Floats) -> None:
        """Take note of a tensor of the model that is compared elsewhere: what agrees with it is no other."""
        halfway = is_halfway(source, expected, scale)
        close = _candidates("", expected, halfway, self._ours, scale, zero)
        self._agreeing |= {candidate.at for candidate in close if candidate.block.is_rounding}

    def suspects(self) -> dict[int, tuple[float, int]]:
        """Return our float tensors that are close to a tensor of bytes, but agree with none.

        Returns
        -------
        dict
            Their places -> the scale of the tensor of bytes, and how many elements it has.
        """
        return {
            at: found
            for at, found in self._suspects.items()
            if at not in self._agreeing and str(self._ours[at].dtype) == "float32"
        }

    def compare(self, at: int, expected: Array, scale: float) -> None:
        """Take note if one of our float tensors agrees with one of the model, in steps of `scale`."""
        wanted = expected.astype(np.float64)
        for plain in _unpacked(self._ours[at].astype(np.float64), expected.shape):
            if block_of("", (plain - wanted) / (scale or 1.0), False, "uint8").is_rounding:
                self._agreeing.add(at)

    def result(self) -> tuple[list[Block], list[str]]:
        """Return how those agree that were found or are faults, and the names of the others.

        A fault has the name of the tensor to which ours is closest.
        """
        closest: dict[int, _Candidate] = {}
        for _, _, close in self._results:
            for candidate in close:
                other = closest.get(candidate.at, candidate)
                if candidate.at not in self._agreeing and candidate.mean <= other.mean:
                    closest[candidate.at] = candidate
        faults: dict[str, Block] = {}
        for candidate in sorted(closest.values(), key=lambda candidate: candidate.mean):
            faults.setdefault(candidate.block.name, candidate.block)
        found: list[Block] = []
        hidden: list[str] = []
        for name, block, _ in self._results:
            if block is None and name not in faults:
                hidden.append(name)
            else:
                found.append(faults[name] if block is None else block)
        return found, hidden


def _candidates(
    name: str,
    expected: Array,
    halfway: npt.NDArray[np.bool_] | bool,
    ours: Sequence[Array],
    scale: Floats,
    zero: Floats,
) -> Iterator[_Candidate]:
    """Yield those of our tensors that are close to `expected`, in the form and layout that is closest."""
    wide = expected.astype(np.float64)
    info = np.iinfo(str(expected.dtype))
    one_scale = scale.size == 1 and zero.size == 1
    for at, array in enumerate(ours):
        if not _may_be(array.shape, expected.shape):
            continue
        best: tuple[float, Floats] | None = None
        for form in _forms(array, expected, scale, zero) if one_scale else _forms(array, expected):
            for plain in _unpacked(form, expected.shape):
                mean = _mean(np.abs(plain - wide))
                if mean <= _CLOSE and (best is None or mean < best[0]):
                    best = mean, plain
        if best is not None:
            mean, plain = best
            own = np.clip(np.rint(np.nan_to_num(plain)), info.min, info.max).astype(expected.dtype)
            block = block_of(name, plain - wide, halfway, str(expected.dtype))
            yield _Candidate(at, mean, own, block)


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
        len(have) == 5
        and len(shape) >= 2
        and (have[0], have[2] * have[3]) == (shape[0], math.prod(shape[2:]))
    )


def _forms(
    array: Array, expected: Array, scale: Floats | None = None, zero: Floats | None = None
) -> Iterator[Floats]:
    """Yield what one of our tensors may say about bytes: in steps, with the model's zero point."""
    dtype = str(array.dtype)
    if dtype in WORDS and dtype == str(expected.dtype):
        yield array.astype(np.float64)
    elif dtype in BYTES:
        shift = 0 if dtype == str(expected.dtype) else (128 if dtype == "int8" else -128)
        yield array.astype(np.float64) + shift
    elif dtype == "float32" and scale is not None and zero is not None:
        numbers = array.astype(np.float64)
        yield numbers / scale.item() + zero.item()
        yield numbers + zero.item()


def _unpacked(array: Floats, shape: tuple[int, ...]) -> Iterator[Floats]:
    """Yield a tensor in the model's layout: reshaped, or with packed channels, with gaps or without."""
    if array.size == np.prod(shape) and (array.ndim != 5 or array.shape[1] == 1 or array.shape[4] == 1):
        yield array.reshape(shape)
    if array.ndim != 5 or len(shape) < 2:
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
