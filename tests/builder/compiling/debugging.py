"""Runs a compiled model and keeps what every kernel computed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from agent.bundle.params import dump_params
from builder.codegen.graph_codegen import GeneratedGraph
from builder.compiling.block_agreement import Step
from builder.running import debug_executor
from builder.running.in_memory import load_kernels


def debug_run(
    code: bytes, graph: GeneratedGraph, inputs: Mapping[str, np.ndarray]
) -> tuple[list[Step], list[np.ndarray]]:
    """Return copies of the outputs of all kernels, and of the model."""
    module = debug_executor.create(graph.graph, load_kernels(code))
    module.load_params(dump_params((spec, data.data) for spec, data in graph.params))
    for name, value in inputs.items():
        module.set_input(name, value)
    steps = [Step(array, graph.sources[node]) for node, array in module.debug_get_outputs()]
    return steps, [np.array(module.get_output(i)) for i in range(module.get_num_outputs())]
