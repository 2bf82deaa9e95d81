"""Compiles one model with default settings, in a process of its own, which can be given a limit.

    python -m benchmarks.zoo.compiling MODEL

Writes our bundle and `inputs.npz` beside the ONNX file MODEL, and prints the seconds of import and
compilation.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import OURS, bundle_of
from builder import compile
from builder.compiling.sample_inputs import make_inputs
from builder.importer import import_onnx


def main(path: Path) -> None:
    """Compile a model."""
    began = time.perf_counter()
    model = import_onnx(path)
    package = compile(model)
    print(time.perf_counter() - began)
    inputs: dict[str, Any] = make_inputs(model.inputs, model.onnx)
    np.savez(path.with_name("inputs.npz"), **inputs)
    package.save(bundle_of(path, OURS))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
