"""Runs kernels as the agent does: with zeros in place of denormal numbers.

The agent sets this around a run through the launcher in `mod.so`. A benchmark that calls kernels without the
launcher would measure an assist of the processor, a hundred cycles and more, wherever a vector has a denormal
number in a lane that is not used, such as what happens to follow the last element of a tensor in memory.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import tvm
import tvm_ffi
from tvm import te

from builder.codegen.kernel_object import compile_object
from builder.codegen.link.linker import link
from builder.target.device_target import DeviceTarget


@contextlib.contextmanager
def flushed(target: DeviceTarget) -> Iterator[None]:
    """Compute with zeros in place of denormal numbers in this thread, by the launcher for `target`."""
    x = te.placeholder((1,), name="x")
    copy = te.create_prim_func([x, te.compute((1,), lambda i: x[i], name="y")])
    kernels = tvm.IRModule({"copy": copy.with_attr("global_symbol", "copy")})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mod.so")
        path.write_bytes(link(compile_object(kernels, target), target))
        flush = tvm_ffi.load_module(str(path))["edge_flush_denormals"]
    before = flush(1)
    try:
        yield
    finally:
        flush(before)
