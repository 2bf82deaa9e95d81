"""Lengths that are only known at run time: padded in the graph, and cut to what ONNX Runtime answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

import builder
from agent.runtime.lengths import cut
from builder.errors import UnsupportedOperatorError
from builder.importer import import_onnx
from builder.running.local_run import Runner
from tests.builder.importer.bounded.graphs import GRAPHS, NEED_SOME, feeds, model_of, model_of_all


def run(model: onnx.ModelProto, inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options)
    given = {value.name: inputs[value.name] for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(None, given), strict=True))


def check(name: str, got: NDArray[Any], wanted: NDArray[Any], seed: int) -> None:
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype), (name, seed)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6, err_msg=f"{name} with seed {seed}")


@pytest.mark.parametrize("name", GRAPHS)
def test_the_padded_graph_says_the_same(name: str) -> None:
    model = model_of(name)
    imported = import_onnx(model)
    assert imported.lengths or name.startswith("scattered")
    for seed in range(5):
        if seed == 0 and name in NEED_SOME:
            continue
        padded = run(imported.onnx, feeds(seed))
        results = cut(padded, padded, imported.lengths)
        for output, wanted in run(model, feeds(seed)).items():
            check(output, np.asarray(results[output]), wanted, seed)
        for length in imported.lengths:
            rest = np.moveaxis(padded[length.output], length.axis, 0)[int(padded[length.count][0]) :]
            assert not rest.any(), f"{length.output} is not zero behind its end"


@pytest.mark.slow
def test_the_bundle_says_the_same() -> None:
    model = model_of_all()
    package = builder.compile(import_onnx(model), "host")
    runner = Runner(package)
    assert package.manifest.lengths
    for seed in (0, 1, 2):
        given = {spec.name: feeds(seed)[spec.name] for spec in package.manifest.inputs}
        results = runner(given).outputs.values()
        for (output, wanted), got in zip(run(model, feeds(seed)).items(), results, strict=True):
            check(output, got, wanted, seed)


def test_a_normalised_model_with_a_suppression_is_imported_again() -> None:
    """As quantising does. A file that only pretends to be one is taken for what it says."""
    first = import_onnx(model_of("suppression of some"))
    again = import_onnx(first.onnx)
    assert (again.outputs, again.lengths) == (first.outputs, first.lengths)
    for (output, got), wanted in zip(
        run(again.onnx, feeds(3)).items(), run(first.onnx, feeds(3)).values(), strict=True
    ):
        check(output, got, wanted, 3)
    forged = onnx.ModelProto()
    forged.CopyFrom(first.onnx)
    for node in forged.graph.node:
        for attribute in node.attribute:
            if attribute.name == "capacity":
                attribute.i = 1 << 40
    with pytest.raises(UnsupportedOperatorError):
        import_onnx(forged)


@pytest.mark.parametrize("inputs", ["x, b, e, i", "x, b, e, a, i"])
def test_axes_and_steps_of_a_slice_that_come_with_a_request(inputs: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]> g (float[4,4] x, int64[1] i) => (float[m,n] y) {{
            b = Constant<value_ints = [1]>() e = Constant<value_ints = [3]>()
            a = Constant<value_ints = [1]>() y = Slice({inputs})
        }}"""
    )
    with pytest.raises(UnsupportedOperatorError, match=r"Slice .*its axes or steps depend on values"):
        import_onnx(model)


def test_what_nothing_bounds_is_named() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (int64 n, float[3] x) => (float[m] y) {
            zero = Constant<value_int = 0>() one = Constant<value_int = 1>() r = Range(zero, n, one)
            y = Cast<to = 1>(r)
        }"""
    )
    with pytest.raises(UnsupportedOperatorError, match=r"Range .*nothing bounds it") as caught:
        import_onnx(model)
    assert "--input-values" in (caught.value.hint or "")


def test_a_range_that_may_begin_below_zero_is_named() -> None:
    """The last five of some elements: of three, the places -2 to 2."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[12] v) => (float[m] y) {
            half = Constant<value_float = 0.5>() high = Greater(v, half) some = Compress(v, high)
            size = Shape(some) end = Squeeze(size) five = Constant<value_int = 5>() begin = Sub(end, five)
            one = Constant<value_int = 1>() places = Range(begin, end, one) y = Gather(some, places)
        }"""
    )
    with pytest.raises(UnsupportedOperatorError, match=r"Range .*below zero"):
        import_onnx(model)


def test_what_cannot_take_a_length_is_named() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[1,1,8] x) => (float[1,1,m] y) {
            shape = Constant<value = int64[1] {8}>() flat = Reshape(x, shape) at = NonZero(flat)
            rows = Cast<to = 1>(at) wide = Constant<value = int64[1] {0}>() three = Unsqueeze(rows, wide)
            w = Constant<value = float[1,1,1] {2}>() y = Conv(three, w)
        }"""
    )
    with pytest.raises(
        UnsupportedOperatorError, match=r"1 operator cannot be imported: Conv .*only the batch"
    ):
        import_onnx(model)
