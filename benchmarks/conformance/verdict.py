"""What became of a case, and how far an output may differ from the right one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.conformance.case import Array

# The kinds of verdicts, as the table's columns have them.
RIGHT: Final = "right"
FIXED: Final = "right, fixed"  # with inputs that hold a shape, an axis or a count fixed (`--input-values`)
REFUSED: Final = "refused"
REFUSED_RIGHT: Final = "refused, right"  # by our own comparison, although the numbers are right
WRONG: Final = "wrong"
DEAD: Final = "dead"
SLOW: Final = "slow"
TRACEBACK: Final = "traceback"
APART: Final = "apart"  # random numbers, and models whose outputs are constants
KINDS: Final = (RIGHT, FIXED, REFUSED, REFUSED_RIGHT, WRONG, DEAD, SLOW, TRACEBACK, APART)
FAULTS: Final = (REFUSED_RIGHT, WRONG, DEAD, SLOW, TRACEBACK)

# Our sums add in another order than those of a source; a wrong number differs by more.
RTOL: Final = 1e-3
ATOL: Final = 1e-5
RTOL_SHORT: Final = 1e-2  # of floats with fewer than 32 bits
ATOL_SHORT: Final = 2e-3


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a case.

    Attributes
    ----------
    name, operator
        The case's.
    kind
        One of `KINDS`.
    reason
        The message of a refusal, or what is wrong.
    seconds
        The time of the processor that it took.
    """

    name: str
    operator: str
    kind: str
    reason: str = ""
    seconds: float = 0.0

    @property
    def is_fault(self) -> bool:
        """Whether it breaks a promise."""
        return self.kind in FAULTS


def difference(found: Array, want: Array, rtol: float = 0.0, atol: float = 0.0) -> str:
    """Say how an output differs from the right one; empty if it does not.

    Parameters
    ----------
    found, want
        The two outputs.
    rtol, atol
        What the source allows; floats may differ by `RTOL` and `ATOL` in any case, integers by `atol`.
    """
    if found.shape != want.shape:
        return f"expected shape {list(want.shape)}, got {list(found.shape)}"
    if want.dtype.isbuiltin == 1 and want.dtype.kind not in "US" and found.dtype != want.dtype:
        return f"expected {want.dtype}, got {found.dtype}"
    return _counted(differing(found, want, rtol, atol), found, want)


def differing(found: Array, want: Array, rtol: float = 0.0, atol: float = 0.0) -> npt.NDArray[np.bool_]:
    """Return which elements of two outputs of one shape differ; parameters as in `difference`."""
    if want.dtype.kind in "US":
        return np.asarray(found.astype(str) != want.astype(str))
    if want.dtype.kind in "iu" and atol >= 1:  # steps of quantised numbers
        return np.asarray(np.abs(found.astype(np.float64) - want) > atol)
    if want.dtype.kind in "biu":
        return np.asarray(found != want)
    if want.dtype.kind == "c":
        return ~np.isclose(found, want, max(rtol, RTOL), max(atol, ATOL), equal_nan=True)
    is_short = want.dtype.itemsize < 4
    right = want.astype(np.float64)
    finite = np.abs(right[np.isfinite(right)])
    scale = max(1.0, float(np.median(finite))) if finite.size else 1.0
    return ~np.isclose(
        found.astype(np.float64),
        right,
        rtol=max(rtol, RTOL_SHORT if is_short else RTOL),
        atol=max(atol, (ATOL_SHORT if is_short else ATOL) * scale),
        equal_nan=True,
    )


def _counted(differs: Array, found: Array, want: Array) -> str:
    if not differs.any():
        return ""
    first = np.unravel_index(int(np.argmax(differs)), differs.shape)
    place = [int(i) for i in first]
    return (
        f"{np.count_nonzero(differs)} of {differs.size} elements differ: "
        f"expected {want[first]}, got {found[first]} at {place}"
    )
