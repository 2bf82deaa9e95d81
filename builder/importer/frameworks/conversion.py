"""Import a model through its framework: export it to ONNX in a process, import that, and compute a reference.

Leaves the framework to its program (`pytorch_process.py`, `keras_process.py`), and the comparison with the
reference to `builder.compiling.framework_parity`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray
from onnx import helper

from builder.errors import ModelError, UnsupportedOperatorError
from builder.importer import advice
from builder.importer.frameworks.interpreter import find_python
from builder.importer.frameworks.process import FrameworkProcess
from builder.importer.frameworks.sample import FrameworkSample
from builder.importer.model_file import decode, read_bytes
from builder.importer.onnx_import import ImportedModel, import_onnx

DIFFERS: Final = "please report it with the model: what its exporter wrote has other outputs"

SEED: Final = 0
_ONNX: Final = "model.onnx"
_TFLITE: Final = "model.tflite"
# A few steps of the type: 2^-11 and 2^-8 each, which add up from layer to layer.
_ROUNDING: Final = {"FLOAT16": 1e-2, "BFLOAT16": 5e-2}


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework that reads models.

    `program`: the file of the program that runs it.
    `packages`: what that program imports: one of these sets of packages.
    `install`: what to install, as arguments of `pip install`.
    """

    name: str
    program: Path
    packages: tuple[tuple[str, ...], ...]
    install: str


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user says about an import.

    `input_shapes`, `input_values`, `max_iterations`, `progress`: as in `builder.importer.import_onnx`.
    `python`: path of the Python that has the framework; None to look for one.
    `trusted`: whether the user trusts the model, so that its framework is not confined.
    """

    input_shapes: Mapping[str, Sequence[int]] | None
    input_values: Mapping[str, ArrayLike] | None
    python: str | None
    progress: Callable[[str], None] | None
    max_iterations: int | None = None
    trusted: bool = False


def import_with(
    framework: Framework, model: str, place: Callable[[Path], None], settings: Settings
) -> ImportedModel:
    """Import a model through its framework.

    `place`: puts the model into the folder of the process.
    Raises `ModelError` if no Python has the framework, or the framework or the importer refuses the model.
    Raises `ShapeError` if names, shapes or values do not fit the model, or some are missing.
    """
    progress = settings.progress or (lambda _: None)
    python = find_python(framework.packages, settings.python, model, framework.install)
    with FrameworkProcess(
        python, framework.program, framework.name, model, trusted=settings.trusted
    ) as process:
        place(process.folder)
        progress(f"exporting with {framework.name} of {python}")
        try:
            reply = process.ask(
                "convert", shapes={name: list(s) for name, s in (settings.input_shapes or {}).items()}
            )
        except UnsupportedOperatorError as error:
            error.details = advice.explain(error, framework.name)
            raise
        tflite = process.take(_TFLITE)
        exported, notes = _exported(process, reply, framework, model, progress, tflite)
        whole = {value.name: _shape(value) for value in exported.graph.input}
        types = {value.name: value.type.tensor_type.elem_type for value in exported.graph.input}
        rounding = _rounding(exported, process.texts(reply, "floats"))
        imported = import_onnx(
            exported,
            input_shapes=None if tflite else settings.input_shapes,
            input_values=settings.input_values,
            max_iterations=settings.max_iterations,
            progress=settings.progress,
        )
        fixed: dict[str, NDArray[Any]] = {}
        for name, value in (settings.input_values or {}).items():
            dtype = helper.tensor_dtype_to_np_dtype(types[name])
            shape = (settings.input_shapes or {}).get(name, whole[name])
            array = np.asarray(value, dtype)
            fixed[name] = array if array.ndim else np.full(tuple(shape or ()), array, dtype)
        inputs = _sample_inputs(imported, process.arrays("examples.npz"))
        progress(f"computing reference outputs with {framework.name}")
        sample = _computed(process, str(reply.get("framework", framework.name)), inputs, fixed, imported)
    sample = replace(sample, rounding=rounding)
    return replace(imported, reference=sample, notes=(*notes, *imported.notes))


def _exported(
    process: FrameworkProcess,
    reply: Mapping[str, Any],
    framework: Framework,
    model: str,
    progress: Callable[[str], None],
    tflite: Path | None,
) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Return the ONNX model that the framework has made, or made a TensorFlow Lite model of; and notes."""
    notes = [note[:300] for note in process.texts(reply, "notes")]
    for note in notes:
        progress(note)
    if tflite is not None:
        from builder.importer.tflite.loading import load_tflite

        file = load_tflite(tflite, None, None, progress)
        if file.states:
            raise ModelError(
                f"{model}: its variable keeps a value from one inference to the next",
                hint="convert it to a .tflite file with tf.lite.TFLiteConverter, and compile that: such a "
                "variable becomes a state",
            )
        exported = file.model
        notes += file.notes
    else:
        path = process.take(_ONNX)
        if path is None:
            raise ModelError(
                f"{framework.name} cannot import {model}: it wrote no model",
                hint="export it to ONNX in your own Python, and compile that file",
            )
        exported = decode(read_bytes(path), f"what {framework.name} made of {model}")
    graph = exported.graph
    inputs, outputs = (process.texts(reply, key) for key in ("inputs", "outputs"))
    if (len(inputs), len(outputs)) != (len(graph.input), len(graph.output)):
        raise ModelError(
            f"{framework.name} cannot import {model}: expected {len(inputs)} inputs and {len(outputs)} "
            f"outputs in "
            f"what it exported, got {len(graph.input)} and {len(graph.output)}",
            hint=f"report it to {framework.name}: its exporter gives other tensors than its model",
        )
    outputs = tuple(f"{name}_out" if name in inputs else name for name in outputs)  # a name is one tensor's
    wanted = dict(zip([value.name for value in graph.input], inputs, strict=True))
    wanted |= dict(zip([value.name for value in graph.output], outputs, strict=True))
    rename(graph, wanted)
    return exported, tuple(notes)


