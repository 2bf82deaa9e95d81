"""Which shipped records still mean something to the design spaces of today.

    python -m benchmarks.shipped_records.check [CORE ...]

An entry does when a model that had its operator still has it, when the space offers what was chosen, and when
the heuristic is the one it was compared with. Others are ignored by compiling, and are to be found anew.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import s_tir as st

from benchmarks.shipped_records.cores import MODELS, TARGETS
from benchmarks.shipped_records.wanted import wanted
from builder.kernels.schedule import SCHEDULE_FAULTS, apply_space
from builder.records.shipped import CoreRecords, EntryChooser, ShippedEntry
from builder.records.task import Task
from builder.target.device_target import resolve


@dataclass(frozen=True)
class Applicability:
    """Of one core's entries that some models had.

    Attributes
    ----------
    fit
        How many apply.
    stale
        The others: signature and why.
    """

    fit: int
    stale: tuple[tuple[str, str], ...]

    @property
    def share(self) -> float:
        """The part that applies; one where there are none."""
        total = self.fit + len(self.stale)
        return self.fit / total if total else 1.0


def applicability(records: CoreRecords, models: Sequence[str]) -> Applicability:
    """Look at the entries that come from `models`."""
    ours = {s: e for s, e in records.entries.items() if set(e.models) & set(models)}
    there = {w.signature: w for w in wanted(models, resolve(TARGETS[records.name]), None)} if ours else {}
    stale = []
    for signature, entry in ours.items():
        why = fault(there[signature].tasks[0], entry) if signature in there else "no model has it any more"
        if why is not None:
            stale.append((signature, why))
    return Applicability(len(ours) - len(stale), tuple(stale))


def fault(task: Task, entry: ShippedEntry) -> str | None:
    """Why an entry does not apply, None where it does."""
    choose = EntryChooser(entry)
    try:
        with task.space.target.tvm_target:
            apply_space(st.Schedule(task.workload), task.space.target, choose)
        choose.check_all_used()
    except SCHEDULE_FAULTS as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shipped_records.check")
    parser.add_argument("core", nargs="*", choices=[[], *TARGETS], default=[])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    worst = 1.0
    for name in args.core or TARGETS:
        result = applicability(CoreRecords.read(name), args.models)
        worst = min(worst, result.share)
        print(f"{name}: {result.fit} of {result.fit + len(result.stale)} entries apply")
        for signature, why in result.stale:
            print(f"  {signature}: {why}")
    return 0 if worst >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
