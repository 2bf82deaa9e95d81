"""Functions without a design space: blocks that move elements, row by row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm_ffi
from tvm import relax, tirx

from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, lower_expression, machine, run

pytestmark = pytest.mark.slow

ROWS = np.array([3, 0, 0, 4], "i8")
MOVES: dict[str, tuple[Callable[[relax.Expr], relax.Expr], Callable[[np.ndarray], np.ndarray]]] = {
    "slice": (
        lambda v: relax.op.strided_slice(v, [2, 3], [1, 2], [5, 19], [2, 1]),
        lambda x: x[:, :, 1:5:2, 2:19],
    ),
    "steps along a row": (lambda v: relax.op.strided_slice(v, [3], [1], [19], [3]), lambda x: x[..., 1:19:3]),
    "gather of rows": (lambda v: relax.op.take(v, relax.const(ROWS), axis=2), lambda x: x[:, :, ROWS]),
    "gather along rows": (
        lambda v: relax.op.take(v, relax.const(np.arange(18, -1, -1)), axis=3),
        lambda x: x[..., ::-1],
    ),
    "concatenation": (
        lambda v: relax.op.concat([v, relax.op.nn.relu(v)], axis=3),
        lambda x: np.concatenate([x, np.maximum(x, 0)], 3),
    ),
    "reflecting pad": (
        lambda v: relax.op.nn.pad(v, [0, 0, 0, 0, 1, 2, 3, 1], pad_mode="reflect"),
        lambda x: np.pad(x, ((0, 0), (0, 0), (1, 2), (3, 1)), "reflect"),
    ),
    "axes in another order": (
        lambda v: relax.op.permute_dims(v, [2, 0, 1, 3]),
        lambda x: x.transpose(2, 0, 1, 3),
    ),
    "a number for each row": (
        lambda v: relax.op.multiply(v, relax.const(np.arange(5, dtype="f4").reshape(5, 1))),
        lambda x: x * np.arange(5, dtype="f4").reshape(5, 1),
    ),
    "nearest picture": (
        lambda v: relax.op.image.resize2d(
            v,
            (10, 38),
            layout="NCHW",
            method="nearest_neighbor",
            coordinate_transformation_mode="asymmetric",
            rounding_method="floor",
        ),
        lambda x: x.repeat(2, 2).repeat(2, 3),
    ),
}


@pytest.mark.parametrize("move", MOVES)
def test_elements_are_moved(move: str, randn: Randn) -> None:
    x = randn(2, 3, 5, 19)
    build, wanted = MOVES[move]
    np.testing.assert_array_equal(run(build, {"x": x}, machine(8)).outputs[0], wanted(x))


@pytest.mark.parametrize("move", ["axes in another order", "a number for each row"])
def test_rows_are_computed_without_divisions(move: str, target: DeviceTarget, randn: Randn) -> None:
    x = randn(2, 3, 5, 80)
    lowered = lower_expression(MOVES[move][0], {"x": x}, target)
    divided: list[tirx.Expr] = []
    loops: list[tirx.For] = []
    for func in lowered.kernels.functions.values():
        tvm_ffi.structural_walk(func.body, ((tirx.FloorDiv, tirx.FloorMod), divided.append))
        tvm_ffi.structural_walk(func.body, (tirx.For, loops.append))
    vectors = [loop.loop_var for loop in loops if loop.kind == tirx.ForKind.VECTORIZED]
    assert vectors
    # Outer loops may be fused, to divide them among cores.
    assert not any(var in tirx.analysis.undefined_vars(each) for each in divided for var in vectors)
    np.testing.assert_array_equal(run(MOVES[move][0], {"x": x}, target).outputs[0], MOVES[move][1](x))


def test_shifted_rows_are_moved_in_vectors(target: DeviceTarget, randn: Randn) -> None:
    lowered = lower_expression(MOVES["slice"][0], {"x": randn(2, 3, 5, 19)}, target)
    kinds: list[tirx.ForKind] = []
    for func in lowered.kernels.functions.values():
        tvm_ffi.structural_walk(func.body, (tirx.For, lambda loop: kinds.append(loop.kind)))
    assert tirx.ForKind.VECTORIZED in kinds
