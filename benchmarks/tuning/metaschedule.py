"""Searches MetaSchedule's default space for a plain computation, for comparison."""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import dataclass

import tvm
from tvm.s_tir import meta_schedule as ms

from benchmarks.tuning.operators import KERNEL, Operator
from builder.boards.measuring_process import BuiltKernel
from builder.target.device_target import DeviceTarget
from builder.tuning.candidates.candidate_builder import build_module


@dataclass(frozen=True, slots=True)
class Tuned:
    """The best kernel that was found, the number of points that were measured, and the seconds it took."""

    code: BuiltKernel | None
    trials: int
    seconds: float


def tune(operator: Operator, target: DeviceTarget, trials: int, seed: int = 0) -> Tuned:
    """Let MetaSchedule search its default space, on one thread if `TVM_NUM_THREADS` is 1."""
    mod, arguments = operator.plain()
    logging.getLogger("tvm").setLevel(logging.ERROR)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        database = ms.tune_tir(
            mod=mod,
            target=target.tvm_target,
            work_dir=work,
            max_trials_global=trials,
            num_trials_per_iter=32,
            runner=ms.runner.LocalRunner(
                evaluator_config=ms.runner.EvaluatorConfig(number=4, repeat=3, min_repeat_ms=5),
                timeout_sec=20,
            ),
            seed=seed,
        )
        records = [r for r in database.get_all_tuning_records() if r.run_secs]
        schedule = ms.tir_integration.compile_tir(database, mod, target.tvm_target)
    seconds = time.monotonic() - started
    if schedule is None:
        return Tuned(None, len(records), seconds)
    kernel = schedule.mod["main"].with_attr("global_symbol", KERNEL)
    return Tuned(
        BuiltKernel(build_module(tvm.IRModule({KERNEL: kernel}), target), arguments), len(records), seconds
    )
