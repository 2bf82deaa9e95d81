"""The kernels without a design space, and their share of the work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm import s_tir as st

from builder.compiling.lower import LoweredModule, lower
from builder.compiling.uncovered import uncovered_kernels
from builder.errors import BuildError
from builder.importer import import_onnx
from builder.kernels.decisions import Schedules
from builder.kernels.schedule import SCHEDULE, SPACES
from builder.kernels.spaces import rows, winograd
from tests.builder.kernels.machines import Build, machine

DIGITS = Path(__file__).parents[3] / "examples" / "digits" / "digits.onnx"
TARGET = machine(8)


def module_of(build: Build, shape: tuple[int, ...]) -> tvm.IRModule:
    bb = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float32"))
    with bb.function("main", [x]):
        with bb.dataflow():
            out = bb.emit_output(bb.normalize(build(x)))
        bb.emit_func_output(out)
    return bb.get()


def lowered(build: Build, shape: tuple[int, ...]) -> LoweredModule:
    return lower(module_of(build, shape), TARGET, Schedules(strict=True))


def kinds(module: LoweredModule) -> list[str]:
    return [str(func.attrs[SCHEDULE]) for func in module.kernels.functions.values()]


def refuses(*_: object) -> None:
    raise st.ScheduleError("no such loop")


def test_a_function_called_for_each_element_is_listed_with_its_share() -> None:
    def tan_and_product(x: relax.Expr) -> relax.Expr:
        return relax.op.matmul(relax.op.tan(x), relax.const(np.ones((512, 512), "f4")))

    (kernel,) = uncovered_kernels(lowered(tan_and_product, (64, 512)), TARGET)
    assert "tan" in kernel.name
    assert 0 < kernel.share < 1


def test_a_network_of_one_kernel_has_all_of_its_work_there() -> None:
    (kernel,) = uncovered_kernels(lowered(relax.op.tan, (64, 512)), TARGET)
    assert kernel.share == 1


@pytest.mark.parametrize(
    "build",
    [
        lambda x: relax.op.add(x, x),
        lambda x: relax.op.concat([x, x], 1),
        lambda x: relax.op.permute_dims(x, [1, 0]),
        relax.op.nn.softmax,
        relax.op.log,
    ],
    ids=["elementwise", "copy", "transpose", "rows", "formula"],
)
def test_what_a_design_space_would_not_improve_is_left_out(build: Build) -> None:
    assert uncovered_kernels(lowered(build, (256, 512)), TARGET) == ()


def test_what_runs_at_load_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPACES, winograd.WEIGHTS_KIND, refuses)
    weights = relax.const(np.ones((64, 64, 3, 3), "f4"))
    module = lower(module_of(lambda x: relax.op.nn.conv2d(x, weights), (1, 64, 34, 34)), TARGET)
    assert "fallback" in kinds(module)
    assert uncovered_kernels(module, TARGET) == ()


def test_a_broken_space_falls_back_and_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPACES, rows.KIND, refuses)
    module = lower(module_of(relax.op.nn.softmax, (256, 512)), TARGET)
    assert kinds(module) == ["fallback"]
    (kernel,) = uncovered_kernels(module, TARGET)
    assert kernel.share == 1


def test_a_broken_space_is_an_error_in_strict_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPACES, rows.KIND, refuses)
    with pytest.raises(BuildError, match="the space rows, got: no such loop"):
        lowered(relax.op.nn.softmax, (256, 512))


def test_a_single_row_is_left_to_the_fallback_in_strict_mode() -> None:
    module = lowered(relax.op.nn.softmax, (512,))
    assert kinds(module) == ["fallback"]


@pytest.mark.slow
def test_every_kernel_of_the_example_has_the_loops_of_its_space() -> None:
    module = lower(import_onnx(DIGITS).mod, TARGET, Schedules(strict=True))
    assert uncovered_kernels(module, TARGET) == ()
