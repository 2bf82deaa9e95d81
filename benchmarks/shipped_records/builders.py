"""Processes that compile candidates beside each other, at low priority."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as LateError
from concurrent.futures.process import BrokenProcessPool

from benchmarks.shipped_records.build import Candidates, arguments_of, build, job
from builder.errors import BuildError
from builder.kernels.design_space import Decisions
from builder.records.task import Task

BUILD_TIMEOUT_S = 300.0


class Builders:
    """A pool of them.

    Parameters
    ----------
    niceness
        Priority is given up for others by so much.
    processes
        How many.
    """

    def __init__(self, niceness: int, processes: int = 2) -> None:
        self._pool = ProcessPoolExecutor(
            processes, multiprocessing.get_context("spawn"), os.nice, (niceness,)
        )

    def build(
        self, asked: Sequence[tuple[Task, Sequence[Decisions]]], *, linked: bool
    ) -> list[Candidates | None]:
        """The candidates of each task that can be built; None where none can."""
        open_jobs: list[
            tuple[Task, tuple[Decisions, ...], tuple[tuple[int, ...], ...], Future[bytes] | None]
        ] = []
        for task, decisions in asked:
            work, made, launches = job(task, decisions, linked=linked)
            open_jobs.append((task, made, launches, self._pool.submit(build, work) if made else None))
        results: list[Candidates | None] = []
        for task, made, launches, future in open_jobs:
            try:
                code = future.result(BUILD_TIMEOUT_S) if future is not None else None
            except (BuildError, LateError, BrokenProcessPool):
                code = None
            results.append(None if code is None else Candidates(made, code, arguments_of(task), launches))
        return results

    def close(self) -> None:
        """End them."""
        self._pool.shutdown(wait=False, cancel_futures=True)
