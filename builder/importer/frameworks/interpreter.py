"""Find a Python that has the packages of a framework.

This Python is asked first, then the active virtual environment, conda's, and `python3` of the `PATH`. A user
who names one gets that one or an error. Nothing is installed, and no package is imported: only looked for.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from builder.errors import ModelError

# Names a Python with the framework, for those who cannot use a flag.
VARIABLE: Final = "EDGEBUNDLE_PYTHON"
_TIMEOUT_S: Final = 60
# The current folder may be a stranger's: it leaves the path of modules before anything else is imported.
_MISSING: Final = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import importlib.util; "
    "print(' '.join(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"
)

# What a Python reads: its installations, the folders of its modules, and where .pth files find others.
_PLACES: Final = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import json; "
    "print(json.dumps([sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, *sys.path]))"
)


def find_python(alternatives: Sequence[Sequence[str]], wanted: str | None, model: str, install: str) -> str:
    """Find a Python that has the packages of one of several alternatives.

    `alternatives`: names to import, such as `torch`; the first alternative is what messages name.
    `wanted`: path of a Python, or None to look for one.
    `install`: what to install, as arguments of `pip install`.
    Raises `ModelError` if there is none, or the one that is wanted lacks a package.
    """
    wanted = wanted or os.environ.get(VARIABLE) or None
    if wanted is not None:
        found = [_missing(wanted, packages) for packages in alternatives]
        missing = found[0]
        if missing is None:
            raise ModelError(
                f"expected a Python that runs, got {wanted}",
                hint="name its program: --python VENV/bin/python",
            )
        if () not in found:
            raise ModelError(
                f"importing {model} needs {' and '.join(missing)}, which {wanted} does not have",
                hint=f"{wanted} -m pip install {install}",
            )
        return wanted
    for packages in alternatives:
        if all(importlib.util.find_spec(name) is not None for name in packages):
            return sys.executable
    for candidate in _candidates():
        if any(_missing(candidate, packages) == () for packages in alternatives):
            return candidate
    raise ModelError(
        f"importing {model} needs {' and '.join(alternatives[0])}, and no Python was found that has them",
        hint=f"make one: python3 -m venv framework && framework/bin/pip install {install}; "
        "then add --python framework/bin/python",
    )


def places_of(python: str) -> tuple[Path, ...]:
    """Return what a Python reads, its installation and the folders of its modules; empty if it fails."""
    try:
        found = json.loads(_printed([python, "-c", _PLACES]) or "[]")
    except ValueError:
        return ()
    if not found:
        return ()
    # The program itself may be a link to a Python elsewhere.
    return (Path(python).absolute(), *(Path(each) for each in found if isinstance(each, str) and each))


def _candidates() -> Iterator[str]:
    """Yield other Pythons that the user works with."""
    seen = {Path(sys.executable)}
    for folder in (os.environ.get("VIRTUAL_ENV"), os.environ.get("CONDA_PREFIX")):
        if folder:
            seen.add(path := Path(folder) / "bin" / "python")
            if path.exists():
                yield str(path)
    for name in ("python3", "python"):
        found = shutil.which(name)
        if found is not None and Path(found) not in seen:
            seen.add(Path(found))
            yield found


def _missing(python: str, packages: Sequence[str]) -> tuple[str, ...] | None:
    """Return which packages a Python lacks; None if it does not run."""
    printed = _printed([python, "-c", _MISSING, *packages])
    return None if printed is None else tuple(printed.split())


def _printed(command: Sequence[str]) -> str | None:
    """Return what a Python of the user's prints; None if it does not run."""
    try:
        ended = subprocess.run(  # noqa: S603 - a Python of the user's
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None
    return None if ended.returncode else ended.stdout.decode(errors="replace")
