"""Measures points without a board: instructions executed under qemu, and llvm-mca's cycles of their blocks.

The cost of a block is the mean of two numbers of cycles: those that the core needs to issue its instructions,
and those that llvm-mca estimates from latencies, pipes and window, with all loads served by the L1 cache.
Cache misses and mispredicted branches are not included. Needs Debian's `qemu-user`, `llvm` and gcc.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.hot_loops import CORES, TRIPLE, tool
from benchmarks.shipped_records.builders import Arguments, Builders, Candidates
from benchmarks.shipped_records.measure import LEAST_GAIN, Verdict
from builder.codegen.link.linker import include_paths
from builder.kernels.design_space import Decisions
from builder.records.task import Task
from builder.target.device_target import DeviceTarget

HERE: Final = Path(__file__).parent
TIMEOUT_S: Final = 300
ISSUE_WIDTH: Final = {"cortex-a53": 2, "cortex-a72": 3, "cortex-a76": 4}
SEEN: Final = 0.98  # the share of executed instructions whose blocks are analysed; the rest hardly matters
ITERATIONS: Final = 50
SAMPLES: Final = 8

_CODES: Final = {"int": 0, "uint": 1, "float": 2, "bool": 6}
_BRANCH: Final = re.compile(r"^(b|bl|br|blr|ret|cbz|cbnz|tbz|tbnz|b\.\w+|adrp?|udf|brk|svc)\b")
_LINE: Final = re.compile(r"^\s*([0-9a-f]+):\s+(?:[0-9a-f]{8}\s+)?(.*?)(?:\s*(?://|;).*)?$")


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one call.

    Attributes
    ----------
    instructions
        Executed instructions.
    cycles
        Cycles that llvm-mca estimates.
    total
        The mean that is compared, in cycles.
    """

    instructions: float
    cycles: float
    total: float


