"""Calibration data: pictures through the declared preprocessing, or arrays from .npz files.

Promises samples that fit the model's inputs: names, shapes, dtypes, finite numbers. Pictures are prepared by
the agent's own code, as on a device. Only one sample, or one file of samples, is in memory at a time.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from agent.array_file import damage, read_arrays, reason_of
from agent.bundle.processing import Preprocess
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import EdgeError
from agent.runtime.preprocess import Preprocessor
from builder.compiling import declarations
from builder.compiling.sample_inputs import make_inputs
from builder.errors import ModelError, ShapeError
from builder.importer import ImportedModel
from builder.quantising.session import Sample
from builder.running.inputs import Picture, read_inputs

# More samples hardly change the ranges: the usual advice is 128 to 512. The rest of a larger set is left out.
MAX_SAMPLES: Final = 320
# With fewer, a range may miss values that later pictures have.
FEW_SAMPLES: Final = 32
_RANDOM_SAMPLES: Final = 4  # if there are no calibration data
# Arrays of one .npz file, decompressed; larger sets fit as a folder of such files.
MAX_NPZ_BYTES: Final = 2 << 30
MAX_FILES: Final = 1_000_000  # of a folder: its names are sorted in memory
_PICTURES: Final = frozenset({".jpg", ".jpeg", ".png"})
_HINT: Final = (
    "give a folder of pictures with --preprocess, or an .npz file with an array for each input, "
    "samples along its first axis"
)

Array = NDArray[Any]
Source: TypeAlias = str | os.PathLike[str] | Mapping[str, ArrayLike]


@dataclass(frozen=True, slots=True)
class CalibrationData:
    """Samples by number.

    `names`: the name of each sample: the path of its picture within the folder, or its number.
    `read`: returns a sample: input name -> array.
    `left_out`: how many samples of the source are not used, because it has more than `MAX_SAMPLES`.
    """

    names: tuple[str, ...]
    read: Callable[[int], Sample]
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.names)

    def evenly(self, count: int) -> list[int]:
        """Numbers of at most `count` samples, evenly spaced."""
        return _evenly(len(self), count)


def samples_for(model: ImportedModel, source: Source | None, preprocess: str | None) -> CalibrationData:
    """Open calibration data as `open_calibration` does; without any, make a few random inputs."""
    declared = declarations.preprocess(preprocess, model.inputs) if preprocess else None
    if source is not None:
        return open_calibration(source, model.inputs, declared)
    before = declared or model.preprocess

    def read(index: int) -> Sample:
        return make_inputs(model.inputs, model.onnx, before, seed=index)

    return CalibrationData(tuple(str(index) for index in range(_RANDOM_SAMPLES)), read)


def open_calibration(
    source: Source, inputs: Sequence[TensorSpec], preprocess: Preprocess | None = None
) -> CalibrationData:
    """Open calibration data.

    `source`: a folder of JPEG and PNG pictures, in subfolders too; an .npz file with one array for each
        input, samples along its first axis; a folder of such files; or these arrays by input name.
    `inputs`: the model's inputs, with static shapes.
    Raises `ModelError` if the source has no samples, or a file cannot be read.
    Raises `ShapeError` if names, shapes or dtypes do not fit the inputs.
    """
    if isinstance(source, Mapping):
        arrays = {name: np.asarray(value) for name, value in source.items()}
        headers = {name: (array.shape, array.dtype) for name, array in arrays.items()}
        count = _count(headers, inputs, "the calibration data")
        return _selected([str(i) for i in range(count)], lambda i: _sample(arrays, inputs, i, f"sample {i}"))
    path = Path(source)
    if path.is_dir():
        return _folder(path, inputs, preprocess)
    if not path.exists():
        raise ModelError(f"no such file or folder: {path}", hint=_HINT)
    if path.suffix.lower() in _PICTURES:
        raise ModelError(f"expected a folder of pictures, got one picture: {path}", hint=_HINT)
    return _npz_files([path], [path.name], inputs)


def _folder(path: Path, inputs: Sequence[TensorSpec], preprocess: Preprocess | None) -> CalibrationData:
    files: list[Path] = []
    for root, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(root) / name for name in names if not name.startswith(".")]
        if len(files) > MAX_FILES:
            raise ModelError(
                f"expected at most {MAX_FILES} files, got more: {path}",
                hint="give a folder with a few hundred samples",
            )
    files.sort(key=lambda file: file.relative_to(path).parts)
    pictures = [file for file in files if file.suffix.lower() in _PICTURES]
    archives = [file for file in files if file.suffix.lower() == ".npz"]
    if pictures and archives:
        raise ModelError(f"expected pictures or .npz files, got both: {path}", hint="use two folders")
    if archives:
        return _npz_files(archives, [file.relative_to(path).as_posix() for file in archives], inputs)
    if not pictures:
        found = "only others" if files else "an empty folder"
        raise ModelError(f"expected JPEG, PNG or .npz files, got {found}: {path}", hint=_HINT)
    if preprocess is None:
        raise ModelError(
            f"expected a preprocess for the pictures in {path}, got none",
            hint="add --preprocess, as for `edgebundle compile`: a preset such as imagenet, or a TOML file",
        )
    others = [spec.name for spec in inputs if spec.name != preprocess.input]
    if others:
        raise ShapeError(
            f"expected values for all inputs, got only pictures for '{preprocess.input}': "
            f"'{', '.join(others)[:200]}' would be missing",
            hint="give prepared arrays for all inputs as an .npz file",
        )
    [spec] = [spec for spec in inputs if spec.name == preprocess.input]
    return _pictures(path, pictures, spec, preprocess)


def _pictures(path: Path, files: list[Path], spec: TensorSpec, declared: Preprocess) -> CalibrationData:
    prepare = Preprocessor(declared, spec)

    def read(index: int) -> Sample:
        picture = read_inputs(files[index], [spec])
        assert isinstance(picture, Picture)
        value = np.empty(spec.shape, spec.dtype)
        try:
            prepare(prepare.decode(picture.content, picture.content_type), value)
        except EdgeError as error:
            raise ModelError(f"{files[index]}: {error}", hint="repair or remove that picture") from error
        return {spec.name: value}

    return _selected([file.relative_to(path).as_posix() for file in files], read)


def _npz_files(files: list[Path], names: list[str], inputs: Sequence[TensorSpec]) -> CalibrationData:
    counts = [_count(_headers(file), inputs, str(file)) for file in files]
    places = [(file, i) for file, count in enumerate(counts) for i in range(count)]
    labels = [
        str(i) if len(files) == 1 else names[file] if counts[file] == 1 else f"{names[file]}/{i}"
        for file, i in places
    ]
    opened: dict[int, dict[str, Array]] = {}  # the file that was read last

    def read(index: int) -> Sample:
        file, i = places[index]
        if file not in opened:
            opened.clear()
            opened[file] = _arrays(files[file])
        return _sample(opened[file], inputs, i, f"{files[file]}: sample {i}")

    return _selected(labels, read)


def _selected(names: list[str], read: Callable[[int], Sample]) -> CalibrationData:
    chosen = _evenly(len(names), MAX_SAMPLES)
    return CalibrationData(
        tuple(names[i] for i in chosen), lambda i: read(chosen[i]), len(names) - len(chosen)
    )


def _evenly(total: int, count: int) -> list[int]:
    if total <= count:
        return list(range(total))
    return [i * total // count for i in range(count)]


Headers: TypeAlias = Mapping[str, tuple[tuple[int, ...], "np.dtype[Any]"]]


def _headers(path: Path) -> Headers:
    """Shapes and dtypes of an .npz file's arrays, without their data."""
    found: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
            if size > MAX_NPZ_BYTES:
                raise ModelError(
                    f"{path}: expected at most {MAX_NPZ_BYTES} bytes of arrays, got {size}",
                    hint="split them into a folder of .npz files",
                )
            for entry in archive.infolist():
                with archive.open(entry) as file:
                    version = np.lib.format.read_magic(file)
                    read = np.lib.format.read_array_header_1_0
                    if version != (1, 0):
                        read = np.lib.format.read_array_header_2_0
                    shape, _, dtype = read(file)
                found[entry.filename.removesuffix(".npy")] = (shape, dtype)
    except damage() as error:
        raise ModelError(
            f"{path}: expected an .npz file of arrays ({reason_of(error)})", hint=_HINT
        ) from error
    return found


