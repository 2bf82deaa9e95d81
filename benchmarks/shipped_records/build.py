"""Candidates of a task as one object file, in a process of low priority."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import load_json, save_json

from builder.boards.measuring_process import KERNEL
from builder.codegen.kernel_object import compile_object
from builder.codegen.link.linker import link
from builder.kernels.design_space import Decisions
from builder.records.task import Task
from builder.target.device_target import DeviceTarget
from builder.tuning.candidates.candidate_builder import arguments_of, kernel_of

Arguments = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Candidates:
    """Points of a task that are compiled together; kernel `k3` is the fourth.

    Attributes
    ----------
    decisions
        The points.
    code
        An object file, or a shared object where it was linked.
    arguments
        Dtypes and shapes.
    launches
        For each point the extents of its parallel loops, in the order in which they run.
    """

    decisions: tuple[Decisions, ...]
    code: bytes
    arguments: Arguments
    launches: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Job:
    """What a building process is given."""

    module: str
    target: DeviceTarget
    linked: bool


def job(
    task: Task, decisions: Sequence[Decisions], *, linked: bool
) -> tuple[Job, tuple[Decisions, ...], tuple[tuple[int, ...], ...]]:
    """The points of a task that apply, ready to be compiled."""
    kernels: dict[str, tirx.PrimFunc] = {}
    made: list[Decisions] = []
    launches: list[tuple[int, ...]] = []
    for point in decisions:
        found = task.space.point(point)
        if found is None:
            continue
        func = kernel_of(found.schedule, task.space.target)[KERNEL]
        name = f"k{len(made)}"
        kernels[name] = func.with_attr("global_symbol", name)
        made.append(point)
        launches.append(parallel_extents(func))
    return Job(save_json(tvm.IRModule(kernels)), task.space.target, linked), tuple(made), tuple(launches)


def build(work: Job) -> bytes:
    """Compile; runs in a process of its own."""
    code = compile_object(load_json(work.module), work.target)
    return link(code, work.target) if work.linked else code


def parallel_extents(func: tirx.PrimFunc) -> tuple[int, ...]:
    """The extents of the loops that are launched, in order."""
    found: list[int] = []

    def loop(stmt: tirx.For) -> None:
        if stmt.kind == tirx.ForKind.PARALLEL:
            found.append(int(stmt.extent))

    tvm_ffi.structural_walk(func.body, ((tirx.For, loop),), order="pre")
    return tuple(found)


__all__ = ["Arguments", "Candidates", "Job", "arguments_of", "build", "job", "parallel_extents"]
