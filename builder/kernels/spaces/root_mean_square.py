"""RMS normalisation of rows: each row divided by the root of its mean square, in the design space `rows`.

Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from tvm import relax, te, tirx
from tvm.ir import Call

from builder.kernels.decisions import SPACE_MARK
from builder.kernels.rewriter import constant_of, legalise_as_tvm, shape_of
from builder.kernels.spaces import rows

NAME: Final = "relax.nn.rms_norm"


def rms_norm(bb: relax.BlockBuilder, call: Call) -> relax.Expr:
    """Legalise an RMS norm: ours for float32 over the last axes, which are one row, else TVM's.

    Its stages are the mean square and the normalised row. A gain of ones is left out.
    """
    shape = shape_of(call)
    axes = sorted(int(a) % len(shape) for a in call.attrs.axes)
    first = len(shape) - len(axes)
    if axes != list(range(first, len(shape))) or str(call.ty.dtype) != "float32":
        return legalise_as_tvm(bb, call)
    epsilon = tirx.const(float(call.attrs.epsilon), "float32")

    def compute(x: te.Tensor, *gain: te.Tensor) -> te.Tensor:
        *lead, columns = x.shape
        share = tirx.const(1.0 / int(columns), "float32")
        square = te.compute(x.shape, lambda *i: x(*i) * x(*i), name="square")
        squares = rows.reduced(square, te.sum, 0.0, "squares")
        inverse = te.compute(lead, lambda *i: tirx.rsqrt(squares(*i) * share + epsilon), name="inverse")

        def element(*i: tirx.Var) -> tirx.Expr:
            value = x(*i) * inverse(*i[:-1])
            return value * gain[0][i[-1]] if gain else value

        return te.compute(x.shape, element, name="rms_norm", attrs={SPACE_MARK: rows.KIND})

    count = math.prod(shape[first:])
    x, gain = call.args
    numbers = constant_of(gain)
    gains = [] if numbers is not None and np.all(numbers == 1) else [gain]
    if len(axes) == 1:
        return bb.call_te(compute, x, *gains, primfunc_name_hint="rms_norm")
    flat = [bb.emit(relax.op.reshape(x, (*(shape[:first] or (1,)), count)))]
    flat += [bb.emit(relax.op.reshape(each, (count,))) for each in gains]
    return relax.op.reshape(bb.emit(bb.call_te(compute, *flat, primfunc_name_hint="rms_norm")), shape)
