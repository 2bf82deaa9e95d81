"""Writes the loops of trees, of pairwise coupling and of suppression, which the importer leaves as calls."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.ir import Call

from builder.calls.coupling import CouplingCall
from builder.calls.suppression import SuppressionCall
from builder.calls.trees import EnsembleCall
from builder.kernels.rewriter import Values, rewrite_main
from builder.kernels.spaces import coupling, suppression, trees
from builder.target.device_target import DeviceTarget


def write_classic(mod: tvm.IRModule, target: DeviceTarget) -> tvm.IRModule:
    """Replace the calls of classic models by calls of kernels for `target`."""

    def emit(table: Values, var: relax.Var, call: Call) -> bool:
        ensemble = EnsembleCall.of(call)
        if ensemble is not None:
            samples = table.plain(ensemble.samples)
            table.define(var, trees.emit(table.bb, samples, ensemble.ensemble, target))
            return True
        pairs = CouplingCall.of(call)
        if pairs is not None:
            table.define(var, coupling.emit(table.bb, table.plain(pairs.pairs)))
            return True
        choice = SuppressionCall.of(call)
        if choice is not None:
            inputs = [table.plain(value) for value in choice.inputs]
            table.define(var, suppression.emit(table.bb, inputs, choice.capacity, centred=choice.centred))
            return True
        return False

    return rewrite_main(mod, emit, Values)
