"""Models in, static Relax out: `load` takes a file of any format, `import_onnx` ONNX, also in memory."""

from __future__ import annotations

from builder.importer.formats import load
from builder.importer.input_shapes import parse_input_shapes, parse_input_values
from builder.importer.onnx_import import ImportedModel, import_onnx

__all__ = ["ImportedModel", "import_onnx", "load", "parse_input_shapes", "parse_input_values"]
