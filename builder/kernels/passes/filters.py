"""Depthwise convolutions with several filters for each channel.

Each becomes as many depthwise convolutions, with one filter for each channel, whose results are interleaved.
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.ir import Call

from builder.kernels.passes.images import Images
from builder.kernels.rewriter import constant_of, shape_of


def several_filters(table: Images, call: Call) -> relax.Expr | None:
    """Return a depthwise convolution with several filters for each channel as as many depthwise ones.

    None for any other convolution.
    """
    attrs, weight = call.attrs, constant_of(call.args[1])
    channels = shape_of(call.args[0])[1] if attrs.data_layout == "NCHW" else 0
    if weight is None or attrs.kernel_layout != "OIHW" or weight.dtype != np.float32:
        return None
    filters = weight.shape[0] // max(channels, 1)
    if int(attrs.groups) != channels or channels < 2 or filters < 2:
        return None
    x = table.plain(call.args[0])
    weights = [relax.const(every(weight, k, filters)) for k in range(filters)]
    return interleaved(table, [Call(call.op, [x, w], attrs) for w in weights])


def every(weight: np.ndarray, first: int, step: int) -> np.ndarray:
    """Return every `step`th filter of `weight`, from the filter `first` on."""
    return np.ascontiguousarray(weight[first::step])


def interleaved(table: Images, parts: list[relax.Expr]) -> relax.Expr:
    """Return `[N, C * len(parts), H, W]` whose channels are taken from each part in turn."""
    bb = table.bb
    frames = [bb.emit(relax.op.expand_dims(bb.emit(part), 2)) for part in parts]
    together = bb.emit(relax.op.concat(frames, 2))
    n, channels, count, height, width = shape_of(together)
    return bb.emit(relax.op.reshape(together, (n, channels * count, height, width)))
