"""How fast a core could run the hot loops of our kernels: llvm-mca's cycles of each, as a share of the peak.

The hot loop of a kernel is the basic block that ends in a branch to its own start and has the most vector
multiply-adds. Its cycles come from a model of the core: out of order if the core is, with all loads served by
the L1 cache. No board is timed. The peak is what the same model gives for independent multiply-adds.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.requirements import RequirementError

TRIPLE: Final = "aarch64-linux-gnu"
# LLVM's model of each core. It has no model of the A76, whose server variant is the Neoverse N1.
CORES: Final = {"cortex-a72": "cortex-a72", "cortex-a76": "neoverse-n1"}
# Older versions model the N1 as an A57, which does half as many multiply-adds per cycle.
LEAST_LLVM: Final = 17
NEWEST_LLVM: Final = 24
ITERATIONS: Final = 100
LIMIT_S: Final = 120

_FUNCTION: Final = re.compile(r"^[0-9a-f]+ <([^>]+)>:$")
_LINE: Final = re.compile(r"^\s*([0-9a-f]+):\s+(?:[0-9a-f]{8}\s+)?(\S.*)$")
# AArch64's, and the jumps of x86-64.
_BRANCH: Final = re.compile(r"^(?:b|bl|br|blr|ret|cbn?z|tbn?z|b\.\w+|j\w+)\b")
_TARGET: Final = re.compile(r"0x([0-9a-f]+)")
_MULTIPLY_ADD: Final = re.compile(r"^fml[as]\s+v\d+\.4s")
_UNKNOWN: Final = re.compile(r"^(?:adrp?|bl|b|cbn?z|tbn?z|b\.\w+)\b")


@dataclass(frozen=True, slots=True)
class HotLoop:
    """The loop in which a kernel spends its time.

    Attributes
    ----------
    function
        The symbol of the function that contains it.
    instructions
        Its instructions without the branch.
    """

    function: str
    instructions: tuple[str, ...]

    @property
    def multiply_adds(self) -> int:
        """Vector multiply-adds in an iteration."""
        return sum(1 for text in self.instructions if _MULTIPLY_ADD.match(text))


@dataclass(frozen=True, slots=True)
class Loop:
    """A kernel's hot loop on a core.

    Attributes
    ----------
    kernel
        The kernel's name.
    share
        The share of the core's peak that it can reach.
    flops
        Operations of all calls of the kernel in an inference: its weight.
    """

    kernel: str
    share: float
    flops: float


def of_model(code: bytes, flops: Mapping[str, float]) -> dict[str, list[Loop]]:
    """Return the hot loops of a model's kernels by core.

    Parameters
    ----------
    code
        The kernels' object file.
    flops
        Kernel -> floating-point operations in an inference; kernels that run at load are left out.
    """
    found = [
        (kernel, loop)
        for loop in hot_loops(code)
        if (kernel := loop.function.removeprefix("__tvm_ffi_").removesuffix("_compute_")) in flops
    ]
    best: dict[str, HotLoop] = {}
    for kernel, loop in found:
        if kernel not in best or loop.multiply_adds > best[kernel].multiply_adds:
            best[kernel] = loop
    kernels = [kernel for kernel in flops if kernel in best]
    return {
        core: [
            Loop(kernel, share, flops[kernel])
            for kernel, share in zip(
                kernels, shares_of_peak([best[kernel] for kernel in kernels], core), strict=True
            )
        ]
        for core in CORES
    }


def tool(name: str) -> str:
    """Return the newest installed version of an LLVM program.

    Parameters
    ----------
    name
        The program's name without a version, such as `llvm-mca`.

    Raises
    ------
    RequirementError
        If no version from `LEAST_LLVM` to `NEWEST_LLVM` is installed.
    """
    for version in range(NEWEST_LLVM, LEAST_LLVM - 1, -1):
        if found := shutil.which(f"{name}-{version}"):
            return found
    raise RequirementError(f"{name}-{LEAST_LLVM} or newer not found: apt-get install llvm-19")


def hot_loops(code: bytes) -> list[HotLoop]:
    """Return the hot loop of every function in an object file that has one, in the file's order."""
    found = []
    for function, lines in disassembled(code, TRIPLE):
        loops = [HotLoop(function, block) for block in _loops(lines)]
        best = max(loops, key=lambda loop: loop.multiply_adds, default=None)
        if best is not None and best.multiply_adds:
            found.append(best)
    return found


