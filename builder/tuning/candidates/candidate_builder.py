"""Builds candidates: generates code in processes that can be killed, and links a batch as one shared object.

Linking takes as long for a batch as for one candidate. A batch holds what a bundle holds, several kernels and
one launcher, so what is measured is what ships.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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
from builder.errors import lines_of
from builder.kernels.design_space import Point
from builder.kernels.postprocessing import postprocess
from builder.records.task import Task
from builder.target.device_target import DeviceTarget

BUILD_TIMEOUT_S: Final = 120.0  # a tile that is unrolled too far keeps LLVM busy for minutes


@dataclass(frozen=True, slots=True)
class Building:
    """Candidates that are being built.

    `arguments`: dtype and shape of each argument, for each candidate.
    `objects`: for each candidate, its relocatable object, in which it is called `kernel_name(index)`.
    `link`: links objects as one shared object.
    """

    arguments: Sequence[tuple[tuple[str, tuple[int, ...]], ...]]
    objects: Sequence[Future[bytes]]
    link: Callable[[Sequence[bytes]], bytes]

    def results(self) -> list[BuiltKernel | str]:
        """Wait for all candidates; return each one, or the reason why it failed.

        Raises `LinkError` if the candidates that compiled cannot be linked: that is a fault of the
            installation.
        """
        found = [_object_or_reason(future) for future in self.objects]
        compiled = [each for each in found if isinstance(each, bytes)]
        content = self.link(compiled) if compiled else b""
        return [
            BuiltKernel(content, arguments, kernel_name(index)) if isinstance(each, bytes) else each
            for index, (each, arguments) in enumerate(zip(found, self.arguments, strict=True))
        ]


def _object_or_reason(future: Future[bytes]) -> bytes | str:
    try:
        return future.result()
    except TimeoutError:
        return f"building took more than {BUILD_TIMEOUT_S:g} s"
    except Exception as error:  # noqa: BLE001 - anything that a build process raised
        return lines_of(error)[-1][:300]


class CandidateBuilder:
    """Builds candidates for one target, several at a time.

    `parallel`: number of processes; None for one per CPU.
    """

    def __init__(self, target: DeviceTarget, parallel: int | None = None) -> None:
        self._target = target
        self._pool = PopenPoolExecutor(
            max_workers=parallel or len(os.sched_getaffinity(0)), timeout=BUILD_TIMEOUT_S
        )

    def build(self, jobs: Sequence[tuple[Task, Point]]) -> list[BuiltKernel | str]:
        """Build points and return each one, or the reason why it failed."""
        return self.start(jobs).results()

    def start(self, jobs: Sequence[tuple[Task, Point]]) -> Building:
        """Start building points, and return at once."""
        work = [
            (save_json(kernel_of(point.schedule, self._target, kernel_name(index))), self._target)
            for index, (_, point) in enumerate(jobs)
        ]
        return Building(
            [arguments_of(task) for task, _ in jobs],
            [self._pool.submit(_compile_one, job) for job in work],
            lambda objects: link(objects[0], self._target, objects[1:]),
        )

    def close(self) -> None:
        """End the processes."""
        self._pool.shutdown(wait=False)


def _compile_one(job: tuple[str, DeviceTarget]) -> bytes:
    text, target = job
    return compile_object(tvm.ir.load_json(text), target)


def kernel_name(index: int) -> str:
    """Return the name of candidate number `index` in the shared object of its batch."""
    return f"{KERNEL}{index}"


def build_module(mod: tvm.IRModule, target: DeviceTarget) -> bytes:
    """Return a shared object with the kernels of `mod`, linked as in a bundle."""
    return link(compile_object(mod, target), target)


def kernel_of(schedule: st.Schedule, target: DeviceTarget, name: str = KERNEL) -> tvm.IRModule:
    """Return the scheduled function, postprocessed as in lowering, under the name `name`."""
    func = postprocess(schedule.mod["main"], target)
    return tvm.IRModule({name: func.with_attr("global_symbol", name)})


def arguments_of(task: Task) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the dtype and shape of each argument of a kernel."""
    infos = ms.arg_info.ArgInfo.from_entry_func(task.workload, False)
    return tuple((str(info.dtype), tuple(int(d) for d in info.shape)) for info in infos)
