"""Compile a model into a package for a device; nothing is run on that device.

The steps, in order: import, lower, generate code, link, plan and write the graph, compare the result with the
reference, describe everything in the manifest. For a device other than this machine, the same scheduled
kernels are also built for this machine, and that build is compared with the reference: it has the device's
schedules, graph and weights, and differs only in LLVM's code generation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata

import numpy as np
import tvm

from agent import __version__
from agent.bundle.buckets import Buckets
from agent.bundle.manifest import Manifest, Resources, Runtime, Samples
from agent.bundle.manifest import Target as ManifestTarget
from agent.bundle.params import dump_params
from agent.bundle.provenance import Provenance, Tuning
from agent.bundle.tensor_spec import TensorSpec
from builder.bundles.package import Package, digests
from builder.codegen.graph_codegen import generate
from builder.codegen.kernel_object import compile_kernels, compile_object, count_flops
from builder.codegen.link.linker import describe, link
from builder.codegen.merged_graphs import MergedGraphs
from builder.compiling import tolerances
from builder.compiling.bucket_comparison import compare_sizes
from builder.compiling.bucket_plan import check_declared
from builder.compiling.comparison import Array, Compared, look_at_sample, outputs_of_picture
from builder.compiling.declared import Declared, declare
from builder.compiling.footprint import resources_of
from builder.compiling.identity import DESCRIBABLE, Identity, bundle_name
from builder.compiling.integer_share import integer_work
from builder.compiling.layers import Layers
from builder.compiling.lower import LoweredModule, lower
from builder.compiling.options import Options
from builder.compiling.outline import Outline
from builder.compiling.plan import Plan
from builder.compiling.uncovered import fallbacks, uncovered_kernels
from builder.errors import ModelError
from builder.importer import ImportedModel
from builder.kernels.decisions import Schedules
from builder.kernels.passes.halves import floats_of
from builder.kernels.spaces.concatenation import joins_of
from builder.records.best_records import BestRecords
from builder.records.folder import Records
from builder.target.device_target import DeviceTarget, resolve
from builder.target.half_arithmetic import require_half_arithmetic

Progress = Callable[[str], None]


def build(
    plan: Plan,
    device: DeviceTarget,
    options: Options,
    *,
    identity: Identity,
    tuning_records: Records | str | os.PathLike[str] | None,
    progress: Progress,
) -> Package:
    """Compile a model at the sizes of a plan.

    Parameters
    ----------
    plan
        The imported model, and its sizes.
    device
        The device.
    options
        Its declarations, and the tolerance.
    identity, tuning_records, progress
        As in `builder.compile`.

    Raises
    ------
    InputFault
        If the declarations or records do not fit the model, or parity fails.
    BuildError
        If the builder itself fails.
    """
    smallest, largest = plan.smallest, plan.largest
    if floats_of(largest.mod) is not None:
        require_half_arithmetic(device)
    declared = declare(Outline.of(smallest), options)
    for note in declared.notes:
        progress(note)
    before, after = declared.preprocess, declared.postprocess
    if plan.buckets is not None:
        check_declared(plan.buckets, before, after)

    tuned = choose_records(tuning_records, device, largest, progress)
    merged, lowered, layers = _lower(plan, device, Schedules(tuned.best, progress=progress), progress)
    if tuned.best is not None:
        progress(f"schedules from tuning records for {len(tuned.best.used)} kernels")
    more = f", of {sum(merged.calls)} in all graphs" if len(merged.graphs) > 1 else ""
    progress(f"generating code for {len(merged.kernels)} kernels{more}")
    kernels = compile_kernels(merged.module(), device)
    code = link(kernels.code, device)
    params = dump_params((spec, data.data) for spec, data in merged.weights)
    runnable = code if device.is_native else build_for_host(merged.module())
    samples = compare_sizes(plan, merged, runnable, params, before, options.tolerance, progress)
    tried = None
    if options.picture is not None:
        tried = outputs_of_picture(smallest, before, samples[0][0], options.picture)
    look_at_sample(smallest, after, samples[0][1], options.postprocess or "", progress, tried)

    names = ("mod.json",) if plan.buckets is None else plan.buckets.members()
    outputs = [
        {spec.name: array for spec, array in zip(largest.outputs, compared.samples, strict=True)}
        for _, compared in samples
    ]
    members = {
        "mod.so": code,
        "mod.params": params,
        **{name: graph.to_json() for name, graph in zip(names, merged.graphs, strict=True)},
        "samples/inputs.params": _dump_samples(largest.inputs, [inputs for inputs, _ in samples]),
        "samples/outputs.params": _dump_samples(largest.outputs, outputs),
    }
    if declared.labels is not None:
        members["labels.txt"] = declared.labels
    worst = max((compared for _, compared in samples), key=lambda compared: compared.agreement.error)
    manifest = _describe(
        identity,
        device,
        largest,
        members,
        declared=declared,
        resources=resources_of(
            merged.graphs,
            [spec.name for spec, _ in merged.weights],
            kernels.workspaces,
            plan.buckets,
            largest.inputs,
        ),
        compared=replace(worst, self_test_rtol=max(compared.self_test_rtol for _, compared in samples)),
        tuned=tuned,
        buckets=plan.buckets,
    )
    return Package(
        manifest,
        members,
        uncovered=uncovered_kernels(lowered, device),
        fallbacks=fallbacks(largest, lowered),
        nodes=layers.fates,
        integers=integer_work(largest, lowered, layers.fates),
        tried=tried,
        exported=largest.exported,
    )


def _lower(
    plan: Plan, device: DeviceTarget, schedules: Schedules, progress: Progress
) -> tuple[MergedGraphs, LoweredModule, Layers]:
    """Lower the model at each size; return the graphs together, and the parts of the largest."""
    merged = MergedGraphs()
    for place, each in enumerate(plan.sizes, 1):
        number = "" if plan.buckets is None else f" ({place} of {plan.buckets.count})"
        progress(f"lowering{plan.describe(each)}{number} for {device.name} ({device.cpu})")
        model = plan.models.at(each)
        lowered = lower(model.mod, device, schedules)
        layers = Layers(model, lowered.main)
        names = [spec.name for spec in model.inputs], [spec.name for spec in model.outputs]
        generated = generate(
            lowered.main, *names, count_flops(lowered.kernels), layers.by_call, joins_of(lowered.kernels)
        )
        merged.add(generated, lowered.kernels)
    return merged, lowered, layers


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a compilation takes from tuning records.

    `best`: the schedules to use, or None if the records do not make the model faster.
    `digest`: SHA-256 of the records in hexadecimal, or None without records.
    `comparison`: the times of the tuned and the untuned model, or None if they were not measured.
    """

    best: BestRecords | None = None
    digest: str | None = None
    comparison: Tuning | None = None


