"""The cores that have shipped records, and the models that supply the operators to search."""

from __future__ import annotations

from typing import Final

TARGETS: Final = {
    "x86-avx512": "host",
    "x86-avx2": "x86-64-v3",
    "cortex-a53": "rpi3",
    "cortex-a72": "rpi4",
    "cortex-a76": "rpi5",
}
MODELS: Final = ("resnet18", "resnet50", "resnet50-v2", "mobilenetv2", "bert", "slim-320")
