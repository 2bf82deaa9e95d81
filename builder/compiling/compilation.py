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
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
import numpy.typing as npt
import tvm

from agent import __version__
from agent.bundle.buckets import Buckets
from agent.bundle.graph import Graph
from agent.bundle.manifest import Manifest, Resources, Runtime, Samples
from agent.bundle.manifest import Target as ManifestTarget
from agent.bundle.params import dump_params
from agent.bundle.processing import Postprocess, Preprocess
from agent.bundle.provenance import Provenance, Tuning
from agent.bundle.quantisation import by_name
from agent.bundle.tensor_spec import TensorSpec
from agent.runtime import debug_executor
from agent.runtime.debug_executor import GraphModuleDebug
from builder.bundles.package import Package, digests
from builder.codegen.graph_codegen import generate
from builder.codegen.kernel_object import compile_kernels, compile_object, count_flops
from builder.codegen.link.linker import describe, link
from builder.compiling import (
    audio_presets,
    block_parity,
    framework_parity,
    half_parity,
    parity,
    tolerances,
)
from builder.compiling.block_agreement import Step
from builder.compiling.columns import Names
from builder.compiling.defined_samples import choose
from builder.compiling.first_look import look
from builder.compiling.footprint import resources_of
from builder.compiling.identity import Identity, bundle_name
from builder.compiling.integer_share import integer_work
from builder.compiling.judge import Judge
from builder.compiling.labels import Labels, label_lines
from builder.compiling.layers import Layers
from builder.compiling.lower import lower
from builder.compiling.output_presets import Signature
from builder.compiling.over_time import Declarations, over_time_of
from builder.compiling.sample_inputs import samples
from builder.compiling.special_samples import is_elementwise, special_samples
from builder.compiling.uncovered import uncovered_kernels
from builder.errors import ModelError
from builder.importer import ImportedModel, load
from builder.kernels.decisions import Schedules
from builder.kernels.passes.halves import floats_of
from builder.kernels.spaces.concatenation import joins_of
from builder.records.best_records import BestRecords
from builder.records.folder import Records
from builder.running.in_memory import load_kernels
from builder.target.device_target import DeviceTarget, resolve
from builder.target.half_arithmetic import require_half_arithmetic

Progress = Callable[[str], None]
Array = npt.NDArray[np.generic]


