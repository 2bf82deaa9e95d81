"""Find the files that a user names as inputs: files, folders and patterns.

Promises each file once, in a fixed order, and at least one.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from builder.errors import ModelError
from builder.running.inputs import PICTURE_SUFFIXES, RECORDING_SUFFIXES
from builder.spelling import similar_file

# A folder of a day's pictures; a longer list is a mistake, such as a pattern that begins at /.
MAX_FILES: Final = 100_000
_TAKEN: Final = (*PICTURE_SUFFIXES, *RECORDING_SUFFIXES)
_SUFFIXES: Final = f"pictures and recordings end in {', '.join(_TAKEN)}"


def input_files(names: Sequence[str]) -> list[Path]:
    """Return the files that are meant.

    Parameters
    ----------
    names
        Files; folders, whose pictures and recordings are taken, sorted by name; or patterns such as
        `photos/*.jpg`, for shells that do not expand them and for quoted ones.

    Raises
    ------
    ModelError
        If a folder or a pattern has no files, or there are too many.
    """
    found: dict[Path, None] = {}
    for name in names:
        path = Path(name)
        if path.is_dir():
            inside = sorted(each for each in path.iterdir() if each.suffix.lower() in _TAKEN)
            if not inside:
                raise ModelError(f"{name}: expected pictures in the folder, got none", hint=_SUFFIXES)
            found |= dict.fromkeys(inside)
        elif not path.exists() and glob.has_magic(name):
            # Path.glob takes no absolute pattern.
            names_there = glob.glob(name, recursive=True)  # noqa: PTH207
            matched = sorted(path for path in map(Path, names_there) if path.is_file())
            if not matched:
                raise ModelError(
                    f"{name}: expected files that match, got none",
                    hint=similar_file(name, otherwise="put the pattern in quotes, such as 'photos/*.jpg'"),
                )
            found |= dict.fromkeys(matched)
        else:
            found[path] = None
        if len(found) > MAX_FILES:
            raise ModelError(
                f"expected at most {MAX_FILES} inputs, got more", hint="give them in several calls"
            )
    return list(found)
