"""How much of ONNX can be compiled: the node tests of the onnx package, each as it ships.

`python -m benchmarks.onnx_coverage` tries the cases whose inputs and outputs are plain tensors: each is
imported, compiled for this machine and run in the executor that devices use. It counts those that pass as
they are, and those that pass when inputs that hold a shape, an axis or a count are fixed to their values.
With `--plain`, only TVM's front end and its default build are tried. It takes about twenty minutes.
Cases run in child processes, so that a crash costs only one case.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx.backend.test.case import node, test_case

from agent.bundle.params import dump_params
from agent.errors import EdgeError
from agent.runtime.lengths import cut
from builder.codegen.graph_codegen import generate
from builder.codegen.kernel_object import compile_kernels
from builder.codegen.link.linker import link
from builder.compiling.lower import lower
from builder.errors import BuildError
from builder.importer import import_onnx
from builder.importer.silence import FOREIGN_FAILURES, first_line, quiet
from builder.running.in_memory import execute
from builder.target.device_target import resolve

CHUNK: Final = 40
CHUNK_TIMEOUT_S: Final = 900
# Looser than the cases' 1e-7: our float32 sums add in another order.
ATOL: Final = 1e-5
ATOL_HALF: Final = 2e-3


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a case: `passed`, `passed with values`, or the stage at which it failed, and why."""

    name: str
    operator: str
    verdict: str
    reason: str = ""


def plain_cases(pattern: str = "", modules: Sequence[str] | None = None) -> list[test_case.TestCase]:
    """Return the node tests whose inputs and outputs are all tensors of numbers.

    Parameters
    ----------
    pattern
        A regular expression; only cases whose name it matches are returned.
    modules
        Only cases of these modules of `onnx.backend.test.case.node`: making all cases takes many seconds.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if modules is None:
            cases = node.collect_testcases(None)
        else:
            for module in modules:
                importlib.import_module(f"{node.__name__}.{module}")
            cases = node._NodeTestCases
    return [c for c in cases if c.data_sets and _is_plain(c) and re.search(pattern, c.name)]


def _is_plain(case: test_case.TestCase) -> bool:
    graph = case.model.graph
    if any(value.type.WhichOneof("value") != "tensor_type" for value in (*graph.input, *graph.output)):
        return False
    inputs, outputs = values_of(case)
    return all(isinstance(a, np.ndarray) and a.dtype.kind in "biuf" for a in (*inputs, *outputs))


def values_of(case: test_case.TestCase) -> tuple[list[Any], list[Any]]:
    """Return the inputs and outputs of a case; some cases have scalars that are no arrays."""
    inputs, outputs = (
        [np.asarray(value) if isinstance(value, np.generic) else value for value in values]
        for values in case.data_sets[0]
    )
    return inputs, outputs


def run_case(case: test_case.TestCase, *, plain: bool) -> Outcome:
    """Import, build and run a case; unless `plain`, try again with some inputs fixed to their values."""
    operator = case.model.graph.node[-1].op_type
    inputs, expected = values_of(case)
    names = [value.name for value in case.model.graph.input]
    feeds = dict(zip(names, inputs, strict=False))
    verdict, reason = _attempt(case, feeds, {}, expected, plain=plain)
    if verdict != "passed" and not plain:
        for fold in (fixable_inputs(feeds), _all_but_first(feeds)):
            if fold and len(fold) < len(feeds):
                rest = {name: value for name, value in feeds.items() if name not in fold}
                again, why = _attempt(case, rest, fold, expected, plain=False)
                reason = f"{reason} | with values: {why}"
                if again == "passed":
                    return Outcome(case.name, operator, "passed with values")
    return Outcome(case.name, operator, verdict, reason)


def fixable_inputs(feeds: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs that are scalars or integer vectors: shapes, axes and counts; not all inputs."""
    small = {n: v for n, v in feeds.items() if v.ndim == 0 or (v.ndim == 1 and v.dtype.kind in "iub")}
    if len(small) == len(feeds):
        small.pop(next(iter(feeds)))
    return small


def _all_but_first(feeds: dict[str, Any]) -> dict[str, Any]:
    return dict(list(feeds.items())[1:])


