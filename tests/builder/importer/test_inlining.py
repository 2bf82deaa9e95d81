"""Functions of a file are inlined, each in the opset that it is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from builder.importer.structure import prepare

Runner = Callable[[onnx.ModelProto, Mapping[str, NDArray[Any]]], list[NDArray[Any]]]
X = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
node = helper.make_node


def function(
    name: str,
    nodes: Sequence[onnx.NodeProto],
    opset: int,
    *,
    domain: str = "local",
    domains: Sequence[str] = (),
    inputs: Sequence[str] = ("a",),
    defaults: Sequence[onnx.AttributeProto] = (),
) -> onnx.FunctionProto:
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(other, 1) for other in domains)]
    return helper.make_function(domain, name, inputs, ["b"], nodes, imports, attribute_protos=list(defaults))


def model(
    nodes: Sequence[onnx.NodeProto],
    functions: Sequence[onnx.FunctionProto],
    opset: int = 18,
    domains: Sequence[str] = ("local",),
    weights: Mapping[str, NDArray[Any]] | None = None,
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, X.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        initializer=[numpy_helper.from_array(value, name) for name, value in (weights or {}).items()],
    )
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(domain, 1) for domain in domains)]
    return helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=10)


def refers_to(made: onnx.NodeProto, name: str, kind: int) -> onnx.NodeProto:
    made.attribute.append(onnx.AttributeProto(name=name, type=kind, ref_attr_name=name))
    return made


def call(name: str, read: str, made: str, domain: str = "local", **options: object) -> onnx.NodeProto:
    return node(name, [read], [made], domain=domain, **options)


OLD_MAXIMUM = function("old", [node("ReduceMax", ["a"], ["b"], axes=[1], keepdims=0)], 13)
RELU = function("relu", [node("Relu", ["a"], ["b"])], 18)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        pytest.param(model([call("old", "x", "y")], [OLD_MAXIMUM]), X.max(1), id="older function"),
        pytest.param(
            model([call("relu", "x", "t"), call("old", "t", "y")], [RELU, OLD_MAXIMUM]),
            np.maximum(X, 0).max(1),
            id="older function behind another",
        ),
        pytest.param(
            model(
                [node("ReduceMax", ["x"], ["t"], axes=[1], keepdims=0), call("new", "t", "y")],
                [
                    function(
                        "new",
                        [node("Constant", [], ["k"], value_ints=[0]), node("ReduceMax", ["a", "k"], ["b"])],
                        18,
                    )
                ],
                opset=13,
            ),
            X.max(1).max(0, keepdims=True),
            id="newer function",
        ),
        pytest.param(
            model(
                [call("outer", "x", "y")],
                [
                    function(
                        "outer",
                        [call("old", "a", "t"), node("Neg", ["t"], ["b"])],
                        17,
                        domains=["local"],
                    ),
                    OLD_MAXIMUM,
                ],
            ),
            -X.max(1),
            id="function that calls an older one",
        ),
        pytest.param(
            model(
                [call("clip", "x", "y")],
                [
                    function(
                        "clip",
                        [node("Clip", ["a"], ["c"], max=0.5), node("Unsqueeze", ["c"], ["b"], axes=[0])],
                        9,
                    )
                ],
            ),
            np.minimum(X, 0.5)[None],
            id="attributes that became inputs",
        ),
        pytest.param(
            model(
                [call("maximum", "x", "y", axes=[2])],
                [
                    helper.make_function(
                        "local",
                        "maximum",
                        ["a"],
                        ["b"],
                        [refers_to(node("ReduceMax", ["a"], ["b"]), "axes", onnx.AttributeProto.INTS)],
                        [helper.make_opsetid("", 13)],
                        attributes=["axes"],
                    )
                ],
            ),
            X.max(2, keepdims=True),
            id="attribute of the call",
        ),
        pytest.param(
            model(
                [node("MatMul", ["x", "w"], ["t"]), call("old", "t", "y")],
                [OLD_MAXIMUM],
                weights={"w": np.ones((4, 5000), np.float32)},
            ),
            (X @ np.ones((4, 5000), np.float32)).max(1),
            id="large weight",
        ),
        pytest.param(
            model(
                [call("a", "x", "y", domain="pkg.a")],
                [
                    function(
                        "a",
                        [call("b", "a", "b", domain="pkg.b")],
                        18,
                        domain="pkg.a",
                        domains=["pkg.b"],
                    ),
                    function("b", [node("Relu", ["a"], ["b"])], 17, domain="pkg.b"),
                ],
                domains=["pkg.a"],
            ),
            np.maximum(X, 0),
            id="domain that only a function imports",
        ),
        pytest.param(
            model(
                [call("leaky", "x", "y")],
                [
                    function(
                        "leaky",
                        [
                            refers_to(
                                node("LeakyRelu", ["a"], ["b"]),
                                "alpha",
                                onnx.AttributeProto.FLOAT,
                            )
                        ],
                        14,
                        defaults=[helper.make_attribute("alpha", 0.25)],
                    )
                ],
            ),
            np.where(X < 0, X * np.float32(0.25), X),
            id="default of an attribute",
        ),
        pytest.param(
            model(
                [node("Relu", ["x"], ["t"]), call("names", "t", "b"), node("Add", ["b", "t"], ["y"])],
                [function("names", [node("Neg", ["a"], ["t"]), node("Exp", ["t"], ["b"])], 18)],
            ),
            np.exp(-np.maximum(X, 0)) + np.maximum(X, 0),
            id="names of values in both",
        ),
        pytest.param(
            model(
                [node("Relu", ["x"], ["y"])],
                [
                    function(
                        "Relu",
                        [node("Neg", ["a"], ["b"])],
                        18,
                        domain="",
                    )
                ],
                domains=(),
            ),
            np.maximum(X, 0),
            id="function with an operator's name",
        ),
    ],
)
def test_functions_compute_the_same_after_inlining(made: onnx.ModelProto, expected: NDArray[Any]) -> None:
    inlined = prepare(made)
    assert not inlined.functions
    np.testing.assert_allclose(ReferenceEvaluator(inlined).run(None, {"x": X})[0], expected, rtol=1e-5)
