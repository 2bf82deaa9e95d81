"""Kernels compiled from C, with the packed calling convention of tvm-ffi."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from agent.bundle.processors import Processors
from agent.errors import ExecutionError, FormatError, IncompatibleError
from agent.runtime import graph_executor
from agent.runtime.module import KernelModule
from benchmarks.executor_overhead import chain, empty_kernels
from tests.fake_module import GraphBuilder
from tests.needs import needed

SOURCE = """
#include <tvm/ffi/c_api.h>

static DLTensor *tensor(const TVMFFIAny *arg) {
  if (arg->type_index == kTVMFFITensor) return (DLTensor *)((char *)arg->v_obj + sizeof(TVMFFIObject));
  return (DLTensor *)arg->v_ptr;
}
static int threads = 4;

int __tvm_ffi_scale(void *self, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {
  DLTensor *in = tensor(&args[0]), *out = tensor(&args[1]);
  if ((uint64_t)in->data % 64 || (uint64_t)out->data % 64 || in->dtype.code != kDLFloat) {
    TVMFFIErrorSetRaisedFromCStr("ValueError", "not what was promised");
    return -1;
  }
  for (int64_t i = 0; i < in->shape[0]; ++i) ((float *)out->data)[i] = FACTOR * ((float *)in->data)[i];
  return 0;
}
int __tvm_ffi_edge_set_threads(void *self, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {
  threads = (int)args[0].v_int64;
  return 0;
}
int __tvm_ffi_edge_threads(void *self, const TVMFFIAny *args, int32_t num_args, TVMFFIAny *result) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = threads;
  return 0;
}
"""


def compile_library(target: Path, factor: int = 2, source: str = SOURCE) -> Path:
    import tvm_ffi.libinfo as info

    text = target.with_suffix(".c")
    text.write_text(source)
    includes = [f"-I{path}" for path in (info.find_include_path(), info.find_dlpack_include_path())]
    fresh = target.with_suffix(".new")
    flags = ["-shared", "-fPIC", f"-DFACTOR={factor}", *includes]
    subprocess.run([needed("gcc"), *flags, "-o", str(fresh), str(text)], check=True)
    fresh.replace(target)
    return target


def scaled(library: KernelModule | Path) -> list[float]:
    g = GraphBuilder()
    graph = g.graph(g.call("scale", [g.input("x", (3,))], (3,)))
    module = graph_executor.create(graph, library)
    module.run(x=np.array([1, 2, 3], np.float32))
    return [float(value) for value in module.get_output(0)]


def test_a_compiled_kernel_gets_aligned_tensors_of_its_dtype(tmp_path: Path) -> None:
    assert scaled(compile_library(tmp_path / "mod.so")) == [2, 4, 6]


def test_a_library_is_loaded_from_a_descriptor_without_a_name(tmp_path: Path) -> None:
    descriptor = os.memfd_create("mod.so")
    os.write(descriptor, compile_library(tmp_path / "mod.so").read_bytes())
    module = KernelModule.load(descriptor)
    os.close(descriptor)
    assert scaled(module) == [2, 4, 6]


def test_a_recompiled_library_is_not_mistaken_for_the_loaded_one(tmp_path: Path) -> None:
    first = KernelModule.load(compile_library(tmp_path / "mod.so", 2))
    second = KernelModule.load(compile_library(tmp_path / "mod.so", 5))
    assert scaled(second) == [5, 10, 15]
    assert scaled(first) == [2, 4, 6]


def test_a_library_is_unmapped_with_its_module(tmp_path: Path) -> None:
    path = compile_library(tmp_path / "mod.so")
    module = KernelModule.load(path)
    assert str(path) in Path("/proc/self/maps").read_text()
    del module
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_threads_are_set_and_read_if_the_library_supports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_NUM_THREADS", "4")
    library = compile_library(tmp_path / "mod.so")
    module = KernelModule.load(library)
    assert module.threads() == 4
    monkeypatch.delenv("EDGE_NUM_THREADS")
    by_default = KernelModule.load(library)
    assert by_default.threads() == Processors.detect().threads
    assert module.set_threads(2)
    assert module.threads() == 2
    with pytest.raises(ValueError, match="1 thread or more"):
        module.set_threads(0)
    bare = KernelModule.load(compile_library(tmp_path / "bare.so", source="int bare;"))
    assert bare.threads() is None
    assert not bare.set_threads(2)


def test_a_missing_or_failing_kernel_is_named(tmp_path: Path) -> None:
    module = KernelModule.load(compile_library(tmp_path / "mod.so"))
    with pytest.raises(FormatError, match=r"kernel 'other', which mod\.so does not have"):
        module["other"]
    g = GraphBuilder()
    graph = g.graph(g.call("scale", [g.input("x", (3,), "int32")], (3,), dtype="int32"))
    with pytest.raises(ExecutionError, match="node 'scale_1', kernel scale: not what was promised"):
        graph_executor.create(graph, module).run()


def test_a_file_that_is_not_a_library_is_refused_in_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "mod.so"
    bad.write_bytes(b"no library")
    for source, words in (
        (bad, "too short|invalid ELF header"),
        (tmp_path / "none.so", "No such file"),
        (999, "Bad file"),
    ):
        with pytest.raises(IncompatibleError, match=words) as raised:
            KernelModule.load(source)
        assert "\n" not in str(raised.value)
    bad.write_bytes(compile_library(tmp_path / "good.so").read_bytes()[:18] + b"\xf3\0" + b"\0" * 5000)
    with pytest.raises(IncompatibleError) as raised:
        KernelModule.load(bad)
    assert str(raised.value).startswith(f"cannot load the kernel library {bad}: ")
    assert raised.value.hint is not None


def test_a_run_is_a_loop_over_the_kernels_that_calls_nothing_else(tmp_path: Path) -> None:
    """Counted, so it holds on any machine; `python -m benchmarks.executor_overhead` measures nanoseconds."""
    needed("gcc")
    graph = chain()
    module = graph_executor.create(graph, empty_kernels(graph, tmp_path))
    module.run()
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(f"{event} {frame.f_code.co_name}"))
    try:
        module.run()
    finally:
        sys.setprofile(None)
    # `run` of the executor and of its program, and the end of profiling: none for each of the 200 nodes.
    assert len(called) < 20, called
