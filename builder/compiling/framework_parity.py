"""Parity with a model's own framework, which computed a sample while the model was imported.

Two comparisons, each on the framework's own inputs: the normalised model in ONNX Runtime, which finds faults
of the export and of the importer, and the compiled kernels, which finds all others. The limits are those of
`builder.compiling.parity`; a quantised model is compared block by block, because a step that is rounded
otherwise changes everything after it. There, the framework's own steps take the place of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from builder.compiling import block_parity, parity, tolerances
from builder.compiling.block_agreement import Step
from builder.compiling.noise import compare_with_noise, noise_of
from builder.errors import ParityError
from builder.importer import ImportedModel
from builder.importer.frameworks.sample import FrameworkSample
from builder.kernels.passes.halves import floats_of

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well a model agrees with its framework.

    Attributes
    ----------
    framework
        Name and version.
    error
        The largest relative error of an output.
    text
        The comparison in one line.
    """

    framework: str
    error: float
    text: str


def check_import(model: ImportedModel) -> Agreement | None:
    """Compare an imported model, as ONNX Runtime runs it, with its framework.

    Returns
    -------
    Agreement or None
        The comparison; None if no framework was asked.

    Raises
    ------
    ParityError
        If they do not agree.
    ModelError
        If ONNX Runtime refuses the model.
    """
    sample = model.reference
    if sample is None:
        return None
    names = [spec.name for spec in model.outputs]
    if not block_parity.is_quantised(model.onnx):
        found = parity.run_as_defined(model.onnx, sample.inputs)
        return _check(model, sample, found, None)
    blocks = block_parity.compare_blocks(model.onnx, sample.inputs, _steps(model, sample), sample.outputs)
    for block in blocks.found:
        if not block.is_rounding:
            raise ParityError(
                f"quantised tensor {block.name[:80]}: expected the steps of {sample.framework} but for "
                f"numbers that are halfway between two, got {block.unexplained:.2%} others, by up to "
                f"{block.largest:.3g} steps",
                hint="the import does not compute what the framework does: please report it with the model",
            )
    outputs = replace(blocks.agreement(names, sample.outputs), reference=sample.framework)
    parity.check(outputs, tolerances.PARITY)
    return Agreement(sample.framework, outputs.error, f"agrees with {sample.framework}: {blocks.summary()}")


def _steps(model: ImportedModel, sample: FrameworkSample) -> list[Step]:
    """Return what quantising nodes of the framework made, with the nodes of the model that make the same.

    Both have them in the program's order. If the importer left some out, nothing is known.
    """
    nodes = [node.name for node in model.onnx.graph.node if node.op_type in block_parity.ROUNDS]
    if len(nodes) != len(sample.steps):
        return [Step(array) for array in sample.steps]
    return [Step(array, (name,)) for array, name in zip(sample.steps, nodes, strict=True)]


def check_kernels(
    model: ImportedModel,
    compute: Callable[[Mapping[str, npt.NDArray[np.generic]]], Sequence[npt.NDArray[np.generic]]],
    tolerance: float | None,
    progress: Progress,
) -> None:
    """Compare compiled kernels with the model's framework, if it was asked.

    `tolerance`: the largest relative error of an output, None for what the framework's numbers deserve.
    Raises `ModelError` if ONNX Runtime refuses the model.
    """
    sample = model.reference
    if sample is None:
        return
    progress(f"comparing with {sample.framework}")
    in_halves = floats_of(model.mod) is not None
    if block_parity.is_quantised(model.onnx) or in_halves:
        # Our kernels agree with the definition block by block, and so must the framework.
        agreement = check_import(model)
    else:
        agreement = _check(model, sample, compute(sample.inputs), tolerance)
    if agreement is not None:
        progress(agreement.text)


def _check(
    model: ImportedModel,
    sample: FrameworkSample,
    found: Sequence[npt.NDArray[np.generic]],
    tolerance: float | None,
) -> Agreement:
    names = [spec.name for spec in model.outputs]
    result = replace(parity.compare(names, found, sample.outputs), reference=sample.framework)
    limit = max(tolerances.PARITY, sample.rounding) if tolerance is None else tolerance
    noise = None
    if tolerance is None and not result.error <= limit:
        # The noise is that of the export; the framework's own rounding may move its answers as much.
        other = parity.run_as_defined(model.onnx, sample.inputs)
        moved = noise_of(model.onnx, sample.inputs, other)
        noise = None if moved is None else compare_with_noise(found, sample.outputs, moved, limit)
    parity.check(result, limit, noise)
    return Agreement(
        sample.framework,
        result.error,
        f"agrees with {sample.framework}: relative error {result.error:.1e}",
    )
