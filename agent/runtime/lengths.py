"""Cut outputs to the lengths that were computed beside them, before they leave the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from agent.bundle.detection import Objects
from agent.bundle.output_length import OutputLength
from agent.bundle.processing import Detect, Step, outputs_of
from agent.runtime.postprocess import Value
from agent.runtime.storage import Array


def cut_objects(
    outputs: Mapping[str, Array], lengths: Sequence[OutputLength], steps: Sequence[Step]
) -> Mapping[str, Array]:
    """Cut the outputs that a detector's step reads, so that it takes no row of the padding for an object.

    Outputs have zeros behind their ends, which the activation of scores may turn into a half.

    Parameters
    ----------
    outputs
        The outputs of the graph by name.
    lengths
        Their declared lengths.
    steps
        The steps of the postprocess.

    Returns
    -------
    Mapping
        The outputs in the same order; those that no such step reads stay whole.
    """
    read = {name for step in steps if isinstance(step, Objects | Detect) for name in outputs_of(step)}
    mine = [length for length in lengths if length.output in read]
    if not mine:
        return outputs
    shorter = cut({name: outputs[name] for name in read}, outputs, mine)
    return {name: np.asarray(shorter.get(name, value)) for name, value in outputs.items()}


def cut(
    values: Mapping[str, Value], outputs: Mapping[str, Array], lengths: Sequence[OutputLength]
) -> dict[str, Value]:
    """Cut values, and leave out those that only hold lengths.

    Parameters
    ----------
    values
        The answer: outputs, and what a postprocess made of them.
    outputs
        The outputs of the graph by name.
    lengths
        Their declared lengths.

    Returns
    -------
    dict
        Values in the same order. What a postprocess made under an output's name stays whole.
    """
    counts = {length.count for length in lengths}
    results: dict[str, Value] = {name: value for name, value in values.items() if name not in counts}
    for length in lengths:
        whole = outputs[length.output]
        value = results.get(length.output)
        if not isinstance(value, np.ndarray) or value.shape[length.axis : length.axis + 1] != (
            whole.shape[length.axis],
        ):
            continue
        extent = min(max(int(outputs[length.count][0]), 0), whole.shape[length.axis])
        places = (slice(None),) * length.axis + (slice(extent),)
        results[length.output] = np.ascontiguousarray(value[places])
    return results
