"""One model at several sizes of its changing dimensions.

Promises that the model is imported at most once for each combination of sizes while it is small, and that
only one is in memory at a time if it is large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from agent.bundle.buckets import CONSTANT, InputAxis, OutputAxis
from builder.compiling.size_rules import find_rule
from builder.errors import ShapeError
from builder.importer.bounded_shapes import BoundedShapes
from builder.importer.large_models import model_bytes
from builder.importer.onnx_import import ImportedModel

Sizes = tuple[int, ...]
Load = Callable[[Mapping[str, tuple[int, ...]]], ImportedModel]

# Weights are in memory twice for each import: in the module and in the normalised model.
MAX_KEPT_BYTES: Final = 256 << 20


class SizedModels:
    """Imports a model at the sizes that are asked for.

    Parameters
    ----------
    load
        Imports the model with shapes for its inputs, by name.
    shapes
        The shapes, some of whose dimensions change.
    """

    def __init__(self, load: Load, shapes: BoundedShapes) -> None:
        self._load = load
        self.shapes = shapes
        self._kept: dict[Sizes, ImportedModel] = {}
        self._kept_bytes = 0

    def at(self, sizes: Sizes) -> ImportedModel:
        """Return the model at these sizes, in the order of `shapes.dimensions`.

        Raises
        ------
        ModelError
            If it cannot be imported at these sizes; the message begins with them.
        """
        model = self._kept.get(sizes)
        if model is None:
            model = self._load(self.shapes.at(sizes))
            nbytes = model_bytes(model.onnx)
            if self._kept_bytes + nbytes > MAX_KEPT_BYTES:
                self._kept.clear()
                self._kept_bytes = 0
            self._kept[sizes] = model
            self._kept_bytes += nbytes
        return model


def input_axes(models: SizedModels, pads: Mapping[str, tuple[str, float]]) -> tuple[InputAxis, ...]:
    """Return the axes of inputs that follow each dimension.

    `pads`: input name -> how it is padded (`constant` or `edge`) and the constant, where that is not zero.
    Raises `ShapeError` if `pads` has an input that the model does not have, or that does not change.
    """
    dimensions = models.shapes.dimensions
    high = tuple(dimension.high for dimension in dimensions)
    largest = models.at(high).inputs
    found = []
    for index, dimension in enumerate(dimensions):
        other = _other_sizes(high, index, dimension.low)
        if other is None:
            continue
        for before, spec in zip(models.at(other).inputs, largest, strict=True):
            for axis, (small, large) in enumerate(zip(before.shape, spec.shape, strict=True)):
                if small != large:
                    pad, value = pads.get(spec.name, (CONSTANT, 0.0))
                    found.append(InputAxis(spec.name, axis, dimension.name, pad, value))
    if unknown := sorted(pads.keys() - {axis.tensor for axis in found}):
        changing = ", ".join(sorted({repr(axis.tensor) for axis in found})) or "none"
        raise ShapeError(
            f"--pad: expected inputs whose shapes change, {changing}, got {unknown[0]!r:.80}",
            hint="leave it out of --pad, or give its shape bounds in --input-shapes",
        )
    return tuple(found)


def _other_sizes(high: Sizes, index: int, low: int) -> Sizes | None:
    """Return the largest sizes with one dimension at its lowest; None if that is the largest, too."""
    return None if low == high[index] else (*high[:index], low, *high[index + 1 :])


def output_axes(models: SizedModels, sizes: Iterable[Sizes]) -> tuple[OutputAxis, ...]:
    """Return the axes of outputs that follow each dimension, and by which rule.

    `sizes`: the sizes that the rule must hold for; more are tried where these leave it open.
    Raises `ShapeError` if an axis follows two dimensions, or no rule of the manifest gives its sizes.
    """
    dimensions = models.shapes.dimensions
    high = tuple(dimension.high for dimension in dimensions)
    largest = models.at(high).outputs
    every = [*sizes, high]
    found: dict[tuple[int, int], OutputAxis] = {}
    for index, dimension in enumerate(dimensions):
        wanted = sorted({each[index] for each in every} | {dimension.low})
        line = {size: models.at((*high[:index], size, *high[index + 1 :])).outputs for size in wanted}
        for place, spec in enumerate(largest):
            for axis in range(len(spec.shape)):
                got = {size: outputs[place].shape[axis] for size, outputs in line.items()}
                if len(set(got.values())) == 1:
                    continue
                if (place, axis) in found:
                    raise ShapeError(
                        f"output '{spec.name}': axis {axis} follows two dimensions",
                        hint="give one of the two dimensions a single size in --input-shapes",
                    )

                def at(size: int, index: int = index, place: int = place, axis: int = axis) -> int:
                    where = (*high[:index], size, *high[index + 1 :])
                    return models.at(where).outputs[place].shape[axis]

                like = OutputAxis(spec.name, axis, dimension.name)
                found[place, axis] = find_rule(like, got, (dimension.low, dimension.high), at)
    return tuple(found.values())
