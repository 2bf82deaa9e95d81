"""Runs inside the emulated machine: each node of bundles, or ONNX Runtime's whole models, between marks.

    nodes.py edgebundle|onnxruntime FOLDER...

Marks are numbered: one before each node of the first folder, one at its end, and so on with the next folder.
So the difference between two marks is the number of a node's instructions. The kernels' names are written to
`nodes.json` in each folder, in the order of the nodes. Emulated, Python takes seconds to start, so one
process runs all folders.
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


def edgebundle(folder: Path, inputs: dict[str, np.ndarray], first: int) -> int:
    """Run our bundle, with marks from `first` on; return the next mark."""
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
    for number, (function, arguments) in enumerate(calls, first):
        system_call(MARK, number)
        function(*arguments)
    system_call(MARK, first + len(calls))
    return first + len(calls) + 1


def onnxruntime(folder: Path, inputs: dict[str, np.ndarray], first: int) -> int:
    """Run the model in ONNX Runtime, between the marks `first` and the one after it; return the next mark."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    session.run(None, inputs)
    system_call = ctypes.CDLL(None).syscall
    system_call(MARK, first)
    session.run(None, inputs)
    system_call(MARK, first + 1)
    return first + 2


os.environ["EDGE_NUM_THREADS"] = "1"
engine = {"edgebundle": edgebundle, "onnxruntime": onnxruntime}[sys.argv[1]]
mark = 0
for place in map(Path, sys.argv[2:]):
    with np.load(place / "inputs.npz") as file:
        given = {key: file[key] for key in file.files}
    mark = engine(place, given, mark)
