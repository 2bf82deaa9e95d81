"""Casts of floats to integers: each number is read once.

TVM's front end tests whether a number is finite, and wraps what is too large, in operators that read it up to
six times. Written into the kernel of a Resize, they make its expression six times as large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from onnx import helper
from tvm import relax
from tvm.ir import GenericConst, is_prim_expr
from tvm.relax.frontend.onnx import onnx_frontend

_BYTES_OF_INT: Final = 4


class Cast:
    """Converts the operator, in the form in which TVM's front end asks for it."""

    def get_converter(self, opset: int) -> Callable[..., relax.Expr]:
        """Return the converter of an opset."""
        theirs = onnx_frontend.Cast.get_converter(opset)

        def convert(
            bb: relax.BlockBuilder, inputs: Sequence[relax.Expr], attrs: Mapping[str, Any], params: object
        ) -> relax.Expr:
            x, dtype = inputs[0], np.dtype(helper.tensor_dtype_to_np_dtype(int(attrs["to"])))
            is_tensor = not (isinstance(x, relax.ShapeExpr | GenericConst) or is_prim_expr(x))
            if not is_tensor or dtype.kind not in "iu" or "float" not in str(x.ty.dtype):
                return theirs(bb, inputs, attrs, params)
            # Integers that are cut to fewer bits wrap.
            wide = "int32" if dtype.itemsize < _BYTES_OF_INT or dtype == np.int32 else "int64"
            return relax.op.astype(bb.emit(relax.op.astype(x, wide)), dtype.name)

        return convert
