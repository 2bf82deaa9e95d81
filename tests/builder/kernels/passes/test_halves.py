"""Which operators of a marked module are computed in float16."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tvm import relax
from tvm.ir import Call

from builder.calls.spans import bindings_of
from builder.compiling.lower import lower
from builder.importer import import_onnx
from builder.kernels.passes.canonical import canonicalise
from builder.kernels.passes.halves import floats_of, mark, use_halves
from tests.builder.kernels.machines import element_machine

FEW, MANY = 16, 72


def network(*, first: str = "Relu", channels: int = MANY) -> onnx.ModelProto:
    """Return two convolutions with a residual sum between them, and a sigmoid after the last."""
    rng, shape = np.random.default_rng(0), [1, channels, 6, 6]
    weights = [rng.standard_normal((channels, channels, 1, 1)).astype("f4") / 8 for _ in range(3)]
    constants = [numpy_helper.from_array(w, f"w{i}") for i, w in enumerate(weights)]
    constants.append(numpy_helper.from_array(np.ones(channels, "f4"), "b"))
    nodes = [
        helper.make_node("Conv", ["x", "w0", "b"], ["c0"], name="first"),
        helper.make_node(first, ["c0"], ["r0"], name="between"),
        helper.make_node("Conv", ["r0", "w1", "b"], ["c1"], name="second"),
        helper.make_node("Add", ["c1", "r0"], ["s"], name="sum"),
        helper.make_node("Conv", ["s", "w2"], ["c2"], name="last"),
        helper.make_node("Sigmoid", ["c2"], ["y"], name="scores"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [value("x", TensorProto.FLOAT, shape)], [value("y", TensorProto.FLOAT, shape)], constants
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def types(
    floats: Collection[str] = (), first: str = "Relu", channels: int = MANY
) -> dict[str, list[tuple[str, str]]]:
    """Return the types that calls read and make, by the name of the operator."""
    model = network(first=first, channels=channels)
    mod = use_halves(canonicalise(mark(import_onnx(model).mod, floats)))
    found: dict[str, list[tuple[str, str]]] = {}
    for binding in bindings_of(mod):
        value = binding.value
        if isinstance(value, Call):
            kinds = str(value.args[0].ty.dtype), str(value.ty.dtype)
            found.setdefault(str(value.op.name), []).append(kinds)
    return found


def test_sums_are_float32_and_what_is_stored_float16() -> None:
    found = types()
    assert found["relax.nn.conv2d"] == [("float16", "float32")] * 3
    # The second is the ReLU, which also limits the numbers that the next product reads.
    assert found["relax.clip"] == [("float16", "float16")] * 3
    assert "relax.nn.relu" not in found


def test_sums_of_few_products_are_float16_if_what_reads_them_is() -> None:
    """The last convolution is read by a sigmoid."""
    half, wide = ("float16", "float16"), ("float16", "float32")
    assert types(channels=FEW)["relax.nn.conv2d"] == [half, half, wide]
    assert types(first="Sigmoid", channels=FEW)["relax.nn.conv2d"] == [wide, half, wide]


def test_what_follows_the_last_product_is_float32() -> None:
    assert types()["relax.sigmoid"] == [("float32", "float32")]


def test_a_function_with_an_exponential_is_computed_from_unrounded_sums() -> None:
    found = types(first="Sigmoid")
    assert found["relax.sigmoid"] == [("float32", "float32")] * 2
    assert ("float16", "float32") not in found["relax.astype"]


def test_named_nodes_stay_in_float32() -> None:
    found = types(floats=("first", "second", "last"))
    assert set(found["relax.nn.conv2d"]) == {("float32", "float32")}
    assert found["relax.nn.relu"] == [("float32", "float32")]
    assert "relax.astype" not in found


def test_a_module_without_a_mark_stays_as_it_is() -> None:
    mod = import_onnx(network()).mod
    assert floats_of(mod) is None
    assert use_halves(mod) is mod
    assert floats_of(mark(mod, {"b", "a"})) == frozenset({"a", "b"})


def _calls(main: relax.Function) -> list[relax.Binding]:
    """Return the bindings of calls of kernels."""
    every = [binding for block in main.body.blocks for binding in block.bindings]
    return [b for b in every if isinstance(b.value, Call) and str(b.value.op.name) == "relax.call_tir"]


@pytest.mark.parametrize(("floats", "products"), [((), 3), (("second",), 2)])
def test_every_kernel_of_a_marked_module_has_a_design_space(floats: tuple[str, ...], products: int) -> None:
    lowered = lower(mark(import_onnx(network()).mod, floats), element_machine())
    functions = lowered.kernels.functions.items()
    kinds = {str(var.name_hint): str(function.attrs["edge.schedule"]) for var, function in functions}
    calls = [str(binding.value.args[0].name_hint) for binding in _calls(lowered.main)]
    assert [kinds[name] for name in calls].count("half_conv2d") == products
