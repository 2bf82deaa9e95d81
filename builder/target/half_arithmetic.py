"""Whether a target computes in float16, not only stores numbers so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from builder.errors import TargetError
from builder.target.device_target import DeviceTarget

# Architecture -> the feature, as /proc/cpuinfo names it: FEAT_FP16 of ARMv8.2, and AVX512-FP16. A bundle that
# needs it says so, and a device without it refuses the bundle, as for every feature.
FEATURES: Final[Mapping[str, str]] = {"aarch64": "asimdhp", "x86_64": "avx512_fp16"}


def computes_halves(target: DeviceTarget) -> bool:
    """Whether a target has vector instructions for arithmetic in float16."""
    return FEATURES.get(target.arch) in target.features


def require_half_arithmetic(target: DeviceTarget) -> None:
    """Refuse a target without vector instructions for arithmetic in float16.

    Raises
    ------
    TargetError
        If it has none.
    """
    if not computes_halves(target):
        raise TargetError(
            f"--precision fp16: expected a target that computes in float16, such as rpi5 or an x86-64 with "
            f"AVX512-FP16, got {target.name} ({target.cpu}), where it would be slower than float32",
            hint="weights-fp16 only stores the weights in float16, and runs on any target",
        )
