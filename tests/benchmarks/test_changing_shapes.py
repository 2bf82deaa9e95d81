"""Padding to a bucket and masked tokens cost next to nothing, by exact counts of executed steps."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np
import onnx
import pytest

from agent.runtime.graph_executor import load
from benchmarks.changing_shapes import WORST_EDGE, WORST_MASKED, edge_costs, encoder, masked_costs, tokens
from builder.compiler import compile as compile_model
from builder.compiling.options import Options
from builder.running.debug_executor import GraphModuleDebug
from builder.running.in_memory import load_kernels
from tests.needs import missing_to_count

pytestmark = pytest.mark.slow
# CI has all of them; elsewhere the test is skipped, and the reason names the missing ones.
MISSING = missing_to_count()
needs_qemu = pytest.mark.skipif(
    platform.machine() != "x86_64" or (bool(MISSING) and "CI" not in os.environ),
    reason=MISSING or "without an x86-64 machine",
)


@needs_qemu
def test_a_request_at_a_buckets_edge_costs_what_the_exact_length_costs(tmp_path: Path) -> None:
    """With all that a worker does: decoding, padding, cutting, encoding."""
    # Narrower than in the benchmark: what a bucket adds weighs more, and the emulator computes half as much.
    found = edge_costs(encoder(128), tmp_path, buckets=(8, 32), lengths=(32, 31, 17))
    assert max(found[32], found[31]) <= WORST_EDGE, found
    # The counts include what is computed for padding: nearly half of this request.
    assert found[17] > 1.3


@needs_qemu
def test_masked_tokens_cost_no_more_steps_than_others(tmp_path: Path) -> None:
    found = masked_costs(encoder(), tmp_path, 32, (1, 4, 16, 29))
    assert max(found.values()) <= WORST_MASKED, found


def test_masked_tokens_leave_no_denormal_numbers(tmp_path: Path) -> None:
    """Some processors take a hundred times as long for each. Here, kernels do not replace them by zeros."""
    path = tmp_path / "model.onnx"
    onnx.save(encoder(64, 4), str(path))
    package = compile_model(path, options=Options(input_shapes=dict.fromkeys(tokens(1), (1, 32))))
    graph, kernels = load(package.members["mod.json"], load_kernels(package.members["mod.so"]))
    module = GraphModuleDebug(graph, kernels)
    module.load_params(package.members["mod.params"])
    for real in (1, 4, 16, 29, 32):
        for name, array in tokens(32, real).items():
            module.set_input(name, array)
        for _, output in module.debug_get_outputs():
            if output.dtype == np.float32:
                assert not ((output != 0) & (np.abs(output) < np.finfo("f4").tiny)).any(), real
