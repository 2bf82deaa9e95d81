"""BitCast in a Relax module: the same bits as another type, which TVM's front end has no converter for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from onnx import helper
from tvm import relax, te, tirx

OPERATOR: Final = "BitCast"


class BitCast:
    """Converts the operator, in the form in which TVM's front end asks for it."""

    def get_converter(self, _opset: int) -> Callable[..., relax.Expr]:
        """Return the converter of an opset."""
        return _convert


def _convert(
    bb: relax.BlockBuilder, inputs: Sequence[relax.Expr], attrs: Mapping[str, Any], _params: object
) -> relax.Expr:
    dtype = str(helper.tensor_dtype_to_np_dtype(int(attrs["to"])))
    source = str(inputs[0].ty.dtype)
    # LLVM has one bit for a boolean, memory a byte.
    if "bool" in (source, dtype):
        return bb.emit(relax.op.astype(inputs[0], dtype))

    def cast(x: te.Tensor) -> te.Tensor:
        return te.compute(x.shape, lambda *place: tirx.reinterpret(dtype, x(*place)), name="bit_cast")

    return bb.emit_te(cast, inputs[0])
