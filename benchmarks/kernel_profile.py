"""Where a model's time goes, kernel by kernel, compared with the peak of the cores.

    python -m benchmarks.kernel_profile resnet50 --threads 1
    python -m benchmarks.kernel_profile model.onnx --by-kernel

Prints for each node its time (the shortest over many runs of the model, so that other work hardly disturbs
it), its GFLOP/s, its share of the machine's multiply-add peak, and the design space that its loops come from.
For Winograd, GFLOP/s count the operations of the convolution that it replaces, and may exceed the peak.
"""

from __future__ import annotations

import argparse
import math
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class Row:
    """One node, or all nodes that call one kernel.

    Attributes
    ----------
    kernel, schedule
        The kernel's name, and the design space that its loops come from.
    calls
        The number of nodes.
    time_us, flops
        Microseconds and floating-point operations of all calls.
    shapes
        The shapes of the arguments.
    """

    kernel: str
    schedule: str
    calls: int
    time_us: float
    flops: float
    shapes: str

    @property
    def gflops(self) -> float:
        """Billions of floating-point operations per second."""
        return self.flops / self.time_us / 1e3 if self.time_us else 0.0


def main() -> None:
    """Profile a model, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="an architecture's name (resnet18, bert, ...) or an ONNX file")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--by-kernel", action="store_true", help="one row for each kernel, slowest first")
    options = parser.parse_args()
    os.environ["TVM_NUM_THREADS"] = str(options.threads)  # read when TVM's library is loaded
    rows, peak = profile(options.model, options.threads, options.repeat)
    if options.by_kernel:
        rows = by_kernel(rows)
    print(table(rows, peak))


def profile(model: str, threads: int, repeat: int) -> tuple[list[Row], float]:
    """Profile `model`; return its rows in order of execution, and the machine's peak in GFLOP/s."""
    from benchmarks.architectures import ARCHITECTURES, generate
    from benchmarks.denormals import flushed
    from benchmarks.interpreter import Interpreter
    from builder.compiling.lower import lower
    from builder.importer import import_onnx
    from builder.kernels.schedule import SCHEDULE
    from builder.target.device_target import resolve

    target = resolve("host")
    source = generate(model) if model in ARCHITECTURES else Path(model)
    shapes = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), (1, 128))
    imported = import_onnx(
        source, input_shapes=shapes if Path(model).stem.startswith("bert") else None, progress=lambda _: None
    )
    lowered = lower(imported.mod, target)
    interpreter = Interpreter(lowered, target.tvm_target)
    state = np.random.RandomState(0)
    interpreter.run(
        {
            s.name: state.randn(*s.shape).astype(s.dtype) if "float" in s.dtype else np.ones(s.shape, s.dtype)
            for s in imported.inputs
        }
    )
    kernels = {g.name_hint: f for g, f in lowered.kernels.functions.items()}
    # Taps of the windows whose weights are transformed: `[OB/t, IB, KH, KW, ...]`.
    taps = {
        step.results[0]: math.prod(interpreter.tensors[step.arguments[0]].shape[2:4])
        for step in interpreter.load_steps
        if "winograd_weights" in step.kernel
    }
    rows = []
    with flushed(target):
        times = interpreter.times_us(repeat)
    for step, time_us in zip(interpreter.steps, times, strict=True):
        shapes_of = [tuple(interpreter.tensors[i].shape) for i in step.arguments + step.results]
        rows.append(
            Row(
                step.kernel,
                str(kernels[step.kernel].attrs[SCHEDULE]),
                1,
                time_us,
                flops_of(step.kernel, shapes_of, next((taps[i] for i in step.arguments if i in taps), 9)),
                " ".join("x".join(map(str, s)) for s in shapes_of if s),
            )
        )
    return rows, peak_gflops(target.simd.lanes, threads)


def flops_of(kernel: str, shapes: list[tuple[int, ...]], taps: int = 9) -> float:
    """Return the floating-point operations of a product, from its arguments' shapes; 0 for other kernels.

    `taps` is the extent of the window whose weights Winograd's algorithm transformed: on phases, with the
    zeros that fill it.
    """
    out = float(np.prod(shapes[-1]))
    if "winograd" in kernel:
        # `[(m + KH - 1) * (n + KW - 1), OB/t, IB, bi, t, bo]`, and of bytes with groups of channels,
        # `[.., bi/g, t, bo * g]`.
        _, _, in_blocks, steps, _, lanes = next(shape for shape in shapes if len(shape) == 6)
        return 2 * taps * out * in_blocks * steps * lanes / shapes[-1][-1]
    if "conv2d" in kernel:
        weights = next((shape for shape in shapes if len(shape) >= 7), None)  # of bytes: a group comes last
        if weights is None:
            return 0.0
        return 2 * out * float(np.prod(weights[1:5])) * (weights[7] if len(weights) == 8 else 1)
    if "depthwise" in kernel:
        return 2 * out * shapes[1][1] * shapes[1][2]
    if "matmul" in kernel:
        return 2 * out * shapes[0][-1]
    return 0.0


def peak_gflops(lanes: int, threads: int) -> float:
    """Measure the peak of `threads` cores: matrix products whose operands stay in the L1 cache."""
    import tvm
    from tvm import s_tir, te

    from builder.codegen.lowering import build_kernels
    from builder.kernels.decisions import heuristic
    from builder.kernels.spaces import matmul
    from builder.target.device_target import resolve

    panel, depth, rows = 2 * lanes, 128, 8 * threads
    a = te.placeholder((rows, depth), "float32", name="a")
    b = te.placeholder((threads, depth, panel), "float32", name="b")
    product = matmul.product(a, b, threads * panel, lanes)
    func = te.create_prim_func([a, b, product]).with_attr("global_symbol", "main")
    sch = s_tir.Schedule(func)
    matmul.schedule(sch, sch.get_sblock("matmul"), resolve("host"), heuristic)
    library = build_kernels(sch.mod, resolve("host").tvm_target)
    arguments = [tvm.runtime.tensor(np.zeros(tuple(map(int, p.shape)), "f4")) for p in func.params]
    result = library.time_evaluator("main", tvm.cpu(), number=2000, repeat=20)(*arguments)
    seconds: float = min(result.results)
    return 2 * rows * depth * panel * threads / seconds / 1e9


def by_kernel(rows: list[Row]) -> list[Row]:
    """Merge the rows of each kernel, slowest first."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.kernel].append(row)
    merged = [
        Row(k, g[0].schedule, len(g), sum(r.time_us for r in g), sum(r.flops for r in g), g[0].shapes)
        for k, g in groups.items()
    ]
    return sorted(merged, key=lambda r: -r.time_us)


def table(rows: list[Row], peak: float) -> str:
    """Return the rows as a table, with a summary; `peak` is in GFLOP/s."""
    total = sum(r.time_us for r in rows)
    lines = [f"{'us':>10} {'%':>5} {'n':>3} {'GFLOP/s':>8} {'peak':>5}  {'space':<16} kernel"]
    for r in rows:
        share = f"{100 * r.gflops / peak:4.0f}%" if r.flops else ""
        speed = f"{r.gflops:8.0f}" if r.flops else ""
        lines.append(
            f"{r.time_us:10.1f} {100 * r.time_us / total:5.1f} {r.calls:3d} {speed:>8} {share:>5}  "
            f"{r.schedule:<16} {r.kernel[:60]} {r.shapes[:90]}"
        )
    reached = sum(r.flops for r in rows) / total / 1e3
    lines.append(f"{total / 1e3:.2f} ms in {len(rows)} rows, {reached:.0f} of {peak:.0f} GFLOP/s at most")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
