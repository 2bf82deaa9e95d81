"""Pooling on packed channels, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from tvm import relax

from builder.kernels.spaces import pooling
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import REGISTERS, Build, Randn, close, machine, run

pytestmark = pytest.mark.slow


def reference(kind: str, x: np.ndarray, **attributes: Any) -> np.ndarray:
    node = onnx.helper.make_node(kind, ["x"], ["y"], **attributes)
    helper = onnx.helper
    x_info, y_info = (
        helper.make_tensor_value_info("x", 1, x.shape),
        helper.make_tensor_value_info("y", 1, None),
    )
    graph = helper.make_graph([node], "g", [x_info], [y_info])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": x})
    return np.asarray(y)


def packed(v: relax.Expr, operator: Build) -> relax.Expr:
    """Apply `operator` to the packed output of a convolution that changes nothing."""
    channels = int(v.ty.shape[1])
    return operator(relax.op.nn.conv2d(v, relax.const(np.eye(channels, dtype="f4")[:, :, None, None])))


# Only an average counts the padding or does not.
KINDS = [("MaxPool", 0), ("AveragePool", 0), ("AveragePool", 1)]
WINDOWS = [(14, 3, 2, 1), (15, 2, 2, 0), (9, 3, 1, 1)]
LANES = list(REGISTERS)


# Each kind, and each window, with each number of lanes once.
@pytest.mark.parametrize(
    ("kind", "counted", "size", "kernel", "stride", "pad", "lanes"),
    [
        (*kind, *window, LANES[(k + w) % 3])
        for k, kind in enumerate(KINDS)
        for w, window in enumerate(WINDOWS)
    ],
)
def test_window(
    kind: str, counted: int, size: int, kernel: int, stride: int, pad: int, lanes: int, randn: Randn
) -> None:
    x = randn(1, 20, size, size)
    attributes: dict[str, Any] = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": [pad] * 4}
    how = {"pool_size": (kernel, kernel), "strides": (stride, stride), "padding": (pad,) * 4}
    if kind == "MaxPool":
        operator = lambda v: relax.op.nn.max_pool2d(v, **how)  # noqa: E731
    else:
        attributes["count_include_pad"] = counted
        operator = lambda v: relax.op.nn.avg_pool2d(v, **how, count_include_pad=bool(counted))  # noqa: E731
    result = run(operator, {"x": x}, machine(lanes))  # which is packed for this
    close(result.outputs[0], reference(kind, x, **attributes))
    assert pooling.KIND in result.schedules


@pytest.mark.parametrize("axes", [[2], [3], [2, 3]])
@pytest.mark.parametrize("keeps", [True, False])
def test_reductions_of_planes(axes: list[int], keeps: bool, target: DeviceTarget, randn: Randn) -> None:
    x, names = randn(2, 20, 7, 9), ("mean", "sum", "max", "min")
    x[0, 3], x[0, 4] = -np.inf, np.inf

    def build(v: relax.Expr) -> relax.Expr:
        planes = relax.op.nn.avg_pool2d(v)  # which packs
        return relax.Tuple([getattr(relax.op, name)(planes, axes, keepdims=keeps) for name in names])

    result = run(build, {"x": x}, target)
    for name, got in zip(names, result.outputs, strict=True):
        want = getattr(np, name)(x.astype("f8"), axis=tuple(axes), keepdims=keeps)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    kinds = [str(f.attrs["edge.schedule"]) for f in result.lowered.kernels.functions.values()]
    assert kinds.count(pooling.KIND) >= len(names)
    assert not result.schedules & {"rows", "columns"}


def test_mean_of_a_plane(target: DeviceTarget, randn: Randn) -> None:
    x = randn(2, 32, 7, 7)
    result = run(lambda v: packed(v, lambda p: relax.op.mean(p, [2, 3], keepdims=True)), {"x": x}, target)
    close(result.outputs[0], x.mean((2, 3), dtype="f8", keepdims=True))
    assert pooling.KIND in result.schedules
