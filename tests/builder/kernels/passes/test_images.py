"""What stands between convolutions of signals and of videos is computed on images, with packed channels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import Call

from builder.calls.spans import bindings_of
from builder.kernels.rewriter import op_name
from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import Randn, Result, close, machine, run

pytestmark = pytest.mark.slow

Between = Callable[[relax.Expr], relax.Expr]


@pytest.fixture
def target() -> DeviceTarget:
    """One width: the operators are rewritten before anything depends on it."""
    return machine(8)


def identity(channels: int, rank: int) -> relax.Expr:
    """Return the weights of a convolution that changes nothing, but packs channels."""
    return relax.const(np.eye(channels, dtype="f4").reshape(channels, channels, *[1] * (rank - 2)))


def between(x: np.ndarray, operator: Between, outputs: int, target: DeviceTarget) -> Result:
    """Run an operator between two convolutions that change nothing."""
    convolve = {3: relax.op.nn.conv1d, 5: relax.op.nn.conv3d}[x.ndim]

    def build(v: relax.Expr) -> relax.Expr:
        y = operator(convolve(v, identity(x.shape[1], x.ndim)))
        return convolve(y, identity(outputs, x.ndim))

    return run(build, {"x": x}, target)


def stays_packed(result: Result) -> bool:
    """Whether channels are only unpacked after the last convolution, and no kernel reads them in rows."""
    values = [binding.value for binding in bindings_of(tvm.IRModule({"main": result.lowered.main}))]
    calls = [
        str(v.args[0].name_hint) for v in values if isinstance(v, Call) and op_name(v) == "relax.call_tir"
    ]
    unpacked = sum("unpack" in name for name in calls)
    return bool(calls) and unpacked <= 1 and not result.schedules & {"rows", "columns"}


def around(x: np.ndarray, axis: int) -> np.ndarray:
    """Return `x` with a low number before and behind it along an axis."""
    return np.pad(x, [(int(a == axis),) * 2 for a in range(x.ndim)], constant_values=-9)


BIAS = np.linspace(-1, 1, 16, dtype="f4")
SIGNALS: dict[str, tuple[Between, Callable[[np.ndarray], np.ndarray]]] = {
    "slice": (lambda v: relax.op.strided_slice(v, [2], [3], [17], [2]), lambda x: x[:, :, 3:17:2]),
    "cut": (lambda v: relax.op.strided_slice(v, [2], [0], [-4]), lambda x: x[:, :, :-4]),
    "half": (lambda v: relax.op.strided_slice(v, [1], [8], [16]), lambda x: x[:, 8:]),
    "pad": (
        lambda v: relax.op.nn.pad(v, [0, 0, 0, 0, 3, 1], "constant", 0.5),
        lambda x: np.pad(x, ((0, 0), (0, 0), (3, 1)), constant_values=0.5),
    ),
    "reflect": (
        lambda v: relax.op.nn.pad(v, [0, 0, 0, 0, 3, 2], "reflect"),
        lambda x: np.pad(x, ((0, 0), (0, 0), (3, 2)), mode="reflect"),
    ),
    "edge": (
        lambda v: relax.op.nn.pad(v, [0, 0, 0, 0, 3, 2], "replicate"),
        lambda x: np.pad(x, ((0, 0), (0, 0), (3, 2)), mode="edge"),
    ),
    "wrap": (
        lambda v: relax.op.nn.pad(v, [0, 0, 0, 0, 3, 2], "circular"),
        lambda x: np.pad(x, ((0, 0), (0, 0), (3, 2)), mode="wrap"),
    ),
    "join": (lambda v: relax.op.concat([v, v], 2), lambda x: np.concatenate([x, x], 2)),
    "stack": (
        lambda v: relax.op.concat([v, relax.op.nn.relu(v)], 1),
        lambda x: np.concatenate([x, x.clip(0)], 1),
    ),
    "mean": (lambda v: relax.op.mean(v, [2], keepdims=True), lambda x: x.mean(2, keepdims=True)),
    "gate": (
        lambda v: relax.op.multiply(v, relax.op.sigmoid(relax.op.max(v, [2], keepdims=True))),
        lambda x: x / (1 + np.exp(-x.max(2, keepdims=True))),
    ),
    "pool": (
        lambda v: relax.op.nn.max_pool1d(v, 3, 2, (1, 1)),
        lambda x: np.stack(
            [around(x, 2)[:, :, k : k + 3].max(2) for k in range(0, 20, 2)], 2
        ),
    ),
    "average": (
        lambda v: relax.op.nn.avg_pool1d(v, 2, 2),
        lambda x: x.reshape(*x.shape[:2], -1, 2).mean(3),
    ),
    "slopes": (
        lambda v: relax.op.nn.prelu(v, relax.const(np.linspace(0.1, 0.9, 16, dtype="f4")), 1),
        lambda x: np.where(x < 0, x * np.linspace(0.1, 0.9, 16)[:, None], x),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNALS)
def test_between_convolutions_in_one_dimension(name: str, target: DeviceTarget, randn: Randn) -> None:
    operator, definition = SIGNALS[name]
    x = randn(2, 16, 20)
    want = definition(x.astype("f8"))
    result = between(x, operator, want.shape[1], target)
    close(result.outputs[0], want)
    assert stays_packed(result)


VIDEOS: dict[str, tuple[Between, Callable[[np.ndarray], np.ndarray]]] = {
    "relu": (
        lambda v: relax.op.nn.relu(relax.op.add(v, relax.const(BIAS.reshape(1, 16, 1, 1, 1)))),
        lambda x: (x + BIAS.reshape(16, 1, 1, 1)).clip(0),
    ),
    "frames": (lambda v: relax.op.strided_slice(v, [2], [1], [6], [2]), lambda x: x[:, :, 1:6:2]),
    "rows": (lambda v: relax.op.strided_slice(v, [3, 4], [1, 0], [4, 5]), lambda x: x[:, :, :, 1:4, :5]),
    "stack": (
        lambda v: relax.op.concat([v, relax.op.nn.relu(v)], 1),
        lambda x: np.concatenate([x, x.clip(0)], 1),
    ),
    "gate": (
        lambda v: relax.op.multiply(v, relax.op.sigmoid(relax.op.mean(v, [2, 3, 4], keepdims=True))),
        lambda x: x / (1 + np.exp(-x.mean((2, 3, 4), keepdims=True))),
    ),
    "pool": (
        lambda v: relax.op.nn.max_pool3d(v, (2, 1, 3), (2, 1, 1), (1, 0, 0, 1, 0, 0)),
        lambda x: np.stack(
            [around(x, 2)[:, :, k : k + 2].max(2) for k in range(0, 8, 2)], 2
        )[..., [[0, 1, 2], [1, 2, 3], [2, 3, 4]]].max(-1),
    ),
    "average": (
        lambda v: relax.op.nn.avg_pool3d(v, (3, 2, 1), (3, 2, 1)),
        lambda x: x.reshape(*x.shape[:2], 2, 3, 2, 2, 5).mean((3, 5)),
    ),
    "norm": (
        lambda v: relax.op.divide(
            relax.op.subtract(v, relax.op.mean(v, [2, 3, 4], keepdims=True)),
            relax.op.sqrt(
                relax.op.add(relax.op.variance(v, [2, 3, 4], keepdims=True), relax.const(1e-5, "float32"))
            ),
        ),
        lambda x: (x - x.mean((2, 3, 4), keepdims=True)) / np.sqrt(x.var((2, 3, 4), keepdims=True) + 1e-5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VIDEOS)
@pytest.mark.parametrize("batch", [1, 2])
def test_between_convolutions_in_three_dimensions(
    name: str, batch: int, target: DeviceTarget, randn: Randn
) -> None:
    operator, definition = VIDEOS[name]
    x = randn(batch, 16, 6, 4, 5)
    want = definition(x.astype("f8"))
    result = between(x, operator, want.shape[1], target)
    close(result.outputs[0], want)


@pytest.mark.parametrize(
    ("kernel", "strides", "groups"),
    [
        ((3, 3, 3), (1, 2, 2), 16),
        ((5, 1, 1), (1, 1, 1), 16),
        ((3, 1, 1), (2, 1, 1), 1),
        ((2, 3, 3), (1, 1, 1), 2),
    ],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_chain_of_convolutions_in_three_dimensions(
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    groups: int,
    batch: int,
    target: DeviceTarget,
    randn: Randn,
) -> None:
    x, w = randn(batch, 16, 5, 6, 7), randn(16, 16 // groups, *kernel)

    def build(v: relax.Expr) -> relax.Expr:
        y = relax.op.nn.relu(relax.op.nn.conv3d(v, identity(16, 5)))
        return relax.op.nn.conv3d(
            y, relax.const(w), strides=strides, padding=(1, 0, 0, 1, 0, 0), groups=groups
        )

    result = run(build, {"x": x}, target)
    padded = np.pad(x.astype("f8").clip(0), ((0, 0), (0, 0), (1, 1), (0, 0), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, (2, 3, 4))
    windows = windows[:, :, :: strides[0], :: strides[1], :: strides[2]]
    n, _, *extents = windows.shape[:5]
    windows = windows.reshape(n, groups, 16 // groups, *windows.shape[2:])
    want = np.einsum(
        "ngcdyzabe,gocabe->ngodyz", windows, w.astype("f8").reshape(groups, 16 // groups, *w.shape[1:])
    )
    close(result.outputs[0], want.reshape(n, 16, *extents))
