"""Compiles candidates of tasks, each task's as one object file, in processes of low priority."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as LateError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Final

import tvm
from tvm import tirx
from tvm.ir import load_json, save_json

from builder.boards.measuring_process import KERNEL
from builder.codegen.kernel_object import compile_object
from builder.codegen.link.linker import link
from builder.errors import BuildError
from builder.kernels.design_space import Decisions
from builder.records.task import Task
from builder.target.device_target import DeviceTarget
from builder.tuning.candidates.candidate_builder import arguments_of, kernel_of

BUILD_TIMEOUT_S: Final = 300.0
Arguments = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Candidates:
    """Points of a task that were compiled together; kernel `k3` is the fourth.

    Attributes
    ----------
    decisions
        The points.
    code
        A shared object.
    arguments
        Dtypes and shapes of the kernels' arguments.
    """

    decisions: tuple[Decisions, ...]
    code: bytes
    arguments: Arguments


@dataclass(frozen=True, slots=True)
class Job:
    """A job of a building process.

    Attributes
    ----------
    module
        TVM's serialised module.
    target
        The device.
    """

    module: str
    target: DeviceTarget


def job(task: Task, decisions: Sequence[Decisions]) -> tuple[Job, tuple[Decisions, ...]]:
    """Return a job for the points of a task that apply, and those points."""
    kernels: dict[str, tirx.PrimFunc] = {}
    made: list[Decisions] = []
    for point in decisions:
        found = task.space.point(point)
        if found is None:
            continue
        func = kernel_of(found.schedule, task.space.target)[KERNEL]
        name = f"k{len(made)}"
        kernels[name] = func.with_attr("global_symbol", name)
        made.append(point)
    return Job(save_json(tvm.IRModule(kernels)), task.space.target), tuple(made)


def build(work: Job) -> bytes:
    """Compile a job in a building process; return the shared object."""
    return link(compile_object(load_json(work.module), work.target), work.target)


class Builders:
    """A pool of processes that compile candidates.

    Parameters
    ----------
    niceness
        The niceness of the processes.
    processes
        The number of processes.
    """

    def __init__(self, niceness: int, processes: int = 2) -> None:
        self._pool = ProcessPoolExecutor(
            processes, multiprocessing.get_context("spawn"), os.nice, (niceness,)
        )

    def build(self, asked: Sequence[tuple[Task, Sequence[Decisions]]]) -> list[Candidates | None]:
        """Build the points of each task; None for a task whose points do not apply or cannot be built."""
        open_jobs: list[tuple[Task, tuple[Decisions, ...], Future[bytes] | None]] = []
        for task, decisions in asked:
            work, made = job(task, decisions)
            open_jobs.append((task, made, self._pool.submit(build, work) if made else None))
        results: list[Candidates | None] = []
        for task, made, future in open_jobs:
            try:
                code = future.result(BUILD_TIMEOUT_S) if future is not None else None
            except (BuildError, LateError, BrokenProcessPool):
                code = None
            results.append(None if code is None else Candidates(made, code, arguments_of(task)))
        return results

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(wait=False, cancel_futures=True)
