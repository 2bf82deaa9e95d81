"""Operators that TVM's front end lacks or gets wrong, written with operators that it gets right."""

from __future__ import annotations

import onnx


def apply_rewrites(model: onnx.ModelProto) -> int:
    return 0
