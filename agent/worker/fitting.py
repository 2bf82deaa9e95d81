"""From a request's shapes to its bucket, for models whose shapes change.

Promises an `InputError` with the bounds for every request that no bucket holds. Leaves padding and cutting to
`agent.runtime.bucketed_module`.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.bundle.manifest import Manifest
from agent.bundle.processing import Normalise, Softmax
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import InputError
from agent.runtime.bucketed_module import BucketedModule
from agent.worker.raw_tensors import Fit


def fitting(manifest: Manifest, module: BucketedModule) -> Fit:
    """Return the function that chooses a request's bucket.

    Parameters
    ----------
    manifest
        The manifest of a model with buckets.
    module
        Its graphs.
    """
    buckets = module.buckets
    inputs = {spec.name: spec for spec in manifest.inputs}
    steps = () if manifest.postprocess is None else manifest.postprocess.steps
    # Such a step makes one result of a whole output, so of one picture.
    is_single = any(not isinstance(step, Softmax | Normalise) for step in steps)
    first = {each.dimension for each in buckets.inputs if each.axis == 0}

    def fit(shapes: Mapping[str, tuple[int, ...]], nbytes: int | None) -> Mapping[str, TensorSpec]:
        if nbytes is not None:
            shapes = buckets.shapes_of_bytes(nbytes, inputs)
        sizes = buckets.sizes_of(shapes, inputs)
        for dimension, size in zip(buckets.dimensions, sizes, strict=True):
            if is_single and dimension.name in first and size > max(1, dimension.low):
                raise InputError(
                    f"expected a {dimension.name} of {dimension.low}, got {size}: this model's "
                    "postprocessing takes one item",
                    hint="send each in a request of its own",
                )
        module.use(sizes)
        return module.specs

    return fit
