"""Runs inside the emulated machine: one inference of one engine, between marks for the counter.

    guest.py ENGINE FOLDER

For our engine, it imports only the agent's runtime, as on a device. It writes the outputs to
`outputs-arm-ENGINE.npz` in the folder.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np

Arrays = dict[str, "np.ndarray[Any, Any]"]
Run = Callable[[], "list[np.ndarray[Any, Any]]"]
MARK: Final = 24302  # the system call that counter.c watches; no kernel has it
WARM_RUNS: Final = 1


def edgebundle(folder: Path, inputs: Arrays) -> Run:
    """Load our bundle."""
    return _bundle(folder, inputs)


def untuned(folder: Path, inputs: Arrays) -> Run:
    """Load our bundle that was compiled without records."""
    return _bundle(folder / "untuned", inputs)


def _bundle(folder: Path, inputs: Arrays) -> Run:
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
    """Load the model in ONNX Runtime."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    return lambda: session.run(None, inputs)


def ncnn(folder: Path, inputs: Arrays) -> Run:
    """Load the converted model in ncnn."""
    import ncnn as engine

    net = engine.Net()
    net.opt.num_threads = 1
    for name in ("use_fp16_packed", "use_fp16_storage", "use_fp16_arithmetic", "use_bf16_storage"):
        setattr(net.opt, name, False)
    net.load_param(str(folder / "model.ncnn.param"))
    net.load_model(str(folder / "model.ncnn.bin"))
    (value,) = inputs.values()
    # A copy: a first layer that works in place would write into the array.
    image = engine.Mat(np.ascontiguousarray(value[0])).clone()
    outputs = net.output_names()

    def run() -> list[np.ndarray[Any, Any]]:
        extractor = net.create_extractor()
        extractor.input("in0", image)
        return [np.array(extractor.extract(name)[1]) for name in outputs]

    return run


def litert(folder: Path, inputs: Arrays) -> Run:
    """Load the converted model in LiteRT with its XNNPACK delegate."""
    from benchmarks.engines import load_litert

    return load_litert(folder / "model.onnx", inputs, threads=1)


def main(name: str, place: Path) -> None:
    """Load and warm up an engine, run it once between two marks, and write its outputs."""
    with np.load(place / "inputs.npz") as file:
        given = {key: file[key] for key in file.files}
    engines = {each.__name__: each for each in (edgebundle, untuned, onnxruntime, ncnn, litert)}
    run = engines[name](place, given)
    for _ in range(WARM_RUNS):
        run()
    system_call = ctypes.CDLL(None).syscall
    system_call(MARK, 0)
    result = run()
    system_call(MARK, 1)
    outputs: dict[str, Any] = {f"{i:03}": np.asarray(o) for i, o in enumerate(result)}
    np.savez(place / f"outputs-arm-{name}.npz", **outputs)


main(sys.argv[1], Path(sys.argv[2]))
