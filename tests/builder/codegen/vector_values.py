"""The values of vector expressions, computed with NumPy: what instructions compute on any machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from tvm import tirx
from tvm.ir import Call, TensorLoad
from tvm.target.codegen import llvm_get_intrinsic_name

from builder.kernels.rewriter import op_name


def _saturated(x: np.ndarray, dtype: str) -> np.ndarray:
    info = np.iinfo(dtype)
    return np.clip(x.astype("f8"), int(info.min), int(info.max)).astype(dtype)


def _integers(x: np.ndarray) -> np.ndarray:
    """Round as x86 does: what does not fit becomes the lowest integer."""
    whole = np.rint(x.astype("f8"))
    fits = (whole >= -(2.0**31)) & (whole < 2.0**31)
    return np.where(fits, whole, -(2.0**31)).astype("int32")


def _in_quarters(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.concatenate([a.reshape(4, -1), b.reshape(4, -1)], axis=1).ravel()


# What the instructions compute, by LLVM's names up to the types.
INSTRUCTIONS: Final[Mapping[str, Callable[..., np.ndarray]]] = {
    "llvm.aarch64.neon.fcvtns": lambda x: _saturated(np.rint(x), "int32"),
    "llvm.aarch64.neon.sqxtn": lambda x: _saturated(x, {4: "int16", 2: "int8"}[x.itemsize]),
    "llvm.aarch64.neon.sqxtun": lambda x: _saturated(x, "uint8"),
    "llvm.sadd.sat": lambda a, b: _saturated(a.astype("i8") + b.astype("i8"), "int16"),
    "llvm.minnum": np.fmin,
    "llvm.maxnum": np.fmax,
    "llvm.roundeven": np.rint,
    "llvm.x86.avx512.mask.cvtps2dq.512": lambda x, *_: _integers(x),
    "llvm.x86.avx512.packssdw.512": lambda a, b: _in_quarters(_saturated(a, "int16"), _saturated(b, "int16")),
    "llvm.x86.avx512.packsswb.512": lambda a, b: _in_quarters(_saturated(a, "int8"), _saturated(b, "int8")),
    "llvm.x86.avx512.packuswb.512": lambda a, b: _in_quarters(_saturated(a, "uint8"), _saturated(b, "uint8")),
}


def value_of(expr: Any, known: Mapping[str, Any]) -> Any:
    """Evaluate an expression of vectors; `known` has the values of variables and buffers by name."""
    part = lambda e: value_of(e, known)  # noqa: E731
    match expr:
        case tirx.Let():
            return value_of(expr.body, {**known, expr.var.name: part(expr.value)})
        case tirx.Var():
            return known[expr.name]
        case TensorLoad():
            return known[expr.source.name][part(expr.indices[0])]
        case tirx.Ramp():
            return part(expr.base) + np.arange(int(expr.ty.dtype.lanes))
        case tirx.Broadcast():
            return np.repeat(part(expr.value), int(expr.ty.dtype.lanes))
        case tirx.Cast():
            kind = str(expr.ty.dtype).partition("x")[0]
            return np.asarray(part(expr.value)).astype(kind)
        case tirx.Shuffle():
            return np.concatenate([part(v) for v in expr.vectors])[[int(i) for i in expr.indices]]
        case tirx.Min():
            a, b = part(expr.a), part(expr.b)
            return np.where(a < b, a, b)
        case tirx.Max():
            a, b = part(expr.a), part(expr.b)
            return np.where(a > b, a, b)
        case tirx.Add():
            return part(expr.a) + part(expr.b)
        case tirx.Mul():
            return part(expr.a) * part(expr.b)
        case tirx.Sub():
            return part(expr.a) - part(expr.b)
        case Call() if op_name(expr) == "tirx.reinterpret":
            return part(expr.args[0]).view(str(expr.ty.dtype).partition("x")[0])
        case Call():
            number, *operands = expr.args
            return INSTRUCTIONS[llvm_get_intrinsic_name(int(number))](*map(part, operands))
        case _:
            return np.asarray(expr.value, str(expr.ty.dtype))
