"""From a request's shapes to its bucket, for models whose shapes change.

Promises an `InputError` with the bounds for every request that no bucket holds. Leaves padding and cutting to
`agent.runtime.bucketed_module`.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.bundle.manifest import Manifest
from agent.bundle.tensor_spec import TensorSpec
from agent.runtime.bucketed_module import BucketedModule
from agent.worker.raw_tensors import Fit


def fitting(manifest: Manifest, module: BucketedModule) -> Fit:
    """Return the function that chooses the bucket of a request."""
    buckets = module.buckets
    inputs = {spec.name: spec for spec in manifest.inputs}

    def fit(shapes: Mapping[str, tuple[int, ...]], nbytes: int | None) -> Mapping[str, TensorSpec]:
        if nbytes is not None:
            shapes = buckets.shapes_of_bytes(nbytes, inputs)
        sizes = buckets.sizes_of(shapes, inputs)
        manifest.check_items(sizes)
        module.use(sizes)
        return module.specs

    return fit
