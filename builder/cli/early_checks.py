"""Checks of a command's arguments that need no compiler, so that a mistake is reported at once.

Loading the compiler takes seconds. What is checked here is checked again where it is used; these checks only
report the same mistakes earlier. They are silent about what only the compiler can know.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from builder.errors import OTHER_FOLDER, PackageError, RecordsError, ShapeError
from builder.importer.model_path import check_exists, check_format
from builder.target.presets import PRESETS, unknown_target

if TYPE_CHECKING:  # which loads ONNX
    from builder.compiling.options import Options
    from builder.compiling.outline import Outline


def check_model(path: str, target: str) -> None:
    """Check the model's file and the target's name.

    Raises `ModelError` if there is no such file, or it has a format that must be converted.
    Raises `TargetError` if the target is neither a preset nor LLVM options nor JSON.
    """
    check_model_file(path)
    text = target.strip()
    if text not in PRESETS and not text.startswith("{") and text.split(maxsplit=1)[:1] != ["llvm"]:
        raise unknown_target(target)


def check_model_file(path: str) -> None:
    """Check that a model's file exists, and that its format can be imported."""
    check_format(Path(path))
    check_exists(Path(path))
    if Path(path).suffix.lower() in (".pt", ".pth"):
        from builder.importer.frameworks.pt2_archive import describe_pt

        raise describe_pt(Path(path))


def read_tensors(path: str, options: Options) -> Outline | None:
    """Read the model's tensors, with the shapes and values that the options give.

    Result: None if the file does not say enough.
    Raises `ShapeError` if shapes do not fit the model, or some are missing.
    """
    from builder.compiling.outline import fixed_outline

    try:
        return fixed_outline(path, **options.fixed_inputs(path))
    except ShapeError as error:
        if (note := sound_note(path, options.preprocess)) is not None:
            raise ShapeError(str(error), hint=note) from error
        raise


def sound_note(path: str, preprocess: str | None) -> str | None:
    """Return a line about the preset for recordings whose inputs the model has, unless a preset is given."""
    from builder.compiling.name_recognition import recognise_sound
    from builder.compiling.outline import tensor_names

    names = None if preprocess else tensor_names(path)
    preset = None if names is None else recognise_sound(*names)
    if preset is None:
        return None
    return f"the model's inputs and states have the names of {preset}'s: --preprocess {preset}"


def check_records(folder: str | None) -> None:
    """Check that a folder of tuning records exists."""
    if folder is not None and not Path(folder).is_dir():
        raise RecordsError(
            f"{folder}: expected a folder of tuning records, got none",
            hint=f"make it: edgebundle tune MODEL.onnx -o {folder}",
        )


def check_folder_of(path: str) -> None:
    """Check that a file can be written to its folder.

    Raises `PackageError` if the folder does not exist or cannot be written, or the path is a folder itself.
    """
    folder = Path(path).parent
    if not folder.is_dir():
        raise PackageError(
            f"{path}: the folder {folder} does not exist", hint=f"create it: mkdir -p {folder}"
        )
    if Path(path).is_dir():
        raise PackageError(
            f"{path}: expected a file, got a folder", hint=f"name the file: -o {path}/NAME.bundle"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PackageError(f"{path}: this user may not write to the folder {folder}", hint=OTHER_FOLDER)
    if os.statvfs(folder).f_bavail == 0:
        raise PackageError(f"{path}: the disk of the folder {folder} is full", hint=OTHER_FOLDER)
