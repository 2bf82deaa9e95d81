"""Rounding to bfloat16, against a library's, and the forms of a factor."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import tvm
from tvm import te, tirx

from builder.codegen.lowering import build_kernels
from builder.kernels.spaces.bfloat_numbers import as_factor, bits_of, numbers_of, rounded, unwidened
from builder.target.device_target import resolve

# The last would become a number if it were rounded as one.
NOT_NUMBERS = np.array([0x7FC00000, 0xFFC00001, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)


def any_numbers(count: int = 4096) -> np.ndarray:
    """Return numbers of all magnitudes, halfway between two, denormal and infinite."""
    bits = np.random.default_rng(3).integers(0, 1 << 32, count, dtype=np.uint64).astype(np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    ends = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0x7F7FFFFF, 0x7F800000, 0x80000000], np.uint32)
    numbers = np.concatenate([bits, ties, ends, ends | np.uint32(0x80000000)]).view(np.float32)
    return numbers[~np.isnan(numbers)]


def test_numbers_are_rounded_to_the_nearest() -> None:
    numbers = any_numbers()
    wanted = numbers.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(bits_of(numbers), wanted.view(np.uint16))
    np.testing.assert_array_equal(numbers_of(bits_of(numbers)), wanted.astype(np.float32))


def test_what_is_no_number_stays_none() -> None:
    assert np.isnan(numbers_of(bits_of(NOT_NUMBERS))).all()


def test_kernels_round_as_the_compiler_does() -> None:
    numbers = np.concatenate([any_numbers(), NOT_NUMBERS])
    numbers = numbers[: len(numbers) // 16 * 16]
    x = te.placeholder(numbers.shape, "float32", "x")
    sch = tvm.s_tir.Schedule(te.create_prim_func([x, rounded(x)]).with_attr("global_symbol", "rounded"))
    [loop] = sch.get_loops(sch.get_sblock("rounded"))
    sch.vectorize(sch.split(loop, [None, 16])[1])
    library = build_kernels(tvm.IRModule({"rounded": sch.mod["main"]}), resolve("host").tvm_target)
    result = tvm.runtime.tensor(np.zeros(numbers.shape, np.uint16))
    library["rounded"](tvm.runtime.tensor(numbers), result)
    np.testing.assert_array_equal(result.numpy(), bits_of(numbers))


def test_a_factor_is_read_without_its_conversion() -> None:
    for dtype in ("uint8", "int8", "int16", "uint16"):
        buffer = tirx.decl_buffer((4,), dtype)
        load = tirx.BufferLoad(buffer, [tirx.const(1, "int32")])
        factor = as_factor(load)
        assert str(factor.ty.dtype) == ("float32" if dtype == "uint16" else "int32")
        assert unwidened(factor).same_as(load)
