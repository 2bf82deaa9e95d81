"""Checks which shipped records still apply to the current design spaces.

    python -m benchmarks.shipped_records.check [CORE ...]

An entry applies if a model still has its operator, the space still offers the recorded values, and the
heuristic still chooses the values that the entry was compared with. The compiler ignores all other entries:
search for their operators again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import s_tir as st

from benchmarks.shipped_records.cores import MODELS, TARGETS
from benchmarks.shipped_records.operators import operators_of
from builder.kernels.schedule import SCHEDULE_FAULTS, apply_space
from builder.records.shipped import CoreRecords, EntryChooser, ShippedEntry
from builder.records.task import Task
from builder.target.device_target import resolve


@dataclass(frozen=True, slots=True)
class Applicability:
    """How many of one core's entries apply.

    Attributes
    ----------
    fit
        The number of entries that apply.
    stale
        The others, as (signature, reason).
    """

    fit: int
    stale: tuple[tuple[str, str], ...]

    @property
    def share(self) -> float:
        """The share of entries that apply; 1 if there are none."""
        total = self.fit + len(self.stale)
        return self.fit / total if total else 1.0


def applicability(records: CoreRecords, models: Sequence[str]) -> Applicability:
    """Check the entries of `records` that were found in `models`."""
    ours = {s: e for s, e in records.entries.items() if set(e.models) & set(models)}
    named = [model for model in models if any(model in entry.models for entry in ours.values())]
    found = {w.signature: w for w in operators_of(named, resolve(TARGETS[records.name]), None)}
    stale = []
    for signature, entry in ours.items():
        why = (
            fault(found[signature].tasks[0], entry)
            if signature in found
            else "no model contains this operator"
        )
        if why is not None:
            stale.append((signature, why))
    return Applicability(len(ours) - len(stale), tuple(stale))


def fault(task: Task, entry: ShippedEntry) -> str | None:
    """Return why an entry does not apply to a task, None if it does."""
    choose = EntryChooser(entry)
    try:
        with task.space.target.tvm_target:
            apply_space(st.Schedule(task.workload), task.space.target, choose)
        choose.check_all_used()
    except SCHEDULE_FAULTS as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    return None


def main() -> int:
    """Check the records of the named cores, or of all, and print stale entries; return the exit status."""
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
