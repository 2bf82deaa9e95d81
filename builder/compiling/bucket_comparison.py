"""A compiled model beside the reference, at every size for which it has a graph.

A bucket is compared at its own size and at the sizes just above the bucket below, where most of its input is
padding; these are also its recorded sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from agent.bundle.buckets import Buckets
from agent.bundle.processing import Preprocess
from agent.runtime.bucketed_module import BucketedModule
from builder.codegen.merged_graphs import MergedGraphs
from builder.compiling import block_parity, framework_parity, parity, tolerances
from builder.compiling.comparison import Compared, check_rounding, compare_model
from builder.compiling.defined_samples import choose
from builder.compiling.judge import Judge
from builder.compiling.padding import request_samples
from builder.compiling.plan import Plan
from builder.compiling.sample_inputs import samples
from builder.compiling.sized_models import Sizes
from builder.running.debug_executor import GraphModuleDebug
from builder.running.in_memory import load_kernels

Progress = Callable[[str], None]
Array = npt.NDArray[np.generic]
Sample = dict[str, Array]


def compare_sizes(
    plan: Plan,
    merged: MergedGraphs,
    code: bytes,
    params: bytes,
    before: Preprocess | None,
    tolerance: float | None,
    progress: Progress,
) -> list[tuple[Sample, Compared]]:
    """Compare a compiled model with the reference at each size.

    `code`, `params`: `mod.so` for this machine, and `mod.params`.
    Result: for each size the inputs of its sample, and the comparison with the larger error, with the
        sample's outputs.
    """
    kernels = load_kernels(code)
    if plan.buckets is None:
        progress("comparing with the reference")
        module = GraphModuleDebug(merged.graphs[0], kernels)
        module.load_params(params)
        model = plan.largest
        inputs = choose(model.onnx, samples(model.inputs, model.onnx, before), progress)
        return [
            (inputs, compare_model(model, module, merged.sources[0], inputs, before, tolerance, progress))
        ]
    largest = plan.largest
    buckets = BucketedModule(
        plan.buckets, largest.inputs, largest.outputs, merged.graphs, kernels, GraphModuleDebug
    )
    buckets.load_params(params)
    return [
        _compare_bucket(plan, buckets, merged.sources[index], index, before, tolerance, progress)
        for index in range(plan.buckets.count)
    ]


def _compare_bucket(
    plan: Plan,
    module: BucketedModule,
    sources: Sequence[tuple[str, ...]],
    index: int,
    before: Preprocess | None,
    tolerance: float | None,
    progress: Progress,
) -> tuple[Sample, Compared]:
    """Compare one bucket, at its own sizes and at the smallest that it computes."""
    sizes = plan.sizes[index]
    progress(f"comparing{plan.describe(sizes)} with the reference")
    model = plan.models.at(sizes)
    bucket = module.modules[index]
    assert isinstance(bucket, GraphModuleDebug)
    inputs = choose(model.onnx, request_samples(model, before), progress)
    compared = compare_model(model, bucket, sources, inputs, before, tolerance, progress)
    least = _least(module.buckets, sizes)
    if least == sizes:
        return inputs, compared
    exact = plan.models.at(least)
    inputs = choose(exact.onnx, request_samples(exact, before), progress)
    judge = Judge(exact)
    wanted = judge.outputs(inputs)

    def compute(inputs: Mapping[str, Array]) -> list[Array]:
        return [np.array(output) for output in module.compute(inputs).values()]

    outputs = compute(inputs)
    names = [spec.name for spec in exact.outputs]
    agreement = parity.compare(names, outputs, wanted)
    quantised = block_parity.is_quantised(exact.onnx)
    # Steps of a quantised model may round the other way; its blocks were compared at the bucket's own size.
    allowed = max(compared.self_test_rtol, tolerances.STEP) if quantised else tolerances.PARITY
    limit = max(tolerance or allowed, compared.agreement.error)
    if tolerance is None and not quantised and not agreement.error <= limit:
        judge.check_normalised(inputs, wanted)
        check_rounding(judge, inputs, outputs, wanted, agreement, progress)
    else:
        parity.check(agreement, limit)
    framework_parity.check_kernels(exact, compute, tolerance, progress)
    if agreement.error > compared.agreement.error and not quantised:
        compared = replace(compared, agreement=replace(agreement, reference=judge.reference))
    return inputs, replace(compared, samples=outputs if quantised else wanted)


def _least(buckets: Buckets, sizes: Sizes) -> Sizes:
    """Return the smallest sizes that a bucket computes."""
    least = []
    for dimension, size in zip(buckets.dimensions, sizes, strict=True):
        place = dimension.sizes.index(size)
        least.append(dimension.sizes[place - 1] + 1 if place else dimension.low)
    return tuple(least)
