"""ONNX Runtime without optimisations: what a model means, with or without taps on the values inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from builder.errors import ModelError
from builder.importer.large_models import open_session
from builder.importer.model_path import EXPORT_HINT
from builder.importer.silence import FOREIGN_FAILURES, first_line, quiet

Array = NDArray[Any]
Sample = Mapping[str, Array]


class Session:
    """A model that is ready to run.

    Its optimised form fuses Q/DQ pairs into integer kernels with a rounding of their own, and on some
    processors with sums that saturate; without optimisations it computes what the standard defines.

    `outputs`: names of the values to return, inside the model or at its end; None for the model's outputs.
    Raises `ModelError` if ONNX Runtime refuses the model.
    """

    def __init__(self, model: onnx.ModelProto, outputs: Sequence[str] | None = None) -> None:
        self.names = [output.name for output in model.graph.output] if outputs is None else list(outputs)
        known = {output.name for output in model.graph.output}
        tapped = model
        if more := [name for name in self.names if name not in known]:
            tapped = onnx.ModelProto()
            tapped.CopyFrom(model)
            tapped.graph.output.extend(onnx.ValueInfoProto(name=name) for name in more)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        # Runs alternate with NumPy's work on their results, which threads that spin would slow down.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            with quiet():
                self._session = open_session(tapped, options)
        except FOREIGN_FAILURES as error:
            raise ModelError(
                f"ONNX Runtime refused the model: {first_line(error)}", hint=EXPORT_HINT
            ) from error

    def run(self, sample: Sample) -> list[Array]:
        """Return the values in the order of `names`."""
        if not self.names:  # for which ONNX Runtime would return every output
            return []
        try:
            results = self._session.run(self.names, dict(sample))
        except FOREIGN_FAILURES as error:
            raise ModelError(
                f"ONNX Runtime cannot run the model on a calibration sample: {first_line(error)}",
                hint="integer inputs must be in the range that the model accepts, such as token ids",
            ) from error
        return [np.asarray(value) for value in results]
