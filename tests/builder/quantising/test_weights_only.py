"""Weights in few bits: the ONNX model, and the bundle that is made of it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder import compile
from builder.errors import ModelError
from builder.importer import ImportedModel, import_onnx
from builder.quantising.session import Session
from builder.quantising.weights_only import WEIGHTS_PRECISIONS, quantize_weights


def network(opset: int = 17) -> ImportedModel:
    """Every kind of weights: a table, a Gemm with its matrix transposed, a MatMul, a convolution."""
    random = np.random.default_rng(0)

    def weights(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array((random.standard_normal(shape) * 0.2).astype("f4"), name)

    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"], name="embed"),
        helper.make_node("Reshape", ["rows", "flat"], ["flat_rows"], name="reshape"),
        helper.make_node("Gemm", ["flat_rows", "turned", "bias"], ["hidden"], name="gemm", transB=1),
        helper.make_node("Relu", ["hidden"], ["positive"], name="relu"),
        helper.make_node("MatMul", ["positive", "matrix"], ["mixed"], name="matmul"),
        helper.make_node("Reshape", ["mixed", "image"], ["picture"], name="picture"),
        helper.make_node("Conv", ["picture", "filters"], ["y"], name="conv", pads=[1, 1, 1, 1]),
    ]
    constants = [
        weights("table", 100, 48),
        weights("turned", 64, 96),
        weights("bias", 64),
        weights("matrix", 64, 128),
        weights("filters", 16, 8, 3, 3),
        numpy_helper.from_array(np.array([1, 96]), "flat"),
        numpy_helper.from_array(np.array([1, 8, 4, 4]), "image"),
    ]
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, [1, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16, 4, 4])],
        constants,
    )
    return import_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "share", "sqnr_db"),
    [("weights-fp16", 0.53, 60), ("weights-int8", 0.29, 35), ("weights-int4", 0.18, 12)],
)
def test_the_bundle_is_as_small_as_the_weights(precision: str, share: float, sqnr_db: float) -> None:
    """`compile` compares it with the dequantised model: the arithmetic is that of float32."""
    model = network()
    result = quantize_weights(model, precision)  # type: ignore[arg-type]
    report = result.report
    assert report.quantised == 100 * 48 + 64 * 96 + 64 * 128 + 16 * 8 * 9
    assert report.agreement.sqnr_db is not None
    assert report.agreement.sqnr_db >= sqnr_db
    package = compile(result.imported())
    floats = 4 * report.weights
    assert len(package.members["mod.params"]) <= share * floats + 3000
    error = package.manifest.provenance.parity_error
    assert error is not None
    assert error < 1e-5
    assert package.manifest.name == "network"


def test_every_precision_keeps_the_kinds_of_weights_apart() -> None:
    model = network()
    found = {}
    for precision in WEIGHTS_PRECISIONS:
        graph = quantize_weights(model, precision).onnx.graph  # type: ignore[arg-type]
        sizes = {t.data_type for t in graph.initializer if np.prod(t.dims) >= 1024}
        found[precision] = {TensorProto.DataType.Name(kind) for kind in sizes}
    assert found == {
        "weights-fp16": {"FLOAT16"},
        "weights-int8": {"INT8"},
        "weights-int4": {"INT4", "INT8"},  # filters keep 8 bits
    }


def test_a_model_without_weights_is_refused() -> None:
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"])],
        "relu",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
    )
    model = import_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    with pytest.raises(ModelError, match="expected float32 weights"):
        quantize_weights(model, "weights-int8")


def test_weights_beyond_float16_are_refused_by_name() -> None:
    model = network()
    for tensor in model.onnx.graph.initializer:
        if tuple(tensor.dims) == (64, 128):
            values = numpy_helper.to_array(tensor).copy()
            values[0, 0] = 1e5
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    with pytest.raises(ModelError, match=r"matmul.*expected weights up to 65504"):
        quantize_weights(model, "weights-fp16")


def _n_bits(bits: int, block: int, *, zeros: bool, opset: int) -> onnx.ModelProto:
    random = np.random.default_rng(bits + block)
    depth, columns = 80, 64
    blocks = -(-depth // block)
    codes = random.integers(0, 256, (columns, blocks, block * bits // 8)).astype("u1")
    constants = [
        numpy_helper.from_array(codes, "codes"),
        numpy_helper.from_array(random.uniform(0.1, 0.2, (columns, blocks)).astype("f4"), "scales"),
    ]
    names = ["x", "codes", "scales"]
    if zeros:
        points = random.integers(0, 256, (columns, -(-blocks * bits // 8))).astype("u1")
        constants.append(numpy_helper.from_array(points, "zeros"))
        names.append("zeros")
    node = helper.make_node(
        "MatMulNBits", names, ["y"], domain="com.microsoft",
        K=depth, N=columns, bits=bits, block_size=block, accuracy_level=1,
    )  # fmt: skip
    graph = helper.make_graph(
        [node],
        "n_bits",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, depth])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, columns])],
        constants,
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.mark.parametrize(
    ("bits", "block", "zeros", "opset"), [(4, 32, False, 17), (4, 16, True, 21), (8, 32, True, 14)]
)
def test_products_of_few_bits_that_arrive_stay_so(bits: int, block: int, zeros: bool, opset: int) -> None:
    """MatMulNBits, as ONNX Runtime computes it in float32."""
    source = _n_bits(bits, block, zeros=zeros, opset=opset)
    model = import_onnx(source)
    package = compile(model)
    assert len(package.members["mod.params"]) < 80 * 64 * bits // 8 + 4 * 64 * 8 + 1500
    x = np.random.default_rng(3).standard_normal((1, 80)).astype("f4")
    # Of float32 (level 1); ONNX Runtime's optimiser would make a product with activations in int8 of ours.
    [theirs], [ours] = (Session(each).run({"x": x}) for each in (source, model.onnx))
    assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
