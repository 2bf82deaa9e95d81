"""Writes the loops of recurrent layers, which the importer leaves as calls."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import Call

from builder.calls.recurrent import DIRECTIONS, RecurrentCall
from builder.kernels.rewriter import Values, constant_of, rewrite_main, shape_of
from builder.kernels.spaces import recurrent
from builder.target.device_target import DeviceTarget


def write_recurrent(mod: tvm.IRModule, target: DeviceTarget) -> tvm.IRModule:
    """Replace the calls of recurrent layers by calls of kernels for `target`."""

    def emit(table: Values, var: relax.Var, call: Call) -> bool:
        layer = RecurrentCall.of(call)
        if layer is None:
            return False
        inputs = [table.plain(value) for value in layer.inputs]
        weights = constant_of(table.plain(layer.weights))
        assert weights is not None
        steps = shape_of(inputs[0])[0]
        directions, batch, hidden = shape_of(inputs[1])
        shape = recurrent.Layer(layer.kind, steps, directions, batch, hidden, DIRECTIONS[layer.direction])
        table.define(var, recurrent.emit(table.bb, shape, inputs, weights, target))
        return True

    return rewrite_main(mod, emit, Values)
