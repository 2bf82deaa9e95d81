"""Compile a model whose dimensions change into one bundle of buckets.

The steps are those of `builder.compiling.compilation`, for each bucket: lower, generate, compare. Kernels and
weights that are equal exist once. Each bucket is compared with the reference at its own size and at the
sizes just above the bucket below, where most of its input is padding; these are also its recorded sample.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.typing import ArrayLike

from agent.bundle.buckets import Buckets
from agent.bundle.graph import Graph
from agent.bundle.params import dump_params
from agent.bundle.processing import Preprocess
from agent.bundle.tensor_spec import TensorSpec
from agent.runtime.bucketed_module import BucketedModule
from agent.runtime.debug_executor import GraphModuleDebug
from builder.bundles.package import Package
from builder.codegen.graph_codegen import generate
from builder.codegen.kernel_object import compile_kernels, count_flops
from builder.codegen.link.linker import link
from builder.codegen.merged_graphs import MergedGraphs
from builder.compiling import audio_presets, block_parity, framework_parity, parity, tolerances
from builder.compiling.bucket_plan import check_declared, plan_buckets
from builder.compiling.columns import Names
from builder.compiling.comparison import Compared, check_rounding, compare_model, look_at_sample
from builder.compiling.compilation import build_for_host, choose_records, describe_model
from builder.compiling.defined_samples import choose
from builder.compiling.footprint import resources_of_buckets
from builder.compiling.identity import Identity
from builder.compiling.integer_share import integer_work
from builder.compiling.judge import Judge
from builder.compiling.labels import Labels, label_lines
from builder.compiling.layers import Layers
from builder.compiling.lower import LoweredModule, lower
from builder.compiling.over_time import over_time_of
from builder.compiling.padding import request_samples
from builder.compiling.sized_models import SizedModels, Sizes
from builder.compiling.uncovered import fallbacks, uncovered_kernels
from builder.errors import ShapeError
from builder.importer import load
from builder.importer.bounded.widening import Capacities, capacities, widened
from builder.importer.bounded_shapes import BoundedShapes
from builder.importer.onnx_import import ImportedModel
from builder.kernels.decisions import Schedules
from builder.kernels.spaces.concatenation import joins_of
from builder.records.folder import Records
from builder.running.in_memory import load_kernels
from builder.target.device_target import DeviceTarget, resolve

Progress = Callable[[str], None]
Array = npt.NDArray[np.generic]


def compile_buckets(
    path: str | os.PathLike[str],
    shapes: BoundedShapes,
    target: str | Mapping[str, Any] | DeviceTarget = "host",
    *,
    sizes: Mapping[str, Sequence[int]] | None = None,
    pads: Mapping[str, tuple[str, float]] | None = None,
    identity: Identity | None = None,
    input_values: Mapping[str, ArrayLike] | None = None,
    max_iterations: int | None = None,
    python: str | None = None,
    trusted: bool = False,
    quantise: Callable[[ImportedModel], ImportedModel] | None = None,
    preprocess: str | None = None,
    postprocess: str | None = None,
    labels: Labels | None = None,
    columns: Names | None = None,
    tolerance: float | None = None,
    tuning_records: Records | str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Package:
    """Compile a model at several sizes of its changing dimensions.

    Parameters
    ----------
    path
        The model's file.
    shapes
        The shapes of its inputs, with bounds.
    sizes
        Dimension -> sizes of its buckets, as `builder.compiling.ladder.parse_buckets` returns them; the
        default ladder for the others.
    pads
        Input name -> how it is padded, as `builder.compiling.bucket_options.parse_pads` says; the others
        are padded with zeros.
    input_values, max_iterations, python, trusted
        As in `builder.load`.
    quantise
        Called with the model at each size that is imported, the largest first; returns what is compiled
        instead.
    target, identity, preprocess, postprocess, labels, columns, tolerance, tuning_records, progress
        As in `builder.compile`.

    Returns
    -------
    Package
        The package, unsigned.

    Raises
    ------
    InputFault
        If an argument cannot be used, padding changes the answer, or parity fails.
    BuildError
        If the builder itself fails.
    """
    progress = progress or (lambda _: None)
    identity = identity or Identity()
    identity.check()
    if audio_presets.is_audio(preprocess or ""):
        raise ShapeError(
            "--input-shapes: expected fixed shapes with recordings, got bounds",
            hint='give each input one shape: --input-shapes "data:[1,16000]"',
        )
    device = target if isinstance(target, DeviceTarget) else resolve(target)

    def imported(at: Mapping[str, tuple[int, ...]]) -> ImportedModel:
        model = load(
            Path(path),
            input_shapes=at,
            input_values=input_values,
            max_iterations=max_iterations,
            python=python,
            trusted=trusted,
        )
        if quantise is not None:
            model = quantise(model)
        return model if room is None else widened(model, room)

    room: Capacities | None = None
    models = SizedModels(imported, shapes)
    first = models.at(tuple(dimension.high for dimension in shapes.dimensions))
    if first.states:
        kept = ", ".join(repr(state.input) for state in first.states)
        raise ShapeError(
            f"--input-shapes: expected fixed shapes with states ({kept:.200}), got bounds",
            hint="give each input one shape, or compile a bundle for each",
        )
    room = capacities(first)
    buckets = plan_buckets(models, sizes=sizes or {}, pads=pads or {}, tolerance=tolerance, progress=progress)
    smallest = models.at(buckets.lowest)
    own = smallest.preprocess
    if own is not None and any(axis.tensor == own.input and axis.axis for axis in buckets.inputs):
        smallest = replace(smallest, preprocess=None)  # it is for pictures of one size
    for note in smallest.notes:
        progress(note)
    over_time = over_time_of(smallest, preprocess, postprocess, (), columns, progress)
    before, after = over_time.preprocess, over_time.postprocess
    check_declared(buckets, before, after)
    names_of_classes = label_lines(labels, smallest.labels, smallest.outputs, after, smallest.class_counts)

    largest = models.at(tuple(dimension.high for dimension in buckets.dimensions))
    tuned = choose_records(tuning_records, device, largest, progress)
    schedules = Schedules(tuned.best, progress=progress)
    merged, lowered, layers = _lower(models, buckets, device, schedules, progress)
    progress(f"generating code for {len(merged.kernels)} kernels, of {sum(merged.calls)} in all graphs")
    kernels = compile_kernels(merged.module(), device)
    code = link(kernels.code, device)
    params = dump_params((spec, data.data) for spec, data in merged.weights)

    runnable = code if device.is_native else build_for_host(merged.module())
    module = BucketedModule(
        buckets, largest.inputs, largest.outputs, merged.graphs, load_kernels(runnable), GraphModuleDebug
    )
    module.load_params(params)
    samples = [
        _compare_bucket(models, module, merged.sources, index, each, before, tolerance, progress)
        for index, each in enumerate(buckets.sizes())
    ]
    look_at_sample(smallest, after, samples[0][1], postprocess or "", progress)
    members = {
        "mod.so": code,
        "mod.params": params,
        **_graphs(buckets, merged.graphs),
        **_recorded(largest, samples),
    }
    if names_of_classes is not None:
        members["labels.txt"] = names_of_classes
    weights = [spec.name for spec, _ in merged.weights]
    worst = max((compared for _, compared in samples), key=lambda compared: compared.agreement.error)
    rtol = max(compared.self_test_rtol for _, compared in samples)
    manifest = describe_model(
        identity,
        device,
        largest,
        members,
        over_time=over_time,
        resources=resources_of_buckets(merged.graphs, weights, kernels.workspaces, buckets, largest.inputs),
        compared=replace(worst, self_test_rtol=rtol),
        tuned=tuned,
        buckets=buckets,
    )
    return Package(
        manifest,
        members,
        uncovered=uncovered_kernels(lowered, device),
        fallbacks=fallbacks(largest, lowered),
        nodes=layers.fates,
        integers=integer_work(largest, lowered, layers.fates),
    )


def _lower(
    models: SizedModels, buckets: Buckets, device: DeviceTarget, schedules: Schedules, progress: Progress
) -> tuple[MergedGraphs, LoweredModule, Layers]:
    """Lower the model at the sizes of every bucket; return all together, and the parts of the largest."""
    merged = MergedGraphs()
    for place, each in enumerate(buckets.sizes()):
        progress(
            f"lowering {describe_sizes(buckets, each)} ({place + 1} of {buckets.count}) for {device.name}"
        )
        model = models.at(each)
        lowered = lower(model.mod, device, schedules)
        layers = Layers(model, lowered.main)
        names = [spec.name for spec in model.inputs], [spec.name for spec in model.outputs]
        generated = generate(
            lowered.main, *names, count_flops(lowered.kernels), layers.by_call, joins_of(lowered.kernels)
        )
        merged.add(generated, lowered.kernels)
    return merged, lowered, layers


def _recorded(
    largest: ImportedModel, samples: Sequence[tuple[dict[str, Array], Compared]]
) -> dict[str, bytes]:
    """Return the members with the recorded samples, one of each bucket."""
    names = [spec.name for spec in largest.outputs]
    outputs = [dict(zip(names, compared.samples, strict=True)) for _, compared in samples]
    return {
        "samples/inputs.params": _dump(largest.inputs, [inputs for inputs, _ in samples]),
        "samples/outputs.params": _dump(largest.outputs, outputs),
    }


def describe_sizes(buckets: Buckets, sizes: Sizes) -> str:
    """Return sizes as messages show them, such as `batch=4 sequence=64`."""
    return " ".join(f"{d.name}={size}" for d, size in zip(buckets.dimensions, sizes, strict=True))


def _compare_bucket(
    models: SizedModels,
    module: BucketedModule,
    sources: Sequence[Sequence[tuple[str, ...]]],
    index: int,
    sizes: Sizes,
    before: Preprocess | None,
    tolerance: float | None,
    progress: Progress,
) -> tuple[dict[str, Array], Compared]:
    """Compare one bucket with the reference, at its own sizes and at the smallest that it computes.

    Returns
    -------
    dict, Compared
        The inputs of its sample, and the comparison with the larger error, with the sample's outputs.

    Raises
    ------
    ParityError
        If a result differs.
    """
    progress(f"comparing {describe_sizes(module.buckets, sizes)} with the reference")
    model = models.at(sizes)
    bucket = module.modules[index]
    assert isinstance(bucket, GraphModuleDebug)
    inputs = choose(model.onnx, request_samples(model, before), progress)
    compared = compare_model(model, bucket, sources[index], inputs, before, tolerance, progress)
    least = _least(module.buckets, sizes)
    if least == sizes:
        return inputs, compared
    exact = models.at(least)
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


def _graphs(buckets: Buckets, graphs: Sequence[Graph]) -> dict[str, bytes]:
    return {name: graph.to_json() for name, graph in zip(buckets.members(), graphs, strict=True)}


def _dump(specs: Sequence[TensorSpec], samples: Sequence[Mapping[str, Array]]) -> bytes:
    return dump_params(
        (
            TensorSpec(f"{k}/{spec.name}", spec.datatype, sample[spec.name].shape),
            np.array(sample[spec.name], order="C").data,
        )
        for k, sample in enumerate(samples)
        for spec in specs
    )
