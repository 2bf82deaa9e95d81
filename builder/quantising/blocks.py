"""Blocks on their own: each quantised unit fed with the float model's values, all of them in one run.

Noise of earlier blocks does not count: what is measured is the block's own.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from builder.importer.onnx_graph import copy_node
from builder.quantising.agreement import Noise
from builder.quantising.calibration import CalibrationData
from builder.quantising.placement import Placement
from builder.quantising.ranges import LEVELS, Levels
from builder.quantising.session import Session

SAMPLES: Final = 16  # of the calibration data, evenly spaced: each has thousands of values for a channel


def isolated_sqnr(
    model: onnx.ModelProto, quantised: onnx.ModelProto, placement: Placement, data: CalibrationData
) -> dict[str, float]:
    """Signal to noise of each block if only that block is quantised, in dB.

    `model`, `quantised`: the float model, and its QDQ form.
    Result: unit name -> dB, for units that do more than move values.
    """
    units = [unit for unit in placement.units if not unit.keeps_levels]
    both = _with_blocks(model, quantised, placement)
    tensors = [name for unit in units for name in unit.results]
    session = Session(both, [*tensors, *map(_isolated, tensors)])
    noises = {unit.name: Noise() for unit in units}
    of = {name: unit.name for unit in units for name in unit.results}
    for index in data.evenly(SAMPLES):
        values = dict(zip(session.names, session.run(data.read(index)), strict=True))
        for name in tensors:
            value = values[_isolated(name)]
            levels = placement.levels.get(name)
            noises[of[name]].add(values[name], value if levels is None else rounded(value, levels))
    return {name: noise.ratio_db for name, noise in noises.items()}


def rounded(value: NDArray[Any], levels: Levels) -> NDArray[np.float64]:
    """A tensor after QuantizeLinear and DequantizeLinear."""
    steps = np.rint(value.astype(np.float64) / float(levels.scale)) + levels.zero_point
    return np.asarray((np.clip(steps, 0, LEVELS) - levels.zero_point) * float(levels.scale), np.float64)


def mean_errors(
    model: onnx.ModelProto, quantised: onnx.ModelProto, placement: Placement, data: CalibrationData
) -> dict[str, NDArray[np.float64]]:
    """What quantising only one unit adds to the mean of each of its channels, before the clamp.

    Weights and inputs round to a level that is on average a little off, mostly in channels with few weights.
    Padding counts as it is.

    Result: unit name -> shape [channels], for units that have a bias or may get one.
    """
    both = _with_blocks(model, quantised, placement)
    made = {node.name: node.output[0] for node in both.graph.node}
    pairs: dict[str, tuple[str, str]] = {}
    for unit in placement.units:
        if unit.weights is None or (unit.kind == "MatMul" and unit.weights.bias is None):
            continue
        last = unit.nodes[-1] if unit.clamp is None else unit.nodes[-2]
        pairs[unit.name] = (made[last], made[_isolated(last)])
    session = Session(both, list(dict.fromkeys(name for pair in pairs.values() for name in pair)))
    axes = {unit.name: 1 if unit.kind == "Conv" else -1 for unit in placement.units}
    sums: dict[str, NDArray[np.float64]] = {}
    indices = data.evenly(SAMPLES)
    for index in indices:
        values = dict(zip(session.names, session.run(data.read(index)), strict=True))
        for name, (exact, isolated) in pairs.items():
            error = values[isolated].astype(np.float64) - values[exact]
            axis = axes[name] % error.ndim
            mean = error.mean(axis=tuple(i for i in range(error.ndim) if i != axis))
            sums[name] = sums.get(name, 0.0) + mean
    return {name: total / len(indices) for name, total in sums.items()}


def _isolated(name: str) -> str:
    return f"{name}/isolated"


def _with_blocks(model: onnx.ModelProto, quantised: onnx.ModelProto, placement: Placement) -> onnx.ModelProto:
    """The float model, with a second form of each unit that reads levels of the float model's values."""
    both = onnx.ModelProto()
    both.CopyFrom(model)
    del both.graph.value_info[:]
    known = {tensor.name for tensor in both.graph.initializer}
    both.graph.initializer.extend(t for t in quantised.graph.initializer if t.name not in known)
    unit_of = {node: unit for unit in placement.units for node in unit.nodes}
    made = {name for node in model.graph.node for name in node.output}
    for node in quantised.graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear") and node.name not in unit_of:
            continue
        copy = copy_node(node)
        if node.name in unit_of:
            # What it reads from within its unit; all else comes from a DequantizeLinear.
            copy.input[:] = [_isolated(name) if name in made else name for name in node.input]
            copy.output[:] = [_isolated(name) for name in node.output]
            copy.name = _isolated(node.name)
        both.graph.node.append(copy)
    return both
