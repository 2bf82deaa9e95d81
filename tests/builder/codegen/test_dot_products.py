"""Sums of products of integers, written as instructions or as arithmetic: always the same sums."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import numpy as np
import pytest
import tvm
from tvm import relax, te, tirx
from tvm import s_tir as st

from builder.codegen.dot_products import write_dot_products
from builder.codegen.lowering import build_kernels, to_loops
from builder.errors import BuildError
from builder.kernels.spaces.dot_loops import mark_dot
from builder.target.device_target import DeviceTarget
from builder.target.dot import Dot
from tests.builder.kernels.integer_machines import DEVICES, any_bytes, device, lower_for, numbers

# Products until a sum of the largest ones has wrapped around.
_DEEP: Final = (1 << 31) // (127 * 128) + 40


def products(
    dot: Dot, steps: int, vectors: int, rows: int, dtype: str, value: Callable[..., tirx.Expr] | None = None
) -> tirx.PrimFunc:
    """Return sums `[rows, lanes]` of `data [rows, depth]` and `weights [steps, lanes, group]`, marked."""
    lanes, group = dot.lanes * vectors, dot.group  # not in halves
    x = te.placeholder((rows, steps * group), name="x", dtype=dtype)
    w = te.placeholder((steps, lanes, group), name="w", dtype="int8")
    k, g = te.reduce_axis((0, steps), "k"), te.reduce_axis((0, group), "g")

    def element(r: tirx.Var, v: tirx.Var) -> tirx.Expr:
        factors = x[r, k * group + g].astype("int32"), w[k, v, g].astype("int32")
        return te.sum(factors[0] * factors[1], axis=[k, g])

    y = te.compute((rows, lanes), value(x, w, k, g) if value else element, name="y")
    sch = st.Schedule(te.create_prim_func([x, w, y]).with_attr("global_symbol", "main"))
    block = sch.get_sblock("y")
    r, v, k_loop, g_loop = sch.get_loops(block)
    sch.reorder(r, k_loop, v, g_loop)
    sch.decompose_reduction(block, k_loop)
    mark_dot(sch, v)
    return sch.mod["main"]


def sums_of(func: tirx.PrimFunc, target: DeviceTarget, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    out = tvm.runtime.tensor(np.zeros((len(x), w.shape[1]), "i4"))
    kernel = build_kernels(tvm.IRModule({"main": func}), target.tvm_target)["main"]
    kernel(tvm.runtime.tensor(x), tvm.runtime.tensor(w), out)
    return out.numpy()


@pytest.mark.parametrize("name", DEVICES)
def test_sums_are_those_of_integers_and_wrap_around(name: str) -> None:
    dot = device(name).dot
    machine = device(name) if device(name).is_native else device("host")
    random = np.random.default_rng(5)
    steps = -(-_DEEP // dot.group) | 1
    info = np.iinfo(dot.data if dot.data != "int16" else "uint8")
    depth = steps * dot.group
    x = np.stack(
        [
            np.full(depth, info.max),
            np.full(depth, info.min),
            np.zeros(depth),
            random.integers(info.min, info.max + 1, depth),
            np.arange(depth) % 2 * info.max,
            # Data of 16 bits stands for either byte.
            np.full(depth, -128 if dot.data == "int16" else info.min),
        ]
    ).astype(dot.data)
    w = any_bytes(random, (steps, 2 * dot.lanes, dot.group), "int8")
    w[:, 0], w[:, 1], w[:, 2], w[:, dot.lanes] = -128, 127, 0, -128
    got = sums_of(products(dot, steps, 2, len(x), dot.data), machine, x, w)
    exact = np.einsum("rkg,kvg->rv", x.reshape(len(x), steps, -1).astype("i8"), w.astype("i8"), optimize=True)
    assert np.abs(exact).max() >= 1 << 31
    assert np.array_equal(got, exact.astype(np.uint32).view("i4"))


INSTRUCTIONS: Final = {
    "cascadelake": r"\tvpdpbusd\t.*%zmm\d+$",
    "alderlake": r"\tvpdpbusd\t.*%ymm\d+$",
    "skylake-avx512": r"\tvpmaddwd\t.*%zmm\d+$",
    "x86-64-v3": r"\tvpmaddwd\t.*%ymm\d+$",
    "x86-64-v2": r"\tpmaddwd\t.*%xmm\d+$",
    "rpi5": r"\tsdot\tv\d+\.4s, v\d+\.16b, v\d+\.4b\[\d\]$",
    "rpi4": r"\tsadalp\tv\d+\.4s, v\d+\.8h$",
    "rpi-armv7": r"\tvmlal\.s16\tq",
}
# A vector is stored: an accumulator that has no register, if this is inside the loop over products.
_STORE: Final = r"\tv?mov\w+\t%[xyz]mm\d+, [^%\n]*\(.*$|\tst[rp]\tq.*$"


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_the_processors_instruction_adds_to_sums_in_registers(name: str) -> None:
    target = device(name)
    x, w = np.zeros((1, 64, 8, 14), "int8"), np.ones((64, 64, 1, 1), "int8")
    lowered = lower_for(
        lambda v: relax.op.nn.conv2d(numbers(v, 0, "int8"), numbers(relax.const(w), 0, "int8")),
        {"x": x},
        target,
    )
    assembly = build_kernels(lowered.kernels, target.tvm_target).inspect_source("asm")
    instruction = re.compile(INSTRUCTIONS[name], re.MULTILINE)
    loop = max(_inner_loops(assembly), key=lambda text: len(instruction.findall(text)))
    count = len(instruction.findall(loop))
    stores = re.findall(_STORE, loop, re.MULTILINE)
    assert count >= 8  # a tile of sums, each once at least
    # If sums went through memory, each group of 4 products would store one.
    assert len(stores) * 8 < count, "sums go through memory"


def _inner_loops(assembly: str) -> list[str]:
    """Return the blocks that end with a jump to their own beginning."""
    _, *parts = re.split(r"\n(\.LBB\w+):", assembly)
    pairs = zip(parts[::2], parts[1::2], strict=True)
    jumps = [(text, re.search(rf"\t\S.*{re.escape(label)}$", text, re.MULTILINE)) for label, text in pairs]
    return [text[: jump.start()] for text, jump in jumps if jump]


def marked(value: Callable[..., tirx.Expr], dtype: str = "uint8") -> tvm.IRModule:
    dot = device("alderlake").dot
    return to_loops(tvm.IRModule({"main": products(dot, 3, 1, 2, dtype, value)}))


def _wide(load: tirx.Expr) -> tirx.Expr:
    return load.astype("int32")


def _form(value: Callable[..., tirx.Expr]) -> Callable[..., Callable[..., tirx.Expr]]:
    """Return the body of a sum: `value` of both tensors, both reduction axes, row and lane."""

    def make(x: te.Tensor, w: te.Tensor, k: te.IterVar, g: te.IterVar) -> Callable[..., tirx.Expr]:
        return lambda r, v: te.sum(value(x, w, k, g, r, v), axis=[k, g])

    return make


FORMS: Final = {
    "a difference": (_form(lambda x, w, k, g, r, v: _wide(x[r, k]) - _wide(w[k, v, g])), "sum of products"),
    "data with gaps": (
        _form(lambda x, w, k, g, r, v: _wide(x[r, (k * 4 + g * 2) % 12]) * _wide(w[k, v, g])),
        "adjacent elements of x",
    ),
    "a lane for each datum": (
        _form(lambda x, w, k, g, r, v: _wide(x[r, k + v]) * _wide(w[k, v, g])),
        "adjacent elements of x",
    ),
    "factors the other way": (
        _form(lambda x, w, k, g, r, v: _wide(w[k, v, g]) * _wide(x[r, k * 4 + g])),
        "adjacent elements of w",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_loop_in_another_form_is_an_error(form: str) -> None:
    value, message = FORMS[form]
    with pytest.raises(BuildError, match=message):
        write_dot_products(marked(value), device("alderlake").dot)


def test_sums_of_other_numbers_are_an_error() -> None:
    value = _form(lambda x, w, k, g, r, v: x[r, k * 4 + g].astype("float32") * w[k, v, g].astype("float32"))
    with pytest.raises(BuildError, match="sum of products of integers"):
        write_dot_products(marked(value), device("alderlake").dot)


@pytest.mark.parametrize("scheduled", ["rpi5", "cascadelake", "x86-64-v2", "rpi4"])
def test_a_loop_that_does_not_fit_the_instruction_is_arithmetic(scheduled: str) -> None:
    dot = device(scheduled).dot
    mod = to_loops(tvm.IRModule({"main": products(dot, 3, 1, 2, dot.data)}))
    for other in map(device, DEVICES):
        written = write_dot_products(mod, other.dot)["main"].script()
        fits = (other.dot.name, other.dot.lanes, other.dot.group) == (dot.name, dot.lanes, dot.group)
        fits = fits or (dot.data, dot.group, dot.lanes % other.dot.lanes) == (
            other.dot.data,
            other.dot.group,
            0,
        )
        fits = fits and not other.dot.halves
        assert ("call_llvm_pure_intrin" in written) == (fits and other.dot.name != "")
