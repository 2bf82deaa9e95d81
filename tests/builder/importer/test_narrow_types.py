"""Numbers of 8 bits and fewer: weights, values, inputs and outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference.ops.op_cast import cast_to

from builder.compiling.judge import Judge
from builder.compiling.parity import compare
from builder.compiling.special_samples import special_samples
from builder.errors import UnsupportedOperatorError
from builder.importer import ImportedModel, import_onnx
from builder.importer.narrow_types import decoded, encoded

VALUES = np.array([[1, 2, -3], [0, 1, 2], [3, -2, 1], [1, 1, 1]], np.float32)
SCALES = np.array([0.5, 2, 0.25], np.float32)


def stored(kind: str, how: str, scale: np.ndarray | None = None) -> onnx.ModelProto:
    """y = x W, with W stored as `kind`."""
    values = np.abs(VALUES) if kind.startswith("U") else VALUES
    weight = helper.make_tensor("w", getattr(TensorProto, kind), [4, 3], values.reshape(-1).tolist())
    tensors = [weight]
    if how == "Cast":
        first = helper.make_node("Cast", ["w"], ["f"], to=TensorProto.FLOAT)
    else:
        tensors.append(numpy_helper.from_array(np.float32(0.5) if scale is None else scale, "s"))
        first = helper.make_node("DequantizeLinear", ["w", "s"], ["f"], axis=1)
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 3])
    nodes = [first, helper.make_node("MatMul", ["x", "f"], ["y"])]
    graph = helper.make_graph(nodes, "stored", [x], [y], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


@pytest.mark.parametrize("how", ["Cast", "DequantizeLinear"])
@pytest.mark.parametrize(
    "kind", ["FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT8E4M3FNUZ", "FLOAT4E2M1", "INT4", "UINT4", "INT8"]
)
def test_narrow_weights_keep_their_values(run_onnx: Any, kind: str, how: str) -> None:
    x = np.random.RandomState(0).randn(2, 4).astype("f4")
    found = run_onnx(import_onnx(stored(kind, how)).onnx, {"x": x})[0]
    wanted = x @ (np.abs(VALUES) if kind.startswith("U") else VALUES) * (0.5 if how != "Cast" else 1)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["FLOAT8E4M3FN", "INT4"])
def test_a_scale_for_each_column(run_onnx: Any, kind: str) -> None:
    x = np.random.RandomState(0).randn(2, 4).astype("f4")
    model = stored(kind, "DequantizeLinear", SCALES)
    found = run_onnx(import_onnx(model).onnx, {"x": x})[0]
    np.testing.assert_allclose(found, x @ (VALUES * SCALES), rtol=1e-6, atol=1e-6)


FLOATS = ["FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E8M0", "FLOAT4E2M1"]
ALL_BYTES = np.arange(256, dtype=np.uint8)


def graph(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[int]]],
    outputs: dict[str, tuple[int, list[int]]],
    weights: list[onnx.TensorProto] | None = None,
) -> onnx.ModelProto:
    before, after = (
        [helper.make_tensor_value_info(name, *kind) for name, kind in values.items()]
        for values in (inputs, outputs)
    )
    made = helper.make_graph(nodes, "narrow", before, after, weights or [])
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 25)], ir_version=11)


def cast(source: int, to: int, count: int, **options: Any) -> onnx.ModelProto:
    node = helper.make_node("Cast", ["x"], ["y"], to=to, **options)
    return graph([node], {"x": (source, [count])}, {"y": (to, [count])})


def compared(run_relax: Any, model: ImportedModel, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """Run a model, and compare with the file as it was given."""
    found = run_relax(model.mod, list(feeds.values()))
    judge = Judge(model)
    assert compare([spec.name for spec in model.outputs], found, judge.outputs(feeds)).error == 0
    return np.asarray(found[0])


@pytest.mark.parametrize("kind", FLOATS)
def test_each_byte_is_the_number_that_its_bits_are(kind: str, run_relax: Any) -> None:
    number = getattr(TensorProto, kind)
    model = import_onnx(cast(number, TensorProto.FLOAT, 256))
    assert [spec.datatype for spec in model.inputs] == ["UINT8"]
    assert any(kind in note for note in model.notes)
    codes = ALL_BYTES & (15 if kind == "FLOAT4E2M1" else 255)
    wanted = codes.view(helper.tensor_dtype_to_np_dtype(number)).astype(np.float32)
    # A denormal number may become zero.
    np.testing.assert_allclose(run_relax(model.mod, [ALL_BYTES])[0], wanted, rtol=0, atol=1.2e-38)


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("kind", FLOATS)
def test_floats_are_rounded_as_onnx_rounds_them(kind: str, saturate: int, run_relax: Any) -> None:
    number = getattr(TensorProto, kind)
    values = np.unique(decoded(ALL_BYTES, number).astype(np.float64))
    values = values[np.isfinite(values)]
    near = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    special = [0, -0.0, np.nan, np.inf, -np.inf, 3e38, -3e38, 248, 249, 464, 465, 61440, 61441, 1e-30]
    x = np.concatenate(
        [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, -np.float32(np.inf))]
    )
    x = np.concatenate([x, np.array(special, np.float32)])
    x = x[~((np.abs(x) < 1.2e-38) & (x != 0))]
    if kind == "FLOAT8E8M0":
        x = np.abs(x)
    options = {} if kind == "FLOAT4E2M1" else {"saturate": saturate}
    with np.errstate(all="ignore"):
        wanted = cast_to(x, number, bool(saturate)).astype(np.float32)
    found = run_relax(import_onnx(cast(TensorProto.FLOAT, number, x.size, **options)).mod, [x])[0]
    assert found.dtype == np.uint8
    numbers = decoded(found, number)
    np.testing.assert_array_equal(numbers, wanted)
    decided = ~(np.isnan(x) | np.isnan(wanted))
    np.testing.assert_array_equal(np.signbit(numbers)[decided], np.signbit(wanted)[decided])


@pytest.mark.parametrize("rounding", ["up", "down", "nearest"])
def test_powers_of_two_are_rounded_as_asked(rounding: str, run_relax: Any) -> None:
    x = np.array([1, 1.2, 1.5, 1.7, 2, 3e38, np.inf, np.nan, 0, 1e-30], np.float32)
    number = TensorProto.FLOAT8E8M0
    model = cast(TensorProto.FLOAT, number, x.size, round_mode=rounding, saturate=0)
    wanted = cast_to(x, number, saturate=False, round_mode=rounding).astype(np.float32)
    np.testing.assert_array_equal(decoded(run_relax(import_onnx(model).mod, [x])[0], number), wanted)


@pytest.mark.parametrize("kind", ["INT4", "UINT4", "INT2", "UINT2"])
def test_integers_keep_their_lowest_bits(kind: str, run_relax: Any) -> None:
    number = getattr(TensorProto, kind)
    x = np.array([*range(-20, 20), 0.7, -0.7, 2.5], np.float32)
    found = run_relax(import_onnx(cast(TensorProto.FLOAT, number, x.size)).mod, [x])[0]
    np.testing.assert_array_equal(
        found, x.astype(helper.tensor_dtype_to_np_dtype(number)).astype(found.dtype)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["INT4", "UINT4", "FLOAT8E4M3FN", "FLOAT8E5M2FNUZ"])
@pytest.mark.parametrize("block", [0, 2])
def test_values_are_quantised_and_back_as_the_file_says(kind: str, block: int, run_relax: Any) -> None:
    number = getattr(TensorProto, kind)
    scales = (
        np.array([0.5, 2, 0.25], np.float32) if not block else np.array([[0.5, 2], [0.25, 1]], np.float32)
    )
    options = {"axis": 1, **({"block_size": block} if block else {})}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s"], ["q"], output_dtype=number, **options),
        helper.make_node("Transpose", ["q"], ["turned"], perm=[1, 0]),
        helper.make_node("Transpose", ["turned"], ["back"], perm=[1, 0]),
        helper.make_node("DequantizeLinear", ["back", "s"], ["y"], **options),
    ]
    model = graph(
        nodes,
        {"x": (TensorProto.FLOAT, [2, 3])},
        {"q": (number, [2, 3]), "y": (TensorProto.FLOAT, [2, 3])},
        [numpy_helper.from_array(scales, "s")],
    )
    x = np.array([[0.3, -9, 1000], [-0.1, 5, -0.0]], np.float32)
    found = compared(run_relax, import_onnx(model), {"x": x})
    spread = scales if not block else np.repeat(scales, 2, axis=1)[:, :3]
    if kind.startswith("F"):
        wanted = cast_to(x / spread, number, saturate=True).astype(np.float32)
    else:
        wanted = np.clip(np.rint(x / spread), *((0, 15) if kind[0] == "U" else (-8, 7)))
    np.testing.assert_array_equal(decoded(found, number), wanted)


def test_scales_may_be_powers_of_two_in_8_bits(run_relax: Any) -> None:
    weights = [
        helper.make_tensor(
            "s", TensorProto.FLOAT8E8M0, [2, 1], np.array([126, 129], np.uint8).tobytes(), raw=True
        )
    ]
    node = helper.make_node("DequantizeLinear", ["x", "s"], ["y"], axis=1, block_size=2, output_dtype=1)
    kind = TensorProto.FLOAT4E2M1
    model = graph([node], {"x": (kind, [2, 2])}, {"y": (1, [2, 2])}, weights)
    x = encoded(np.array([[1, -6], [0.5, 3]], np.float32), kind)
    assert run_relax(import_onnx(model).mod, [x])[0].tolist() == [[0.5, -3], [2, 12]]


@pytest.mark.parametrize("kind", FLOATS)
def test_a_nan_at_an_output_is_always_the_same_byte(kind: str, run_relax: Any) -> None:
    number = getattr(TensorProto, kind)
    node = helper.make_node("Identity", ["x"], ["y"])
    model = import_onnx(graph([node], {"x": (number, [256])}, {"y": (number, [256])}))
    found = run_relax(model.mod, [ALL_BYTES])[0]
    kept = ~np.isnan(decoded(ALL_BYTES, number))
    np.testing.assert_array_equal(found[kept], ALL_BYTES[kept])
    assert len(set(found[~kept].tolist())) == (0 if kind == "FLOAT4E2M1" else 1)


@pytest.mark.parametrize("taken", [True, False])
def test_a_branch_that_is_never_or_always_taken(taken: bool, run_onnx: Any) -> None:
    weight = helper.make_tensor("w", TensorProto.FLOAT8E4M3FN, [2], [1.0, -3.5])
    branches = [
        helper.make_graph(
            [helper.make_node("Cast", [name], [f"{name}_y"], to=TensorProto.FLOAT)],
            name,
            [],
            [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, [2])],
            [each],
        )
        for name, each in (("w", weight), ("v", numpy_helper.from_array(np.array([5, 6]), "v")))
    ]
    nodes = [
        helper.make_node("If", ["c"], ["z"], then_branch=branches[0], else_branch=branches[1]),
        helper.make_node("Add", ["x", "z"], ["y"]),
    ]
    c = numpy_helper.from_array(np.array(taken), "c")
    model = import_onnx(graph(nodes, {"x": (1, [2])}, {"y": (1, [2])}, [c]))
    found = run_onnx(model.onnx, {"x": np.zeros(2, np.float32)})[0]
    assert found.tolist() == ([1, -3.5] if taken else [5, 6])


def test_a_branch_that_reads_such_numbers_is_refused_by_name() -> None:
    branches = [
        helper.make_graph(
            [helper.make_node("Cast", ["x"], [name], to=TensorProto.FLOAT)],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])],
        )
        for name in ("a", "b")
    ]
    node = helper.make_node(
        "If", ["c"], ["y"], name="either", then_branch=branches[0], else_branch=branches[1]
    )
    inputs = {"x": (TensorProto.FLOAT8E4M3FN, [2]), "c": (TensorProto.BOOL, [])}
    with pytest.raises(
        UnsupportedOperatorError, match=r"If \(either\): it cannot take or make .*FLOAT8E4M3FN"
    ):
        import_onnx(graph([node], inputs, {"y": (1, [2])}))


@pytest.mark.parametrize("kind", ["INT4", "UINT4", "INT2", "UINT2"])
def test_a_model_is_compared_on_the_limits_of_its_type(kind: str) -> None:
    number = getattr(TensorProto, kind)
    model = import_onnx(cast(number, TensorProto.FLOAT, 9))
    assert model.original is not None
    first = {"x": np.ones(9, model.inputs[0].dtype)}
    drawn = special_samples(model.inputs, model.onnx, first, narrow=model.original.narrow)
    numbers = np.unique([sample["x"] for sample in drawn]).tolist()
    bits = int(kind[-1])
    low, high = (0, 2**bits - 1) if kind[0] == "U" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    assert (numbers[0], numbers[-1]) == (low, high)
    assert {0, 1} <= set(numbers)


@pytest.mark.parametrize("kind", ["FLOAT8E5M2", "UINT4"])
def test_the_judge_is_the_file_itself(kind: str, run_relax: Any) -> None:
    number = getattr(TensorProto, kind)
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "s"], ["real"]),
        helper.make_node("QuantizeLinear", ["real", "t"], ["y"], output_dtype=number),
    ]
    weights = [numpy_helper.from_array(np.float32(size), name) for name, size in (("s", 0.5), ("t", 0.75))]
    model = import_onnx(graph(nodes, {"x": (number, [16])}, {"y": (number, [16])}, weights))
    assert model.number_types == {"x": kind, "y": kind}
    judge = Judge(model)
    x = np.arange(16, dtype=np.uint8) * (1 if kind == "UINT4" else 15)
    found = judge.outputs({"x": x})
    assert "because" not in judge.reference
    np.testing.assert_array_equal(run_relax(model.mod, [x])[0], found[0])
