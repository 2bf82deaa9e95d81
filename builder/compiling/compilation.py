"""Compile: a model becomes a package, for a device it does not run on here.

The steps in order: import, lower, generate code, link, plan and write the graph, run the result against the
reference, declare everything in the manifest. For a device that this machine is not, the same scheduled
kernels are also built for this machine, and those are run against the reference: schedule, graph and
weights are the device's, LLVM's last step alone is not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tvm

from agent import __version__
from agent.bundle.manifest import Manifest, Provenance, Resources, Runtime, Samples, Tuning
from agent.bundle.manifest import ShippedRecords as ManifestShipped
from agent.bundle.manifest import Target as ManifestTarget
from agent.bundle.params import dump_params
from agent.bundle.tensor_spec import TensorSpec
from builder.bundles.package import Package, digests
from builder.codegen.graph_codegen import generate
from builder.codegen.kernel_object import compile_object, count_flops
from builder.codegen.link.linker import describe, link
from builder.compiling import parity, presets, sample_inputs
from builder.compiling.lower import lower
from builder.errors import ModelError
from builder.importer import ImportedModel, load
from builder.kernels.decisions import Schedules
from builder.records.best_records import BestRecords
from builder.records.folder import Records
from builder.records.shipped import NONE, ShippedChoices, shipped_for
from builder.running.execute import execute
from builder.target.device_target import DeviceTarget, resolve

# What a device compares its own answers with: looser than parity, since its own libm and FMA units round
# once more.
SELF_TEST_RTOL: Final = 10 * parity.TOLERANCE
SELF_TEST_ATOL: Final = 1e-6

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Identity:
    """What a bundle is called and what takes it.

    Attributes
    ----------
    name
        The model's name on devices; None takes it from the file's name.
    version
        Semantic version.
    security_counter
        Never lower than what a device has committed for that name.
    compatible
        Device types; None means any Linux of the target's architecture.
    """

    name: str | None = None
    version: str = "1.0.0"
    security_counter: int = 0
    compatible: Sequence[str] | None = None

    def check(self) -> None:
        """Refuse what no manifest can say, before anything is compiled.

        Raises
        ------
        ModelError
            If a name, version or counter that devices refuse.
        """
        if self.name is not None and not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,63}", self.name):
            raise ModelError(
                f"name: expected lower case letters, digits and ._-, got {self.name[:80]!r}",
                hint=f"for example {_bundle_name(self.name)}",
            )
        if not re.fullmatch(r"\d+\.\d+\.\d+([-+][0-9A-Za-z.+-]+)?", self.version):
            raise ModelError(
                f"version: expected a semantic version, got {self.version[:80]!r}", hint="for example 1.0.0"
            )
        if self.security_counter < 0:
            raise ModelError(f"security_counter: expected 0 or more, got {self.security_counter}")


def compile(
    model: ImportedModel | str | os.PathLike[str],
    target: str | Mapping[str, Any] | DeviceTarget = "host",
    *,
    identity: Identity | None = None,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    preprocess: str | None = None,
    postprocess: str | None = None,
    labels: str | os.PathLike[str] | None = None,
    tolerance: float = parity.TOLERANCE,
    tuning_records: Records | str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Package:
    """Compile a model for a device.

    Parameters
    ----------
    model
        What `builder.load` returned, or a path, which is then loaded with `input_shapes`.
    target
        A preset's name, a TVM target as JSON or in the old spelling, or a resolved target.
    identity
        Name, version, counter and compatible devices.
    input_shapes
        Input name -> shape, for a path with symbolic dimensions.
    preprocess, postprocess
        Presets or TOML files, see `builder.compiling.presets`.
    labels
        File with one label a line.
    tolerance
        Largest relative error against the reference.
    tuning_records
        What `builder.tune` returned, or its folder: measured schedules take the place of the heuristic's.
        Where they have nothing faster, and without them, the records that are shipped for the device decide
        (docs/shipped-records.md); `"none"` leaves those out too.
    progress
        Called with each step as it begins.

    Returns
    -------
    Package
        Unsigned.

    Raises
    ------
    InputFault
        If the model, target, shapes, declarations or records cannot be used, or parity fails.
    BuildError
        If a fault of ours.
    """
    progress = progress or (lambda _: None)
    identity = identity or Identity()
    identity.check()
    device = target if isinstance(target, DeviceTarget) else resolve(target)
    if not isinstance(model, ImportedModel):
        progress("importing the model")
        model = load(model, input_shapes=input_shapes, notes=progress)
    name = identity.name or _bundle_name(model.name)
    declared_before = presets.preprocess(preprocess, model.inputs) if preprocess else None
    declared_after = presets.postprocess(postprocess, model.outputs) if postprocess else None
    label_lines = presets.labels(Path(labels), model.outputs, declared_after) if labels else None

    progress(f"lowering for {device.name} ({device.cpu})")
    shipped = None if tuning_records == NONE else shipped_for(device)
    tuned = None
    if tuning_records is not None and tuning_records != NONE:
        tuned = _tuned(tuning_records, device, model, progress)
    best = tuned.best if tuned is not None else None
    lowered = lower(model.mod, device, Schedules(best, shipped, progress=progress))
    if best is not None:
        progress(f"schedules from tuning records for {len(best.used)} kernels")
    if shipped is not None and shipped.used:
        progress(f"schedules from shipped records of {shipped.records.name} for {len(shipped.used)} kernels")
    names = [s.name for s in model.inputs], [s.name for s in model.outputs]
    graph = generate(lowered.main, *names, count_flops(lowered.kernels))
    progress(f"generating code for {len(lowered.kernels.functions)} kernels")
    code = link(compile_object(lowered.kernels, device), device)
    params = dump_params((spec, data.data) for spec, data in graph.params)

    progress("comparing with the reference")
    inputs = sample_inputs.record(model.inputs, model.onnx, declared_before)
    reference = parity.reference_outputs(model.onnx, inputs)
    runnable = code if device.is_native else _build_for_host(lowered.kernels)
    outputs = execute(runnable, graph.graph, params, inputs)
    agreement = parity.compare([s.name for s in model.outputs], outputs, reference)
    parity.check(agreement, tolerance)

    members = {
        "mod.so": code,
        "mod.json": graph.graph.to_json(),
        "mod.params": params,
        "samples/inputs.params": _dump_samples(model.inputs, [inputs[s.name] for s in model.inputs]),
        "samples/outputs.params": _dump_samples(model.outputs, reference),
    }
    if label_lines is not None:
        members["labels.txt"] = label_lines
    try:
        manifest = Manifest(
            name=name,
            version=identity.version,
            security_counter=identity.security_counter,
            compatible=tuple(identity.compatible or (f"linux-{device.arch}",)),
            target=ManifestTarget(device.triple, device.cpu, device.features),
            runtime=_runtime(code),
            inputs=model.inputs,
            outputs=model.outputs,
            preprocess=declared_before,
            postprocess=declared_after,
            samples=Samples(1, SELF_TEST_RTOL, SELF_TEST_ATOL),
            resources=Resources(graph.arena_bytes, len(params)),
            files=digests(members),
            provenance=Provenance(
                source_sha256=model.source_sha256,
                builder=f"edgebundle {__version__}",
                parity_error=float(f"{agreement.error:.3g}"),
                reference=agreement.reference,
                tuning_records_sha256=tuned.digest if tuned is not None else None,
                tuning=tuned.comparison if tuned is not None else None,
                shipped_records=_declare(shipped),
            ),
        )
    except ValueError as error:
        raise ModelError(f"the bundle cannot be described: {error}") from error
    return Package(manifest, members)


@dataclass(frozen=True, slots=True)
class _Tuned:
    """What a compilation takes from tuning records."""

    best: BestRecords | None
    digest: str
    comparison: Tuning | None


def _tuned(
    records: Records | str | os.PathLike[str], device: DeviceTarget, model: ImportedModel, progress: Progress
) -> _Tuned:
    if isinstance(records, Records):
        records.meta.check_target(device, str(records.path))
    else:
        records = Records.read(records, device)
    result = records.meta.models.get(model.source_sha256)
    if result is not None and not result.use:
        progress("the tuned model was slower as a whole: it is compiled without its records")
        return _Tuned(None, records.digest(), None)
    comparison = None
    if result is not None and result.ratio is not None and result.board is not None:
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
    return _Tuned(BestRecords(records), records.digest(), comparison)


def _declare(shipped: ShippedChoices | None) -> ManifestShipped | None:
    """What the manifest says of shipped records, nothing where none applied."""
    if shipped is None or not shipped.used:
        return None
    records = shipped.records
    return ManifestShipped(records.name, records.digest(), len(shipped.used), records.board_timed)


def _build_for_host(kernels: tvm.IRModule) -> bytes:
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


def _dump_samples(specs: Sequence[TensorSpec], arrays: Sequence[npt.NDArray[np.generic]]) -> bytes:
    return dump_params(
        (TensorSpec(f"0/{spec.name}", spec.datatype, spec.shape), np.array(array, order="C").data)
        for spec, array in zip(specs, arrays, strict=True)
    )


def _bundle_name(text: str) -> str:
    """`ResNet 50 (v2)` -> `resnet-50-v2`."""
    name = re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:64]
    return name or "model"
