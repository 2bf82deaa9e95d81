"""Import models as static Relax modules: `load` for any supported file, `import_onnx` for ONNX."""

from __future__ import annotations

from builder.importer.formats import load
from builder.importer.input_shapes import parse_input_shapes, parse_input_values
from builder.importer.onnx_import import ImportedModel, import_onnx

__all__ = ["ImportedModel", "import_onnx", "load", "parse_input_shapes", "parse_input_values"]