def compile(
    model: ImportedModel | str | os.PathLike[str],
    target: str | Mapping[str, Any] | DeviceTarget = "host",
    *,
    identity: Identity | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    preprocess: str | None = None,
    postprocess: str | None = None,
    labels: Labels | None = None,
    states: Sequence[str] = (),
    columns: Names | None = None,
    tolerance: float | None = None,
    tuning_records: Records | str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Package:
    """Compile a model for a device.

    Parameters
    ----------
    model
        The result of `builder.load`, or a path, which is loaded with `input_shapes`.
    target
        A preset's name, a TVM target as JSON or in TVM's old command-line syntax, or a resolved target.
    identity
        Name, version, counter and compatible devices.
    input_shapes
        Input name -> shape, for a path with symbolic dimensions.
    preprocess, postprocess
        Presets or TOML files, see `builder.compiling.declarations`. With None, the preprocess is what the
        model's file says itself.
    labels
        The labels, a file with one label per line, or `coco` for the 80 classes of COCO. With None, the
        labels that are in the model's file, unless there is a postprocess that has no use for them.
    states
        Outputs that are inputs of the next run, as `builder.compiling.states` takes them; added to those of
        an audio preset.
    columns
        Names of the columns of a table that the inputs take: the names, a text with commas between them, or
        the path of a CSV file whose first line has them. With None, the names that the model's file has.
    tolerance
        Largest relative error that is allowed against the reference. With None, it is
        `builder.compiling.tolerances.PARITY`, or more if the model amplifies rounding.
    tuning_records
        The result of `builder.tune`, or its folder; its schedules replace the heuristic's where they are
        faster.
    progress
        Called with each step as it begins.

    Returns
    -------
    Package
        The package, unsigned.

    Raises
    ------
    InputFault
        If the identity, model, target, shapes, declarations or records cannot be used, or parity fails.
    BuildError
        If the builder itself fails.
    """
    progress = progress or (lambda _: None)
    identity = identity or Identity()
    identity.check()
    device = target if isinstance(target, DeviceTarget) else resolve(target)
    if not isinstance(model, ImportedModel):
        progress("importing the model")
        model = load(model, **audio_presets.import_options(preprocess, input_shapes), progress=progress)
    if floats_of(model.mod) is not None:
        require_half_arithmetic(device)
    over_time = over_time_of(model, preprocess, postprocess, states, columns, progress)
    before = over_time.preprocess
    after = over_time.postprocess
    labels = labels or over_time.labels
    names_of_classes = label_lines(labels, model.labels, model.outputs, after, model.class_counts)

    progress(f"lowering for {device.name} ({device.cpu})")
    tuned = choose_records(tuning_records, device, model, progress)
    lowered = lower(model.mod, device, Schedules(tuned.best, progress=progress))
    if tuned.best is not None:
        progress(f"schedules from tuning records for {len(tuned.best.used)} kernels")
    names = [s.name for s in model.inputs], [s.name for s in model.outputs]
    layers = Layers(model, lowered.main)
    graph = generate(
        lowered.main, *names, count_flops(lowered.kernels), layers.by_call, joins_of(lowered.kernels)
    )
    progress(f"generating code for {len(lowered.kernels.functions)} kernels")
    kernels = compile_kernels(lowered.kernels, device)
    code = link(kernels.code, device)
    params = dump_params((spec, data.data) for spec, data in graph.params)

    progress("comparing with the reference")
    inputs = choose(model.onnx, samples(model.inputs, model.onnx, before), progress)
    runnable = code if device.is_native else build_for_host(lowered.kernels)
    module = _debug_executor(runnable, graph.graph, params)
    compared = compare_model(model, module, graph.sources, inputs, before, tolerance, progress)
    look_at_sample(model, after, compared, postprocess or "", progress)

    members = {
        "mod.so": code,
        "mod.json": graph.graph.to_json(),
        "mod.params": params,
        "samples/inputs.params": _dump_samples(model.inputs, [inputs[s.name] for s in model.inputs]),
        "samples/outputs.params": _dump_samples(model.outputs, compared.samples),
    }
    if names_of_classes is not None:
        members["labels.txt"] = names_of_classes
    manifest = describe_model(
        identity,
        device,
        model,
        members,
        over_time=over_time,
        resources=resources_of(graph.graph, (spec.name for spec, _ in graph.params), kernels.workspaces),
        compared=compared,
        tuned=tuned,
    )
    return Package(
        manifest,
        members,
        uncovered=uncovered_kernels(lowered, device),
        nodes=layers.fates,
        integers=integer_work(model, lowered, layers.fates),
    )


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison with the reference that a model has passed.

    Attributes
    ----------
    agreement
        How far its outputs are from the reference's.
    samples
        The outputs that devices compare theirs with.
    self_test_rtol
        How far theirs may be from these.
    """

    agreement: parity.Parity
    samples: Sequence[Array]
    self_test_rtol: float


def compare_model(
    model: ImportedModel,
    module: GraphModuleDebug,
    sources: Sequence[tuple[str, ...]],
    inputs: Mapping[str, Array],
    before: Preprocess | None,
    tolerance: float | None,
    progress: Progress,
) -> Compared:
    """Compare a compiled model with the reference, and with its own framework if that was asked.

    Parameters
    ----------
    model, module
        The model and its kernels.
    sources
        For each node of the module's graph, the names of the model's nodes that it computes.
    inputs
        An ordinary sample.
    before
        How a picture becomes an input, or None.
    tolerance
        The largest relative error of an output, None for what the model's numbers deserve.
    progress
        Called with what is worth saying.

    Raises
    ------
    ParityError
        If they do not agree.
    """
    names = [spec.name for spec in model.outputs]
    for name, value in inputs.items():
        module.set_input(name, value)
    quantised = block_parity.is_quantised(model.onnx)
    halves = floats_of(model.mod) is not None
    compare_steps = tolerance is None and (quantised or halves)
    ran = module.debug_get_outputs() if compare_steps else []
    steps = [Step(array, sources[node]) for node, array in ran]
    outputs = computed(module, inputs)
    half = any(spec.datatype == "FP16" for spec in model.outputs)
    judge = Judge(model)
    reference = judge.outputs(inputs)
    agreement = parity.compare(names, outputs, reference)
    if tolerance is not None:
        parity.check(agreement, tolerance)
    elif halves:
        judge.check_normalised(inputs, reference)
        compared = half_parity.compare_halves(
            model.onnx, inputs, [step.array for step in steps], outputs, reference
        )
        compared.check()
        progress(compared.summary())
    elif quantised:
        blocks = block_parity.compare_blocks(model.onnx, inputs, steps, outputs)
        blocks.check()
        agreement = blocks.agreement(names, outputs)
        parity.check(agreement, tolerances.PARITY)
        if blocks.found:
            progress(blocks.summary())
    elif not agreement.error <= tolerances.PARITY:
        judge.check_normalised(inputs, reference)
        check_rounding(judge, inputs, outputs, reference, agreement, progress)
    if tolerance is None and not halves and judge.compares_floats:
        check_special(model, judge, module, inputs, before)
    framework_parity.check_kernels(model, partial(computed, module), tolerance, progress)
    rtol = tolerances.self_test_rtol(agreement.error, half=half)
    agreement = replace(agreement, reference=judge.reference)
    # The bytes of a quantised model are the same on every device, but for a few that are rounded to the other
    # step; so devices compare with what was computed here, not with the reference.
    if not quantised:
        return Compared(agreement, reference, rtol)
    return Compared(agreement, outputs, max(rtol, tolerances.STEP))


def computed(module: GraphModuleDebug, inputs: Mapping[str, Array]) -> list[Array]:
    """Return the outputs for inputs."""
    for name, value in inputs.items():
        module.set_input(name, value)
    module.run()
    return [np.array(module.get_output(index)) for index in range(module.get_num_outputs())]


def look_at_sample(
    model: ImportedModel, after: Postprocess | None, compared: Compared, text: str, progress: Progress
) -> None:
    """Tell what is doubtful about what the postprocess makes of the sample.

    Parameters
    ----------
    model
        The model.
    after, text
        The postprocess, and what the user declares; or None and an empty text.
    compared
        The comparison, with the sample's outputs.
    progress
        Called with each doubt.

    Raises
    ------
    ModelError
        If boxes are in other units than declared.
    """
    if model.lengths:  # whose outputs are padded
        return
    names = [spec.name for spec in model.outputs]
    values = {name: np.asarray(value) for name, value in zip(names, compared.samples, strict=True)}
    size = Signature.of(model.inputs, model.outputs).size
    for line in look(after, model.outputs, values, size, by_name(model.scales.quantisation.outputs), text):
        progress(line)


def check_special(
    model: ImportedModel,
    judge: Judge,
    module: GraphModuleDebug,
    inputs: Mapping[str, Array],
    before: Preprocess | None,
) -> None:
    """Compare a compiled model with the reference on NaN, infinities and other special numbers.

    Raises
    ------
    ParityError
        If they do not agree where the reference is defined.
    """
    names = [spec.name for spec in model.outputs]
    by_element = is_elementwise(model.onnx)
    operators = () if model.original is None else model.original.operators
    for sample in special_samples(model.inputs, model.onnx, inputs, before, operators):
        reference = judge.outputs_if_defined(sample)
        if reference is None:
            continue
        outputs = computed(module, sample)
        agreement = parity.compare(names, outputs, reference, by_element=by_element)
        if agreement.error <= tolerances.PARITY:
            continue
        judge.check_normalised(sample, reference, by_element=by_element)
        noise = judge.noise(sample, outputs, reference, by_element=by_element)
        if noise is not None:
            # Where huge products cancel, what is left is as large as their rounding: only that is judged.
            noise = replace(noise, error=0.0)
        where = f"{judge.reference}, on zeros, infinities and other special numbers"
        parity.check(replace(agreement, reference=where), tolerances.PARITY, noise)


def check_rounding(
    judge: Judge,
    inputs: Mapping[str, Array],
    outputs: Sequence[Array],
    reference: Sequence[Array],
    agreement: parity.Parity,
    progress: Progress,
) -> None:
    """Refuse a model whose difference from the reference is more than rounding.

    Raises
    ------
    ParityError
        If it is.
    """
    progress("comparing with the noise of rounding, because the model may amplify it")
    noise = judge.noise(inputs, outputs, reference)
    parity.check(replace(agreement, reference=judge.reference), tolerances.PARITY, noise)
    if noise is not None:
        progress(f"the model amplifies rounding: the difference is {noise.ratio:.2g} times its noise")


def _debug_executor(code: bytes, graph: Graph, params: bytes) -> GraphModuleDebug:
    """Create an executor whose single nodes can be inspected, and load its weights."""
    module = debug_executor.create(graph, load_kernels(code))
    module.load_params(params)
    return module


@dataclass(frozen=True, slots=True)
class Tuned:
    """What a compilation takes from tuning records.

    Attributes
    ----------
    best
        The schedules to use, or None if the records do not make the model faster.
    digest
        SHA-256 of the records in hexadecimal, or None without records.
    comparison
        The times of the tuned and the untuned model, or None if they were not measured.
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

    Parameters
    ----------
    records
        As `tuning_records` of `compile`.
    device, model
        What is compiled.
    progress
        Called with what is worth saying about the records.

    Raises
    ------
    RecordsError
        If they cannot be read, or are for another target.
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


def describe_model(
    identity: Identity,
    device: DeviceTarget,
    model: ImportedModel,
    members: Mapping[str, bytes],
    *,
    over_time: Declarations,
    resources: Resources,
    compared: Compared,
    tuned: Tuned,
    buckets: Buckets | None = None,
) -> Manifest:
    """Describe a compiled model and the files of its bundle; there is one sample, or one for each bucket.

    Raises
    ------
    ModelError
        If a value breaks a rule of the manifest.
    """
    code = members["mod.so"]
    try:
        return Manifest(
            name=identity.name or bundle_name(model.name),
            version=identity.version,
            security_counter=identity.counter(),
            compatible=tuple(identity.compatible or (f"linux-{device.arch}",)),
            target=ManifestTarget(device.triple, device.cpu, device.features),
            runtime=_runtime(code),
            inputs=model.inputs,
            outputs=model.outputs,
            preprocess=over_time.preprocess,
            postprocess=over_time.postprocess,
            states=over_time.states,
            audio=over_time.audio,
            columns=over_time.columns,
            lengths=model.lengths or None,
            quantisation=model.scales.declared,
            class_counts=_counts(model),
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
        raise ModelError(f"the bundle cannot be described: {error}") from error


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


def _dump_samples(specs: Sequence[TensorSpec], arrays: Sequence[Array]) -> bytes:
    return dump_params(
        (TensorSpec(f"0/{spec.name}", spec.datatype, spec.shape), np.array(array, order="C").data)
        for spec, array in zip(specs, arrays, strict=True)
    )
