"""The polynomials of exp, log, sin, tanh, erf and the functions made of them, against SciPy."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from scipy import special
from tvm import relax

from builder.target.device_target import DeviceTarget
from tests.builder.kernels.machines import close, machine, run

GRID = np.linspace(-30, 30, 4001, dtype="f4").reshape(1, -1)
FORMULAS = {
    "exp": (relax.op.exp, np.exp),
    "sigmoid": (relax.op.sigmoid, special.expit),
    "tanh": (relax.op.tanh, np.tanh),
    "erf": (relax.op.erf, special.erf),
    "silu": (relax.op.nn.silu, lambda x: x * special.expit(x)),
    "log": (relax.op.log, np.log),
    "sin": (relax.op.sin, np.sin),
    "cos": (relax.op.cos, np.cos),
    "gelu": (relax.op.nn.gelu, lambda x: x * 0.5 * (1 + special.erf(x / 2**0.5))),
}


SPECIAL = np.array(
    [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-40,
        -1e-40,
        88.7,
        88.73,
        -87.0,
        -87.33,
        -87.34,
        -104,
        9,
        -9,
        4,
        -4,
        1,
        -1,
        -np.nan,
        1.1754942e-38,
        1.1754944e-38,
    ],
    "f4",
)
SMALLEST_NORMAL = np.finfo("f4").tiny


def units_in_the_last_place(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the error of `got` in units of the last place of `want`; 0 where both are the same special."""
    with np.errstate(all="ignore"):
        rounded = want.astype("f4")
        rounded[np.abs(rounded) < SMALLEST_NORMAL] = 0
        unit = np.spacing(np.maximum(np.abs(rounded), SMALLEST_NORMAL)).astype("f8")
        error = np.abs(got.astype("f8") - want) / unit
    same = (got == rounded) | (np.isnan(got) & np.isnan(want))
    return np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))


@functools.cache
def floats_and_values(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return floats of any size, and the values of a formula there: a cosine of 1e38 takes its time."""
    state = np.random.RandomState(3)
    patterns = state.randint(0, 2**32, 10**6, dtype=np.uint64).astype("u4").view("f4")
    x = np.concatenate([SPECIAL, patterns, (state.randn(10**5) * 4).astype("f4")])
    with np.errstate(all="ignore"):
        return x, FORMULAS[name][1](x.astype("f8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exp", "log", "sin", "cos", "sigmoid", "tanh", "erf"])
def test_every_float_has_its_value(name: str, target: DeviceTarget) -> None:
    x, want = floats_and_values(name)
    got = run(FORMULAS[name][0], {"x": x}, target).outputs[0]
    assert units_in_the_last_place(got, want).max() < 6
    assert not ((got != 0) & (np.abs(got) < SMALLEST_NORMAL) & (np.abs(x) > 1)).any(), "a denormal result"


@pytest.mark.parametrize("part", np.array_split(SPECIAL, 4), ids=str)
def test_single_numbers_have_their_values(part: np.ndarray) -> None:
    """TVM folds more of a number than of a vector, such as a product with 0."""
    names = [name for name in FORMULAS if name not in ("silu", "gelu")]
    build = lambda v: relax.Tuple([FORMULAS[name][0](v) for name in names])  # noqa: E731
    for name, got in zip(names, run(build, {"x": part}, machine(16)).outputs, strict=True):
        with np.errstate(all="ignore"):
            want = FORMULAS[name][1](part.astype("f8"))
        assert units_in_the_last_place(got, want).max() < 6, name


def test_tanh_of_a_large_number_is_one(target: DeviceTarget) -> None:
    """What GELU multiplies with a large negative number is 0, not the rounding of a quotient."""
    x = np.concatenate([np.linspace(9.1, 20, 500), [1e6, 1e38, np.inf]]).astype("f4")
    got = run(relax.op.tanh, {"x": np.concatenate([x, -x])}, target).outputs[0]
    np.testing.assert_array_equal(got, np.repeat([1, -1], x.size))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["silu", "gelu"])  # made of those whose every float is tested above
def test_formula_is_accurate_over_the_whole_range(name: str, target: DeviceTarget) -> None:
    operator, reference = FORMULAS[name]
    got = run(operator, {"x": GRID}, target).outputs[0]
    want = reference(GRID.astype("f8"))
    close(got, want, 1e-6)


def test_exp_is_accurate_relative_to_each_value(target: DeviceTarget) -> None:
    got = run(relax.op.exp, {"x": GRID}, target).outputs[0]
    assert np.abs(got / np.exp(GRID.astype("f8")) - 1).max() < 1e-6
