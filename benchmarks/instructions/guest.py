"""Runs inside the emulated machine: one engine, so many inferences, nothing printed but the outputs' sum.

    guest.py ENGINE FOLDER RUNS

Imports nothing of this project but the agent's runtime: what a device has.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Arrays = dict[str, "np.ndarray[Any, Any]"]
Run = Callable[[], "list[np.ndarray[Any, Any]]"]


def edgebundle(folder: Path, inputs: Arrays) -> Run:
    from agent.runtime.graph_executor import create

    module = create((folder / "mod.json").read_bytes(), folder / "mod.so")
    module.load_params((folder / "mod.params").read_bytes())
    for name, value in inputs.items():
        module.set_input(name, value)
    outputs = [module.output_view(i) for i in range(module.get_num_outputs())]

    def run() -> list[np.ndarray[Any, Any]]:
        module.run()
        return outputs

    return run


def onnxruntime(folder: Path, inputs: Arrays) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, inputs)


def ncnn(folder: Path, inputs: Arrays) -> Run:
    import ncnn as engine

    net = engine.Net()
    net.opt.num_threads = 1
    for name in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage"):
        setattr(net.opt, name, False)
    net.load_param(str(folder / "model.ncnn.param"))
    net.load_model(str(folder / "model.ncnn.bin"))
    (value,) = inputs.values()
    image = engine.Mat(np.ascontiguousarray(value[0]))

    def run() -> list[np.ndarray[Any, Any]]:
        extractor = net.create_extractor()
        extractor.input("in0", image)
        return [np.array(extractor.extract("out0")[1])]

    return run


name, place, runs = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
with np.load(place / "inputs.npz") as file:
    given = {key: file[key] for key in file.files}
execute = {"edgebundle": edgebundle, "onnxruntime": onnxruntime, "ncnn": ncnn}[name](place, given)
for _ in range(runs):
    result = execute()
print([float(np.abs(o).sum()) for o in result])
