"""The example model in float16 has the accuracy of float32."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from agent.bundle.params import dump_params
from builder.codegen.graph_codegen import generate
from builder.compiling.compilation import build_for_host
from builder.compiling.lower import lower
from builder.compiling.parity import run_as_defined
from builder.importer import load
from builder.quantising.halves import to_halves
from builder.running import debug_executor
from builder.running.in_memory import load_kernels
from builder.target.device_target import resolve

DIGITS = Path(__file__).parents[2] / "examples" / "digits"


def pictures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("digits_pictures", DIGITS / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_as_many_held_out_digits_are_right_as_in_float32() -> None:
    target = resolve("rpi5")
    found = to_halves(load(DIGITS / "digits.onnx"), target)
    assert found.report.half_macs == found.report.total_macs
    model = found.model
    lowered = lower(model.mod, target)
    names = [spec.name for spec in model.inputs], [spec.name for spec in model.outputs]
    graph = generate(lowered.main, *names)
    executor = debug_executor.create(graph.graph, load_kernels(build_for_host(lowered.kernels)))
    executor.load_params(dump_params((spec, data.data) for spec, data in graph.params))
    module = pictures()
    _, _, held_out, truth = module.load()
    right = {"halves": 0, "float32": 0}
    for picture, answer in zip(module.preprocess(held_out), truth, strict=True):
        inputs = {model.inputs[0].name: np.ascontiguousarray(picture, np.float32).reshape(1, 1, 8, 8)}
        executor.set_input(model.inputs[0].name, inputs[model.inputs[0].name])
        executor.run()
        right["halves"] += int(np.argmax(np.array(executor.get_output(0))) == answer)
        right["float32"] += int(np.argmax(run_as_defined(model.onnx, inputs)[0]) == answer)
    assert len(held_out) == module.HELD_OUT
    assert right["halves"] == right["float32"]
