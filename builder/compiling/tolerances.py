"""How far numbers may differ: without imports, so that the command line can show them without loading TVM."""

from __future__ import annotations

from typing import Final

# Largest relative error against the reference. Float32 sums of a few thousand terms in another order differ
# by 1e-6 to 1e-5.
PARITY: Final = 1e-4
# A device's self-test: looser than parity, because the device's libm and FMA units round differently again.
SELF_TEST_RTOL: Final = 10 * PARITY
SELF_TEST_ATOL: Final = 1e-6


# One step of a quantised output that uses half of its byte's range.
STEP: Final = 1 / 64

# The largest step from one float16 to the next, relative to the smaller one.
HALF_STEP: Final = 2.0**-10


def self_test_rtol(parity_error: float, *, half: bool = False) -> float:
    """Return the tolerance of a device's self-test for a bundle whose error against the reference is known.

    What was granted when the bundle was compiled must pass on the device too.

    `parity_error`: the error against the reference, which for float16 outputs leaves out one step of
        rounding.
    """
    granted = max(SELF_TEST_RTOL, 10 * float(f"{parity_error:.1g}"))
    return granted + HALF_STEP if half else granted
