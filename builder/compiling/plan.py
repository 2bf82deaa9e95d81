"""At which sizes a model is compiled: those of its buckets, or one if its shapes are fixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agent.bundle.buckets import Buckets
from builder.compiling.sized_models import SizedModels, Sizes
from builder.importer.bounded_shapes import BoundedShapes
from builder.importer.onnx_import import ImportedModel


@dataclass(frozen=True, slots=True)
class Plan:
    """A model, and the sizes at which it is compiled.

    Attributes
    ----------
    models
        The model at any of its sizes.
    buckets
        The manifest's; None if the shapes are fixed.
    """

    models: SizedModels
    buckets: Buckets | None = None

    @classmethod
    def fixed(cls, model: ImportedModel) -> Plan:
        """Return the plan for a model with fixed shapes: nothing changes, so there is one size."""
        return cls(SizedModels(lambda _: model, BoundedShapes((), {})))

    @property
    def sizes(self) -> Sequence[Sizes]:
        """The sizes that are compiled, the largest last."""
        return [()] if self.buckets is None else list(self.buckets.sizes())

    @property
    def largest(self) -> ImportedModel:
        """The model at its largest sizes, whose shapes the manifest has."""
        return self.models.at(self.sizes[-1])

    @property
    def smallest(self) -> ImportedModel:
        """The model at the sizes of the smallest request, which declarations are made for."""
        if self.buckets is None:
            return self.models.at(())
        model = self.models.at(self.buckets.lowest)
        own = model.preprocess
        if own is not None and any(axis.tensor == own.input and axis.axis for axis in self.buckets.inputs):
            model = replace(model, preprocess=None)  # it is for pictures of one size
        return model

    def describe(self, sizes: Sizes) -> str:
        """Return sizes as messages show them, such as ` batch=4 sequence=64`; nothing if they are fixed."""
        dimensions = () if self.buckets is None else self.buckets.dimensions
        return "".join(f" {d.name}={size}" for d, size in zip(dimensions, sizes, strict=True))
