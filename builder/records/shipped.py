"""Shipped records: for each kind of core, decisions that were found to be better than the heuristic's.

Promises: an entry is used only if it still means the same, that is, if the design space asks for the same
decisions by name, offers the recorded values, and its heuristic would still choose the values that the entry
was compared with. Otherwise the heuristic decides, without a message. The instruction set of a device selects
the core. `benchmarks.shipped_records` makes the records.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Final

import tvm
from tvm import s_tir as st

from agent.bundle import canonical_json
from agent.errors import FormatError
from builder.errors import BuildError, StaleEntryError
from builder.kernels.decisions import Chooser, Decision
from builder.kernels.design_space import Decisions, DesignSpace
from builder.kernels.schedule import anchor_of
from builder.kernels.signature import signature_of
from builder.target.device_target import DeviceTarget

NONE: Final = "none"  # in place of a records folder: use no records, not even the shipped ones
FORMAT: Final = 1

# LLVM's names of the cores that execute in order. They differ from others with the same instruction set only
# in their pipeline, which no CPU feature reveals.
IN_ORDER: Final = frozenset({"cortex-a34", "cortex-a35", "cortex-a53", "cortex-a55", "cortex-a510"})


@dataclass(frozen=True, slots=True)
class ShippedEntry:
    """The decisions that were found for one signature.

    Attributes
    ----------
    chosen
        Name of a decision -> the best value.
    instead
        Name of a decision -> the value that the heuristic chose at that time.
    gain
        Cost of `instead` divided by the cost of `chosen`, in the records' measure.
    models
        Architectures of the benchmark that have such an operator.
    """

    chosen: Mapping[str, int]
    instead: Mapping[str, int]
    gain: float
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CoreRecords:
    """The shipped records for one kind of core.

    Attributes
    ----------
    format
        The version of the file's layout.
    name
        The name of the file, and of these records in a manifest.
    cpu
        LLVM's name of the core that the candidates were compiled for.
    board_timed
        Whether a device of that kind was timed.
    measure
        What was measured, and on what, in one sentence.
    made
        The date.
    entries
        Signature (`builder.kernels.signature`) -> the decisions that were found.
    """

    format: int
    name: str
    cpu: str
    board_timed: bool
    measure: str
    made: str
    entries: Mapping[str, ShippedEntry] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str) -> CoreRecords:
        """Read the records called `name`.

        Raises
        ------
        BuildError
            If the installation is broken: the file is missing or malformed.
        """
        file = resources.files("builder.records") / f"{name}.json"
        try:
            records = canonical_json.from_json(cls, json.loads(file.read_text("utf-8")), f"{name}.json")
        except (OSError, ValueError, FormatError) as error:
            raise BuildError(f"the shipped records {name}.json cannot be read: {str(error)[:200]}") from error
        if records.format != FORMAT:
            raise BuildError(
                f"{name}.json: expected shipped records of format {FORMAT}, got {records.format}"
            )
        return records

    def to_text(self) -> str:
        """Return the file's text, with one entry per line, sorted, so that differences are readable."""
        head = {**canonical_json.to_json(self), "entries": None}
        del head["entries"]
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
        entries = canonical_json.to_json(self)["entries"]
        body = ",\n".join(
            f"  {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in sorted(entries.items())
        )
        return "{\n" + ",\n".join(f" {line}" for line in lines) + ',\n "entries": {\n' + body + "\n }\n}\n"

    def digest(self) -> str:
        """Return the SHA-256 of the file."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()


class ShippedChoices:
    """The shipped records in one compilation, and which of them it has used.

    Attributes
    ----------
    used
        Signatures whose entry was applied.
    stale
        Signatures whose entry did not fit.
    """

    def __init__(self, records: CoreRecords) -> None:
        self.records = records
        self.used: set[str] = set()
        self.stale: set[str] = set()

    def chooser(self, signature: str) -> EntryChooser | None:
        """Return the chooser for a kernel; None if the records have no entry for it."""
        entry = self.records.entries.get(signature)
        return None if entry is None else EntryChooser(entry)

    def count_outcome(self, signature: str, *, fits: bool) -> None:
        """Count whether the entry of `signature` could be applied."""
        (self.used if fits else self.stale).add(signature)


class EntryChooser(Chooser):
    """Chooses the values of an entry."""

    def __init__(self, entry: ShippedEntry) -> None:
        self._entry = entry
        self._left = set(entry.chosen)

    def __call__(self, name: str, values: Sequence[int], default: int) -> Decision:
        """Return the recorded value of the decision `name`.

        Raises
        ------
        StaleEntryError
            If the space no longer offers it, or its heuristic has changed.
        """
        chosen, instead = self._entry.chosen.get(name), self._entry.instead.get(name)
        if chosen is None or instead != default or chosen not in {*values, default}:
            raise StaleEntryError(
                f"{name}: expected the heuristic's choice {instead} and a value {chosen}, "
                f"got {default} of {values}"
            )
        self._left.discard(name)
        return chosen

    def check_all_used(self) -> None:
        """Check that the design space asked for every decision of the entry.

        Raises
        ------
        StaleEntryError
            If it did not ask for one of them.
        """
        if self._left:
            raise StaleEntryError(f"the design space does not ask for {', '.join(sorted(self._left))}")


def name_for(target: DeviceTarget) -> str | None:
    """Return the name of the records for a device, by its instruction set and vector lanes; or None."""
    lanes, fma = target.simd.lanes, target.simd.fma
    if target.arch == "x86_64" and fma and lanes in (8, 16):
        return "x86-avx512" if lanes == 16 else "x86-avx2"
    if target.arch != "aarch64":
        return None
    if target.cpu in IN_ORDER:
        return "cortex-a53"
    return "cortex-a76" if "asimddp" in target.features else "cortex-a72"


def shipped_for(target: DeviceTarget) -> ShippedChoices | None:
    """Return the shipped records for a device; None if there are none for its kind."""
    name = name_for(target)
    return None if name is None else ShippedChoices(CoreRecords.read(name))


def signature_for(workload: tvm.IRModule) -> str | None:
    """Return the signature of an unscheduled workload; None if it has no design space."""
    sch = st.Schedule(workload)
    anchor = anchor_of(sch)
    return None if anchor is None else signature_of(sch, *anchor)


def point_of(entry: ShippedEntry, space: DesignSpace) -> Decisions | None:
    """Return `entry.chosen` as indices into the values of `space`; None if `space` does not offer it."""
    if set(entry.chosen) != set(space.names):
        return None
    chosen = [entry.chosen[name] for name in space.names]
    if any(value not in values for value, values in zip(chosen, space.values, strict=True)):
        return None
    return tuple(values.index(value) for value, values in zip(chosen, space.values, strict=True))
