"""The best records of a folder, which compiling uses; picking them, and merging folders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from tvm import tirx
from tvm.s_tir.schedule import Trace

from builder.kernels.design_space import workload_of
from builder.records.folder import Record, Records
from builder.target.device_target import DeviceTarget


class BestRecords:
    """The schedules that were measured to be best, for lowering.

    The verdict of the final comparison decides. Without a verdict, as after an interrupted run, the fastest
    record does; if nothing beat the heuristic, that is the heuristic's own.

    Attributes
    ----------
    used
        Keys of the workloads whose schedule has been taken from the records.
    """

    def __init__(self, records: Records) -> None:
        self._records = records
        self.used: set[str] = set()

    def trace(self, func: tirx.PrimFunc) -> Trace | None:
        """Return the schedule for `func`; None if the heuristic's is used."""
        key = workload_of(func)[1]
        record = chosen(self._records, key)
        if record is None:
            return None
        self.used.add(key)
        return self._records.trace(record)


def chosen(records: Records, key: str) -> Record | None:
    """Return the record of workload `key` that replaces the heuristic's point; None if none does."""
    best = records.best(key)
    if not best:
        return None
    operator, verdict = records.meta.operators.get(key), records.meta.verdicts.get(key)
    record: Record | None = best[0]
    if verdict is not None:
        record = next((r for r in records.all if r.key == key and r.decisions == verdict.decisions), None)
        if not verdict.use:
            return None
    if record is None or (operator is not None and record.decisions == operator.default):
        return None
    return record


def merge(
    out: str | os.PathLike[str], inputs: Sequence[str | os.PathLike[str]], target: DeviceTarget
) -> Records:
    """Add the records of several folders for one target to the folder `out`, which may be new.

    Raises
    ------
    RecordsError
        If a folder cannot be read, or is for another TVM or target.
    """
    sources = [Records.read(path, target) for path in inputs]
    merged = Records.write(out, target)
    for source in sources:
        merged.copy((r, source.workload(r.key), source.meta.operators[r.key]) for r in source.all)
        meta, other = merged.meta, source.meta
        for name, time in other.boards.items():
            meta = meta.with_board(name, time)
        merged.update(
            replace(
                meta,
                peak_gflops=meta.peak_gflops if meta.peak_gflops is not None else other.peak_gflops,
                verdicts={**other.verdicts, **meta.verdicts},
                models={**other.models, **meta.models},
            )
        )
    return merged


def pick_best(records: Records, out: str | os.PathLike[str], target: DeviceTarget) -> Records:
    """Write the records that compiling uses, one per workload, into the new folder `out`."""
    picked = Records.write(out, target)
    wanted = [r for key in records.keys if (r := chosen(records, key)) is not None]
    picked.copy((r, records.workload(r.key), records.meta.operators[r.key]) for r in wanted)
    keys = {r.key for r in wanted}
    meta = records.meta
    picked.update(
        replace(
            meta,
            operators=picked.meta.operators,
            verdicts={k: v for k, v in meta.verdicts.items() if k in keys},
            retired=picked.meta.retired,
        )
    )
    return picked
