"""Whether a target computes in float16, not only stores numbers so."""

from __future__ import annotations

from typing import Final

from builder.errors import TargetError
from builder.target.device_target import DeviceTarget

# FEAT_FP16 of ARMv8.2, as /proc/cpuinfo names it. A bundle that needs it says so, and a device without it
# refuses the bundle, as for every feature.
FEATURE: Final = "asimdhp"


def require_half_arithmetic(target: DeviceTarget) -> None:
    """Refuse a target without vector instructions for arithmetic in float16.

    Raises
    ------
    TargetError
        If it has none.
    """
    if FEATURE not in target.features:
        raise TargetError(
            f"--precision fp16: expected a target that computes in float16, such as rpi5, got {target.name} "
            f"({target.cpu}), where it would be slower than float32",
            hint="weights-fp16 only stores the weights in float16, and runs on any target",
        )
