"""Flags that TVMC had and that are not here: what to do instead, for whoever types one from a tutorial.

docs/from-tvmc.md has the same, for reading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_LAYOUT: Final = "layouts are chosen for each target; leave it out"
_TARGET: Final = 'say it in the target: --target "llvm -mcpu=NAME -mattr=+FEATURE"'
_LINKED: Final = "the linker comes with edgebundle, for every target; leave it out"
_EXECUTOR: Final = "the graph executor is the only one; leave it out"
_PASSES: Final = "the passes are part of a version of edgebundle; leave it out"

# Flag, without what follows an equals sign -> what to do.
INSTEAD: Final = {
    "--cross-compiler": _LINKED,
    "--cross-compiler-options": _LINKED,
    "--output-format": "a bundle is the only format; -o NAME.bundle",
    "-f": "a bundle is the only format; -o NAME.bundle",
    "--model-format": "the file's own suffix says it; leave it out",
    "--desired-layout": _LAYOUT,
    "--desired-layout-ops": _LAYOUT,
    "--executor": _EXECUTOR,
    "--runtime": _EXECUTOR,
    "--runtime-cpp-system-lib": _EXECUTOR,
    "--module-name": "--name, which is also its name on devices",
    "--disabled-pass": _PASSES,
    "--pass-config": _PASSES,
    "--instruments": _PASSES,
    "--dump-code": "`edgebundle inspect` shows the graph and the kernels",
    "--target-host": "kernels are for CPUs, so host and target are one: --target alone",
    "--target-llvm-mcpu": _TARGET,
    "--target-llvm-mattr": _TARGET,
    "--target-llvm-mtriple": 'say it in the target: --target "llvm -mtriple=aarch64-linux-gnu -mcpu=NAME"',
    "--enable-autoscheduler": "one search does what both did; leave it out",
    "--include-simple-tasks": "every operator with a choice is a task: --tasks list shows them",
    "--num-cores": "the target has them; measuring takes --threads",
    "--options": "edgebundle VERB --help lists them",
    "--list-options": "edgebundle VERB --help lists them",
    "--benchmark": "--print-time, with --repeat and --number",
    "--project-dir": "microTVM is not part of edgebundle: boards run Linux",
    "--micro": "microTVM is not part of edgebundle: boards run Linux",
}


def instead_of(unknown: Sequence[str]) -> str | None:
    """Return what to do instead of the first of these arguments that TVMC knew, or None.

    Parameters
    ----------
    unknown
        Arguments that were not understood, in their order.
    """
    for argument in unknown:
        flag = argument.partition("=")[0]
        if flag in INSTEAD:
            return f"{flag} was TVMC's: {INSTEAD[flag]}"
    return None
