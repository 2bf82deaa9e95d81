"""A compiled model beside the reference: its outputs, its parts where it is quantised, and special numbers.

Promises that a model which differs by more than rounding is refused. Leaves to others: what the right numbers
are (`judge`), and what is compiled at which sizes (`compilation`, `bucket_comparison`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike

import numpy as np
import numpy.typing as npt

from agent.bundle.detection import Objects
from agent.bundle.processing import Detect, Pose, Postprocess, Preprocess
from agent.bundle.quantisation import by_name
from builder.compiling import (
    block_parity,
    framework_parity,
    half_parity,
    parity,
    tolerances,
)
from builder.compiling.block_agreement import Step
from builder.compiling.first_look import look
from builder.compiling.judge import Judge
from builder.compiling.signature import Signature
from builder.compiling.special_samples import is_elementwise, special_samples
from builder.importer import ImportedModel
from builder.kernels.passes.halves import floats_of
from builder.running.debug_executor import GraphModuleDebug
from builder.running.shown_input import prepared

Progress = Callable[[str], None]
Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison with the reference that a model has passed.

    `agreement`: how far its outputs are from the reference's.
    `samples`: the outputs that devices compare theirs with.
    `self_test_rtol`: how far theirs may be from these.
    """

    agreement: parity.Parity
    samples: Sequence[Array]
    self_test_rtol: float


def compare_model(
    model: ImportedModel,
    module: GraphModuleDebug,
    sources: Sequence[tuple[str, ...]],
    inputs: Mapping[str, Array],
    before: Preprocess | None,
    tolerance: float | None,
    progress: Progress,
) -> Compared:
    """Compare a compiled model with the reference, and with its own framework if that was asked.

    `sources`: for each node of the module's graph, the names of the model's nodes that it computes.
    `tolerance`: the largest relative error of an output, None for what the model's numbers deserve.
    Raises `ParityError` if they do not agree.
    """
    names = [spec.name for spec in model.outputs]
    for name, value in inputs.items():
        module.set_input(name, value)
    quantised = block_parity.is_quantised(model.onnx)
    halves = floats_of(model.mod) is not None
    compare_steps = tolerance is None and (quantised or halves)
    ran = module.debug_get_outputs() if compare_steps else []
    steps = [Step(array, sources[node]) for node, array in ran]
    outputs = computed(module, inputs)
    half = any(spec.datatype == "FP16" for spec in model.outputs)
    judge = Judge(model)
    reference = judge.outputs(inputs)
    agreement = parity.compare(names, outputs, reference)
    if tolerance is not None:
        parity.check(agreement, tolerance)
    elif halves:
        judge.check_normalised(inputs, reference)
        compared = half_parity.compare_halves(
            model.onnx, inputs, [step.array for step in steps], outputs, reference
        )
        compared.check()
        progress(compared.summary())
    elif quantised:
        blocks = block_parity.compare_blocks(model.onnx, inputs, steps, outputs)
        blocks.check()
        agreement = blocks.agreement(names, outputs)
        parity.check(agreement, tolerances.PARITY)
        if blocks.found:
            progress(blocks.summary())
    elif not agreement.error <= tolerances.PARITY:
        judge.check_normalised(inputs, reference)
        check_rounding(judge, inputs, outputs, reference, agreement, progress)
    if tolerance is None and not halves and judge.compares_floats:
        check_special(model, judge, module, inputs, before)
    framework_parity.check_kernels(model, partial(computed, module), tolerance, progress)
    rtol = tolerances.self_test_rtol(agreement.error, half=half)
    agreement = replace(agreement, reference=judge.reference)
    # The bytes of a quantised model are the same on every device, but for a few that are rounded to the other
    # step; so devices compare with what was computed here, not with the reference.
    if not quantised:
        return Compared(agreement, reference, rtol)
    return Compared(agreement, outputs, max(rtol, tolerances.STEP))