def choose_records(
    records: Records | str | os.PathLike[str] | None,
    device: DeviceTarget,
    model: ImportedModel,
    progress: Progress,
) -> Tuned:
    """Return what a compilation takes from tuning records.

    Raises `RecordsError` if they cannot be read, or are for another target.
    """
    if records is None:
        return Tuned()
    if isinstance(records, Records):
        records.meta.check_target(device, str(records.path))
    else:
        records = Records.read(records, device)
    for line in records.notes():
        progress(line)
    result = records.meta.models.get(model.source_sha256)
    if result is not None and not result.use:
        progress("the tuned model was slower as a whole, so it is compiled without its records")
        return Tuned(None, records.digest(), None)
    comparison = None
    if result is not None and result.ratio is not None and result.ratio.is_gain and result.board is not None:
        ratio = result.ratio
        comparison = Tuning(
            result.board,
            ratio.untuned_us / 1e3,
            ratio.tuned_us / 1e3,
            ratio.speedup,
            ratio.low,
            ratio.high,
            ratio.pairs,
        )
    return Tuned(BestRecords(records), records.digest(), comparison)


def _describe(
    identity: Identity,
    device: DeviceTarget,
    model: ImportedModel,
    members: Mapping[str, bytes],
    *,
    declared: Declared,
    resources: Resources,
    compared: Compared,
    tuned: Tuned,
    buckets: Buckets | None = None,
) -> Manifest:
    """Describe a compiled model and the files of its bundle; there is one sample, or one for each bucket.

    Raises `ModelError` if a value breaks a rule of the manifest.
    """
    code = members["mod.so"]
    try:
        return Manifest(
            name=identity.name or bundle_name(model.name),
            version=identity.version,
            security_counter=identity.counter(),
            counter_ahead_of_time=identity.counter_ahead_of_time or None,
            compatible=tuple(identity.compatible or (f"linux-{device.arch}",)),
            target=ManifestTarget(device.triple, device.cpu, device.features),
            runtime=_runtime(code),
            inputs=model.inputs,
            outputs=model.outputs,
            preprocess=declared.preprocess,
            postprocess=declared.postprocess,
            states=declared.states,
            audio=declared.audio,
            columns=declared.columns,
            lengths=model.lengths or None,
            quantisation=model.scales.declared,
            class_counts=_counts(model),
            number_types=model.number_types or None,
            buckets=buckets,
            samples=Samples(
                1 if buckets is None else buckets.count, compared.self_test_rtol, tolerances.SELF_TEST_ATOL
            ),
            resources=resources,
            files=digests(members),
            provenance=Provenance(
                source_sha256=model.source_sha256,
                builder=f"edgebundle {__version__}",
                parity_error=float(f"{compared.agreement.error:.3g}"),
                reference=compared.agreement.reference,
                tuning_records_sha256=tuned.digest,
                tuning=tuned.comparison,
            ),
        )
    except ValueError as error:
        raise ModelError(f"the bundle cannot be described: {error}", hint=DESCRIBABLE) from error


def _counts(model: ImportedModel) -> dict[str, int] | None:
    """Return how many classes the numbers in each output stand for, None if it is not known of any."""
    names = {spec.name for spec in model.outputs}
    return {name: count for name, count in model.class_counts.items() if name in names and count} or None


def build_for_host(kernels: tvm.IRModule) -> bytes:
    """Build kernels that were scheduled for a device as a library for this machine."""
    host = resolve("host")
    return link(compile_object(kernels, host), host)


def _runtime(code: bytes) -> Runtime:
    tvm_ffi_version = metadata.version("apache-tvm-ffi")
    major, minor = tvm_ffi_version.split(".")[:2]
    return Runtime(
        tvm=metadata.version("apache-tvm"),
        tvm_ffi=tvm_ffi_version,
        executor="graph",
        abi=f"tvm-ffi-{major}.{minor}",
        glibc=describe(code).glibc,
    )


def _dump_samples(specs: Sequence[TensorSpec], samples: Sequence[Mapping[str, Array]]) -> bytes:
    return dump_params(
        (
            TensorSpec(f"{index}/{spec.name}", spec.datatype, sample[spec.name].shape),
            np.array(sample[spec.name], order="C").data,
        )
        for index, sample in enumerate(samples)
        for spec in specs
    )
