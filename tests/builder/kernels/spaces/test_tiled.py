"""Products with packed rows, and by Strassen's algorithm."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from builder.kernels.spaces import matmul, tiled
from builder.kernels.spaces.tiled import Form
from builder.target.device_target import DeviceTarget, resolve
from tests.builder.kernels.machines import Randn, close, element_machine, run

pytestmark = pytest.mark.slow


def linear(w: np.ndarray, b: np.ndarray) -> object:
    return lambda v: relax.op.nn.relu(relax.op.add(relax.op.matmul(v, relax.const(w)), relax.const(b)))


@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [((13,), 64, 96), ((1, 197), 32, 64), ((2, 3, 11), 48, 48)]
)
def test_rows_that_do_not_fill_the_last_tile(
    rows: tuple[int, ...], depth: int, columns: int, target: DeviceTarget, randn: Randn
) -> None:
    x, w, b = randn(*rows, depth), randn(depth, columns), randn(columns)
    result = run(linear(w, b), {"x": x}, target)  # type: ignore[arg-type]
    close(result.outputs[0], np.maximum(x.astype("f8") @ w + b, 0))
    assert result.schedules == {matmul.KIND}
    assert len(result.lowered.kernels.functions) == 1
    packed = run(linear(w, b), {"x": x}, element_machine())  # type: ignore[arg-type]
    close(packed.outputs[0], np.maximum(x.astype("f8") @ w + b, 0))
    assert packed.schedules == {tiled.KIND}


@pytest.mark.parametrize("rows", [(128,), (2, 67), (1, 65)])
def test_large_product_on_arm_takes_seven_products_of_quarters(rows: tuple[int, ...], randn: Randn) -> None:
    x, w, b = randn(*rows, 256), randn(256, 512), randn(512)
    result = run(linear(w, b), {"x": x}, element_machine())  # type: ignore[arg-type]
    close(result.outputs[0], np.maximum(x.astype("f8") @ w + b, 0))
    assert result.schedules == {tiled.KIND, tiled.WEIGHTS_KIND}


def test_a_product_that_is_added_to_its_operand(randn: Randn) -> None:
    x, w = randn(1, 128, 256), randn(256, 256)
    build = lambda v: relax.op.add(relax.op.matmul(v, relax.const(w)), v)  # noqa: E731
    result = run(build, {"x": x}, element_machine())
    close(result.outputs[0], x.astype("f8") @ w + x)
    assert result.schedules == {tiled.KIND, tiled.WEIGHTS_KIND}


def test_form_follows_rows_and_registers() -> None:
    pi, x86, scalar = resolve("rpi4"), resolve("x86-64-v3"), resolve("riscv64")
    assert Form.of((1,), 768, 768, 8, pi) is None
    assert Form.of((128,), 768, 768, 8, pi) == Form(8, 4, True)
    assert Form.of((128,), 768, 760, 8, pi) == Form(8, 4, False), "an odd number of panels has no halves"
    assert Form.of((16,), 768, 768, 8, pi) == Form(8, 4, False)
    assert Form.of((128,), 771, 768, 8, pi) is None
    assert Form.of((128,), 768, 766, 8, pi) == Form(8, 4, False), "the last panel is incomplete"
    assert Form.of((12,), 768, 768, 24, x86) is None, "three tiles of four rows"
    assert Form.of((2, 197), 768, 768, 24, x86) is None
    assert Form.of((197, 2), 768, 768, 24, x86) == Form(4, 8, False), "a tile of two rows is too small"
    assert Form.of((197,), 768, 768, 4, scalar) is None