def computed(module: GraphModuleDebug, inputs: Mapping[str, Array]) -> list[Array]:
    """Return the outputs for inputs."""
    for name, value in inputs.items():
        module.set_input(name, value)
    module.run()
    return [np.array(module.get_output(index)) for index in range(module.get_num_outputs())]


def outputs_of_picture(
    model: ImportedModel, before: Preprocess | None, inputs: Mapping[str, Array], picture: str | PathLike[str]
) -> dict[str, Array]:
    """Return the right outputs for a picture; other inputs are those of the sample.

    Raises `ModelError` if no preprocess is declared, or the picture cannot be read.
    """
    scales = by_name(model.scales.quantisation.inputs)
    value = prepared(before, model.inputs, picture, scales.get(before.input) if before else None)
    outputs = Judge(model).outputs({**inputs, **({before.input: value} if before else {})})
    return {spec.name: array for spec, array in zip(model.outputs, outputs, strict=True)}


def look_at_sample(
    model: ImportedModel,
    after: Postprocess | None,
    compared: Compared,
    text: str,
    progress: Progress,
    tried: Mapping[str, Array] | None = None,
) -> None:
    """Tell what is doubtful about what the postprocess makes of the sample.

    `after`, `text`: the postprocess, and what the user declares; or None and an empty text.
    Raises `ModelError` if boxes are in other units than declared.
    """
    if after is None:
        return
    if model.lengths:  # whose outputs are padded
        progress(
            "the postprocess was not tried on the sample: how many results there are depends on the input"
        )
        return
    names = [spec.name for spec in model.outputs]
    values = tried or {name: np.asarray(v) for name, v in zip(names, compared.samples, strict=True)}
    size = Signature.of(model.inputs, model.outputs).size
    if size is None and any(isinstance(step, Detect | Objects | Pose) for step in after.steps):
        progress("the sample's boxes were not compared with the picture: no single input takes one")
    quantised = by_name(model.scales.quantisation.outputs)
    for line in look(after, model.outputs, values, size, quantised, text, is_picture=tried is not None):
        progress(line)


def check_special(
    model: ImportedModel,
    judge: Judge,
    module: GraphModuleDebug,
    inputs: Mapping[str, Array],
    before: Preprocess | None,
) -> None:
    """Compare a compiled model with the reference on NaN, infinities and other special numbers.

    Raises `ParityError` if they do not agree where the reference is defined.
    """
    names = [spec.name for spec in model.outputs]
    by_element = is_elementwise(model.onnx)
    original = model.original
    operators, narrow = ((), {}) if original is None else (original.operators, original.narrow)
    for sample in special_samples(model.inputs, model.onnx, inputs, before, operators, narrow):
        reference = judge.outputs_if_defined(sample)
        if reference is None:
            continue
        outputs = computed(module, sample)
        agreement = parity.compare(names, outputs, reference, by_element=by_element)
        if agreement.error <= tolerances.PARITY:
            continue
        judge.check_normalised(sample, reference, by_element=by_element)
        noise = judge.noise(sample, outputs, reference, by_element=by_element)
        if noise is not None:
            # Where huge products cancel, what is left is as large as their rounding: only that is judged.
            noise = replace(noise, error=0.0)
        where = f"{judge.reference}, on zeros, infinities and other special numbers"
        parity.check(replace(agreement, reference=where), tolerances.PARITY, noise)


def check_rounding(
    judge: Judge,
    inputs: Mapping[str, Array],
    outputs: Sequence[Array],
    reference: Sequence[Array],
    agreement: parity.Parity,
    progress: Progress,
) -> None:
    """Refuse a model whose difference from the reference is more than rounding."""
    progress("comparing with the noise of rounding, because the model may amplify it")
    noise = judge.noise(inputs, outputs, reference)
    parity.check(replace(agreement, reference=judge.reference), tolerances.PARITY, noise)
    if noise is not None:
        progress(f"the model amplifies rounding: the difference is {noise.ratio:.2g} times its noise")
