"""Whether padding changes a model's answer: found by the reference, before anything is compiled.

A request is padded to its bucket and its outputs are cut. That is right for a model with a mask, or one whose
elements along a dimension do not influence each other. It is wrong for a mean over a sequence, a convolution
along it, or a recurrent network that reads it backwards. Promises that the reference gives, for padded
inputs, what it gives for the exact ones: on inputs just above each smaller bucket, where padding is longest,
also with large negative numbers, which a maximum with zeros would hide. Leaves the compiled kernels to
`builder.compiling.bucket_comparison`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from agent.bundle.buckets import CONSTANT, Buckets, InputAxis
from agent.bundle.processing import Preprocess
from builder.compiling import parity, tolerances
from builder.compiling.sample_inputs import masks, samples
from builder.compiling.sized_models import SizedModels, Sizes
from builder.importer.onnx_import import ImportedModel

Array = npt.NDArray[np.generic]
Arrays = Mapping[str, Array]


@dataclass(frozen=True, slots=True)
class PaddingDifference:
    """A dimension along which padding changes the answer.

    `output`: the output that changes most.
    `error`: by how much, relative to its largest value; infinite for integers.
    `size`, `bucket`: the size of the request and that of its bucket.
    """

    dimension: str
    output: str
    error: float
    size: int
    bucket: int

    def __str__(self) -> str:
        by = f"by {self.error:.1e}" if np.isfinite(self.error) else "its integers"
        padding = f"padding {self.dimension} from {self.size} to {self.bucket}"
        return f"{padding} changes output '{self.output}' ({by})"


def pad(inputs: Arrays, axes: Sequence[InputAxis], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Pad inputs to the shapes of a bucket, by the rules of its axes."""
    padded = dict(inputs)
    for each in axes:
        array, wanted = padded[each.tensor], shapes[each.tensor][each.axis]
        widths = [(0, 0)] * array.ndim
        widths[each.axis] = (0, wanted - array.shape[each.axis])
        if each.pad == CONSTANT:
            value = np.array(each.value).astype(array.dtype)
            padded[each.tensor] = np.pad(array, widths, constant_values=value)
        else:
            padded[each.tensor] = np.pad(array, widths, mode="edge")
    return padded


def cut(buckets: Buckets, model: ImportedModel, outputs: Sequence[Array], sizes: Sizes) -> list[Array]:
    """Cut a bucket's outputs to a request's sizes; `model` is the model at any sizes."""
    return [
        output[tuple(map(slice, buckets.output_shape(spec, sizes)))]
        for spec, output in zip(model.outputs, outputs, strict=True)
    ]


def request_inputs(
    model: ImportedModel, preprocess: Preprocess | None = None, *, negative: bool = False
) -> dict[str, Array]:
    """Make the inputs of a request: the first of `samples`, with at least one part that is not masked.

    `negative`: whether all floats are at most -1.
    """
    inputs = next(request_samples(model, preprocess))
    if negative:
        for name, array in inputs.items():
            if array.dtype.kind == "f":
                inputs[name] = (-np.abs(array.astype(np.float64)) - 1).astype(array.dtype)
    return inputs


def request_samples(model: ImportedModel, preprocess: Preprocess | None = None) -> Iterator[dict[str, Array]]:
    """Yield sets of inputs as `samples` does, each with at least one part that is not masked."""
    for inputs in samples(model.inputs, model.onnx, preprocess):
        for name in masks(model.inputs, model.onnx):
            if inputs[name].ndim and inputs[name].size:
                inputs[name][..., 0] = 1
        yield inputs


def reference(model: ImportedModel, inputs: Arrays) -> list[Array]:
    """Run the reference as parity does."""
    return parity.run_as_defined(model.onnx, inputs)


def find_differences(
    models: SizedModels, buckets: Buckets, tolerance: float | None
) -> list[PaddingDifference]:
    """Return the dimensions along which padding changes the answer, each with its first difference.

    `tolerance`: largest relative error; with None, `tolerances.PARITY`.
    Raises `ModelError` if the model cannot be imported at a size, or the reference refuses it.
    """
    found = []
    for index in range(len(buckets.dimensions)):
        first = next(_differences(models, buckets, index, tolerance or tolerances.PARITY), None)
        if first is not None:
            found.append(first)
    return found


def _differences(
    models: SizedModels, buckets: Buckets, index: int, tolerance: float
) -> Iterator[PaddingDifference]:
    """Yield the differences of one dimension; the others have their smallest bucket's sizes."""
    dimension = buckets.dimensions[index]
    others = [each.sizes[0] for each in buckets.dimensions]
    below = dimension.low - 1
    for bucket in dimension.sizes:
        size, below = below + 1, bucket
        if size == bucket:
            continue
        exact_sizes = (*others[:index], size, *others[index + 1 :])
        padded_sizes = (*others[:index], bucket, *others[index + 1 :])
        exact, padded = models.at(exact_sizes), models.at(padded_sizes)
        shapes = {spec.name: spec.shape for spec in padded.inputs}
        for negative in (False, True):
            inputs = request_inputs(exact, negative=negative)
            wanted = reference(exact, inputs)
            got = reference(padded, pad(inputs, buckets.inputs, shapes))
            names = [spec.name for spec in exact.outputs]
            agreement = parity.compare(names, cut(buckets, exact, got, exact_sizes), wanted)
            if not agreement.error <= tolerance:
                yield PaddingDifference(dimension.name, agreement.worst_output, agreement.error, size, bucket)


def batch_of(models: SizedModels, buckets: Buckets, tolerance: float | None) -> str | None:
    """Return the dimension along which requests may be computed together; None if there is none.

    It is the first axis of every input and output, and its parts do not see each other: two of them together
    give what each gives by itself.
    """
    sizes = [dimension.sizes[0] for dimension in buckets.dimensions]
    for index, dimension in enumerate(buckets.dimensions):
        if dimension.low > 1 or dimension.high < 2:
            continue
        one = models.at((*sizes[:index], 1, *sizes[index + 1 :]))
        two = models.at((*sizes[:index], 2, *sizes[index + 1 :]))
        pairs = [*zip(one.inputs, two.inputs, strict=True), *zip(one.outputs, two.outputs, strict=True)]
        if not all(a.shape[:1] == (1,) and b.shape == (2, *a.shape[1:]) for a, b in pairs):
            continue
        first = request_inputs(one)
        second = {
            name: array[::-1, ..., ::-1].copy() if array.dtype.kind == "f" else array
            for name, array in request_inputs(one, negative=True).items()
        }
        both = {name: np.concatenate([first[name], second[name]]) for name in first}
        together = reference(two, both)
        apart = [
            np.concatenate(parts) for parts in zip(reference(one, first), reference(one, second), strict=True)
        ]
        names = [spec.name for spec in one.outputs]
        if parity.compare(names, together, apart).error <= (tolerance or tolerances.PARITY):
            return dimension.name
    return None
