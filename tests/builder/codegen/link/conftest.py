"""A small kernel that uses everything that the launcher offers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tvm
from tvm import te

ROWS = 64


@pytest.fixture(scope="session")
def doubling() -> Callable[[], tvm.IRModule]:
    """Make a parallel kernel `double` over float32[64, 64] that doubles and mirrors rows, using workspace."""

    def make() -> tvm.IRModule:
        x = te.placeholder((ROWS, 64), name="x")
        hidden = te.compute((ROWS, 64), lambda i, j: x[i, j] * 2.0, name="hidden")
        y = te.compute((ROWS, 64), lambda i, j: hidden[i, 63 - j] + te.tanh(x[i, j]) * 0.0, name="y")
        func = te.create_prim_func([x, y]).with_attr("global_symbol", "double")
        schedule = tvm.s_tir.Schedule(tvm.IRModule({"double": func}))
        block = schedule.get_sblock("y", "double")
        schedule.parallel(schedule.get_loops(block)[0])
        return schedule.mod

    return make
