"""A small kernel that uses everything that the launcher offers, and a control group to throttle threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

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


@pytest.fixture
def cpu_group() -> Iterator[Path]:
    """A control group of version 1 for processor time, in which a single thread of a process may be."""
    mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    tops = [Path(mount[1]) for mount in mounts if mount[2] == "cgroup" and "cpu" in mount[3].split(",")]
    group = (tops[0] if tops else Path("/nowhere")) / f"edgebundle-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs a writable control group of version 1: {error.strerror}")
    yield group
    end_s = time.monotonic() + 10
    while group.exists() and time.monotonic() < end_s:
        with suppress(OSError):  # until the last thread has ended
            group.rmdir()
        time.sleep(0.01)
