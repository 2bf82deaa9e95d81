"""Builds candidates as shared objects: generates and links code, in processes that can be killed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import tvm
from tvm import s_tir as st
from tvm.ir import save_json
from tvm.s_tir import meta_schedule as ms
from tvm.support.popen_pool import PopenPoolExecutor

from builder.boards.measuring_process import KERNEL, BuiltKernel
from builder.codegen.kernel_object import compile_object
from builder.codegen.link.linker import link
from builder.kernels.design_space import Point
from builder.kernels.postprocessing import postprocess
from builder.records.task import Task
from builder.target.device_target import DeviceTarget

BUILD_TIMEOUT_S: Final = 120.0  # a tile that is unrolled too far keeps LLVM busy for minutes


@dataclass(frozen=True, slots=True)
class Building:
    """Candidates that are being built."""

    _arguments: Sequence[tuple[tuple[str, tuple[int, ...]], ...]]
    _futures: Sequence[Future[bytes]]

    def results(self) -> Iterator[BuiltKernel | str]:
        """Wait for each candidate in turn; yield its shared object, or the reason why it failed."""
        for arguments, future in zip(self._arguments, self._futures, strict=True):
            try:
                yield BuiltKernel(future.result(), arguments)
            except TimeoutError:
                yield f"building took more than {BUILD_TIMEOUT_S:g} s"
            except Exception as error:  # noqa: BLE001 - anything that a build process raised
                text = str(error).strip()
                yield text.splitlines()[-1][:300] if text else "building failed"


class CandidateBuilder:
    """Builds candidates for one target, several at a time.

    Parameters
    ----------
    target
        The device.
    parallel
        Number of processes; None for one per CPU.
    """

    def __init__(self, target: DeviceTarget, parallel: int | None = None) -> None:
        self._target = target
        self._pool = PopenPoolExecutor(
            max_workers=parallel or len(os.sched_getaffinity(0)), timeout=BUILD_TIMEOUT_S
        )

    def build(self, jobs: Sequence[tuple[Task, Point]]) -> list[BuiltKernel | str]:
        """Build points and return for each its shared object, or the reason why it failed."""
        return list(self.start(jobs).results())

    def start(self, jobs: Sequence[tuple[Task, Point]]) -> Building:
        """Start building points, and return at once."""
        work = [(save_json(kernel_of(point.schedule, self._target)), self._target) for _, point in jobs]
        return Building(
            [arguments_of(task) for task, _ in jobs], [self._pool.submit(_build_one, job) for job in work]
        )

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(wait=False)


def _build_one(job: tuple[str, DeviceTarget]) -> bytes:
    text, target = job
    return build_module(tvm.ir.load_json(text), target)


def build_module(mod: tvm.IRModule, target: DeviceTarget) -> bytes:
    """Return a shared object with the kernels of `mod`, linked as in a bundle."""
    return link(compile_object(mod, target), target)


def kernel_of(schedule: st.Schedule, target: DeviceTarget) -> tvm.IRModule:
    """Return the scheduled function, postprocessed as in lowering, under the name `KERNEL`."""
    func = postprocess(schedule.mod["main"], target)
    return tvm.IRModule({KERNEL: func.with_attr("global_symbol", KERNEL)})


def arguments_of(task: Task) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the dtype and shape of each argument of a kernel."""
    infos = ms.arg_info.ArgInfo.from_entry_func(task.workload, False)
    return tuple((str(info.dtype), tuple(int(d) for d in info.shape)) for info in infos)
