"""Run files in LiteRT and their conversions in ONNX Runtime, and compare the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from builder.importer.tflite.comparison import NOT_REFERENCE
from builder.importer.tflite.conversion import convert
from builder.importer.tflite.schema import read

TYPES: Final = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
    "tensor(int16)": "int16",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(bool)": "bool",
}

Arrays = Sequence[NDArray[Any]]


def run_litert(
    raw: bytes, feeds: Arrays, *codes: str, steps: Sequence[Arrays] = ()
) -> list[NDArray[Any]] | str:
    """The interpreter's outputs, or why it refuses the file; `codes` are the operators in it.

    With `steps`, the feeds of several runs, all their outputs one after the other.
    """
    package = pytest.importorskip("ai_edge_litert.interpreter", reason="ai-edge-litert is not installed")
    kinds = package.OpResolverType
    is_reference = NOT_REFERENCE.isdisjoint(codes)
    kind = kinds.BUILTIN_REF if is_reference else kinds.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    found: list[NDArray[Any]] = []
    try:
        interpreter = package.Interpreter(model_content=raw, experimental_op_resolver_type=kind)
        interpreter.allocate_tensors()
        for step in steps or (feeds,):
            for detail, values in zip(interpreter.get_input_details(), step, strict=True):
                interpreter.set_tensor(detail["index"], values)
            interpreter.invoke()
            found += [interpreter.get_tensor(detail["index"]) for detail in interpreter.get_output_details()]
    except (RuntimeError, ValueError) as error:
        return str(error)
    return found


def run_converted(raw: bytes, feeds: Arrays, *, steps: Sequence[Arrays] = ()) -> list[NDArray[Any]]:
    """The outputs of the converted model in ONNX Runtime, which runs it as it is.

    With `steps`, the feeds of several runs, each of which gets the states that the one before left.
    """
    converted = convert(read(raw, "file"), "file")
    model = converted.model
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    inputs = {given.name: given for given in session.get_inputs()}
    outputs = [made.name for made in session.get_outputs()]
    kept = {}
    for state in converted.states:
        dtype = TYPES[inputs[state.input].type]
        kept[state.input] = np.full(inputs[state.input].shape, state.initial or 0, dtype)
    names = [name for name in inputs if name not in kept]
    after = {state.output: state.input for state in converted.states}
    found: list[NDArray[Any]] = []
    for step in steps or (feeds,):
        results = dict(
            zip(outputs, session.run(None, dict(zip(names, step, strict=True)) | kept), strict=True)
        )
        found += [value for name, value in results.items() if name not in after]
        kept = {after[name]: value for name, value in results.items() if name in after}
    return found


def distance(ours: Arrays, theirs: Arrays) -> float:
    """The largest difference: of real numbers relative to the largest, of whole numbers in steps.

    Infinite if a shape, a datatype or the places of NaN differ.
    """
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape or a.dtype != b.dtype or not np.array_equal(a != a, b != b):
            return float("inf")
        if not a.size:
            continue
        wide, reference = a.astype(np.float64), b.astype(np.float64)
        same = (wide == reference) | (reference != reference)
        with np.errstate(invalid="ignore"):
            error = float(np.abs(np.where(same, 0, wide - reference)).max())
        if b.dtype.kind == "f":
            finite = np.abs(reference[np.isfinite(reference)])
            error /= max(float(finite.max(initial=0)), 1e-2)
        worst = max(worst, error)
    return worst
