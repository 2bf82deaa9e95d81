"""Convert Pad to an operator of Relax, which later passes know, instead of a tensor expression of TVM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tvm import relax
from tvm.relax.frontend.onnx import onnx_frontend

NAME: Final = "Pad"
_MODES: Final = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


class Padding(onnx_frontend.Pad):  # type: ignore[misc]  # TVM has no types
    """TVM's converter of Pad, but for float32 with an operator of Relax; other types are left to TVM."""

    @classmethod
    def _lower_pad(
        cls,
        bb: relax.BlockBuilder,
        inputs: Sequence[relax.Expr],
        attr: Mapping[str, Any],
        params: object,
        allowed_modes: set[str],
    ) -> relax.Expr:
        before, after, value = cls._parse_pads_and_axes(inputs, params)
        mode = attr.get("mode", b"constant").decode()
        plain = str(inputs[0].ty.dtype) == "float32" and min((*before, *after), default=-1) >= 0
        if mode not in allowed_modes or not plain:
            return super()._lower_pad(bb, inputs, attr, params, allowed_modes)
        widths = [int(width) for pair in zip(before, after, strict=True) for width in pair]
        return bb.emit(relax.op.nn.pad(inputs[0], widths, _MODES[mode], float(value)))
