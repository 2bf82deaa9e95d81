"""A sample of ONNX's node tests, compiled together and run in the executor that devices use."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import defs
from onnx.backend.test.case import test_case

from benchmarks.onnx_coverage import difference, fixable_inputs, plain_cases, run_as_shipped, values_of

MODULES = (
    "adagrad", "adam", "add", "bitcast", "bitshift", "col2im", "compress", "cosh", "cumprod", "deformconv",
    "det", "dft", "flexattention", "linear_attention", "maxpool", "maxunpool", "mod", "momentum", "reducemax",
    "sinh", "swiglu", "swish", "tensorscatter", "tfidfvectorizer",
)  # fmt: skip

# All operators of these cases mean the same in this opset.
OPSET = defs.onnx_opset_version()
SAMPLE = (
    "flexattention_score_mod",
    "swish",
    "tensorscatter_circular",
    "bitcast_float32_to_int32",
    "bitcast_bool_to_uint8",
    "bitshift_right_int8_shift_ge_width",
    "cumprod_1d_int32_exclusive",
    "col2im_pads",
    "deform_conv_with_mask_bias",
    "det_nd",
    "dft_irfft",
    "maxpool_with_argmax_2d_precomputed_pads",
    "maxunpool_export_with_output_shape",
    "mod_float_edge_cases_fmod_0_float32",
    "sinh",
    "cosh",
    "tfidfvectorizer_tf_batch_uniandbigrams_skip5",
    "compress_1",
    "reduce_max_bool_inputs",
    "adam_multiple",
    "adagrad",
    "nesterov_momentum",
)


@functools.cache
def cases_by_name() -> dict[str, test_case.TestCase]:
    return {case.name: case for case in plain_cases(modules=MODULES)}


def named(name: str) -> test_case.TestCase:
    return cases_by_name()[f"test_{name}"]


def together(cases: list[test_case.TestCase]) -> onnx.ModelProto:
    """One model with the graphs of all cases, whose values get a prefix."""
    whole = onnx.ModelProto(ir_version=10)
    whole.graph.name = "sample"
    whole.opset_import.append(onnx.helper.make_opsetid("", OPSET))
    for number, case in enumerate(cases):
        part = onnx.compose.add_prefix(case.model, f"c{number}_")
        for field in ("node", "input", "output", "initializer"):
            getattr(whole.graph, field).extend(getattr(part.graph, field))
        known = {entry.domain for entry in whole.opset_import}
        whole.opset_import.extend(o for o in part.opset_import if o.domain and o.domain not in known)
    return whole


def fits(case: test_case.TestCase) -> bool:
    """Whether a case's operators mean the same in `OPSET`."""
    version = max((o.version for o in case.model.opset_import if not o.domain), default=OPSET)
    names = {node.op_type for node in case.model.graph.node if not node.domain}
    return all(
        defs.has(name, OPSET, "")
        and defs.get_schema(name, OPSET, "").since_version == defs.get_schema(name, version, "").since_version
        for name in names
    )


def check(cases: list[test_case.TestCase]) -> None:
    feeds: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for number, case in enumerate(cases):
        inputs = dict(zip((v.name for v in case.model.graph.input), values_of(case)[0], strict=False))
        fixed = fixable_inputs(inputs)
        for name, array in inputs.items():
            (values if name in fixed else feeds)[f"c{number}_{name}"] = array
    results = run_as_shipped(together(cases), feeds, values)
    for case in cases:
        for want in values_of(case)[1]:
            assert not (reason := difference(results.pop(0), want, case)), f"{case.name}: {reason}"
    assert not results


@pytest.mark.slow
def test_a_sample_of_the_node_tests_is_right_as_it_ships() -> None:
    cases = [named(name) for name in SAMPLE]
    assert all(fits(case) for case in cases)
    check(cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swiglu", "linear_attention_gated_delta_gqa"])
def test_an_operator_that_onnx_runtime_does_not_have_yet_is_right(name: str) -> None:
    check([named(name)])


def test_a_wrong_number_is_noticed() -> None:
    case = named("add")
    want = values_of(case)[1][0]
    assert not difference(want, want, case)
    assert "1 of" in difference(want + _one(want), want, case)


def _one(like: np.ndarray) -> np.ndarray:
    spot = np.zeros_like(like)
    spot.flat[0] = 1
    return spot
