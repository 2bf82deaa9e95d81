"""The result of a command, and the types of the fixtures that run one."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """Exit code, standard output, and the lines of standard error."""

    code: int
    out: str
    err: list[str]


Terminal = Callable[..., Result]
# Returns what a process would; the arguments are those of the command.
Edgebundle = Callable[..., "subprocess.CompletedProcess[str]"]
