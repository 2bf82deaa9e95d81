"""Arrays at the executor's boundary: checks those that callers pass in, makes those that they get back."""

from __future__ import annotations

from typing import Any

import numpy as np

from agent.bundle.tensor_spec import TensorSpec
from agent.errors import InputError
from agent.runtime.storage import Array, is_aligned


class HostTensor(np.ndarray[Any, np.dtype[Any]]):
    """A numpy array that also has `.numpy()`, as TVM's `get_output` returned."""

    def numpy(self) -> Array:
        """Return a plain array of the same values."""
        return np.array(self)


def copy_of(source: Array, out: Array | None) -> Array:
    """Copy an array into `out`, which must have its shape and dtype, or into a new `HostTensor`."""
    if out is None:
        return source.copy().view(HostTensor)
    np.copyto(out, source)
    return out


def as_array(value: object, spec: TensorSpec) -> Array:
    """Return a caller's value as an array: numpy and DLPack arrays unchanged, numbers in the spec's dtype.

    Anything else raises InputError.
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
            f"input {spec.name!r}: expected {spec.dtype}, got {type(value).__name__}: {error}"
        ) from error


def check_fits(what: str, value: object, spec: TensorSpec) -> None:
    """Check that a value is an array of a spec's dtype and shape.

    Parameters
    ----------
    what
        The value's name in error messages, such as `input 'x'`.

    Raises
    ------
    InputError
        If it is not such an array.
    """
    if not isinstance(value, np.ndarray):
        raise InputError(f"{what}: expected a numpy array, got {type(value).__name__}")
    if value.dtype != spec.dtype or value.shape != spec.shape:
        raise InputError(
            f"{what}: expected {spec.dtype}[{','.join(map(str, spec.shape))}], "
            f"got {value.dtype}[{','.join(map(str, value.shape))}]"
        )


def check_adoptable(what: str, value: Array, spec: TensorSpec) -> None:
    """Check that kernels may use an array's memory as it is.

    `what` is its name in messages, such as `input 'x'`. An array that does not fit, is read-only, not
    contiguous, or not aligned to 64 bytes raises InputError.
    """
    check_fits(what, value, spec)
    if not value.flags.writeable:
        raise InputError(f"{what}: expected writable memory, got a read-only array")
    if not is_aligned(value):
        raise InputError(
            f"{what}: expected contiguous memory aligned to 64 bytes, got strides {value.strides} at "
            f"{value.ctypes.data:#x}",
            hint="use set_input, which copies from any array",
        )
