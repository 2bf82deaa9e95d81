"""ONNX's node tests: a model of each operator in each form, with inputs and outputs, in the onnx package."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case import node, test_case

from benchmarks.conformance.case import Array, Case
from benchmarks.conformance.sources.makers import Maker

_RANDOM: Final = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
_TRAINING: Final = "Dropout"  # with a third input


def makers() -> Iterator[Maker]:
    """Return the node tests."""
    for case in collected():
        if case.data_sets:
            yield case.name, functools.partial(make, case)


def modules() -> list[str]:
    """Return the modules that have node tests: one for each operator."""
    return sorted(module.name for module in pkgutil.iter_modules(node.__path__))


def collected(names: Sequence[str] | None = None) -> list[test_case.TestCase]:
    """Return the node tests.

    Parameters
    ----------
    names
        Only those of these modules: making all takes half a minute.
    """
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        if names is None:
            return list(node.collect_testcases(None))
        return [case for name in names for case in _of_module(name)]


@functools.cache
def _of_module(name: str) -> list[test_case.TestCase]:
    """Return the cases of a module, which registers them when it is first imported."""
    before = len(node._NodeTestCases)
    importlib.import_module(f"{node.__name__}.{name}")
    return list(node._NodeTestCases[before:])


def make(test: test_case.TestCase, folder: Path) -> Case:
    """Make a case of a node test; its model is written into a folder."""
    path = folder / "model.onnx"
    path.write_bytes(test.model.SerializeToString())
    given, wanted = test.data_sets[0]
    inputs = [_array(value) for value in given]
    # A bundle has an output for each element of a sequence.
    elements = [each for value in wanted for each in (value if isinstance(value, list) else [value])]
    outputs = [_array(value) for value in elements]
    names = [value.name for value in test.model.graph.input]
    named = {n: v for n, v in zip(names, inputs, strict=False) if v is not None}
    known = [value for value in outputs if value is not None]
    if len(known) < len(outputs):
        known = []
    return Case(
        "onnx_nodes",
        test.name,
        operator_of(test.model, test.name),
        path,
        named,
        known,
        test.rtol,
        test.atol,
        apart(test.model),
    )


def operator_of(model: onnx.ModelProto, name: str) -> str:
    """Return the operator that a test is about; of one that is written out, the test's name says it."""
    nodes = model.graph.node
    return nodes[-1].op_type if len(nodes) == 1 else name.removeprefix("test_").partition("_expanded")[0]


def apart(model: onnx.ModelProto) -> str:
    """Return why a model is counted apart: random numbers, or no inputs."""
    if not model.graph.input:
        return "no inputs"
    nodes = [*model.graph.node, *(each for function in model.functions for each in function.node)]
    trains = any(each.op_type == _TRAINING and len(each.input) == 3 and each.input[2] for each in nodes)
    return "random numbers" if trains or any(each.op_type in _RANDOM for each in nodes) else ""


def _array(value: Any) -> Array | None:  # noqa: ANN401 - the onnx package has arrays, scalars, lists and protobufs
    """Return a tensor as an array; None for a sequence, a map or an optional without a value."""
    if isinstance(value, onnx.TensorProto):
        return np.asarray(numpy_helper.to_array(value))
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        return array.astype(str) if array.dtype.kind == "O" else array
    return None
