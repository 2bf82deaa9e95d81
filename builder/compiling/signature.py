"""The signature of a model: what a preset of the postprocess is fitted to.

Leaves the presets to `output_presets`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agent.bundle.detection import Level
from agent.bundle.tensor_spec import TensorSpec
from builder.compiling.hints import NO_HINTS, Hints

# Strides of feature pyramids: P3 to P5, with P6, and with P2.
PYRAMIDS: Final = ((8, 16, 32), (8, 16, 32, 64), (4, 8, 16, 32))
BOX: Final = 4  # values of a box

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """What a preset is fitted to.

    `size`: height and width of the model's image input, in pixels, or None if it has none.
    `hints`: what the model's file says besides.
    """

    outputs: tuple[TensorSpec, ...]
    size: tuple[int, int] | None
    hints: Hints = NO_HINTS

    @classmethod
    def of(
        cls, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], hints: Hints = NO_HINTS
    ) -> Signature:
        """Take the size from the only input of 4 dimensions, whose channels are its first or last ones."""
        images = [spec.shape[1:] for spec in inputs if len(spec.shape) == 4]
        size = None
        if len(images) == 1:
            first, second, last = images[0]
            size = (first, second) if last in (1, 3) and first not in (1, 3) else (second, last)
        return cls(tuple(outputs), size, hints)

    def levels(self, strides: Sequence[int]) -> tuple[Level, ...]:
        """Return the grids of a feature pyramid over the input; none without a size."""
        if self.size is None:
            return ()
        height, width = self.size
        return tuple(Level(math.ceil(height / s), math.ceil(width / s), float(s)) for s in strides)

    def pyramid(self, rows: int) -> tuple[Level, ...]:
        """Return the feature pyramid that has this number of rows, or none."""
        for strides in PYRAMIDS:
            levels = self.levels(strides)
            if levels and sum(level.count for level in levels) == rows:
                return levels
        return ()

    def is_transposed(self, shape: tuple[int, ...]) -> bool:
        """Return whether an output [1, a, b] has b candidate boxes of a values, and not a boxes of b values.

        The number of boxes is that of a pyramid's cells, or three times that; or the other number is that of
        a box and the classes that the file names; otherwise it is the larger number.
        """
        named = [n == BOX + self.hints.classes for n in shape[1:]]
        if self.hints.classes and named[0] != named[1]:
            return named[0]
        known = [any(map(self.pyramid, (n, n // 3 if n % 3 == 0 else 0))) for n in shape[1:]]
        return known[1] if known[0] != known[1] else shape[1] < shape[2]

    def channels_last(self, spec: TensorSpec) -> bool | None:
        """Return whether a map [1, a, b, c] has its channels last: its sides then are the input's, reduced.

        If both fit, or neither, the graph decides. None if it does not show it.
        """
        if self.size is None:
            return None
        height, width = self.size
        sides = spec.shape[2:], spec.shape[1:3]
        first, last = (rows * width == columns * height for rows, columns in sides)
        return last if first != last else self.hints.channels_last.get(spec.name)

    def points(self, values: int) -> tuple[int, int] | None:
        """Return how many classes and values of a key point are in the values behind a box, or None.

        Without hints it is one class, and a confidence for each point.
        """
        count, size = self.hints.points or (0, 3)
        for classes in dict.fromkeys((self.hints.classes or 1, 1)):
            rest = values - classes
            if rest > 0 and rest % size == 0 and (not count or rest == count * size):
                return classes, size
        return None

    def described(self) -> str:
        """Return the outputs' names and shapes, such as `output[1, 3549, 85]`."""
        return ", ".join(f"{spec.name}{list(spec.shape)}" for spec in self.outputs)[:300]
