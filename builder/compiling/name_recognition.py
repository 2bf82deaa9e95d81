"""Recognise what a model takes and keeps by the names of its tensors, and propose the flags that say so.

Promises proposals only: nothing is applied without the user. Leaves outputs, which are recognised by their
shapes, to `builder.compiling.recognition`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from agent.bundle.processing import Postprocess
from agent.bundle.tensor_spec import TensorSpec
from agent.runtime.postprocess import class_count
from builder.compiling.audio_presets import AUDIO_PRESETS, preset_of
from builder.compiling.labels import COCO, COCO_LABELS, NAMED
from builder.compiling.states import split_state

_IMAGENET_CLASSES: Final = 1000
# How exporters name what comes back: h and hn, state and stateN, state_in and state_out, cache and new_cache.
_NEXT: Final = re.compile(r"(?:_?(?:out|output|new|next|n|N)|Out|New|Next|N)$")
_BEFORE: Final = re.compile(r"(?:_?(?:in|input|old|prev|previous|0)|In|Old|Prev)$")
_PREFIX: Final = re.compile(r"^(?:new|next|out|output|old|prev|previous|in|input)_")


def recognise_sound(inputs: Sequence[str], outputs: Sequence[str]) -> str | None:
    """Return the preset for recordings that a model's names of inputs and states fit; None if none fits.

    Parameters
    ----------
    inputs, outputs
        The names of the model's tensors.
    """
    for name in AUDIO_PRESETS:
        preset = preset_of(name)
        if preset is None or not preset.states:
            continue
        pairs = [split_state(state) for state in preset.states]
        wanted = {*preset.input_shapes, *preset.input_values}
        if wanted == set(inputs) and {after for _, after in pairs} < set(outputs):
            return name
    return None


def recognise_states(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> str | None:
    """Return a text for `--state` if some outputs look like inputs of the next run; None if none do.

    An input and an output are a pair if their names differ only in how exporters mark the next value, their
    datatypes and shapes are equal, and no other tensor fits.
    """
    pairs = []
    for before in inputs:
        after = [
            each
            for each in outputs
            if (each.datatype, each.shape) == (before.datatype, before.shape)
            and each.name != before.name
            and _stem(each.name, _NEXT) in (before.name, _stem(before.name, _BEFORE))
        ]
        if len(after) == 1 and " " not in before.name + after[0].name:
            pairs.append((before.name, after[0].name))
    unique = len({after for _, after in pairs}) == len(pairs)
    if not pairs or not unique or len(pairs) in (len(inputs), len(outputs)):
        return None
    return " ".join(f"{before}:{after}" for before, after in pairs)


def label_hint(
    declared: Postprocess | None, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> str | None:
    """Return a line that advises labels for a model of pictures with several classes; None for any other.

    Answers without labels have only the numbers of classes, which few users expect. A model of rows often
    contains its labels, so it gets no advice.
    """
    if not any(len(spec.shape) == 4 for spec in inputs):
        return None
    specs = {spec.name: spec for spec in outputs}
    for step in declared.steps if declared is not None else ():
        count = class_count(step, specs) if step.kind in NAMED else 0
        if count == len(COCO_LABELS):
            return f"{count} classes without names: if they are those of COCO, add --labels {COCO}"
        if count > 1:
            whose = "; docs/your-detector.md says where ImageNet's are" if count == _IMAGENET_CLASSES else ""
            return f"{count} classes without names: --labels FILE names them in answers, one a line{whose}"
    return None


def _stem(name: str, suffix: re.Pattern[str]) -> str:
    return _PREFIX.sub("", suffix.sub("", name))