def _arrays(path: Path) -> dict[str, Array]:
    try:
        return read_arrays(path)
    except damage() as error:
        raise ModelError(f"{path}: cannot be read ({reason_of(error)})", hint=_HINT) from error


def _count(headers: Headers, inputs: Sequence[TensorSpec], source: str) -> int:
    """How many samples arrays of these shapes hold."""
    names = [spec.name for spec in inputs]
    if unknown := [name for name in headers if name not in names]:
        raise ShapeError(
            f"{source}: expected arrays named '{', '.join(names)[:200]}', got '{unknown[0][:80]}'",
            hint=f"numpy.savez('calibration.npz', **{{{names[0]!r}: array}}) names them",
        )
    if missing := [name for name in names if name not in headers]:
        raise ShapeError(
            f"{source}: expected an array for each input, got none for '{missing[0][:80]}'",
            hint=f"numpy.savez('calibration.npz', **{{{missing[0]!r}: array}}) names them",
        )
    counts = {}
    for spec in inputs:
        shape, dtype = headers[spec.name]
        _check_dtype(spec, dtype, source)
        if shape == spec.shape:
            counts[spec.name] = 1
        elif shape[1:] == spec.shape:
            counts[spec.name] = shape[0]
        elif spec.shape and shape[1:] == spec.shape[1:]:
            counts[spec.name] = shape[0] // max(spec.shape[0], 1)
        else:
            wanted = ", ".join(str(dim) for dim in (spec.shape[1:] if spec.shape[:1] == (1,) else spec.shape))
            raise ShapeError(
                f"{source}: expected shape [samples, {wanted}] for '{spec.name}', got {list(shape)[:16]}",
                hint="the first axis counts the samples; --input-shapes sets the model's own dimensions",
            )
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} for '{name}'" for name, count in counts.items())
        raise ShapeError(
            f"{source}: expected equally many samples for all inputs, got {found[:200]}",
            hint="the first axis of each array counts the samples: leave out the rest of the longer ones",
        )
    count = next(iter(counts.values()))
    rows = [headers[spec.name][0][0] for spec in inputs if headers[spec.name][0] != spec.shape]
    if count == 0 and any(rows):
        raise ShapeError(
            f"{source}: expected a batch of {inputs[0].shape[0]} rows, got {max(rows)}",
            hint="give more samples: the model computes as many at once; --input-shapes sets its batch",
        )
    if count == 0:
        raise ModelError(f"{source}: expected at least one sample, got none", hint=_HINT)
    return count


