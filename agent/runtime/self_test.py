"""The self-test: runs a bundle's recorded samples on this machine.

Promises that a model is not served if its results here differ from those where it was built, be it for a
wrong kernel, a broken weight, or a processor that misreports its features.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from agent.bundle.manifest import Samples
from agent.bundle.params import index_params
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import SelfTestError
from agent.runtime.bucketed_module import BucketedModule
from agent.runtime.graph_executor import GraphModule
from agent.runtime.storage import Array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer


def check_samples(
    module: GraphModule | BucketedModule,
    outputs: Sequence[TensorSpec],
    samples: Samples,
    recorded_inputs: ReadableBuffer,
    recorded_outputs: ReadableBuffer,
) -> float:
    """Run every recorded sample and compare the outputs.

    Parameters
    ----------
    module
        The model, with its weights loaded. A sample of a model with buckets has any of its sizes.
    outputs
        The manifest's outputs, in the graph's order.
    samples
        Number and tolerance of the samples.
    recorded_inputs, recorded_outputs
        The contents of `samples/inputs.params` and `samples/outputs.params`: tensors named
        `<k>/<tensor name>`, with `k` from 0.

    Returns
    -------
    float
        The largest `relative_error`; 0 without samples.

    Raises
    ------
    SelfTestError
        If an element of an output differs by more than `atol + rtol * max|expected|`, an output has another
        shape or dtype, or a sample is missing.
    FormatError, EndlessDataError
        If the recorded samples are not valid parameter files.
    InputError, ExecutionError
        If a recorded input does not fit the model, or a kernel fails.
    """
    if not samples.count:
        return 0.0
    inputs, expected = _read(recorded_inputs), _read(recorded_outputs)
    names = tuple(module.get_input_info()[0])
    worst = 0.0
    for k in range(samples.count):
        actuals = _computed(module, {name: _sample(inputs, k, name) for name in names})
        for spec, actual in zip(outputs, actuals, strict=True):
            wanted = _sample(expected, k, spec.name)
            if wanted.shape != actual.shape or wanted.dtype != actual.dtype:
                raise SelfTestError(
                    f"sample {k}: output {spec.name!r}: expected {wanted.dtype}{wanted.shape}, "
                    f"got {actual.dtype}{actual.shape}"
                )
            error = relative_error(wanted, actual)
            largest = float(np.abs(wanted.astype(np.float64)).max(initial=0.0, where=np.isfinite(wanted)))
            # Equal outputs are within any tolerance, and an error of NaN is within none.
            if error and not error * largest <= samples.atol + samples.rtol * largest:
                raise SelfTestError(
                    f"sample {k}: output {spec.name!r}: expected a relative error up to {samples.rtol:.3g}, "
                    f"got {error:.3g}",
                    hint="these kernels compute other results here than where they were built: compile the "
                    "bundle again with the --target of this machine",
                )
            worst = max(worst, error)
    return worst


def _computed(module: GraphModule | BucketedModule, inputs: dict[str, Array]) -> list[Array]:
    """Run a sample, and return views of the outputs in the graph's order."""
    if isinstance(module, BucketedModule):
        return list(module.compute(inputs).values())
    for name, value in inputs.items():
        module.set_input(name, value)
    module.run()
    return [module.output_view(index) for index in range(module.get_num_outputs())]


def relative_error(expected: Array, actual: Array) -> float:
    """Return the largest difference of two tensors, relative to the largest expected magnitude.

    The error is infinite if an infinity or NaN is not where it is expected, or if the tensors differ and all
    expected values are zero. Integers and booleans are compared as numbers.
    """
    a, b = expected.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(a)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    difference = np.abs(a[finite] - b[finite])
    worst = float(difference.max(initial=0.0))
    if worst == 0:
        return 0.0
    largest = float(np.abs(a[finite]).max(initial=0.0))
    return worst / largest if largest else float("inf")


def _read(raw: ReadableBuffer) -> dict[str, Array]:
    tensors = {}
    with memoryview(raw) as view:
        for entry in index_params(view):
            # Copied, since the file's tensors are not aligned to their dtype.
            data = bytes(view[entry.offset : entry.offset + entry.nbytes])
            tensors[entry.spec.name] = np.frombuffer(data, entry.spec.dtype).reshape(entry.spec.shape)
    return tensors


def _sample(tensors: dict[str, Array], k: int, name: str) -> Array:
    try:
        return tensors[f"{k}/{name}"]
    except KeyError:
        raise SelfTestError(f"sample {k} has no tensor {name!r}") from None
