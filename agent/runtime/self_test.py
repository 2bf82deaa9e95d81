"""The recorded samples of a bundle, run on the machine at hand.

Promises that a model which computes something else here than where it was built (a wrong kernel, a broken
weight, a processor that lies about its features) does not go into service.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from agent.bundle.manifest import Samples
from agent.bundle.params import index_params
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import SelfTestError
from agent.runtime.graph_executor import GraphModule
from agent.runtime.storage import Array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer


def check_samples(
    module: GraphModule,
    outputs: Sequence[TensorSpec],
    samples: Samples,
    recorded_inputs: ReadableBuffer,
    recorded_outputs: ReadableBuffer,
) -> float:
    """Run every recorded sample and compare.

    Parameters
    ----------
    module
        The model, weights loaded.
    outputs
        The manifest's outputs, in the order of the graph's.
    samples
        How many samples there are, and how far off they may be.
    recorded_inputs, recorded_outputs
        `samples/inputs.params` and `samples/outputs.params`: tensors named `<k>/<tensor name>`, `k`
        from 0.

    Returns
    -------
    float
        The largest relative error, as `relative_error` has it; 0 without samples.

    Raises
    ------
    SelfTestError
        If an output is off by more than `atol + rtol * max|expected|` anywhere, or a sample is absent.
    """
    if not samples.count:
        return 0.0
    inputs, expected = _read(recorded_inputs), _read(recorded_outputs)
    names = tuple(module.get_input_info()[0])
    worst = 0.0
    for k in range(samples.count):
        for name in names:
            module.set_input(name, _sample(inputs, k, name))
        module.run()
        for index, spec in enumerate(outputs):
            wanted, came = _sample(expected, k, spec.name), module.output_view(index)
            if wanted.shape != came.shape or wanted.dtype != came.dtype:
                raise SelfTestError(
                    f"sample {k}: output {spec.name!r} is {came.dtype}{came.shape}, "
                    f"recorded as {wanted.dtype}{wanted.shape}"
                )
            error = relative_error(wanted, came)
            largest = float(np.abs(wanted.astype(np.float64)).max(initial=0.0, where=np.isfinite(wanted)))
            # Exactly equal is within any tolerance; an error that is not a number is within none.
            if error and not error * largest <= samples.atol + samples.rtol * largest:
                raise SelfTestError(
                    f"sample {k}: output {spec.name!r} is off by {error:.3g} of its largest value, "
                    f"expected at most {samples.rtol:.3g}",
                    hint="the kernels compute something else on this machine than where they were built",
                )
            worst = max(worst, error)
    return worst


def relative_error(expected: Array, actual: Array) -> float:
    """Return the largest difference of two tensors, relative to the largest value expected.

    An infinity or NaN must stand where it was expected, else the error is infinite; so is any difference
    where all that was expected is zero.

    Parameters
    ----------
    expected, actual
        Arrays of one shape; integers and booleans are compared as numbers.
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
            # A copy: the file's tensors are not aligned to their own dtype.
            data = bytes(view[entry.offset : entry.offset + entry.nbytes])
            tensors[entry.spec.name] = np.frombuffer(data, entry.spec.dtype).reshape(entry.spec.shape)
    return tensors


def _sample(tensors: dict[str, Array], k: int, name: str) -> Array:
    try:
        return tensors[f"{k}/{name}"]
    except KeyError:
        raise SelfTestError(f"sample {k} has no tensor {name!r}") from None
