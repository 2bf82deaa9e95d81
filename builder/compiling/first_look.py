"""A first look at an answer: what the declared steps make of the sample that a model is compared on.

Promises an error for boxes that are surely in other units than declared, and a line for each result that
hardly any right declaration gives: boxes outside of the picture or of no area, scores that are all equal or
not within 0 to 1. Leaves results that may be right, such as no object in noise, to `run`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agent.bundle.audio import Keywords
from agent.bundle.detection import ABSOLUTE, Objects
from agent.bundle.output_length import answered
from agent.bundle.params import index_params
from agent.bundle.processing import (
    ClassMap,
    Ctc,
    Detect,
    Normalise,
    Pose,
    Postprocess,
    Softmax,
    Step,
    TopK,
    outputs_of,
    real_outputs,
)
from agent.bundle.quantisation import NO_QUANTISATION, Quantised, by_name
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import EdgeError
from agent.runtime.postprocess import Postprocessor
from agent.runtime.quantisation import to_real
from builder.bundles.package import Package
from builder.compiling.hints import Hints
from builder.compiling.recognition import LARGEST_STEP, Proposal, recognise
from builder.compiling.signature import Signature
from builder.errors import ModelError

Arrays = Mapping[str, npt.NDArray[Any]]
# Boxes that are looked at, those with the best scores.
_MOST_BOXES: Final = 100
# In pixels: no detector's boxes are all within so few. Fractions end at 1, and a box may reach over the edge.
_MOST_FRACTION: Final = 2.0
_ROUNDING: Final = 1e-3
_SAME: Final = 1e-6  # of one number, computed in float32 in two places; the best of many scores are near
# Fewer different numbers may be whole, or have equal distances, by chance.
_FEWEST_STEPS: Final = 16
_ROWS: Final = 3  # dimensions of an output with a row of scores for each box
_MOST_INSIDE_OUT: Final = 0.1  # of boxes; a model that decodes its own makes none
# In pictures: the exponential of what is a size already has more.
_LARGEST_BOX: Final = 8


def look(
    declared: Postprocess | None,
    outputs: Sequence[TensorSpec],
    values: Arrays,
    size: tuple[int, int] | None,
    quantised: Mapping[str, Quantised],
    text: str = "",
    *,
    is_picture: bool = False,
) -> list[str]:
    """Look at what a postprocess makes of a sample.

    `size`: height and width of the input that takes a picture, or None.
    `text`: what the user declares: if it says itself whether boxes are normalised, it is not refused.
    Raises `ModelError` if the sample's boxes are fractions and the postprocess takes them for pixels, or the
        other way round.
    """
    steps = () if declared is None else declared.steps
    lines: list[str] = []
    softened = {step.output for step in steps if isinstance(step, Softmax)}
    for step in steps:
        lines += _degenerate(step, values, quantised, softened)
        if isinstance(step, TopK) and step.output not in softened:
            lines += _scores(step.output, to_real(values[step.output], quantised.get(step.output)))
        elif isinstance(step, Detect | Objects | Pose):
            lines += [*_coarse(step, values, quantised), *_below_zero(step, values, quantised)]
            found = _best(step, outputs, values, quantised)
            if found is not None:
                _check_units(step, found[0], size, text)
                lines += _boxes(step, *found, size, is_picture=is_picture)
    return list(dict.fromkeys(lines))


def _degenerate(
    step: Step, values: Arrays, quantised: Mapping[str, Quantised], softened: set[str]
) -> Iterator[str]:
    """Tell values that nothing can be made of, and what is no score where the step takes it for one."""
    for name in dict.fromkeys(outputs_of(step)):
        real = to_real(values[name], quantised.get(name))
        if not np.isfinite(real).all():
            yield f"some values of {name} are NaN or infinite in the sample, which cannot be decoded"
        elif isinstance(step, Softmax | ClassMap | Ctc | Normalise | Keywords) and real.size > 1:
            low, high = float(real.min()), float(real.max())
            option = ""
            if isinstance(step, ClassMap) and step.threshold is not None and 0 < step.threshold < 1:
                option = "threshold=0"
            elif isinstance(step, Ctc | Keywords) and step.activation == "none" and name not in softened:
                option = "activation=softmax"
            if high - low <= _ROUNDING * abs(high):
                yield f"all values of {name} are {high:.4g} in the sample"
            elif option and (low < -_ROUNDING or high > 1 + _ROUNDING):
                yield (
                    f"scores of {name} are from {low:.4g} to {high:.4g} in the sample, not from 0 to 1: "
                    f"add {option} if they are no probabilities yet"
                )


def proposed(package: Package) -> Proposal | None:
    """Return the presets that fit a package which declares nothing, or None if none do."""
    manifest, labels = package.manifest, package.members.get("labels.txt", b"").splitlines()
    if manifest.postprocess or manifest.states or manifest.audio or manifest.buckets:
        return None
    exported = package.exported
    roles = dict.fromkeys(manifest.class_counts or (), "classes")
    edges = manifest.quantisation or NO_QUANTISATION
    hints = Hints(
        exported.task,
        classes=len(labels),
        points=exported.points,
        roles=roles,
        steps={each.name: each.scale for each in edges.outputs},
        is_prepared=manifest.preprocess is not None,
        scales=by_name(edges.inputs),
    )
    proposal = recognise(manifest.inputs, answered(manifest.outputs, manifest.lengths or ()), hints)
    return proposal if proposal is None else confirmed(proposal, package)


def confirmed(proposal: Proposal, package: Package) -> Proposal | None:
    """Return the proposal that a picture or the sample speaks least against, with its units and doubts.

    None if scores come in steps that tell few of them apart.
    """
    values = package.tried or _sample(package)
    each_tried = [_tried(each, package, values) for each in (proposal, *proposal.others)]
    tried = [each for each in each_tried if each is not None]
    best = next((each for each in tried if not each.doubt), tried[0] if tried else None)
    if best is None or (best is each_tried[0] and not best.doubt):
        return best
    return replace(best, sure=False)


def look_again(package: Package, declared: Postprocess, text: str) -> list[str]:
    """Look at what a new postprocess makes of a package's sample, as `look` does when it is compiled.

    Raises `ModelError` as `look` does.
    """
    manifest = package.manifest
    values = _sample(package)
    if manifest.lengths or manifest.buckets or manifest.audio or {*declared.outputs} - values.keys():
        return []
    size = Signature.of(manifest.inputs, manifest.outputs).size
    quantised = by_name((manifest.quantisation or NO_QUANTISATION).outputs)
    lines = look(declared, manifest.outputs, values, size, quantised, text)
    for step in declared.steps:
        if isinstance(step, Softmax) and _are_scores({step.output: values[step.output]}, quantised):
            lines.append(
                f"all values of {step.output} are from 0 to 1 in the sample: "
                "leave out softmax if they are scores already"
            )
    return lines


def _sample(package: Package) -> Arrays:
    """Return the outputs of the first sample that a package has."""
    raw = package.members.get("samples/outputs.params", b"")
    return {
        entry.spec.name.removeprefix("0/"): np.frombuffer(
            raw, entry.spec.dtype, entry.spec.nbytes // entry.spec.itemsize, entry.offset
        ).reshape(entry.spec.shape)
        for entry in (index_params(raw) if raw else ())
        if entry.spec.name.startswith("0/")
    }


def _tried(proposal: Proposal, package: Package, values: Arrays) -> Proposal | None:
    manifest = package.manifest
    signature = Signature.of(manifest.inputs, answered(manifest.outputs, manifest.lengths or ()))
    step = proposal.step
    quantised = by_name((manifest.quantisation or NO_QUANTISATION).outputs)
    if proposal.preset == "softmax" and _are_scores(values, quantised):
        name = proposal.postprocess.removeprefix("softmax,")
        return replace(proposal, evidence=f"{proposal.evidence} from 0 to 1", postprocess=name)
    if signature.size is None or not values or step is None:
        return proposal
    if not isinstance(step, Detect | Objects | Pose) or {*outputs_of(step)} - values.keys():
        return proposal
    if any(_coarse(step, values, quantised)):
        return None
    found = _best(step, manifest.outputs, values, quantised)
    if found is None or _has_fractions(step, values):
        return replace(proposal, doubt="the sample has no such boxes or classes: it may be another model's")
    is_absolute = isinstance(step, Pose) or (isinstance(step, Objects) and step.coding in ABSOLUTE)
    contradicts = is_absolute and _units(found[0], signature.size) is (not step.normalised)
    if contradicts and isinstance(step, Objects | Pose):
        step = replace(step, normalised=not step.normalised)
        said = proposal.postprocess.replace(f",normalised={str(not step.normalised).lower()}", "")
        proposal = replace(
            proposal,
            evidence=f"{proposal.evidence}, boxes as {'fractions' if step.normalised else 'pixels'}",
            postprocess=f"{said},normalised={str(step.normalised).lower()}",
        )
    doubts = [
        *_below_zero(step, values, quantised),
        *_boxes(step, *found, signature.size, is_picture=package.tried is not None),
        proposal.doubt,
    ]
    return replace(proposal, doubt=doubts[0])


def _are_scores(values: Arrays, quantised: Mapping[str, Quantised]) -> bool:
    """Return whether all values are scores already: what a Softmax is made of hardly ever is."""
    reals = [to_real(array, quantised.get(name)) for name, array in values.items()]
    return bool(reals) and all(float(real.min()) >= 0 and float(real.max()) <= 1 for real in reals)


def _has_fractions(step: Detect | Objects | Pose, values: Arrays) -> bool:
    """Return whether numbers of classes are none that a model of floats can mean."""
    for part in step.class_ids if isinstance(step, Objects) else ():
        ids = values[part.output]
        ids = ids[..., part.first] if ids.dtype.kind == "f" and ids.ndim == 3 else np.zeros(1)
        if not np.array_equal(ids, np.rint(ids)):
            return True
    return False


def _best(
    step: Detect | Objects | Pose,
    outputs: Sequence[TensorSpec],
    values: Arrays,
    quantised: Mapping[str, Quantised],
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
    """Return boxes and scores of the best candidates without suppression; None if they cannot be decoded."""
    if isinstance(step, Pose):
        bare: Detect | Objects | Pose = replace(step, score_threshold=0.0, point_threshold=0.0)
    else:
        bare = replace(step, score_threshold=0.0, iou_threshold=1.0, max_detections=_MOST_BOXES)
    if isinstance(bare, Objects):
        bare = replace(bare, keypoints=(), mask_weights=(), prototypes=None, prototype_order=None)
    declared = Postprocess((bare,))
    try:
        found = Postprocessor(declared, outputs, (), real_outputs(declared, quantised))(values)
    except (EdgeError, ValueError):
        return None
    return np.asarray(found["boxes"]), np.asarray(found["scores"])


def _units(boxes: npt.NDArray[Any], size: tuple[int, int]) -> bool | None:
    if not len(boxes):
        return None
    reach = float(np.abs(boxes).max(initial=0.0))
    if reach <= _MOST_FRACTION and min(size) > 8 * _MOST_FRACTION and reach > 0:
        return True
    # More than twice the picture as fractions: most boxes of a detector lie in it.
    return False if float(np.median(np.abs(boxes).max(axis=1))) > 2 * _MOST_FRACTION else None


def _check_units(
    step: Detect | Objects | Pose, boxes: npt.NDArray[Any], size: tuple[int, int] | None, text: str
) -> None:
    is_absolute = not isinstance(step, Objects) or step.coding in ABSOLUTE
    if size is None or not is_absolute or _units(boxes, size) is not (not step.normalised):
        return
    if text.endswith(".toml"):
        text = Path(text).read_text()
    if "normalised" in text:
        return
    read, rather = "pixels", "fractions of the picture"
    if step.normalised:
        read, rather = rather, read
    raise ModelError(
        f"--postprocess: expected boxes as {read} of an input of {size[1]} x {size[0]}, "
        f"got a sample whose boxes reach {float(np.abs(boxes).max()):.4g}, as {rather} do",
        hint=f"add normalised={str(not step.normalised).lower()} to the preset, or "
        f"normalised={str(step.normalised).lower()} if they are {read} after all",
    )


def _coarse(
    step: Detect | Objects | Pose, values: Arrays, quantised: Mapping[str, Quantised]
) -> Iterator[str]:
    names = [part.output for part in step.scores] if isinstance(step, Objects) else [outputs_of(step)[-1]]
    for part in step.class_ids if isinstance(step, Objects) else ():
        if part.output in quantised and quantised[part.output].scale > 1:
            yield f"class numbers of {part.output} are integers in steps above 1, so that some cannot be told"
    is_raw = isinstance(step, Objects) and step.activation != "none"
    for name in () if is_raw else dict.fromkeys(names):
        distance = quantised[name].scale if name in quantised else _distance(values[name])
        if distance > LARGEST_STEP:
            yield (
                f"scores of {name} are numbers in steps of {distance:.3g}, so that few can be told apart: "
                "export the model with boxes as fractions, or without quantising its last layers"
            )


def _distance(values: npt.NDArray[Any]) -> float:
    """Return the distance of real numbers that were integers with a scale before; 0 for any others."""
    numbers = np.unique(values) if values.dtype.kind == "f" else np.zeros(0)
    if len(numbers) < _FEWEST_STEPS or not np.isfinite(numbers).all():
        return 0.0
    between = np.diff(numbers.astype(np.float64))
    steps = between / between.min()
    return float(between.min()) if np.abs(steps - np.rint(steps)).max() < _ROUNDING * steps.max() else 0.0


def _below_zero(
    step: Detect | Objects | Pose, values: Arrays, quantised: Mapping[str, Quantised]
) -> Iterator[str]:
    if not isinstance(step, Objects) or step.activation != "none":
        return
    for part in step.scores:
        array = values[part.output]
        if part.count == 1 or array.ndim != _ROWS:
            continue
        columns = range(part.first, part.first + part.count)
        scores = array.take(columns, 1 if step.transposed else 2)
        low = float(to_real(scores, quantised.get(part.output)).min())
        if low < -max(_ROUNDING, quantised[part.output].scale if part.output in quantised else 0):
            yield (
                f"scores of {part.output} reach down to {low:.3g}: the postprocess may lack "
                "activation=sigmoid, or take other values for scores"
            )


def _boxes(
    step: Detect | Objects | Pose,
    boxes: npt.NDArray[Any],
    scores: npt.NDArray[Any],
    size: tuple[int, int] | None,
    *,
    is_picture: bool,
) -> Iterator[str]:
    what = "picture" if is_picture else "sample"
    if not len(scores):
        yield (
            f"no score of the {what} is above 0: if a{' usual' * is_picture} picture gives none either, the "
            "model may have lost them in integers that boxes share, or the postprocess be another model's"
        )
        return
    if scores.max() > 1 + _ROUNDING:
        yield (
            f"scores of the {what} reach {scores.max():.4g}, not at most 1: "
            "the postprocess may lack activation=sigmoid, or be another model's"
        )
    elif len(scores) > 1 and float(np.ptp(scores)) <= _SAME * abs(float(scores[0])):
        which = "all" if len(scores) < _MOST_BOXES else f"the {len(scores)} best"
        yield f"{which} scores of the {what} are {scores[0]:.4g}: the postprocess may be another model's"
    elif is_picture and scores.max() <= step.score_threshold:
        yield (
            f"no score of the picture is above {step.score_threshold:g}; the best is {scores.max():.2g}: if "
            "there is something to find, the preprocess or the postprocess may be another model's"
        )
    if size is None:
        return
    high = np.ones(2) if step.normalised else np.array(size[::-1], np.float64)
    sides = boxes[:, 2:] - boxes[:, :2]
    empty = (sides <= 0).any(axis=1)
    outside = (boxes[:, 2:] <= 0).any(axis=1) | (boxes[:, :2] >= high).any(axis=1)
    if (empty | outside).all():
        where = "have no area" if empty.all() else "lie outside of the picture"
        yield f"all boxes of the {what} {where}: the postprocess may be another model's"
    elif (sides < 0).any(axis=1).mean() > _MOST_INSIDE_OUT:
        yield (
            f"many boxes of the {what} end before they begin: they may be offsets from anchors, which no "
            "preset decodes, or the postprocess another model's"
        )
    elif not np.median(sides) <= _LARGEST_BOX * high.max():
        yield f"most boxes of the {what} are much larger than it: the postprocess may be another model's"


def _scores(name: str, scores: npt.NDArray[Any]) -> Iterator[str]:
    if not np.isfinite(scores).all():
        return
    low, high = float(scores.min()), float(scores.max())
    if scores.size > 1 and high - low <= _ROUNDING * abs(high):
        yield f"all scores of {name} are {high:.4g} in the sample"
    elif low < -_ROUNDING or high > 1 + _ROUNDING:
        yield (
            f"scores of {name} are from {low:.4g} to {high:.4g} in the sample, not from 0 to 1: "
            "add softmax if they are no probabilities yet"
        )
