"""Finds the tasks of a model: its different kernels that have a design space, and the calls of each.

A task is identified by its *workload*, the unscheduled function. So two models that have a convolution in
common share its records.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax, tirx
from tvm.ir import Call

from agent.bundle.layer import MAX_NAME_CHARS, clean
from builder.calls.spans import names_of
from builder.codegen.kernel_object import count_flops
from builder.compiling.lower import fuse
from builder.errors import RecordsError
from builder.importer import ImportedModel, load
from builder.kernels.decisions import Chooser, heuristic
from builder.kernels.design_space import DesignSpace, workload_of
from builder.kernels.rewriter import op_name
from builder.kernels.schedule import space_of, without_pragmas
from builder.records.task import Task
from builder.target.device_target import DeviceTarget, resolve


def extract_tasks(
    model: ImportedModel | str | os.PathLike[str],
    target: str | Mapping[str, Any] | DeviceTarget = "host",
    *,
    input_shapes: Mapping[str, Sequence[int]] | None = None,
    choose: Chooser = heuristic,
) -> tuple[Task, ...]:
    """Find the tasks of a model.

    Parameters
    ----------
    model
        A model that `builder.load` returned, or the path of an ONNX file.
    target
        The device that it is compiled for.
    input_shapes
        Shapes of inputs with symbolic dimensions, if `model` is a path.
    choose
        Chooses the default point of each space.

    Returns
    -------
    tuple of Task
        One task per workload, in the order of the model, without workloads that have only one point.
    """
    device = target if isinstance(target, DeviceTarget) else resolve(target)
    imported = model if isinstance(model, ImportedModel) else load(model, input_shapes=input_shapes)
    fused = fuse(imported.mod, device)
    calls = _calls(fused["main"])
    nodes = _nodes(fused["main"], imported)
    tasks: dict[str, Task] = {}
    for name, count in calls.items():
        func = fused[name]
        if not isinstance(func, tirx.PrimFunc):
            continue
        func = without_pragmas(func)  # as in lowering: otherwise the workload would differ
        kind = space_of(func)
        space = DesignSpace.of(func, device, choose) if kind is not None else None
        if kind is None or space is None or space.size < 2:
            continue
        workload, key = workload_of(func)
        if key in tasks:
            known = tasks[key]
            tasks[key] = Task(
                known.index,
                known.name,
                kind,
                workload,
                key,
                known.calls + count,
                known.flops,
                space,
                known.nodes,
            )
            continue
        flops = count_flops(workload)["main"]
        tasks[key] = Task(len(tasks), name, kind, workload, key, count, flops, space, nodes.get(name, ()))
    return tuple(tasks.values())


def _calls(main: relax.Function) -> Counter[str]:
    """Count the calls of each kernel, in the order of their first calls."""
    calls: Counter[str] = Counter()
    for block in main.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, Call) and op_name(value) == "relax.call_tir":
                calls[value.args[0].name_hint] += 1
    return calls


def _nodes(main: relax.Function, model: ImportedModel) -> dict[str, tuple[str, ...]]:
    """Return the nodes of the model that the first call of each kernel computes, in the model's order."""
    source = model.source
    found: dict[str, tuple[str, ...]] = {}
    for block in main.body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, Call) and op_name(value) == "relax.call_tir":
                origins = {source.origins.get(name) for name in names_of(value)} - {None}
                nodes = (
                    source.nodes[origin] for origin in sorted(each for each in origins if each is not None)
                )
                labels = tuple(
                    f"{clean(node.op, MAX_NAME_CHARS)} {clean(node.name, MAX_NAME_CHARS)}" for node in nodes
                )
                found.setdefault(str(value.args[0].name_hint), labels)
    return found


def select(tasks: Sequence[Task], spec: str) -> tuple[Task, ...]:
    """Return the tasks that `--tasks` names: `all`, or numbers and ranges such as `0,2|3-5`."""
    if spec == "all":
        return tuple(tasks)
    chosen: set[int] = set()
    for part in re.split(r"[,|]", spec):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        if match is None:
            raise RecordsError(
                f"--tasks: expected all, list, or numbers such as 0,2|3-5, got {spec[:80]!r}",
                hint="--tasks list shows them",
            )
        first = int(match[1])
        chosen.update(range(first, int(match[2] or first) + 1))
    if not chosen or max(chosen) >= len(tasks):
        raise RecordsError(
            f"--tasks: expected numbers from 0 to {len(tasks) - 1}, got {spec[:80]!r}",
            hint="--tasks list shows them",
        )
    return tuple(task for task in tasks if task.index in chosen)


def table(tasks: Sequence[Task]) -> str:
    """Return the table of tasks that `--tasks list` prints."""
    heads = ("task", "calls", "MFLOP", "points", "kind", "name")
    rows = [
        (str(t.index), str(t.calls), f"{t.flops / 1e6:.2f}", str(t.space.size), t.kind, t.title)
        for t in tasks
    ]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    total = math.fsum(t.flops * t.calls for t in tasks)
    lines = [
        "  ".join(
            cell.rjust(w) if i < 4 else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in [heads, *rows]
    ]
    return "\n".join(
        [*(line.rstrip() for line in lines), f"{len(tasks)} tasks, {total / 1e9:.3f} GFLOP per inference"]
    )