def _attempt(
    case: test_case.TestCase,
    feeds: dict[str, Any],
    values: dict[str, Any],
    expected: list[Any],
    *,
    plain: bool,
) -> tuple[str, str]:
    try:
        results = _run_plain(case.model, feeds) if plain else run_as_shipped(case.model, feeds, values)
    except BuildError as error:
        return "refused", f"{error} | {error.hint or 'no hint'}"
    except (*FOREIGN_FAILURES, EdgeError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        return "refused" if plain else "TRACEBACK", reason
    for got, want in zip(results, expected, strict=False):
        if reason := difference(got, want, case):
            return "result", reason
    return "passed", ""


def run_as_shipped(
    model: onnx.ModelProto,
    feeds: dict[str, Any],
    values: dict[str, Any] | None = None,
    max_iterations: int | None = None,
) -> list[Any]:
    """Compile a model for this machine and run it in the executor that devices use.

    Raises
    ------
    BuildError
        If the model cannot be taken.
    """
    shapes = {name: value.shape for name, value in feeds.items()}
    imported = import_onnx(model, input_shapes=shapes, input_values=values, max_iterations=max_iterations)
    target = resolve("host")
    lowered = lower(imported.mod, target)
    made = generate(lowered.main, [s.name for s in imported.inputs], [s.name for s in imported.outputs])
    code = link(compile_kernels(lowered.kernels, target).code, target)
    params = dump_params((spec, array.data) for spec, array in made.params)
    inputs = {
        spec.name: np.asarray(feeds[spec.name], order="C").astype(spec.dtype, copy=False)
        for spec in imported.inputs
    }
    results = execute(code, made.graph, params, inputs)
    named = {spec.name: np.asarray(array) for spec, array in zip(imported.outputs, results, strict=True)}
    return list(cut(named, named, imported.lengths).values())


def _run_plain(model: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any]:
    import tvm
    from tvm import relax
    from tvm.relax.frontend.onnx import from_onnx

    with quiet():
        mod = from_onnx(model, keep_params_in_input=False)
        machine = relax.VirtualMachine(tvm.compile(mod, target="llvm"), tvm.cpu())
    results = machine["main"](*(tvm.runtime.tensor(np.ascontiguousarray(v)) for v in feeds.values()))
    return [r.numpy() for r in ([results] if isinstance(results, tvm.runtime.Tensor) else results)]


def difference(found: Any, want: Any, case: test_case.TestCase) -> str:  # noqa: ANN401 - arrays of any dtype
    """Say how an output differs from what the case expects; empty if it does not."""
    if found.shape != want.shape or found.dtype != want.dtype:
        return f"expected {want.dtype}{list(want.shape)}, got {found.dtype}{list(found.shape)}"
    half = want.dtype.itemsize < 4 and want.dtype.kind == "f"
    close = np.isclose(
        found.astype(np.float64),
        want.astype(np.float64),
        rtol=1e-2 if half else case.rtol,
        atol=ATOL_HALF if half else max(case.atol, ATOL),
        equal_nan=True,
    )
    return "" if close.all() else f"{np.count_nonzero(~close)} of {close.size} elements differ"


def _child(start: int, stop: int, pattern: str, *, plain: bool) -> None:
    for case in plain_cases(pattern)[start:stop]:
        print(json.dumps(["begin", case.name]), flush=True)
        print(json.dumps(["end", asdict(run_case(case, plain=plain))]), flush=True)


def _chunk(start: int, stop: int, pattern: str, *, plain: bool) -> tuple[list[Outcome], int]:
    """Run a chunk in a child; return its outcomes, and the next case: the one after a crash, if any."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.onnx_coverage",
        "--child",
        f"{start}:{stop}",
        "--filter",
        pattern,
    ]
    try:
        done = subprocess.run(
            [*command, *(["--plain"] if plain else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=CHUNK_TIMEOUT_S,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired as error:
        done = error.stdout or b""
    outcomes, begun = [], ""
    for line in done.decode().splitlines():
        if not line.startswith('["'):
            continue
        kind, what = json.loads(line)
        if kind == "begin":
            begun = what
        else:
            outcomes.append(Outcome(**what))
            begun = ""
    if begun:
        outcomes.append(Outcome(begun, "", "CRASH"))
    return outcomes, (start + len(outcomes)) if outcomes else stop


def main() -> None:
    """Run the cases in child processes, and print how many passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.onnx_coverage", description=__doc__)
    parser.add_argument("--filter", default="", help="only cases whose name matches this regular expression")
    parser.add_argument("--plain", action="store_true", help="try only TVM's front end")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, help="write all outcomes here (JSON)")
    arguments = parser.parse_args()
    if arguments.child:
        start, stop = (int(part) for part in arguments.child.split(":"))
        _child(start, stop, arguments.filter, plain=arguments.plain)
        return
    total = len(plain_cases(arguments.filter))
    outcomes: list[Outcome] = []
    position = 0
    while position < total:
        stop = min(position + CHUNK, total)
        found, position = _chunk(position, stop, arguments.filter, plain=arguments.plain)
        outcomes += found
        if sys.stderr.isatty():
            print(f"\r{position} of {total}", end="", file=sys.stderr)
    counts = collections.Counter(outcome.verdict for outcome in outcomes)
    for verdict, count in counts.most_common():
        print(f"{count:6} {verdict}")
    passed = counts["passed"] + counts["passed with values"]
    print(f"{passed} of {total} pass (onnx {onnx.__version__})")
    if arguments.output:
        arguments.output.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))


if __name__ == "__main__":
    main()
