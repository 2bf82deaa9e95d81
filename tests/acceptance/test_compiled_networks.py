"""Compiled networks: number of kernels, memory, accuracy, and speed relative to ONNX Runtime."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import tvm
from tvm import relax

from agent.bundle.graph import Graph
from agent.bundle.node import NOP
from agent.runtime.graph_executor import create
from builder import Package, load
from builder.codegen.graph_codegen import generate
from builder.compiling.lower import LoweredModule, lower
from builder.running.in_memory import load_kernels
from builder.target.device_target import resolve
from tests.acceptance.conftest import RealPackage

pytestmark = pytest.mark.slow

REAL = ["mnist", "slim-320", "RFB-320", "yunet_n_320"]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def lowered_resnet18(resnet18: Path) -> LoweredModule:
    return lower(load(resnet18).mod, resolve("host"))


def without_load_time(main: relax.Function) -> relax.Function:
    """Replace calls that read only constants by parameters: TVM's planner has no nodes that run at load."""
    known: dict[tvm.ir.Expr, tvm.ir.Expr] = {}
    params = list(main.params)
    bindings = []

    def sub(expr: tvm.ir.Expr) -> tvm.ir.Expr:
        if isinstance(expr, tvm.ir.Tuple):
            return tvm.ir.Tuple([sub(field) for field in expr.fields])
        return known.get(expr, expr)

    for binding in main.body.blocks[0].bindings:
        value = binding.value
        if isinstance(value, relax.Call):
            leaves = value.args[1].fields if value.op.name == "relax.call_tir" else value.args[:1]
            if all(isinstance(leaf, tvm.ir.GenericConst) for leaf in leaves):
                known[binding.var] = relax.Var(binding.var.name, binding.var.ty)
                params.append(known[binding.var])
                continue
            value = relax.Call(value.op, [sub(a) for a in value.args], value.attrs, value.ty_args)
        known[binding.var] = relax.Var(binding.var.name, binding.var.ty)
        bindings.append(relax.VarBinding(known[binding.var], sub(value)))
    body = relax.SeqExpr([relax.BindingBlock(bindings)], sub(main.body.body))
    return relax.Function(params, body, main.ret_ty).with_attr("global_symbol", "main")


def tvm_plan_bytes(lowered: LoweredModule) -> int:
    """Return the bytes of storage that TVM's own planner allocates for the same module."""
    main = without_load_time(lowered.main)
    called: dict[str, tvm.ir.GlobalVar] = {}

    def collect(expr: tvm.ir.Expr) -> None:
        if isinstance(expr, tvm.ir.GlobalVar):
            called[expr.name_hint] = expr

    relax.analysis.post_order_visit(main, collect)
    kernels = {var.name_hint: function for var, function in lowered.kernels.functions.items()}
    functions = {var: kernels[name] for name, var in called.items()}
    module = relax.transform.Normalize()(tvm.IRModule(functions | {tvm.ir.GlobalVar("main"): main}))
    passes = [
        relax.transform.CallTIRRewrite(),
        relax.transform.StaticPlanBlockMemory(),
    ]
    module = tvm.transform.Sequential(passes)(module)
    total = 0

    def visit(expr: tvm.ir.Expr) -> None:
        nonlocal total
        if isinstance(expr, relax.Call) and getattr(expr.op, "name", "") == "relax.memory.alloc_storage":
            total += int(expr.args[0].values[0])

    relax.analysis.post_order_visit(module["main"], visit)
    return total


def calls_of_a_run(graph: Graph) -> int:
    """Return the number of kernel calls of an inference, without those that read only parameters."""
    at_load = {i for i, node in enumerate(graph.nodes) if node.is_null and node.name != "x"}
    calls = 0
    for i, node in enumerate(graph.nodes):
        if node.is_null:
            continue
        if all(entry.node_id in at_load for entry in node.inputs):
            at_load.add(i)
        elif node.func_name != NOP:
            calls += 1
    return calls


def test_resnet18_has_at_most_30_kernels(lowered_resnet18: LoweredModule) -> None:
    made = generate(lowered_resnet18.main, ["x"], ["y"])
    assert 20 <= calls_of_a_run(made.graph) <= 30


def test_resnet18_arena_is_at_most_as_large_as_tvms_plan(lowered_resnet18: LoweredModule) -> None:
    made = generate(lowered_resnet18.main, ["x"], ["y"])
    outputs = sum(spec.nbytes for spec in made.outputs)  # TVM does not include them in its plan
    planned = tvm_plan_bytes(lowered_resnet18)
    assert planned > 0
    assert made.arena_bytes <= planned + outputs


# slim-320 is RFB-320 without its block of dilated convolutions.
@pytest.mark.models
@pytest.mark.parametrize(
    ("name", "target"),
    [*((name, "host") for name in REAL), *((name, "rpi4") for name in REAL if name != "slim-320")],
)
def test_a_real_model_agrees_with_the_reference(real_package: RealPackage, name: str, target: str) -> None:
    package = real_package(name, target)
    assert package.manifest.provenance.parity_error is not None
    assert package.manifest.provenance.parity_error <= TOLERANCE


def paired_speed(package: Package, model: Path, threads: int = 2, runs: int = 15) -> float:
    """Return ONNX Runtime's time divided by ours: medians of runs in turn on the same inputs."""
    kernels = load_kernels(package.members["mod.so"])
    kernels.set_threads(threads)
    ours = create(package.members["mod.json"], kernels)
    ours.load_params(package.members["mod.params"])
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    theirs = ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    inputs = {s.name: rng.standard_normal(s.shape).astype(s.dtype) for s in package.manifest.inputs}
    for name, value in inputs.items():
        ours.set_input(name, value)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(runs):
        for engine, spent in ((ours.run, times[0]), (lambda: theirs.run(None, inputs), times[1])):
            start = time.perf_counter()
            engine()
            spent.append(time.perf_counter() - start)
    return statistics.median(times[1]) / statistics.median(times[0])


@pytest.mark.models
@pytest.mark.parametrize("name", ["slim-320", "RFB-320", "yunet_n_320"])
def test_real_model_has_at_least_a_tenth_of_the_references_speed(
    real_package: RealPackage, models: Path, name: str
) -> None:
    speed = paired_speed(real_package(name, "host"), models / f"{name}.onnx")
    print(f"{name}: {speed:.2f} of ONNX Runtime's speed")
    assert speed >= 0.1


def test_resnet18_has_at_least_a_tenth_of_the_references_speed(
    resnet18_package: Package, resnet18: Path
) -> None:
    threads = min(2, len(os.sched_getaffinity(0)))
    speed = paired_speed(resnet18_package, resnet18, threads)
    print(f"resnet18: {speed:.2f} of ONNX Runtime's speed")
    assert speed >= 0.1
