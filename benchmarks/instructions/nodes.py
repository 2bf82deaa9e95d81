"""Runs inside the emulated machine: each node of a bundle, or ONNX Runtime's whole model, between marks.

    nodes.py edgebundle|onnxruntime FOLDER

The mark before each node has the node's number, so the difference between two marks is the number of the
node's instructions. The kernels' names are written to `nodes.json` in the folder, in the order of the nodes.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Final

import numpy as np

MARK: Final = 24302  # the system call that counter.c watches; no kernel has it


def edgebundle(folder: Path, inputs: dict[str, np.ndarray]) -> None:
    """Run our bundle, with a mark before each node."""
    from agent.runtime.graph_executor import create

    module = create((folder / "mod.json").read_bytes(), folder / "mod.so")
    module.load_params((folder / "mod.params").read_bytes())
    for name, value in inputs.items():
        module.set_input(name, value)
    module.run()
    program = module._program  # the public interface cannot call a single node
    calls = program.calls
    nodes = json.loads((folder / "mod.json").read_text())["nodes"]
    names = [nodes[step]["attrs"]["func_name"] for step in program.steps]
    (folder / "nodes.json").write_text(json.dumps(names))
    system_call = ctypes.CDLL(None).syscall
    for number, (function, arguments) in enumerate(calls):
        system_call(MARK, number)
        function(*arguments)
    system_call(MARK, len(calls))


def onnxruntime(folder: Path, inputs: dict[str, np.ndarray]) -> None:
    """Run the model in ONNX Runtime, between two marks."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    session.run(None, inputs)
    system_call = ctypes.CDLL(None).syscall
    system_call(MARK, 0)
    session.run(None, inputs)
    system_call(MARK, 1)


os.environ["EDGE_NUM_THREADS"] = "1"
place = Path(sys.argv[2])
with np.load(place / "inputs.npz") as file:
    given = {key: file[key] for key in file.files}
{"edgebundle": edgebundle, "onnxruntime": onnxruntime}[sys.argv[1]](place, given)
