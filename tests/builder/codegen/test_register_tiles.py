"""Sums that a space keeps in registers do not take memory from the launcher, and other buffers do."""

from __future__ import annotations

import pytest
import tvm
from tvm import s_tir, te

from builder.codegen.lowering import lower_kernels
from builder.codegen.register_tiles import MOST_BYTES
from builder.target.device_target import resolve


def lowered(floats: int, scope: str) -> str:
    """Return a lowered function with an intermediate buffer of so many floats in each parallel round."""
    x = te.placeholder((4, floats), "float32", name="x")
    inner = te.compute(x.shape, lambda i, j: x[i, j] * x[i, j], name="inner")
    outer = te.compute(x.shape, lambda i, j: inner[i, floats - 1 - j] + x[i, j], name="outer")
    sch = s_tir.Schedule(te.create_prim_func([x, outer]).with_attr("global_symbol", "main"))
    i, _ = sch.get_loops(sch.get_sblock("outer"))
    sch.compute_at(sch.get_sblock("inner"), i)
    sch.set_scope(sch.get_sblock("inner"), 0, scope)
    sch.parallel(i)
    return str(lower_kernels(tvm.IRModule({"main": sch.mod["main"]}), resolve("host").tvm_target).script())


@pytest.mark.parametrize(
    ("floats", "scope", "workspaces"),
    [
        (MOST_BYTES // 4, "local", 0),
        (384, "local", 0),
        (MOST_BYTES // 4 + 1, "local", 1),
        (384, "global", 1),
    ],
)
def test_small_local_buffers_are_on_the_stack(floats: int, scope: str, workspaces: int) -> None:
    text = lowered(floats, scope)
    assert text.count("TVMBackendAllocWorkspace(") == workspaces
    assert text.count("TVMBackendFreeWorkspace(") == workspaces
    assert text.count("isnullptr(inner") == workspaces
