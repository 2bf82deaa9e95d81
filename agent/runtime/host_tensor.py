"""Arrays at the executor's boundary: what callers hand in is checked, what they get back is made."""

from __future__ import annotations

from typing import Any

import numpy as np

from agent.bundle.tensor_spec import TensorSpec
from agent.errors import InputError
from agent.runtime.storage import Array, is_aligned


class HostTensor(np.ndarray[Any, np.dtype[Any]]):
    """A numpy array that answers to `.numpy()` too, as what TVM's `get_output` returned did."""

    def numpy(self) -> Array:
        """Return a plain array of the same values."""
        return np.array(self)


def copy_of(source: Array, out: Array | None) -> Array:
    """Copy into `out`, which fits, or into a new array."""
    if out is None:
        return source.copy().view(HostTensor)
    np.copyto(out, source)
    return out


def as_array(value: object, spec: TensorSpec) -> Array:
    """Return a caller's value as an array: what speaks DLPack as it is, numbers in the spec's dtype.

    Raises
    ------
    InputError
        If it is neither.
    """
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__dlpack__"):
        array: Array = np.from_dlpack(value)
        return array
    try:
        return np.asarray(value, dtype=spec.dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"input {spec.name!r} expects {spec.dtype}, came {type(value).__name__}: {error}"
        ) from error


def check_fits(what: str, value: object, spec: TensorSpec) -> None:
    """Check that an array has a spec's dtype and shape.

    Raises
    ------
    InputError
        If it has not.
    """
    if not isinstance(value, np.ndarray):
        raise InputError(f"{what} is a numpy array, not {type(value).__name__}")
    if value.dtype != spec.dtype or value.shape != spec.shape:
        raise InputError(
            f"{what} expects {spec.dtype}[{','.join(map(str, spec.shape))}], "
            f"came {value.dtype}[{','.join(map(str, value.shape))}]"
        )


def check_adoptable(what: str, value: Array, spec: TensorSpec) -> None:
    """Check that a kernel may be given an array's memory as it is.

    Raises
    ------
    InputError
        If the array does not fit, is read-only, not contiguous, or not on a 64-byte line.
    """
    check_fits(what, value, spec)
    if not value.flags.writeable:
        raise InputError(f"{what} needs writable memory, a read-only array came")
    if not is_aligned(value):
        raise InputError(
            f"{what} needs contiguous memory on a 64-byte line, came strides {value.strides} at "
            f"{value.ctypes.data:#x}",
            hint="set_input copies from any array",
        )
