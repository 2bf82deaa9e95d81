"""Programs that tests need beside Python; `make test` installs them as root (`packaging/needs.txt`)."""

from __future__ import annotations

import importlib
import os
import shutil
from types import ModuleType

import pytest

from benchmarks.requirements import RequirementError, require_programs


def missing_to_count() -> str:
    """Return what is missing to count the instructions of programs for x86-64, or nothing."""
    try:
        require_programs({"gcc": "gcc", "qemu-x86_64": "qemu-user"})
    except RequirementError as error:
        return str(error)
    return ""


def needed(*names: str) -> str:
    """Return the path of the first of these programs that is installed; skip the test without any.

    Parameters
    ----------
    names
        Names of one program.
    """
    for name in names:
        path = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if path is not None:
            return path
    pytest.skip(f"{names[0]} is not installed (`make test` installs it as root)")


def needed_lightgbm() -> ModuleType:
    """Return LightGBM; skip the test, or the file, where GCC's library of threads is missing."""
    try:
        return importlib.import_module("lightgbm")
    except OSError as error:
        pytest.skip(f"{error} (`make test` installs it as root)", allow_module_level=True)
