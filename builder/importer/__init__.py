"""Models in, static Relax out."""

from __future__ import annotations

from builder.importer.input_shapes import parse_input_shapes, parse_input_values
from builder.importer.onnx_import import ImportedModel, import_onnx

__all__ = ["ImportedModel", "import_onnx", "parse_input_shapes", "parse_input_values"]
