"""Products in bfloat16: with an instruction for pairs, without one, and on tiles that `tiles.c` emulates."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from tvm import relax

from builder.codegen.lowering import build_kernels
from builder.kernels.passes.bfloats import mark
from builder.kernels.spaces import bfloat_matmul, matmul
from builder.kernels.spaces.bfloat_numbers import bits_of, numbers_of
from builder.target.device_target import DeviceTarget, resolve
from tests.builder.kernels.integer_machines import RandomChooser, lower_for, run_here
from tests.builder.kernels.tile_machine import Case, Shared, exact_on_tiles

X86 = "llvm -mtriple=x86_64-linux-gnu -mcpu="
# One row and several, a depth that is no pair, columns that are no vector.
SHAPES = [
    ((1,), 64, 40),
    ((7,), 97, 16),
    ((2, 3), 70, 17),
    ((1, 1), 5, 3),
    ((33,), 200, 24),
    ((1, 130), 8, 100),
]


def cooperlake() -> DeviceTarget:
    """Return a device with the instruction, and without tiles."""
    return resolve(f"{X86}cooperlake")


def as_bfloat(numbers: np.ndarray) -> np.ndarray:
    """Return numbers rounded to bfloat16, in double precision."""
    return numbers_of(bits_of(numbers)).astype("f8")


@pytest.mark.parametrize(("lead", "depth", "columns"), SHAPES)
def test_only_the_operands_are_rounded(lead: tuple[int, ...], depth: int, columns: int) -> None:
    rng = np.random.default_rng(5)
    x = rng.standard_normal((*lead, depth)).astype("f4")
    w = (rng.standard_normal((depth, columns)) / depth**0.5).astype("f4")
    b = np.linspace(-1, 1, columns).astype("f4")

    def build(v: relax.Expr) -> relax.Expr:
        return relax.op.nn.relu(relax.op.add(relax.op.matmul(v, relax.const(w)), relax.const(b)))

    result = run_here(build, {"x": x}, cooperlake(), mark=mark)
    assert bfloat_matmul.KIND in result.schedules
    want = np.maximum(as_bfloat(x) @ as_bfloat(w) + b, 0)
    assert result.outputs[0].shape == want.shape
    np.testing.assert_allclose(result.outputs[0], want, atol=1e-5)
    # The test would not notice a product in float32 if rounding changed little.
    assert np.abs(want - np.maximum(x.astype("f8") @ w + b, 0)).max() > 1e-3


def test_every_point_of_the_space_is_valid() -> None:
    x, w = (np.random.default_rng(1).standard_normal(shape).astype("f4") for shape in ((20, 32), (32, 80)))
    for seed in range(4):
        chooser = RandomChooser(seed)
        result = run_here(
            lambda v: relax.op.matmul(v, relax.const(w)), {"x": x}, cooperlake(), chooser, mark=mark
        )
        assert set(chooser.made) == {"rows", "k"}
        np.testing.assert_allclose(result.outputs[0], as_bfloat(x) @ as_bfloat(w), atol=1e-4)


def test_a_value_is_rounded_once_for_all_products_and_before_it_gets_another_shape() -> None:
    rng = np.random.default_rng(2)
    x, w = rng.standard_normal((4, 6, 16)).astype("f4"), rng.standard_normal((96, 8)).astype("f4")

    def build(v: relax.Expr) -> relax.Expr:
        flat = relax.op.reshape(relax.op.nn.relu(v), (4, 96))
        return relax.op.add(
            relax.op.matmul(flat, relax.const(w)), relax.op.nn.relu(relax.op.matmul(flat, relax.const(-w)))
        )

    lowered = lower_for(build, {"x": x}, cooperlake(), mark=mark)
    # ReLU and the rounding, two products, of which one adds the other.
    assert len(lowered.kernels.functions) == 3
    result = run_here(build, {"x": x}, cooperlake(), mark=mark)
    product = as_bfloat(np.maximum(x, 0).reshape(4, 96)) @ as_bfloat(w)
    np.testing.assert_allclose(result.outputs[0], product + np.maximum(-product, 0), atol=1e-4)


def test_products_of_two_computed_matrices_stay_in_float32() -> None:
    x = np.random.default_rng(2).standard_normal((4, 4)).astype("f4")
    result = run_here(lambda v: relax.op.matmul(v, v), {"x": x}, cooperlake(), mark=mark)
    assert result.schedules & {matmul.BATCHED, matmul.KIND}
    np.testing.assert_allclose(result.outputs[0], x.astype("f8") @ x, atol=1e-6)


@pytest.mark.parametrize(
    ("attributes", "lead", "in_bfloat"),
    [
        ("sapphirerapids -mattr=-amx-tile", (2, 2), True),
        ("sapphirerapids -mattr=-amx-tile", (1, 5), False),
        ("sapphirerapids -mattr=-amx-tile", (5, 1), False),
        ("sapphirerapids", (1, 5), False),
        ("sapphirerapids", (8, 2), False),
        ("sapphirerapids", (2, 8), True),
        ("sapphirerapids -mattr=-avx512bf16", (2, 8), True),
        ("sapphirerapids -mattr=-avx512bf16", (1, 2), False),
        ("znver4", (1, 5), True),
    ],
)
def test_a_product_that_would_be_slower_stays_in_float32(
    attributes: str, lead: tuple[int, ...], in_bfloat: bool
) -> None:
    x, w = np.ones((*lead, 32), "f4"), np.ones((32, 16), "f4")
    target = resolve(X86 + attributes)
    lowered = lower_for(lambda v: relax.op.matmul(v, relax.const(w)), {"x": x}, target, mark=mark)
    kinds = {str(f.attrs.get("edge.schedule")) for f in lowered.kernels.functions.values()}
    assert bool(kinds & {bfloat_matmul.KIND, bfloat_matmul.TILE_KIND}) is in_bfloat
    assert bfloat_matmul.pays(lead, target) is in_bfloat


@pytest.mark.parametrize(
    ("cpu", "rows", "instruction"),
    [("cooperlake", 8, "vdpbf16ps"), ("znver4", 1, "vdpbf16ps"), ("sapphirerapids", 16, "tdpbf16ps")],
)
def test_the_code_has_the_instruction(cpu: str, rows: int, instruction: str) -> None:
    x, w = np.zeros((rows, 64), "f4"), np.ones((64, 32), "f4")
    target = resolve(X86 + cpu)
    lowered = lower_for(lambda v: relax.op.matmul(v, relax.const(w)), {"x": x}, target, mark=mark)
    assembly = build_kernels(lowered.kernels, target.tvm_target).inspect_source("asm")
    assert instruction in assembly
    # Nothing else multiplies.
    assert "vfmadd" not in assembly
    assert "vmulps" not in assembly


@pytest.mark.parametrize(
    "function", [relax.op.nn.gelu, relax.op.nn.silu, relax.op.tanh, relax.op.exp], ids=lambda f: f.__name__
)
@pytest.mark.parametrize(("cpu", "rows"), [("cooperlake", 8), ("sapphirerapids", 16)])
def test_a_function_is_a_formula_of_vectors_where_its_result_is_rounded(
    cpu: str, rows: int, function: Callable[[relax.Expr], relax.Expr]
) -> None:
    x, target = np.zeros((rows, 64), "f4"), resolve(X86 + cpu)
    first, second = (relax.const(np.ones(shape, "f4")) for shape in ((64, 32), (32, 32)))
    lowered = lower_for(
        lambda v: relax.op.matmul(function(relax.op.matmul(v, first)), second), {"x": x}, target, mark=mark
    )
    assembly = build_kernels(lowered.kernels, target.tvm_target).inspect_source("asm")
    assert not re.findall(r"\b(?:erff|expf|tanhf)@PLT", assembly)
    assert re.search(r"\bvmulps\b.*[yz]mm", assembly)


@pytest.mark.slow
def test_sums_on_tiles_are_exact(shared_file: Shared) -> None:
    cases = [
        Case((1, 64, 128), (128, 96), bfloat=True),
        Case((37, 100), (100, 40), bfloat=True),
        Case((2, 9, 64), (64, 16), bfloat=True),
        Case((1, 3, 48, 70), (70, 33), bfloat=True),
        Case((8, 1), (1, 130), bfloat=True),
        *(Case((48, 128), (128, 96), seed=seed, bfloat=True) for seed in range(3)),
    ]
    for each, outcome in exact_on_tiles(cases, shared_file):
        assert bfloat_matmul.TILE_KIND in outcome.schedules, each
        assert outcome.products > 0, each


@pytest.mark.slow
def test_few_rows_are_left_to_the_instruction_for_pairs(shared_file: Shared) -> None:
    for each, outcome in exact_on_tiles([Case((2, 2, 64), (64, 64), bfloat=True)], shared_file):
        assert bfloat_matmul.KIND in outcome.schedules, each
        assert outcome.products == 0, each
