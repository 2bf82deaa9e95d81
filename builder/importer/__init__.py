"""Import models as static Relax modules: `load` for any supported file, `import_onnx` for ONNX.

Each name is imported at its first use: a wrong path or shape is reported before a compiler is loaded.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from builder.importer.formats import load
    from builder.importer.input_shapes import parse_input_shapes, parse_input_values
    from builder.importer.onnx_import import ImportedModel, import_onnx

_MODULE_OF: Final = {
    "ImportedModel": "builder.importer.onnx_import",
    "import_onnx": "builder.importer.onnx_import",
    "load": "builder.importer.formats",
    "parse_input_shapes": "builder.importer.input_shapes",
    "parse_input_values": "builder.importer.input_shapes",
}

__all__ = ["ImportedModel", "import_onnx", "load", "parse_input_shapes", "parse_input_values"]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'builder.importer' has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
