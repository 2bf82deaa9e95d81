"""Read the inputs of a run, on this machine or on a board: arrays, an .npz file, a picture or a recording."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from agent.array_file import damage, read_arrays, reason_of
from agent.bundle.tensor_spec import TensorSpec
from builder.errors import ModelError, ShapeError

# A 24 megapixel photograph takes some 12 MB, 35 minutes of speech 64 MiB: what a request may have.
MAX_FILE_BYTES: Final = 64 << 20
_PICTURE_TYPES: Final = MappingProxyType(
    {".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".png": "image/png"}  # suffix -> content type
)

# How an .npz begins, and an .npy, which is refused with numpy's reason: its array has no name.
_ARCHIVE: Final = b"PK"
_TAKEN: Final = "a picture (.jpg, .png), a recording (.wav) or arrays (.npz)"
_ONE_ARRAY: Final = b"\x93NUMPY"
RECORDING_SUFFIXES: Final = (".wav", ".wave")
PICTURE_SUFFIXES: Final = tuple(_PICTURE_TYPES)

Inputs: TypeAlias = Mapping[str, npt.ArrayLike] | str | os.PathLike[str] | None
Arrays: TypeAlias = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that is not decoded yet.

    Attributes
    ----------
    content
        The bytes of the file.
    content_type
        `image/jpeg` or `image/png`.
    suffix
        The suffix of the file, such as `.jpg`.
    """

    content: bytes
    content_type: str
    suffix: str


@dataclass(frozen=True, slots=True)
class Sound:
    """A recording that is not decoded yet: the bytes of a WAV file."""

    content: bytes


def read_inputs(inputs: Inputs, specs: Sequence[TensorSpec]) -> Arrays | Picture | Sound:
    """Read the inputs that the user gave.

    Parameters
    ----------
    inputs
        Arrays by input name; the path of an .npz file of them; the path of a picture (.jpg, .jpeg or .png)
        or of a recording (.wav); or None for no arrays.
    specs
        The model's inputs.

    Returns
    -------
    Arrays, Picture or Sound
        Arrays for some or all of the inputs; shapes and dtypes are not checked yet.

    Raises
    ------
    ModelError
        If a file cannot be read or has another format.
    ShapeError
        If the model has no input of an array's name.
    """
    if inputs is None:
        return {}
    if isinstance(inputs, Mapping):
        arrays = {name: np.asarray(value) for name, value in inputs.items()}
    else:
        path = Path(inputs)
        suffix = path.suffix.lower()
        if suffix in _PICTURE_TYPES:
            return Picture(_read_file(path, "a picture"), _PICTURE_TYPES[suffix], suffix)
        if suffix in RECORDING_SUFFIXES:
            return Sound(_read_file(path, "a recording"))
        arrays = _read_npz(path)
    names = [spec.name for spec in specs]
    for name in arrays:
        if name not in names:
            raise ShapeError(
                f"the input tensor '{name[:80]}' is not in the graph. Expected inputs: '{', '.join(names)}'",
                hint=f"numpy.savez('inputs.npz', **{{{names[0]!r}: array}}) names them",
            )
    return arrays


def _read_npz(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    try:
        with path.open("rb") as raw:
            is_arrays = raw.read(len(_ONE_ARRAY)).startswith((_ARCHIVE, _ONE_ARRAY))
        if not is_arrays:
            raise ModelError(
                f"{path}: expected {_TAKEN if path.suffix != '.npz' else 'an .npz file'}, got another file",
                hint="the suffix says what a file is; numpy.savez('inputs.npz', data=array) writes arrays",
            )
        return read_arrays(path)
    except damage() as error:
        raise ModelError(
            f"{path}: expected an .npz file, a JPEG, a PNG or a WAV ({reason_of(error)})",
            hint="numpy.savez('inputs.npz', data=array) makes one",
        ) from error


def _read_file(path: Path, what: str) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ModelError(
                f"{path}: expected {what} of at most {MAX_FILE_BYTES} bytes, got {size}",
                hint="give a smaller one, or the arrays as .npz with --inputs",
            )
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})", hint="repair or remove it") from error
