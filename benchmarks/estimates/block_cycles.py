"""Cycles of blocks of machine code by llvm-mca, with all data in the L1 cache and all branches foreseen.

A block is analysed as if it ran again and again, as the block of a hot loop does. Its cycles include waiting
for results, for pipes and for the window of an out-of-order core. In llvm-mca's model no load waits for a
store to the same address, so a tile that spills its registers is slower than its estimate.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.hot_loops import tool
from benchmarks.instructions.traffic import Block, Stretch

ITERATIONS: Final = 50
LIMIT_S: Final = 300
AT_ONCE: Final = 400  # blocks of one run of llvm-mca
# The share of executed instructions whose blocks are analysed. The others run rarely.
SEEN: Final = 0.995
# Instructions that end no block of ours: they tell llvm-mc's output of two blocks apart. On x86-64, qemu cuts
# an instruction off at the end of a page; what is missing is taken from the first of them.
_SEPARATORS: Final = {
    "aarch64": (bytes.fromhex("00003ed4"), "brk"),
    "x86_64": (bytes.fromhex("90" * 14 + "0f0b"), "ud2"),
}
# llvm-mca has no costs of them.
_UNKNOWN: Final = re.compile(
    r"^\s*(svc|brk|udf|hlt|nop\w?|syscall|int3|cpuid|xgetbv|rdtsc|mrs|msr|dc|ic|rep\w*)\b"
)


def frequent(stretches: Sequence[Stretch], blocks: Mapping[int, Block]) -> list[int]:
    """Return the blocks that have nearly all executed instructions."""
    executed: dict[int, int] = {}
    for stretch in stretches:
        for number, times in stretch.blocks.items():
            executed[number] = executed.get(number, 0) + times * blocks[number].instructions
    left = SEEN * sum(executed.values())
    chosen = []
    for number, count in sorted(executed.items(), key=lambda pair: -pair[1]):
        if left <= 0:
            break
        chosen.append(number)
        left -= count
    return chosen


def cycles_of(codes: Sequence[bytes], arch: str, model: str) -> list[float]:
    """Return the cycles that one execution of each block takes.

    Parameters
    ----------
    codes
        The machine code of the blocks.
    arch
        `aarch64` or `x86_64`.
    model
        LLVM's name of the core.

    Raises
    ------
    RequirementError
        If LLVM is missing.
    RuntimeError
        If llvm-mca refuses a block.
    """
    texts = disassembled(codes, arch)
    distinct = list(dict.fromkeys(text for text in texts if text))
    known = {"": 0.0}
    for start in range(0, len(distinct), AT_ONCE):
        some = distinct[start : start + AT_ONCE]
        known |= dict(zip(some, _analysed(some, arch, model), strict=True))
    return [known[text] for text in texts]


def disassembled(codes: Sequence[bytes], arch: str) -> list[str]:
    """Return the assembly of each block, without instructions whose costs are unknown."""
    separator, mnemonic = _SEPARATORS[arch]
    lines = [" ".join(f"0x{byte:02x}" for byte in code + separator) for code in codes]
    done = subprocess.run(
        [tool("llvm-mc"), "--disassemble", f"--triple={arch}-linux-gnu", *_FEATURES[arch]],
        input="\n".join(lines), capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    blocks: list[list[str]] = [[]]
    for line in done.stdout.splitlines():
        if line.strip().startswith(mnemonic):
            blocks.append([])
        elif line.strip() and line.strip() != ".text" and not _UNKNOWN.match(line):
            blocks[-1].append(line.strip())
    if len(blocks) != len(codes) + 1:
        raise RuntimeError(
            f"llvm-mc: expected {len(codes)} blocks, got {len(blocks) - 1}: {done.stderr[-300:]}"
        )
    return ["\n".join(block) for block in blocks[:-1]]


_FEATURES: Final = {"aarch64": ["--mattr=+v8.2a,+fullfp16,+dotprod"], "x86_64": ["--mattr=+avx2,+fma"]}


def _analysed(texts: Sequence[str], arch: str, model: str) -> list[float]:
    source = "".join(f"# LLVM-MCA-BEGIN\n{text}\n# LLVM-MCA-END\n" for text in texts)
    done = subprocess.run(
        [tool("llvm-mca"), f"--mtriple={arch}-linux-gnu", f"--mcpu={model}", *_FEATURES[arch],
         f"--iterations={ITERATIONS}", "--instruction-info=0", "--resource-pressure=0",
         "--skip-unsupported-instructions=lack-sched"],
        input=source, capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    totals = re.findall(r"^Total Cycles:\s+(\d+)", done.stdout, re.MULTILINE)
    if len(totals) != len(texts):
        counts = f"expected {len(texts)} answers, got {len(totals)}"
        raise RuntimeError(f"llvm-mca: {counts}: {done.stderr[-300:]}")
    return [int(total) / ITERATIONS for total in totals]
