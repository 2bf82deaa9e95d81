"""What a model's file says about its outputs besides their shapes: metadata, operators, scales.

Promises statements only; what follows from them is decided by the presets and by recognition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from agent.bundle.quantisation import Quantised


@dataclass(frozen=True, slots=True)
class Hints:
    """What a model's file says about its outputs besides their shapes.

    `task`: what Ultralytics' exports say: `detect`, `segment`, `pose`, `obb`, `classify`; empty for others.
    `makers`: the operator that computes the values of each output; those that only move values do not count.
    `operators`: all operators of the model, such as `Exp`, in either format; empty if they are not known.
    `normalised`: whether boxes are fractions of the picture; None if the file does not say.
    `steps`: what one step of each output stands for that is integers, or real numbers made of them.
    `channels_last`: whether a convolution's channels are an output's last axis, where the graph shows it.
    `roles`: what outputs of finished detections have, if the graph says it: `boxes`, `scores`, `classes`.
    `classes`: how many names of classes an export of Ultralytics has; 0 for others.
    `points`: key points of an object and values of each, as such exports say; None for others.
    `is_prepared`: whether it is known how a picture becomes the input, so that no preset needs to say it.
    `scales`: the scale of each quantised input.
    """

    task: str = ""
    makers: Mapping[str, str] = field(default_factory=dict)
    operators: frozenset[str] = frozenset()
    normalised: bool | None = None
    steps: Mapping[str, float] = field(default_factory=dict)
    channels_last: Mapping[str, bool] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)
    classes: int = 0
    points: tuple[int, int] | None = None
    is_prepared: bool = False
    scales: Mapping[str, Quantised] = field(default_factory=dict)

    def ends_in_softmax(self, output: str) -> bool:
        """Return whether the values of an output are probabilities that add up to 1."""
        return self.makers.get(output) == "Softmax"


NO_HINTS: Final = Hints()
