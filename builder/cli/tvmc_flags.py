"""Flags that TVMC had and edgebundle does not, with what to do instead, for users who follow a tutorial.

The table in docs/from-tvmc.md says the same; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_LAYOUT: Final = "the layout is chosen for each target; omit this flag"
_TARGET: Final = 'put it in the target: --target "llvm -mcpu=NAME -mattr=+FEATURE"'
_LINKED: Final = "edgebundle brings a linker for every target; omit this flag"
_EXECUTOR: Final = "the graph executor is the only executor; omit this flag"
_PASSES: Final = "passes cannot be configured; omit this flag"
_LINUX: Final = "microTVM is not supported: boards run Linux"

# Flag, without an equals sign and what follows it -> what to do instead.
INSTEAD: Final = {
    "--cross-compiler": _LINKED,
    "--cross-compiler-options": _LINKED,
    "--output-format": "a bundle is the only format: -o NAME.bundle",
    "-f": "a bundle is the only format: -o NAME.bundle",
    "--model-format": "the file's suffix determines the format; omit this flag",
    "--desired-layout": _LAYOUT,
    "--desired-layout-ops": _LAYOUT,
    "--executor": _EXECUTOR,
    "--runtime": _EXECUTOR,
    "--runtime-cpp-system-lib": _EXECUTOR,
    "--module-name": "use --name, which is also the model's name on devices",
    "--disabled-pass": _PASSES,
    "--pass-config": _PASSES,
    "--instruments": _PASSES,
    "--dump-code": "edgebundle inspect FILE --html OUT draws the graph; mod.so in the bundle has the kernels",
    "--target-host": "host and target are the same CPU: use --target only",
    "--target-llvm-mcpu": _TARGET,
    "--target-llvm-mattr": _TARGET,
    "--target-llvm-mtriple": 'put it in the target: --target "llvm -mtriple=aarch64-linux-gnu -mcpu=NAME"',
    "--enable-autoscheduler": "one search replaces both tuners; omit this flag",
    "--include-simple-tasks": "every operator that can be tuned is a task: --tasks list shows them",
    "--num-cores": "the number of cores is part of the target; use --threads for measurements",
    "--options": "edgebundle VERB --help lists the options",
    "--list-options": "edgebundle VERB --help lists the options",
    "--benchmark": "use --print-time, with --repeat and --number",
    "--project-dir": _LINUX,
    "--micro": _LINUX,
}


def instead_of(unknown: Sequence[str]) -> str | None:
    """Return what to do instead of the first argument that TVMC knew, or None if it knew none of them.

    `unknown`: the arguments that the parser did not recognise, in order.
    """
    for argument in unknown:
        flag = argument.partition("=")[0]
        if flag in INSTEAD:
            return f"{flag} is a TVMC flag: {INSTEAD[flag]}"
    return None
