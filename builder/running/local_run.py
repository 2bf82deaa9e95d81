"""Run a compiled model on this machine, as TVMC's `run` did.

Takes packages and bundle files, signed or not: the workstation trusts its user. The outputs are called
`output_0`, `output_1` and so on, as in TVMC's files.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from agent.array_file import write_arrays
from agent.bundle.machine import Machine
from agent.bundle.state import requested
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import EdgeError
from agent.runtime.benchmark import BenchmarkResult
from agent.runtime.bucketed_module import BucketedModule
from agent.runtime.graph_executor import GraphModule, load
from agent.runtime.lengths import cut, cut_objects
from agent.runtime.module import KernelModule
from agent.runtime.placement import Placement
from agent.runtime.postprocess import Postprocessor, Value
from agent.runtime.preprocess import Preprocessor
from agent.runtime.quantisation import to_input
from agent.runtime.streaming import StreamingModel, is_streaming
from agent.runtime.wav import read_recording
from agent.wire.content_types import WAV
from builder.bundles.package import Package
from builder.bundles.profile_report import Report, Stage
from builder.errors import ModelError, PackageError, ShapeError
from builder.running.debug_executor import GraphModuleDebug
from builder.running.in_memory import load_kernels
from builder.running.inputs import Arrays, Inputs, Picture, Sound, read_inputs
from builder.running.nearest import Nearest, nearest_of
from builder.running.sizes import Shapes, fit, make_module, recorded_input

FillMode = Literal["zeros", "ones", "random"]
_STAGE_RUNS: Final = 5  # of decoding and postprocessing, whose times are means
SEED: Final = 0  # of inputs that are filled with random values

Array = npt.NDArray[Any]


class TimingOptions(TypedDict, total=False):
    """How a model is timed, as in `agent.runtime.graph_executor.GraphModule.benchmark`.

    Attributes
    ----------
    repeat, number
        So many results, 10 by default, each of so many runs, 1 by default.
    min_repeat_ms
        Each result takes at least this long: it is of more runs if necessary.
    end_to_end
        Whether to time copying the inputs and outputs as well.
    """

    repeat: int
    number: int
    min_repeat_ms: float
    end_to_end: bool


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run.

    Attributes
    ----------
    outputs
        `output_0`, `output_1`, ... in the model's order.
    answers
        Name -> value after the declared postprocess, or None if the model declares none.
    times
        The benchmark's times, or None if the model was not timed.
    nearest
        The best object if a detector found none, else None.
    """

    outputs: Mapping[str, Array]
    answers: Mapping[str, Value] | None
    times: BenchmarkResult | None
    nearest: Nearest | None = None

    def get_output(self, name: str) -> Array:
        """Return an output by its name, such as `output_0`."""
        return self.outputs[name]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the outputs as an .npz file."""
        write_arrays(Path(path), self.outputs)


def save_steps(path: str | os.PathLike[str], steps: Sequence[RunResult]) -> None:
    """Write the outputs of the steps of a stream as an .npz file, stacked along a new first axis.

    Raises
    ------
    ShapeError
        If an output has another shape in another step.
    """
    for name, first in steps[0].outputs.items():
        for number, step in enumerate(steps, 1):
            if (found := step.outputs[name].shape) != first.shape:
                raise ShapeError(
                    f"--outputs: expected a {name} of one shape, got {list(first.shape)} in step 1 and "
                    f"{list(found)} in step {number}",
                    hint="leave out --outputs, or give steps of one size",
                )
    stacked = {name: np.stack([step.outputs[name] for step in steps]) for name in steps[0].outputs}
    write_arrays(Path(path), stacked)


def run(
    package: Package | str | os.PathLike[str],
    inputs: Inputs = None,
    *,
    device: str = "cpu",
    fill_mode: FillMode = "random",
    benchmark: bool = False,
    threads: int | None = None,
    input_shapes: Shapes | None = None,
    **timing: Unpack[TimingOptions],
) -> RunResult:
    """Run a compiled model.

    Parameters
    ----------
    package
        The result of `builder.compile`, or a bundle's path.
    inputs
        Arrays by input name; an .npz file of them; or a JPEG or PNG picture or a WAV file, for a model that
        declares a preprocess for it. Missing inputs are filled.
    device
        `cpu`, the only one.
    fill_mode
        What missing inputs are filled with; random values are seeded.
    benchmark
        Whether to time the model.
    threads
        Kernel threads; None means `EDGE_NUM_THREADS` or the number of CPUs.
    input_shapes
        Shapes of filled inputs of a model whose shapes change; by default its largest.
    timing
        How it is timed.

    Raises
    ------
    PackageError
        If the bundle cannot be read, or was compiled for another machine.
    ShapeError, ModelError
        If an input has a wrong name, shape or dtype, or the file cannot be read.
    """
    if device != "cpu":
        raise PackageError(f"device: expected cpu, got {device!r:.40}", hint="bundles hold kernels for CPUs")
    package = package if isinstance(package, Package) else Package.load(package)
    how = timing_options(**timing)
    runner = Runner(package, threads)
    result = runner(inputs, fill_mode, input_shapes)
    if not benchmark:
        return result
    module = runner.module
    graph = module if isinstance(module, GraphModule) else module.module
    return replace(result, times=graph.benchmark(**how))


def timing_options(
    *, repeat: int = 10, number: int = 1, min_repeat_ms: float = 0, end_to_end: bool = False
) -> TimingOptions:
    """Return all options of a timing, with the defaults of those that are not given."""
    return {"repeat": repeat, "number": number, "min_repeat_ms": min_repeat_ms, "end_to_end": end_to_end}


class Runner:
    """A compiled model, loaded once for many inputs.

    Parameters
    ----------
    package
        The model.
    threads
        Kernel threads; None means `EDGE_NUM_THREADS` or the number of CPUs.

    Raises
    ------
    PackageError
        If the bundle was compiled for another machine, or its declarations do not fit.
    """

    def __init__(self, package: Package, threads: int | None = None) -> None:
        self.module = _executor(package, threads)
        self._package = package
        manifest = package.manifest
        self._labels = labels = package.members.get("labels.txt", b"").splitlines()
        self._declared = manifest.postprocess if manifest.audio is None else None
        self._kept = {state.output for state in manifest.states or ()}
        self._streaming: StreamingModel | None = None
        try:
            self._finish = Postprocessor(
                self._declared, manifest.smallest_outputs, labels, manifest.real_outputs
            )
            if isinstance(self.module, GraphModule) and is_streaming(manifest):
                self._streaming = StreamingModel(manifest, self.module, labels)
                self._stream = self._streaming.begin()
        except EdgeError as error:
            raise PackageError(
                f"the bundle's postprocess cannot work: {error}", hint="change it: edgebundle repack"
            ) from error

    def __call__(
        self, inputs: Inputs = None, fill_mode: FillMode = "random", input_shapes: Shapes | None = None
    ) -> RunResult:
        """Run the model once; the parameters and errors are those of `run`.

        A model with states continues from the previous call, until `reset`. A recording begins and ends in
        one call.
        """
        package, module = self._package, self.module
        given = read_inputs(inputs, self._requested)
        if isinstance(given, Sound):
            if package.manifest.preprocess is not None and package.manifest.audio is None:
                raise ModelError(
                    "expected a picture, got a recording",
                    hint="the model sees: give it a .jpg or a .png file",
                )
            return self._listen(given)
        _set_all(package, module, given, fill_mode, input_shapes or {})
        placement = _set_picture(package, module, given) if isinstance(given, Picture) else None
        if self._streaming is None:
            module.run()
        else:
            self._streaming.run(self._stream)
            self._streaming.commit(self._stream)
        manifest = package.manifest
        computed = _outputs(module, package)
        named = {spec.name: value for spec, value in zip(manifest.outputs, computed, strict=True)}
        whole = cut(named, named, manifest.lengths or ())
        outputs = {f"output_{i}": np.asarray(array) for i, array in enumerate(whole.values())}
        answers, nearest = None, None
        if self._declared is not None or manifest.real_outputs:
            made = {name: value for name, value in named.items() if name not in self._kept}
            steps = () if manifest.postprocess is None else manifest.postprocess.steps
            shorter = cut_objects(made, manifest.lengths or (), steps)
            try:
                answers = cut(self._finish(shorter, placement), made, manifest.lengths or ())
            except EdgeError as error:
                raise ModelError(
                    f"the outputs cannot be turned into an answer: {error}",
                    hint=error.hint or "declare another one: edgebundle repack BUNDLE --postprocess PRESET",
                ) from error
            if any(name.endswith("boxes") and not len(value) for name, value in answers.items()):
                nearest = nearest_of(manifest, self._labels, shorter)
        return RunResult(outputs, answers, None, nearest)

    def reset(self) -> None:
        """Reset a model with states to its initial values."""
        if self._streaming is not None:
            self._stream = self._streaming.begin()

    @property
    def _requested(self) -> tuple[TensorSpec, ...]:
        manifest = self._package.manifest
        return requested(manifest.inputs, [state.input for state in manifest.states or ()])

    def _listen(self, sound: Sound) -> RunResult:
        if self._streaming is None or self._streaming.listener is None:
            raise ModelError(
                "the model does not declare how to turn a recording into its input",
                hint="add it: edgebundle compile MODEL --preprocess silero, or another preset of sound",
            )
        try:
            recording = read_recording(sound.content, WAV)
            answers = self._streaming.listen(self._streaming.begin(), recording, end=True)
        except EdgeError as error:
            raise ModelError(str(error), hint=error.hint or "give a .wav file of 8 or 16 bits") from error
        outputs = {name: value for name, value in answers.items() if not isinstance(value, tuple)}
        return RunResult(outputs, answers, None)


def profile(
    package: Package | str | os.PathLike[str],
    inputs: Inputs = None,
    *,
    fill_mode: FillMode = "random",
    number: int = 10,
    threads: int | None = None,
    input_shapes: Shapes | None = None,
) -> Report:
    """Time each kernel of a compiled model, and what is declared before and after the kernels.

    Parameters
    ----------
    package
        The result of `builder.compile`, or a bundle's path.
    inputs, fill_mode
        As in `run`.
    number
        How many times to run the model.
    threads
        Kernel threads; None means `EDGE_NUM_THREADS` or the number of CPUs.
    input_shapes
        As in `run`; the bucket that computes these shapes is timed.

    Raises
    ------
    PackageError
        If the bundle cannot be read, or was compiled for another machine.
    ShapeError, ModelError
        If an input has a wrong name, shape or dtype, or the file cannot be read.
    """
    package = package if isinstance(package, Package) else Package.load(package)
    module = _executor(package, threads, GraphModuleDebug)
    given = read_inputs(inputs, package.manifest.inputs)
    if isinstance(given, Sound):
        raise ModelError("profile: expected tensors, got a recording", hint="leave out --inputs")
    _set_all(package, module, given, fill_mode, input_shapes or {})
    stages: list[Stage] = []
    placement = None
    if isinstance(given, Picture):
        placement = _set_picture(package, module, given)
        stages.append(_stage("decode and preprocess", lambda: _set_picture(package, module, given)))
    module.run()
    timed = module if isinstance(module, GraphModule) else module.module
    assert isinstance(timed, GraphModuleDebug)
    report = timed.profile(number=number, flops=timed.flops())
    if package.manifest.postprocess is not None and package.manifest.audio is None:
        finish = _postprocessor(package)
        names = [spec.name for spec in package.manifest.outputs]
        outputs = dict(zip(names, _outputs(module, package), strict=True))
        stages.append(_stage("postprocess", lambda: finish(outputs, placement)))
    return replace(report, stages=tuple(stages))


def _stage(name: str, work: Callable[[], object]) -> Stage:
    """Time `work`, after a run to warm up."""
    work()
    start = time.perf_counter()
    for _ in range(_STAGE_RUNS):
        work()
    return Stage(name, (time.perf_counter() - start) / _STAGE_RUNS * 1e6)


def _postprocessor(package: Package) -> Postprocessor:
    declared = package.manifest.postprocess
    assert declared is not None
    labels = package.members.get("labels.txt", b"").splitlines()
    manifest = package.manifest
    return Postprocessor(declared, manifest.smallest_outputs, labels, manifest.real_outputs)


def prepared(package: Package, threads: int | None = None) -> GraphModule:
    """Make a module with random inputs, ready to be run and timed."""
    module = _executor(package, threads)
    _set_all(package, module, {}, "random", {})
    return module if isinstance(module, GraphModule) else module.module


def _executor(
    package: Package, threads: int | None, make: type[GraphModule] = GraphModule
) -> GraphModule | BucketedModule:
    kernels = _loaded(package, threads)
    if package.manifest.buckets is not None:
        return make_module(package, kernels, make)
    module = make(*load(package.members["mod.json"], kernels))
    module.load_params(package.members["mod.params"])
    return module


def _set_all(
    package: Package,
    module: GraphModule | BucketedModule,
    given: Arrays | Picture,
    fill_mode: FillMode,
    input_shapes: Shapes,
) -> None:
    """Set every input: to what the user gives, or to values that fill it."""
    if isinstance(given, Picture):
        # The picture itself comes later; it is one item of a batch.
        smallest = {spec.name: spec.shape for spec in package.manifest.smallest_inputs}
        input_shapes, values = smallest, {}
    else:
        values = dict(given)
    for spec in fit(package, module, values, input_shapes):
        value = values[spec.name] if spec.name in values else _fill(package, spec, fill_mode)
        _set(module, spec, _as_integers(package, spec, value))


def _as_integers(package: Package, spec: TensorSpec, value: Array) -> Array:
    """Return the integers of a quantised input if real numbers are given for it, as devices do."""
    quantised = package.manifest.quantised_inputs.get(spec.name)
    if quantised is None or np.asarray(value).dtype.kind != "f":
        return value
    if not np.isfinite(value).all():
        raise ShapeError(
            f"input '{spec.name}': expected finite numbers, got others",
            hint="replace NaN and infinities before the call: integers cannot hold them",
        )
    return to_input(np.asarray(value), spec.dtype, quantised)


def _outputs(module: GraphModule | BucketedModule, package: Package) -> list[Array]:
    """Return copies of the outputs, in order."""
    if isinstance(module, BucketedModule):
        return [np.array(value) for value in module.outputs().values()]
    return [np.array(module.get_output(i)) for i in range(len(package.manifest.outputs))]


def _loaded(package: Package, threads: int | None) -> KernelModule:
    target, machine = package.manifest.target, Machine.detect()
    if target.triple.split("-")[0] != machine.arch or not set(target.features) <= machine.features:
        raise PackageError(
            f"expected a bundle for this {machine.arch} machine, got one for {target.triple} {target.cpu}",
            hint="compile it with --target host, or deploy it to a device of that kind",
        )
    try:
        kernels = load_kernels(package.members["mod.so"])
    except EdgeError as error:
        raise PackageError(str(error), hint=error.hint or "compile it again") from error
    if threads is not None:
        kernels.set_threads(threads)
    return kernels


def _set(module: GraphModule | BucketedModule, spec: TensorSpec, value: Array) -> None:
    try:
        module.set_input(spec.name, value)
    except EdgeError as error:
        raise ShapeError(
            str(error), hint=error.hint or "see names, shapes and types with `edgebundle inspect BUNDLE`"
        ) from error


def _set_picture(package: Package, module: GraphModule | BucketedModule, picture: Picture) -> Placement:
    declared = package.manifest.preprocess
    if package.manifest.audio is not None:
        raise ModelError("expected a recording, got a picture", hint="it takes audio: give it a .wav file")
    if declared is None:
        raise ModelError(
            "the model does not declare how to turn a picture into its input",
            hint="add one: edgebundle repack BUNDLE --preprocess PRESET; or give an .npz file",
        )
    spec = next(spec for spec in package.manifest.smallest_inputs if spec.name == declared.input)
    prepare = Preprocessor(declared, spec, quantised=package.manifest.quantised_inputs.get(spec.name))
    try:
        return prepare(prepare.decode(picture.content, picture.content_type), module.input_view(spec.name))
    except EdgeError as error:
        raise ModelError(str(error), hint=error.hint or "give a JPEG or PNG picture") from error


def _fill(package: Package, spec: TensorSpec, mode: FillMode) -> Array:
    if mode == "zeros":
        return np.zeros(spec.shape, spec.dtype)
    if mode == "ones":
        return np.ones(spec.shape, spec.dtype)
    if np.dtype(spec.dtype).kind == "f":
        return np.random.default_rng(SEED).standard_normal(spec.shape).astype(spec.dtype)
    # Integers may select rows of a table. The recorded ones are known to be in range.
    return recorded_input(package, spec)
