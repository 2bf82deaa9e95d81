"""Samples on which a model defines all the integers that it makes.

ONNX does not say which integer QuantizeLinear or Cast makes of a NaN, nor which one Cast makes of a number
beyond its type, and engines and processors differ. On such a sample a model cannot be compared, and a device
would fail its self-test. Most often it is the sample's fault: models take logarithms and roots of inputs that
are positive where they are used. So parity asks for the first of several samples on which the model is
defined, preferably one on which its outputs are numbers too. Leaves drawing them to `sample_inputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from builder.compiling.parity import run_as_defined
from builder.errors import ModelError, ParityError
from builder.importer.onnx_graph import OnnxGraph, attributes

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

_ROUNDS: Final = frozenset({"QuantizeLinear", "DynamicQuantizeLinear"})
# Operators that are not defined for some finite numbers.
PARTIAL: Final = frozenset({"Acos", "Acosh", "Asin", "Atanh", "Log", "Pow", "Sqrt"})
# Operators that make a NaN only of an infinity, or of zeros; a quantised model is searched for theirs too.
_QUOTIENTS: Final = frozenset({"Div", "Mod", "Reciprocal", "Softmax", "LogSoftmax", "Exp"})


@dataclass(frozen=True, slots=True)
class Undefined:
    """A node that makes integers of what has none.

    `node`: its operator and name.
    `count`, `size`: how many elements of the tensor have no integer, and how many there are.
    """

    node: str
    tensor: str
    count: int
    size: int


def choose(
    model: onnx.ModelProto, samples: Iterable[Arrays], progress: Callable[[str], None]
) -> dict[str, Array]:
    """Return the first sample on which a model is defined.

    `samples`: inputs by name, at least one; the best one first.
    `progress`: called if outputs are NaN on every sample.
    Raises `ModelError` if ONNX Runtime refuses the model.
    """
    nodes = list(_makers_of_integers(model))
    operators = {node.op_type for node in model.graph.node}
    may_fail = any(node.op_type == "Cast" for node in nodes)
    may_fail |= divides_integers(model)
    may_fail |= not operators.isdisjoint(PARTIAL | _QUOTIENTS if nodes else PARTIAL)
    defined: Arrays | None = None
    fault: Undefined | None = None
    missing = ""
    refused: ModelError | None = None
    for sample in samples:
        if not may_fail:
            return dict(sample)
        try:
            values = _values(model, nodes, sample)
        except ModelError as error:
            refused = error
            continue
        found = next(_undefined(nodes, values), None)
        if found is not None:
            fault = fault or found
            continue
        counts = {output.name: _count_nan(values[output.name]) for output in model.graph.output}
        if not any(counts.values()):
            return dict(sample)
        if defined is None:
            defined = sample
            name = max(counts, key=lambda each: counts[each])
            missing = f"output {name[:80]}: {counts[name]} of {values[name].size} numbers are NaN"
    if defined is not None:
        progress(f"{missing}, on every sample; only the others are compared")
        return dict(defined)
    if fault is None:
        assert refused is not None
        raise refused
    raise ParityError(
        f"{fault.node} makes integers of {fault.tensor[:80]}: expected numbers within the type, got "
        f"{fault.count} of {fault.size} elements that are NaN or beyond it, on every sample",
        hint="ONNX does not define their integers, and devices differ: correct the operator that makes them, "
        "or limit its operand with Max or Clip",
    )


def _makers_of_integers(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yield the nodes that make integers of computed floats."""
    graph = OnnxGraph(model)
    for node in model.graph.node:
        found = graph.type_of(node.input[0]) if node.input else None
        if node.domain or found is None or found.dtype.kind != "f" or graph.is_constant(node.input[0]):
            continue
        if node.op_type in _ROUNDS or (node.op_type == "Cast" and _type(node).kind in "iu"):
            yield node


def divides_integers(model: onnx.ModelProto) -> bool:
    """Whether integers are divided by what is not constant: ONNX Runtime refuses to divide them by zero."""
    graph = OnnxGraph(model)
    for node in model.graph.node:
        if node.op_type in ("Div", "Mod") and not node.domain and not graph.is_constant(node.input[1]):
            found = graph.type_of(node.input[1])
            if found is None or found.dtype.kind in "iu":
                return True
    return False


def _type(node: onnx.NodeProto) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(int(attributes(node)["to"])))
    return dtype


def _values(model: onnx.ModelProto, nodes: list[onnx.NodeProto], sample: Arrays) -> dict[str, Array]:
    """Return what `nodes` read, and the model's outputs, by name, as the reference computes them."""
    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    names = [output.name for output in model.graph.output]
    inputs = {value.name for value in model.graph.input}
    added = list(dict.fromkeys(node.input[0] for node in nodes if node.input[0] not in {*names, *inputs}))
    tapped.graph.output.extend(onnx.ValueInfoProto(name=name) for name in added)
    values = run_as_defined(tapped, sample)
    return {**sample, **dict(zip((*names, *added), values, strict=True))}


def _undefined(nodes: Iterable[onnx.NodeProto], values: Arrays) -> Iterator[Undefined]:
    for node in nodes:
        value = values[node.input[0]]
        wrong = np.isnan(value)
        if node.op_type == "Cast":
            info = np.iinfo(_type(node))
            whole = np.trunc(value.astype(np.float64))
            # The largest int64 is no float64: the number after it is one too far.
            wrong = ~((whole >= float(info.min)) & (whole < float(info.max) + 1))
        if wrong.any():
            count = int(np.count_nonzero(wrong))
            yield Undefined(f"{node.op_type} {node.name[:80]}", node.input[0], count, value.size)


def _count_nan(value: Array) -> int:
    return int(np.count_nonzero(np.isnan(value))) if value.dtype.kind == "f" else 0
