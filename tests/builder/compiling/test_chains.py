"""What is generated for a chain grows with its length, whatever its operators are."""

from __future__ import annotations

import pytest
import tvm_ffi
from tvm.ir import Expr

from builder.codegen.lowering import lower_kernels
from builder.compiling.lower import lower
from builder.importer import import_onnx
from builder.target.device_target import resolve
from tests.builder.compiling.chains import LINKS, chain


def sizes(kind: str, count: int) -> list[int]:
    """Return the nodes of each kernel of a chain, as it is given to LLVM."""
    target = resolve("host")
    lowered = lower(import_onnx(chain(kind, count)).mod, target)
    found = []
    for func in lower_kernels(lowered.kernels, target.tvm_target).functions.values():
        nodes: list[Expr] = []
        tvm_ffi.structural_walk(func.body, (Expr, nodes.append))
        found.append(len(nodes))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "reflecting pads",
        "edge pads",
        "wrapping pads",
        "cubic resizes",
        "linear resizes",
        "nearest resizes",
        "gathers",
        "rolls",
        "tiles",
        "choices",
        "transpositions",
        "sorted rows",
        "softmaxes",
        "running sums",
        "convolutions",
        "LSTMs",
        "resized bytes",
    ],
)
def test_twice_the_chain_is_at_most_twice_the_work(kind: str) -> None:
    assert kind in LINKS
    once, twice = sizes(kind, 4), sizes(kind, 8)
    assert sum(twice) <= 2.2 * sum(once)
    assert max(twice) <= 1.2 * max(once)


@pytest.mark.slow
def test_two_hundred_elementwise_operators_are_a_few_kernels_of_bounded_size() -> None:
    found = sizes("elementwise", 70)
    assert len(found) < 20
    assert max(found) < 60_000
