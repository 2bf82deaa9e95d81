"""Run a compiled model from memory, with the executor that devices use.

Parity and `edgebundle run` therefore measure what ships. Nothing is verified here: callers are trusted.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from agent.bundle.graph import Graph
from agent.runtime.graph_executor import GraphModule, create
from agent.runtime.module import KernelModule

Arrays = Mapping[str, npt.NDArray[np.generic]]


def load_kernels(code: bytes) -> KernelModule:
    """Load `mod.so` from memory.

    Raises
    ------
    IncompatibleError
        If the code was compiled for another machine.
    """
    fd = os.memfd_create("mod.so", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(code)
        return KernelModule.load(fd)
    finally:
        os.close(fd)


def executor(code: bytes, graph: Graph | bytes, params: bytes) -> GraphModule:
    """Create an executor and load its weights; `code` is `mod.so`, `params` is `mod.params`."""
    module = create(graph, load_kernels(code))
    module.load_params(params)
    return module


def execute(
    code: bytes, graph: Graph | bytes, params: bytes, inputs: Arrays
) -> list[npt.NDArray[np.generic]]:
    """Run a compiled model once.

    `code`, `graph`, `params`: `mod.so`, `mod.json` (its bytes, or parsed) and `mod.params`.
    Result: copies of the outputs, in order.
    """
    module = executor(code, graph, params)
    for name, value in inputs.items():
        module.set_input(name, value)
    module.run()
    return [np.array(module.get_output(i)) for i in range(module.get_num_outputs())]
