"""Run a model once in LiteRT's interpreter and write all its tensors.

A program of its own, started by file name: it imports nothing of edgebundle, and a model that crashes the
interpreter ends only this process. Its argument is a folder with `model.tflite` and `inputs.npz`; it writes
`tensors.npz`, each named after the tensor's index. It ends with a one-line reason if the interpreter refuses.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any, Final

import numpy as np

# A model that needs more does not fit the devices either; a damaged one may ask for anything.
MEMORY_BYTES: Final = 8 << 30


def main(folder: Path, kernels: str) -> str | None:
    """Run the model; return why it could not be run, or None."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    try:
        interpreter = Interpreter(
            model_content=(folder / "model.tflite").read_bytes(),
            experimental_op_resolver_type=OpResolverType.BUILTIN_REF
            if kernels == "reference"
            else OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
            experimental_preserve_all_tensors=True,
        )
        with np.load(folder / "inputs.npz", allow_pickle=False) as inputs:
            for name, values in inputs.items():
                interpreter.resize_tensor_input(int(name), values.shape)
            interpreter.allocate_tensors()
            for name, values in inputs.items():
                interpreter.set_tensor(int(name), values)
        interpreter.invoke()
        tensors: dict[str, Any] = {}
        for detail in interpreter.get_tensor_details():
            if detail["dtype"] is np.object_:
                continue  # a variable's handle, which the interpreter reads as text and may crash
            try:
                found = np.asarray(interpreter.get_tensor(detail["index"]))
            except (TypeError, ValueError):
                continue  # a tensor without memory, such as a temporary one
            if found.dtype.kind in "biuf":
                tensors[str(detail["index"])] = found
    except (RuntimeError, TypeError, ValueError, MemoryError) as error:
        return " ".join(str(error).split())[:300] or type(error).__name__
    with (folder / "tensors.npz").open("wb") as stream:
        np.savez(stream, **tensors)
    return None


if __name__ == "__main__":
    reason = main(Path(sys.argv[1]), sys.argv[2])
    if reason is not None:
        sys.exit(f"refused: {reason}")
