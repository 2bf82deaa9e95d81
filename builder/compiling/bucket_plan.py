"""Plan the buckets of a model: which sizes, how inputs are padded and outputs cut.

Promises buckets for which the reference gives the same answers with padding as without. A dimension along
which padding changes the answer gets a bucket for every size if there are few, and is refused otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from agent.bundle.buckets import MAX_BUCKETS, Buckets, Dimension
from agent.bundle.detection import Objects
from agent.bundle.processing import ClassMap, Detect, Pose, Postprocess, Preprocess
from builder.compiling.ladder import MAX_EXACT, chosen_sizes
from builder.compiling.padding import batch_of, find_differences
from builder.compiling.sized_models import SizedModels, Sizes, input_axes, output_axes
from builder.errors import ModelError, ShapeError


def plan_buckets(
    models: SizedModels,
    *,
    sizes: Mapping[str, Sequence[int]],
    pads: Mapping[str, tuple[str, float]],
    tolerance: float | None,
    progress: Callable[[str], None],
) -> Buckets:
    """Plan the buckets of a model.

    Parameters
    ----------
    models
        The model at any of its sizes.
    sizes
        Dimension -> the sizes that the user wants; "" for the only dimension.
    pads
        Input name -> how it is padded, as `parse_pads` returns it.
    tolerance
        Largest relative difference that padding may make, or None for the default.
    progress
        Called with each step and each choice.

    Raises
    ------
    ShapeError
        If sizes or paddings do not fit the dimensions.
    ModelError
        If padding changes an answer and the dimension has too many sizes to compile each.
    """
    bounds = models.shapes.dimensions
    names = [each.name for each in bounds]
    given = dict(sizes)
    if "" in given and len(bounds) == 1:
        given[names[0]] = given.pop("")
    if unknown := sorted(given.keys() - set(names)):
        raise ShapeError(
            f"--buckets: expected sizes of {', '.join(names)}, got {unknown[0] or 'sizes without a name'!r}",
            hint='write --buckets "NAME=16,64,128", for each dimension that has its own',
        )
    planned = tuple(
        Dimension(
            each.name,
            each.low,
            each.high,
            chosen_sizes(given.get(each.name), each.low, each.high, each.name, len(bounds)),
        )
        for each in bounds
    )
    progress("comparing the model's shapes at different sizes")
    buckets = _buckets(models, planned, pads)
    progress("checking with ONNX Runtime that padding does not change the answer")
    differences = {
        difference.dimension: difference for difference in find_differences(models, buckets, tolerance)
    }
    exact = []
    for dimension in buckets.dimensions:
        difference = differences.get(dimension.name)
        if difference is None:
            exact.append(dimension)
            continue
        count = dimension.high - dimension.low + 1
        if dimension.name in given or count > MAX_EXACT:
            raise ModelError(
                f"{difference}: the model has no mask for it, or mixes its elements",
                hint=_hint(dimension),
            )
        progress(f"{difference}: every size from {dimension.low} to {dimension.high} is compiled")
        exact.append(replace(dimension, sizes=tuple(range(dimension.low, dimension.high + 1))))
    if differences:
        count = math.prod(len(dimension.sizes) for dimension in exact)
        if count > MAX_BUCKETS:
            raise ModelError(
                f"{next(iter(differences.values()))}: expected at most {MAX_BUCKETS} combinations of sizes, "
                f"got {count}",
                hint="narrow the bounds, or give fewer sizes of the other dimensions with --buckets",
            )
        buckets = _buckets(models, tuple(exact), pads)
    return replace(buckets, batch=batch_of(models, buckets, tolerance))


def _hint(dimension: Dimension) -> str:
    return (
        "export the model with a mask as an input, or fix the size with --input-shapes; up to "
        f"{MAX_EXACT} sizes, such as {dimension.low}..{min(dimension.low + MAX_EXACT - 1, dimension.high)}, "
        "are compiled one by one"
    )


def _buckets(
    models: SizedModels, dimensions: tuple[Dimension, ...], pads: Mapping[str, tuple[str, float]]
) -> Buckets:
    inputs = input_axes(models, pads)
    if missing := [d.name for d in dimensions if d.name not in {axis.dimension for axis in inputs}]:
        raise ShapeError(
            f"expected inputs whose shapes follow {missing[0]}, got none: fix its size",
            hint=f"give {missing[0]} one size in --input-shapes",
        )
    try:
        buckets = Buckets(dimensions, inputs, ())
        buckets = replace(buckets, outputs=output_axes(models, _corners(buckets)))
        largest = models.at(tuple(dimension.high for dimension in dimensions))
        buckets.check(largest.inputs, largest.outputs)
    except ValueError as error:
        raise ShapeError(
            f"the buckets cannot be described: {error}",
            hint="give fewer dimensions bounds, or narrower ones, in --input-shapes",
        ) from error
    return buckets


def _corners(buckets: Buckets) -> list[Sizes]:
    """Return the smallest bucket's size of each dimension, with the others at their largest.

    The rule that fits these sizes is checked at every bucket when the bucket's kernels are compared.
    """
    high = tuple(dimension.high for dimension in buckets.dimensions)
    return [
        (*high[:index], dimension.sizes[0], *high[index + 1 :])
        for index, dimension in enumerate(buckets.dimensions)
    ]


def check_declared(buckets: Buckets, before: Preprocess | None, after: Postprocess | None) -> None:
    """Refuse declarations that need a fixed shape where the shape changes.

    Raises `ModelError` if a picture's size changes, or the boxes or the map that are decoded change with more
        than the batch.
    """
    if before is not None and any(e.tensor == before.input and e.axis for e in buckets.inputs):
        raise ModelError(
            f"--preprocess: expected an input of which at most the batch changes, got {before.input!r}",
            hint="fix height, width and channels with --input-shapes",
        )
    if (
        before is not None
        and any(e.tensor == before.input for e in buckets.inputs)
        and buckets.lowest[0] != 1
    ):
        raise ModelError(
            "--preprocess: expected a batch from 1, because a picture is a batch of 1",
            hint='let the bounds of the batch begin at 1: --input-shapes "data:[1..8,3,224,224]"',
        )
    changing = {rule.tensor for rule in buckets.outputs if rule.axis}
    for step in () if after is None else after.steps:
        if isinstance(step, Detect | Objects | Pose | ClassMap) and changing:
            raise ModelError(
                f"--postprocess: expected outputs of which at most the batch changes, got {min(changing)!r}",
                hint="give the picture one size in --input-shapes, or leave out --postprocess",
            )
