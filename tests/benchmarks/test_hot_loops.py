"""Hot loops are found in compiled code, and compared with the core's peak."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from benchmarks import hot_loops
from benchmarks.hot_loops import HotLoop, of_model, shares_of_peak
from benchmarks.requirements import RequirementError

# Two nested loops: the inner one does the work.
SOURCE = """
typedef float v4 __attribute__((vector_size(16)));
void product_compute_(v4 *restrict out, const v4 *restrict a, const float *b, long rows, long depth) {
  for (long i = 0; i < rows; i++) {
    v4 s = {0}, t = {0};
#pragma clang loop unroll(disable)
    for (long k = 0; k < depth; k++) s += a[2 * k] * b[k], t += a[2 * k + 1] * b[k];
    out[2 * i] = s, out[2 * i + 1] = t;
  }
}
int nothing(int x) { return x + 1; }
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("object")
    (folder / "product.c").write_text(SOURCE)
    command = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-gnu", "-O2", "-c", "-g0"]
    command += ["-mcpu=cortex_a72", "-ffp-contract=fast", "-fno-vectorize", "-fno-sanitize=all"]
    command += [str(folder / "product.c"), "-o", str(folder / "product.o")]
    subprocess.run(command, check=True)
    return (folder / "product.o").read_bytes()


def has_llvm() -> bool:
    try:
        return bool(hot_loops.tool("llvm-mca") and hot_loops.tool("llvm-objdump"))
    except RequirementError:
        return False


needs_llvm = pytest.mark.skipif(not has_llvm() and "CI" not in os.environ, reason="needs llvm-17 or newer")


@needs_llvm
def test_the_inner_loop_is_hot_and_functions_without_products_have_no_hot_loop(code: bytes) -> None:
    (loop,) = hot_loops.hot_loops(code)
    assert loop.function == "product_compute_"
    assert loop.multiply_adds == 2
    assert not any(text.startswith("b.") for text in loop.instructions)


@needs_llvm
def test_kernels_are_weighted_by_operations_and_those_that_run_at_load_are_left_out(code: bytes) -> None:
    found = of_model(code, {"product": 5.0, "absent": 7.0})
    assert set(found) == {"cortex-a72", "cortex-a76"}
    for loops in found.values():
        assert [(loop.kernel, loop.flops) for loop in loops] == [("product", 5.0)]
    assert of_model(code, {"other": 1.0}) == {"cortex-a72": [], "cortex-a76": []}


@needs_llvm
def test_a_loop_that_waits_for_its_own_sum_is_far_from_the_peak_and_a_free_one_is_near() -> None:
    waiting = HotLoop("waiting", ("fmla v0.4s, v30.4s, v31.4s",))
    free = HotLoop("free", tuple(f"fmla v{i}.4s, v30.4s, v31.4s" for i in range(24)))
    for core in hot_loops.CORES:
        slow, fast = shares_of_peak([waiting, free], core)
        assert slow < 0.4
        assert fast == pytest.approx(1.0, abs=0.02)


@needs_llvm
def test_the_a76_does_two_multiply_adds_a_cycle_and_the_a72_one() -> None:
    free = HotLoop("free", tuple(f"fmla v{i}.4s, v30.4s, v31.4s" for i in range(24)))
    rates = [24 / hot_loops._cycles([free.instructions], cpu)[0] for cpu in hot_loops.CORES.values()]
    assert rates == [pytest.approx(1.0, abs=0.05), pytest.approx(2.0, abs=0.1)]


def test_a_missing_llvm_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(RequirementError, match="apt-get install llvm-19"):
        hot_loops.tool("llvm-mca")
