"""Compile a model without comparing it with a reference, and run it, where others have the right numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from agent.bundle.params import dump_params
from agent.runtime.lengths import cut
from benchmarks.conformance.case import Array
from builder.codegen.graph_codegen import generate
from builder.codegen.kernel_object import compile_kernels
from builder.codegen.link.linker import link
from builder.compiling.lower import lower
from builder.importer import ImportedModel, import_onnx
from builder.running.in_memory import execute
from builder.target.device_target import resolve


def run_as_shipped(
    model: onnx.ModelProto,
    feeds: Mapping[str, Any],
    values: Mapping[str, Any] | None = None,
    max_iterations: int | None = None,
) -> list[Array]:
    """Import a model and run it in the executor that devices use.

    Raises
    ------
    BuildError
        If the model cannot be taken.
    """
    shapes = {name: value.shape for name, value in feeds.items()}
    imported = import_onnx(model, input_shapes=shapes, input_values=values, max_iterations=max_iterations)
    return run_imported(imported, feeds)


def run_imported(imported: ImportedModel, feeds: Mapping[str, Any]) -> list[Array]:
    """Compile an imported model for this machine, and run it."""
    target = resolve("host")
    lowered = lower(imported.mod, target)
    made = generate(lowered.main, [s.name for s in imported.inputs], [s.name for s in imported.outputs])
    code = link(compile_kernels(lowered.kernels, target).code, target)
    params = dump_params((spec, array.data) for spec, array in made.params)
    inputs = {
        spec.name: np.asarray(feeds[spec.name], order="C").astype(spec.dtype, copy=False)
        for spec in imported.inputs
    }
    results = execute(code, made.graph, params, inputs)
    named = {spec.name: np.asarray(array) for spec, array in zip(imported.outputs, results, strict=True)}
    return [np.asarray(array) for array in cut(named, named, imported.lengths).values()]