def disassembled(code: bytes, triple: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Iterate over the functions of an object file: its symbol, and the address and text of each instruction.

    Raises
    ------
    RequirementError
        If llvm-objdump is missing.
    """
    with tempfile.NamedTemporaryFile(suffix=".o") as file:
        file.write(code)
        file.flush()
        command = [tool("llvm-objdump"), "-d", "--no-show-raw-insn", f"--triple={triple}", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    return _functions(done.stdout)


def _functions(text: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    name = ""
    lines: list[tuple[int, str]] = []
    for line in text.splitlines():
        if match := _FUNCTION.match(line):
            if lines:
                yield name, lines
            name, lines = match[1], []
        elif match := _LINE.match(line):
            lines.append((int(match[1], 16), match[2]))
    if lines:
        yield name, lines


def jumps(lines: Sequence[tuple[int, str]]) -> dict[int, int | None]:
    """Return the line that each line of a function may jump to; None if it does not jump, or elsewhere."""
    place = {address: i for i, (address, _) in enumerate(lines)}
    found = {}
    for i, (_, text) in enumerate(lines):
        target = _TARGET.search(text) if _BRANCH.match(text) else None
        found[i] = place.get(int(target[1], 16)) if target else None
    return found


def _loops(lines: Sequence[tuple[int, str]]) -> Iterator[tuple[str, ...]]:
    """Iterate over basic blocks that end in a branch to their own start."""
    targets = jumps(lines)
    starts = {0} | {t for t in targets.values() if t is not None}
    starts |= {i + 1 for i, (_, text) in enumerate(lines) if _BRANCH.match(text)}
    for end, start in targets.items():
        if start is None or start > end or any(start < other <= end for other in starts):
            continue
        yield tuple(
            re.sub(r"\s*(//|;|<).*$", "", text).strip()
            for _, text in lines[start:end]
            if not _UNKNOWN.match(text)
        )


def shares_of_peak(loops: Sequence[HotLoop], core: str) -> list[float]:
    """Return the multiply-adds per cycle of each loop, as a share of the core's peak."""
    flat = tuple(f"fmla v{i}.4s, v30.4s, v31.s[0]" for i in range(24))
    peak = HotLoop("peak", flat)
    cycles = _cycles([peak.instructions, *(loop.instructions for loop in loops)], CORES[core])
    most = peak.multiply_adds / cycles[0]
    return [loop.multiply_adds / each / most for loop, each in zip(loops, cycles[1:], strict=True)]


def _cycles(blocks: Sequence[Sequence[str]], cpu: str) -> list[float]:
    """Return the cycles that llvm-mca estimates for an iteration of each block."""
    source = "".join("# LLVM-MCA-BEGIN\n" + "\n".join(block) + "\n# LLVM-MCA-END\n" for block in blocks)
    command = [tool("llvm-mca"), f"--mtriple={TRIPLE}", f"--mcpu={cpu}", f"--iterations={ITERATIONS}"]
    command += ["--instruction-info=0", "--resource-pressure=0"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    totals = re.findall(r"^Total Cycles:\s+(\d+)", done.stdout, re.MULTILINE)
    if len(totals) != len(blocks):
        found = f"expected {len(blocks)} answers, got {len(totals)}"
        raise RuntimeError(f"llvm-mca: {found}: {done.stderr[:300]}")
    return [int(total) / ITERATIONS for total in totals]


def kernels_object(path: Path, shapes: dict[str, list[int]] | None, target: str) -> bytes:
    """Compile a model's kernels to an object file: unlike `mod.so` it has symbols."""
    from builder.codegen.kernel_object import compile_object
    from builder.compiling.lower import lower
    from builder.importer import import_onnx
    from builder.target.device_target import resolve

    device = resolve(target)
    lowered = lower(import_onnx(path, input_shapes=shapes).mod, device)
    return compile_object(lowered.kernels, device)
