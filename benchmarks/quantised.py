"""Networks in int8, made from those in float32, for all engines alike.

Networks of pictures are quantised by our own quantiser, BERT as its users do it: by ONNX Runtime's
`quantize_dynamic`, which quantises activations while the network runs.

Weights are seeded, and so are the data that the ranges are chosen by: how much work a kernel has depends on
neither, if sums of four products fit 16 bits where they must. The quantiser makes such weights for a target
without dot products of bytes, and all engines get the same. Nothing is left in float32 for accuracy, which
such a network does not have.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from onnx import helper

from builder import Limits, quantize
from builder.importer import import_onnx

SUFFIX: Final = "-int8"
_SAMPLES: Final = 4


def quantised(model: onnx.ModelProto, target: str = "host") -> onnx.ModelProto:
    """Return a float32 network with float32 inputs in QDQ form: weights in int8, activations in uint8.

    `target` is the device that the weights are chosen for.
    """
    imported = import_onnx(model)
    state = np.random.default_rng(0)
    data = {
        spec.name: np.stack([state.standard_normal(spec.shape[1:], "float32") for _ in range(_SAMPLES)])
        for spec in imported.inputs
    }
    limits = Limits(metric="sqnr", max_float=0.0)
    return quantize(imported, data, activations="uint8", target=target, limits=limits).onnx


def dynamically_quantised(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a float32 network whose products with constant weights are MatMulInteger, weights in int8."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # Without this mark it advises, on standard error, to optimise the file first.
    marked = onnx.ModelProto()
    marked.CopyFrom(model)
    helper.set_model_props(marked, {"onnx.quant.pre_process": "onnxruntime.quant"})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "quantised.onnx")
        quantize_dynamic(marked, path, weight_type=QuantType.QInt8)
        return onnx.load(path)