def rename(graph: onnx.GraphProto, wanted: Mapping[str, str]) -> None:
    """Rename inputs and outputs of a graph; a value that has such a name gets an underscore."""
    changed = {old: new for old, new in wanted.items() if old != new}
    for name in {value for node in graph.node for value in (*node.input, *node.output)} & set(
        changed.values()
    ):
        if name not in changed:
            changed[name] = f"{name}_"
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = changed.get(value.name, value.name)
    _rename_nodes(graph, changed)


def _rename_nodes(graph: onnx.GraphProto, changed: Mapping[str, str]) -> None:
    for node in graph.node:
        for names in (node.input, node.output):
            for place, name in enumerate(names):
                names[place] = changed.get(name, name)
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
                _rename_nodes(inner, changed)
                for value in inner.output:
                    value.name = changed.get(value.name, value.name)


def _rounding(model: onnx.ModelProto, floats: Sequence[str]) -> float:
    """Return how far the framework's rounding may take an output.

    It follows from the types of weights and inputs, and `floats`, in which only the framework computes.
    """
    types = {tensor.data_type for tensor in model.graph.initializer}
    types |= {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)}
    names = {onnx.TensorProto.DataType.Name(kind) for kind in types} | {name.upper() for name in floats}
    return max((limit for name, limit in _ROUNDING.items() if name in names), default=0.0)


def _shape(value: onnx.ValueInfoProto) -> tuple[int, ...] | None:
    dims = value.type.tensor_type.shape.dim
    return tuple(dim.dim_value for dim in dims) if all(dim.dim_value > 0 for dim in dims) else None


def _sample_inputs(model: ImportedModel, examples: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the inputs that the model was exported with where they say something, else random ones.

    An integer may be an index into a table, so only the exported one is known to be valid.
    """
    rng = np.random.default_rng(SEED)
    inputs: dict[str, NDArray[Any]] = {}
    for spec in model.inputs:
        dtype = np.dtype(spec.dtype)
        example = examples.get(spec.name)
        if example is not None and (example.shape != spec.shape or example.dtype.kind != dtype.kind):
            example = None
        if dtype.kind == "f":
            is_usable = example is not None and np.isfinite(example).all() and np.ptp(example) > 0
            values = example if is_usable else rng.standard_normal(spec.shape)
        else:
            values = example if example is not None else rng.random(spec.shape) < 0.9
        assert values is not None
        inputs[spec.name] = np.asarray(values).astype(dtype)
    return inputs


def _computed(
    process: FrameworkProcess,
    framework: str,
    inputs: dict[str, NDArray[Any]],
    fixed: Mapping[str, NDArray[Any]],
    model: ImportedModel,
) -> FrameworkSample:
    """Compute the reference outputs."""
    process.give("inputs.npz", {**inputs, **fixed})
    process.ask("run")
    arrays = process.arrays("outputs.npz")
    outputs = tuple(arrays[f"output_{at}"] for at in range(len(arrays)) if f"output_{at}" in arrays)
    steps = tuple(arrays[f"step_{at}"] for at in range(len(arrays)) if f"step_{at}" in arrays)
    for spec, output in zip(model.outputs, outputs, strict=False):
        if output.shape != spec.shape:
            raise ModelError(
                f"output {spec.name}: expected {list(output.shape)} as {framework} gives, got "
                f"{list(spec.shape)}",
                hint=DIFFERS,
            )
    if len(outputs) != len(model.outputs):
        raise ModelError(
            f"expected {len(outputs)} outputs as {framework} gives, got {len(model.outputs)}", hint=DIFFERS
        )
    return FrameworkSample(framework[:80], inputs, outputs, steps)
