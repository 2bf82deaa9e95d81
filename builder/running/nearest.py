"""How near a detector was that found nothing: its best score, and of which class.

A wrong preset and an empty picture look alike in an answer without objects; the best score tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from agent.bundle.detection import Objects
from agent.bundle.manifest import Manifest
from agent.bundle.processing import Detect, Pose, Postprocess
from agent.errors import EdgeError
from agent.runtime.postprocess import Postprocessor

# Smaller scores are written with an exponent.
_SMALLEST_PLAIN: Final = 0.0001


@dataclass(frozen=True, slots=True)
class Nearest:
    """The best object of a picture in which none is good enough.

    `threshold`: what its score had to exceed.
    `score`: its score; 0 if no score is above 0.
    `name`: its class's label, or `class 3`; empty if no score is above 0.
    """

    threshold: float
    score: float
    name: str

    def __str__(self) -> str:
        if not self.name:
            return f"nothing above {self.threshold:g}; no score is above 0"
        shown = f"{self.score:.4f}" if self.score >= _SMALLEST_PLAIN else f"{self.score:.1e}"
        return f"nothing above {self.threshold:g}; the best was {shown} ({self.name})"


def nearest_of(
    manifest: Manifest, labels: Sequence[bytes], outputs: Mapping[str, npt.NDArray[Any]]
) -> Nearest | None:
    """Return the best object of a model's outputs if its detector finds none; None if it finds some.

    `manifest`: the model's manifest.
    """
    steps = () if manifest.postprocess is None else manifest.postprocess.steps
    detectors = [step for step in steps if isinstance(step, Detect | Objects | Pose)]
    if len(detectors) != 1:
        return None
    if isinstance(detectors[0], Pose):
        changed: Detect | Objects | Pose = replace(detectors[0], score_threshold=0.0)
    else:
        changed = replace(detectors[0], score_threshold=0.0, max_detections=1)
    declared = Postprocess(tuple(changed if step is detectors[0] else step for step in steps))
    try:
        found = Postprocessor(declared, manifest.smallest_outputs, labels, manifest.real_outputs)(outputs)
    except EdgeError:
        return None
    prefix = next((name.removesuffix("boxes") for name in found if name.endswith("boxes")), "")
    scores = np.asarray(found[f"{prefix}scores"])
    if not scores.size:
        return Nearest(detectors[0].score_threshold, 0.0, "")
    named = found.get(f"{prefix}labels")
    number = np.asarray(found[f"{prefix}classes"])[0]
    name = named[0].decode() if isinstance(named, tuple) else f"class {number}"
    threshold, score = detectors[0].score_threshold, float(scores[0])
    return Nearest(threshold, score, name) if score <= threshold else None