class Emulated:
    """Measures in instructions and cycles of an emulated core.

    Parameters
    ----------
    target
        The device, whose core is emulated.
    samples
        Iterations of a parallel loop that are run; they are counted for all of its iterations.
    niceness
        The niceness of compiling.
    """

    def __init__(self, target: DeviceTarget, samples: int = SAMPLES, niceness: int = 5) -> None:
        self._target, self._width = target, ISSUE_WIDTH[target.cpu]
        self._samples = samples
        self._builders = Builders(niceness)
        self._folder = tempfile.TemporaryDirectory()
        self._plugin = Path(self._folder.name, "blocks.so")
        self._cycles: dict[str, float] = {}
        self.found: dict[tuple[str, Decisions], Cost] = {}
        self._described = CORES.get(target.cpu, target.cpu)
        self.sentence = (
            f"no board was timed: executed instructions under qemu at {self._width} a cycle, and llvm-mca's "
            f"cycles of the same blocks for {self._described}, their mean; kept from {LEAST_GAIN:g} on, "
            "where neither rises"
        )
        subprocess.run(
            ["gcc", "-O2", "-fPIC", "-shared", str(HERE / "blocks.c"), "-o", str(self._plugin),
             "-Wl,--unresolved-symbols=ignore-all"], check=True,
        )  # fmt: skip

    def costs(self, asked: Sequence[tuple[Task, Sequence[Decisions]]]) -> list[dict[Decisions, float | None]]:
        """Return the cost of each point, which is the same every time."""
        built = self._builders.build(asked, linked=False)
        with ThreadPoolExecutor(2) as pool:
            counted = list(pool.map(lambda c: {} if c is None else self._count(c), built))
        results: list[dict[Decisions, float | None]] = []
        for (task, decisions), costs in zip(asked, counted, strict=True):
            self.found.update({(task.key, d): cost for d, cost in costs.items()})
            results.append({d: costs[d].total if d in costs else None for d in decisions})
        return results

    def verdicts(self, asked: Sequence[tuple[Sequence[Task], Decisions]]) -> list[Verdict]:
        """Compare both halves of the cost, in each kernel of a signature."""
        missing = [
            (task, [d for d in (task.space.default, point) if (task.key, d) not in self.found])
            for tasks, point in asked
            for task in tasks
        ]
        self.costs([(task, points) for task, points in missing if points])
        verdicts = []
        for tasks, point in asked:
            pairs = [
                (self.found.get((t.key, t.space.default)), self.found.get((t.key, point))) for t in tasks
            ]
            both = [(old, new) for old, new in pairs if old is not None and new is not None]
            if len(both) < len(pairs):
                verdicts.append(Verdict(0.0, False, "did not run"))
                continue
            gain = min(old.total / new.total for old, new in both)
            fewer = min(old.instructions / new.instructions for old, new in both)
            faster = min(old.cycles / new.cycles for old, new in both)
            holds = gain >= LEAST_GAIN and min(fewer, faster) >= 1.0
            verdicts.append(
                Verdict(gain, holds, f"{gain:.3f} (instructions {fewer:.3f}, cycles {faster:.3f})")
            )
        return verdicts

    def close(self) -> None:
        """End the building processes."""
        self._builders.close()
        self._folder.cleanup()

    def _count(self, made: Candidates) -> dict[Decisions, Cost]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "kernels.o").write_bytes(made.code)
            (folder / "table.h").write_text(table(made.arguments, made.launches))
            program = folder / "program"
            try:
                subprocess.run(
                    [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl", "-static", "-O1",
                     "-fno-sanitize=all", f"-DSAMPLES={self._samples}",
                     "-I", str(folder), *(f"-I{path}" for path in include_paths()),
                     str(HERE / "runner.c"), str(folder / "kernels.o"), "-o", str(program), "-lm"],
                    check=True, capture_output=True, timeout=TIMEOUT_S,
                )  # fmt: skip
                out = folder / "blocks"
                subprocess.run(
                    ["qemu-aarch64", "-cpu", self._target.cpu, "-plugin", str(self._plugin), str(program)],
                    env={**os.environ, "BLOCKS_OUT": str(out)},
                    check=True, capture_output=True, timeout=TIMEOUT_S,
                )  # fmt: skip
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                print(
                    f"a candidate did not run: {(error.stderr or b'')[-400:].decode(errors='replace')}",
                    flush=True,
                )
                return {}
            times = read_blocks(out.read_text())
            lines = disassemble(program)
        self._analyse([block for blocks in times.values() for block in frequent(blocks)], lines)
        return {d: self._cost(times[i], lines) for i, d in enumerate(made.decisions) if i in times}

    def _cost(self, blocks: Counter[tuple[int, int]], lines: dict[int, str]) -> Cost:
        instructions = sum(count * size for (_, size), count in blocks.items())
        cycles = 0.0
        for block, count in blocks.items():
            known = self._cycles.get(text_of(block, lines))
            cycles += count * (known if known is not None else block[1] / self._width)
        return Cost(instructions, cycles, (instructions / self._width + cycles) / 2)

    def _analyse(self, blocks: Sequence[tuple[int, int]], lines: dict[int, str]) -> None:
        """Let llvm-mca analyse the blocks that it has not analysed yet."""
        texts = [t for t in dict.fromkeys(text_of(b, lines) for b in blocks) if t and t not in self._cycles]
        if not texts:
            return
        source = "".join(f"# LLVM-MCA-BEGIN\n{text}\n# LLVM-MCA-END\n" for text in texts)
        done = subprocess.run(
            [tool("llvm-mca"), f"--mtriple={TRIPLE}", f"--mcpu={self._described}",
             f"--iterations={ITERATIONS}", "--instruction-info=0", "--resource-pressure=0"],
            input=source, capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        found = [float(n) for n in re.findall(r"^Total Cycles:\s+(\d+)", done.stdout, re.MULTILINE)]
        if len(found) != len(texts):
            counts = f"expected {len(texts)} answers, got {len(found)}"
            raise RuntimeError(f"llvm-mca: {counts}: {done.stderr[:300]}")
        self._cycles.update({text: cycles / ITERATIONS for text, cycles in zip(texts, found, strict=True)})


def table(arguments: Arguments, launches: Sequence[Sequence[int]]) -> str:
    """Return the header file that runner.c includes."""
    lines = [
        f"extern int __tvm_ffi_k{i}(void *, const TVMFFIAny *, int32_t, TVMFFIAny *);"
        for i in range(len(launches))
    ]
    rows = ", ".join(
        f"{{__tvm_ffi_k{i}, {{{', '.join(map(str, [*extents, 0]))}}}}}" for i, extents in enumerate(launches)
    )
    lines.append(f"static const Kernel kernels[] = {{{rows}}};")
    cells = []
    for dtype, shape in arguments:
        match = re.fullmatch(r"([a-z]+)(\d*)", dtype)
        assert match is not None
        cells.append(
            f"{{{_CODES[match[1]]}, {match[2] or 8}, {len(shape)}, {{{', '.join(map(str, shape or (0,)))}}}}}"
        )
    lines.append(f"static const Argument arguments[] = {{{', '.join(cells)}}};")
    return "\n".join(lines) + "\n"


def read_blocks(text: str) -> dict[int, Counter[tuple[int, int]]]:
    """Return kernel number -> (address, instructions) of a block -> executions, scaled up from samples."""
    found: dict[int, Counter[tuple[int, int]]] = {}
    for line in text.splitlines():
        label, every, run, *blocks = line.split()
        counts = found.setdefault(int(label), Counter())
        for block in blocks:
            address, size, times = block.split(":")
            counts[int(address, 16), int(size)] += int(times) * int(every) / int(run)  # type: ignore[assignment]
    return found


def frequent(blocks: Counter[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the blocks that contain nearly all executed instructions."""
    left = SEEN * sum(count * size for (_, size), count in blocks.items())
    chosen = []
    for (address, size), count in sorted(blocks.items(), key=lambda b: -b[1] * b[0][1]):
        if left <= 0:
            break
        chosen.append((address, size))
        left -= count * size
    return chosen


def disassemble(program: Path) -> dict[int, str]:
    """Return a program's instructions by address."""
    done = subprocess.run(
        ["llvm-objdump", "-d", "--no-show-raw-insn", str(program)],
        capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    matches = (_LINE.match(line) for line in done.stdout.splitlines())
    return {int(m[1], 16): re.sub(r"<[^>]*>", "", m[2]).strip() for m in matches if m}


def text_of(block: tuple[int, int], lines: dict[int, str]) -> str:
    """Return a block's instructions without branches and addresses, which llvm-mca cannot read."""
    address, size = block
    words = (lines.get(address + 4 * i, "") for i in range(size))
    return "\n".join(word for word in words if word and not _BRANCH.match(word))