def _check_dtype(spec: TensorSpec, dtype: np.dtype[Any], source: str) -> None:
    kinds = {"f": "f", "i": "iu", "u": "iu", "b": "b"}
    wanted = np.dtype(spec.dtype)
    if dtype.kind not in kinds.get(wanted.kind, ""):
        raise ShapeError(
            f"{source}: expected {wanted} for '{spec.name}', got {dtype}",
            hint="give the arrays as the model takes them, after the preprocessing",
        )


def _sample(arrays: Mapping[str, Array], inputs: Sequence[TensorSpec], index: int, where: str) -> Sample:
    sample = {}
    for spec in inputs:
        array = arrays[spec.name]
        if array.shape == spec.shape:
            value = array
        elif array.shape[1:] == spec.shape:
            value = array[index]
        else:
            batch = spec.shape[0]
            value = array[index * batch : (index + 1) * batch]
        value = np.asarray(value)
        wanted = np.dtype(spec.dtype)
        if wanted.kind == "f" and not np.isfinite(value).all():
            bad = float(value[~np.isfinite(value)].ravel()[0])
            raise ModelError(
                f"{where}: expected finite numbers for '{spec.name}', got {bad}",
                hint="leave out or repair that sample",
            )
        if wanted.kind in "iu" and value.size:
            limits = np.iinfo(wanted)
            if int(value.min()) < limits.min or int(value.max()) > limits.max:
                raise _out_of_range(where, spec)
        with np.errstate(over="ignore"):
            converted = value.astype(wanted)
        if wanted.kind == "f" and not np.isfinite(converted).all():
            raise _out_of_range(where, spec)
        sample[spec.name] = np.ascontiguousarray(converted).reshape(spec.shape)
    return sample


def _out_of_range(where: str, spec: TensorSpec) -> ShapeError:
    return ShapeError(
        f"{where}: expected {np.dtype(spec.dtype)} for '{spec.name}', got a number out of range",
        hint="leave out or repair that sample",
    )


def describe(data: CalibrationData) -> str:
    """A line such as `320 calibration samples, evenly chosen from 5000`."""
    plural = "" if len(data) == 1 else "s"
    chosen = f", evenly chosen from {len(data) + data.left_out}" if data.left_out else ""
    return f"{len(data)} calibration sample{plural}{chosen}"


def resolution(data: CalibrationData) -> float:
    """The smallest difference in accuracy that the samples can show, in percentage points."""
    return 100.0 / len(data) if len(data) else math.inf
