"""Requirements of benchmarks, checked before any work: installed programs, and root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping


class RequirementError(Exception):
    """A benchmark needs something that this machine lacks; the message is one line that says what to do."""


def require_programs(packages: Mapping[str, str]) -> None:
    """Check that programs are on the `PATH`.

    Parameters
    ----------
    packages
        Program -> the Debian package that contains it.

    Raises
    ------
    RequirementError
        If any is missing; the message names all missing programs and the command that installs them.
    """
    missing = [program for program in packages if shutil.which(program) is None]
    if missing:
        needed = sorted({packages[program] for program in missing})
        raise RequirementError(f"{', '.join(missing)} not found: apt-get install {' '.join(needed)}")
    for program in packages:
        if packages[program] == "qemu-user" and not takes_plugins(program):
            raise RequirementError(
                f"expected a {program} that loads plugins, got one that is linked statically: "
                "Debian 12's counts instructions, Debian 13's does not"
            )


def takes_plugins(emulator: str) -> bool:
    """Return whether an emulator can load a plugin; if it cannot be started, what follows says why."""
    try:
        done = subprocess.run([emulator, "-plugin", "none", ""], capture_output=True, text=True, check=False)
    except OSError:
        return True
    return "unknown option" not in done.stderr


def require_root(purpose: str) -> None:
    """Check that this process runs as root.

    Parameters
    ----------
    purpose
        The subject of "needs root" in the message, such as "counting instructions".

    Raises
    ------
    RequirementError
        If it is not root.
    """
    if os.geteuid() != 0:
        raise RequirementError(f"{purpose} needs root: run it with sudo")
