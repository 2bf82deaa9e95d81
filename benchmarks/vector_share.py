"""The share of a kernel's arithmetic that is written with vectors, read from its code.

A kernel without a design space, or with a tile that LLVM gave up, computes one number at a time. Counts of
executed steps of a whole network may hide it; the share of its own instructions does not. Counted are the
floating-point arithmetic instructions of innermost loops: what an outer loop computes, such as the logarithm
of a row's sum, is rare.

    python -m benchmarks.vector_share        # the small zoo, for AVX2 and a Cortex-A72
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import onnx

from benchmarks.hot_loops import disassembled, jumps
from benchmarks.requirements import RequirementError
from benchmarks.zoo.small import NETWORKS

# Target -> triple of its code.
TARGETS: Final = {"x86-64-v3": "x86_64-linux-gnu", "rpi4": "aarch64-linux-gnu"}
LEAST: Final = 0.55
# Fewer instructions say nothing: an index computed in floats, a mean's last step.
FEWEST: Final = 8

_X86: Final = re.compile(r"^v?(?:add|sub|mul|div|min|max|sqrt|fn?m(?:add|sub)(?:132|213|231))([ps])[sd]\b")
_ARM: Final = re.compile(r"^f(?:add|sub|mul|div|min|max|minnm|maxnm|sqrt|mla|mls|n?madd|n?msub)\s+([vsd])\d")


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The floating-point arithmetic instructions in a kernel's innermost loops.

    Attributes
    ----------
    vector
        Those that compute a vector.
    scalar
        Those that compute one number.
    """

    vector: int
    scalar: int

    @property
    def share(self) -> float:
        """The share of vectors; 1 without any arithmetic."""
        return self.vector / total if (total := self.vector + self.scalar) else 1.0


def arithmetic(code: bytes, triple: str) -> dict[str, Arithmetic]:
    """Return the arithmetic of each kernel in an object file.

    Parameters
    ----------
    code
        The object file.
    triple
        The triple of its machine, of x86-64 or AArch64.

    Raises
    ------
    RequirementError
        If llvm-objdump is missing.
    """
    found: dict[str, Arithmetic] = {}
    for function, lines in disassembled(code, triple):
        inside = {i for loop in _innermost(jumps(lines)) for i in loop}
        kinds = [kind for i in inside if (kind := _kind(lines[i][1])) is not None]
        kernel = function.removeprefix("__tvm_ffi_").removesuffix("_compute_")
        before = found.get(kernel, Arithmetic(0, 0))
        vectors = sum(kinds)
        found[kernel] = Arithmetic(before.vector + vectors, before.scalar + len(kinds) - vectors)
    return found


def _innermost(targets: Mapping[int, int | None]) -> list[range]:
    """Return the lines of each loop that contains no other: from the target of a jump back up to the jump."""
    loops = [range(start, end) for end, start in targets.items() if start is not None and start <= end]
    return [
        loop
        for loop in loops
        if not any(
            loop.start <= other.start and other.stop <= loop.stop and len(other) < len(loop)
            for other in loops
        )
    ]


def _kind(text: str) -> bool | None:
    """Whether an instruction computes a vector; None if it is no floating-point arithmetic."""
    if match := _X86.match(text) or _ARM.match(text):
        return match[1] in "pv"
    return None


def of_network(model: onnx.ModelProto, target: str) -> dict[str, Arithmetic]:
    """Compile a network without records; return the arithmetic of each kernel."""
    from builder.codegen.kernel_object import compile_object
    from builder.compiling.lower import lower
    from builder.importer import import_onnx
    from builder.kernels.decisions import Schedules
    from builder.target.device_target import resolve

    device = resolve(target)
    lowered = lower(import_onnx(model).mod, device, Schedules())
    return arithmetic(compile_object(lowered.kernels, device), TARGETS[target])


def below(found: Mapping[str, Arithmetic]) -> list[str]:
    """Return a line for each kernel whose share is below `LEAST`."""
    return [
        f"{kernel}: {each.share:.2f} of {each.vector + each.scalar} instructions compute vectors, "
        f"expected {LEAST}"
        for kernel, each in found.items()
        if each.vector + each.scalar >= FEWEST and each.share < LEAST
    ]


def main() -> int:
    """Print the shares of the small zoo; return the exit status: 1 if one is below `LEAST`."""
    failed = False
    try:
        for name, network in NETWORKS.items():
            for target in TARGETS:
                found = of_network(network(), target)
                vector, scalar = (
                    sum(getattr(each, kind) for each in found.values()) for kind in ("vector", "scalar")
                )
                print(f"{Arithmetic(vector, scalar).share:.3f} {name}, {target}", flush=True)
                for line in below(found):
                    print(f"  {line}", file=sys.stderr)
                    failed = True
    except RequirementError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
