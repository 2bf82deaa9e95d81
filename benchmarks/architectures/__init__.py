"""ONNX models generated from their architectures, with seeded weights.

Benchmarks and tests need the real shapes and export forms, not the trained values. These models have the
operators, attributes, names and quirks of the usual export of each network. Their weights keep activations at
a sane scale through all layers, so that comparing logits means something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import onnx

from benchmarks.architectures.bert import bert
from benchmarks.architectures.efficientnet import efficientnet_b0
from benchmarks.architectures.mobilenet import mobilenetv2
from benchmarks.architectures.mobilenet_v3 import mobilenetv3
from benchmarks.architectures.resnet import resnet18, resnet50, resnet50_v2
from benchmarks.architectures.slim320 import slim320

ARCHITECTURES: Final[Mapping[str, Callable[..., onnx.ModelProto]]] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "resnet50-v2": resnet50_v2,
    "mobilenetv2": mobilenetv2,
    "mobilenetv3": mobilenetv3,
    "efficientnet-b0": efficientnet_b0,
    "bert": bert,
    "slim-320": slim320,
}


def generate(name: str, seed: int = 0, **parameters: int) -> onnx.ModelProto:
    """Generate a network.

    Parameters
    ----------
    name
        One of `ARCHITECTURES`.
    seed
        Seed of the weights: the same seed gives the same bytes.
    parameters
        The parameters of the architecture: `bert` has `layers`, `hidden`, `heads`, `vocabulary` and
        `positions`; `slim-320` has `height` and `width` (pixels); the other image networks have `size`
        (pixels) and `classes`, and the ResNets `width` (channels of the first stage).

    Raises
    ------
    KeyError
        If there is no architecture called `name`.
    """
    if name not in ARCHITECTURES:
        raise KeyError(f"expected one of {', '.join(ARCHITECTURES)}, got '{name}'")
    return ARCHITECTURES[name](seed=seed, **parameters)
