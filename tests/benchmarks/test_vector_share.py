"""The small zoo's kernels compute vectors; without design spaces, scalar loops would be noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from benchmarks import vector_share
from benchmarks.hot_loops import tool
from benchmarks.requirements import RequirementError
from benchmarks.vector_share import LEAST, TARGETS, Arithmetic, arithmetic, below, of_network
from benchmarks.zoo.small import NETWORKS
from builder.kernels import schedule

# A product of vectors, and outside of its inner loop one of numbers; then a loop over numbers.
SOURCE = """
typedef float v4 __attribute__((vector_size(16)));
void vectors_compute_(v4 *restrict out, const v4 *restrict a, float scale, long rows, long depth) {
  for (long i = 0; i < rows; i++) {
    v4 s = {0};
    long k = 0;
#pragma clang loop unroll(disable)
    do s += a[k] * a[k];
    while (++k < depth);
    scale *= scale;
    out[i] = s * scale;
  }
}
void numbers_compute_(float *restrict out, const float *restrict a, long depth) {
#pragma clang loop unroll(disable) vectorize(disable)
  for (long k = 0; k < depth; k++) out[k] = a[k] * a[k] + out[k];
}
int nothing_compute_(int x) { return x + 1; }
"""


def missing() -> str:
    """Say what is not installed; CI has all of it."""
    try:
        tool("llvm-objdump")
    except RequirementError as error:
        return "" if "CI" in os.environ else str(error)
    return ""


needs_llvm = pytest.mark.skipif(bool(missing()), reason=missing())


@needs_llvm
@pytest.mark.parametrize("triple", TARGETS.values())
def test_instructions_of_innermost_loops_are_counted(triple: str, tmp_path: Path) -> None:
    source, made = tmp_path / "loops.c", tmp_path / "loops.o"
    source.write_text(SOURCE)
    command = [
        sys.executable,
        "-m",
        "ziglang",
        "cc",
        "-target",
        triple,
        "-O2",
        "-c",
        "-g0",
        "-fno-sanitize=all",
    ]
    subprocess.run([*command, str(source), "-o", str(made)], check=True)
    found = arithmetic(made.read_bytes(), triple)
    assert found["vectors"].vector > 0
    assert found["vectors"].scalar == 0
    assert found["numbers"].vector == 0
    assert found["numbers"].scalar > 0
    assert found["nothing"] == Arithmetic(0, 0)


def test_a_kernel_of_scalars_is_named() -> None:
    kernels = {
        "good": Arithmetic(80, 20),
        "bad": Arithmetic(3, 17),
        "tiny": Arithmetic(0, 3),
        "none": Arithmetic(0, 0),
    }
    assert below(kernels) == [f"bad: 0.15 of 20 instructions compute vectors, expected {LEAST}"]


@needs_llvm
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("network", NETWORKS)
def test_kernels_of_the_small_zoo_compute_vectors(network: str, target: str) -> None:
    found = of_network(NETWORKS[network](), target)
    assert sum(each.vector for each in found.values()) > 0
    assert below(found) == []


@needs_llvm
@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_without_a_design_space_are_noticed(target: str) -> None:
    with mock.patch.object(schedule, "apply_space", lambda *_: None):
        found = of_network(NETWORKS["windows"](), target)
    assert below(found) != []


def test_a_missing_program_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(
        vector_share, "of_network", side_effect=RequirementError("llvm-objdump not found")
    ):
        assert vector_share.main() == 2
    assert capsys.readouterr().err == "error: llvm-objdump not found\n"
