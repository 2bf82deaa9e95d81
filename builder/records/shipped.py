"""Shipped records: for a kind of core, decisions that were found better than the heuristic's.

Promises: an entry is used only where it still means what it meant, that is, where the design space asks for
the same decisions by name, offers the recorded values, and its heuristic would choose what the entry was
compared with. Otherwise the heuristic stands, quietly. Which core a device counts as is decided by its
instruction set; making the records is for `benchmarks.shipped_records`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Final

from agent.bundle import canonical_json
from agent.errors import FormatError
from builder.errors import BuildError, StaleEntryError
from builder.kernels.decisions import Chooser, Decision
from builder.target.device_target import DeviceTarget

NONE: Final = "none"  # in place of a records folder: no records at all, shipped ones neither
FORMAT: Final = 1

# LLVM's names of the cores that execute in order; what differs from others of their instruction set is the
# model of the pipeline alone, which no feature tells.
IN_ORDER: Final = frozenset({"cortex-a34", "cortex-a35", "cortex-a53", "cortex-a55", "cortex-a510"})


@dataclass(frozen=True, slots=True)
class ShippedEntry:
    """What was found for one signature.

    Attributes
    ----------
    chosen
        Decision's name -> value.
    instead
        What the heuristic chose when this was found.
    gain
        Cost of `instead` over that of `chosen`, in the records' measure.
    models
        Architectures of the benchmark that have it.
    """

    chosen: Mapping[str, int]
    instead: Mapping[str, int]
    gain: float
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CoreRecords:
    """The records for one kind of core.

    Attributes
    ----------
    format
        Of the file.
    name
        Of the file, and of the core in the manifest.
    cpu
        LLVM's name of the core that was compiled for.
    board_timed
        Whether a device of that kind was timed.
    measure
        In a sentence: what was measured, on what.
    made
        The date.
    entries
        Signature (`builder.kernels.signature`) -> what was found.
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
        """The records of a core.

        Raises
        ------
        BuildError
            If the installation is broken: the file is missing or is not what `to_text` writes.
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
        """The file's text: an entry a line, sorted, so that differences can be read."""
        head = {**canonical_json.to_json(self), "entries": None}
        del head["entries"]
        lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
        entries = canonical_json.to_json(self)["entries"]
        body = ",\n".join(
            f"  {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in sorted(entries.items())
        )
        return "{\n" + ",\n".join(f" {line}" for line in lines) + ',\n "entries": {\n' + body + "\n }\n}\n"

    def digest(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()


class ShippedChoices:
    """What one compilation asks: who decides for a signature.

    Attributes
    ----------
    used
        Signatures whose entry decided.
    stale
        Signatures whose entry did not fit.
    """

    def __init__(self, records: CoreRecords) -> None:
        self.records = records
        self.used: set[str] = set()
        self.stale: set[str] = set()

    def chooser(self, signature: str) -> EntryChooser | None:
        """Who decides for a kernel, None where nothing is known of it."""
        entry = self.records.entries.get(signature)
        return None if entry is None else EntryChooser(entry)

    def count_outcome(self, signature: str, *, fits: bool) -> None:
        """Whether the entry could be applied."""
        (self.used if fits else self.stale).add(signature)


class EntryChooser(Chooser):
    """Answers with an entry's decisions."""

    def __init__(self, entry: ShippedEntry) -> None:
        self._entry = entry
        self._left = set(entry.chosen)

    def __call__(self, name: str, values: Sequence[int], default: int) -> Decision:
        """The recorded value.

        Raises
        ------
        StaleEntryError
            If the space offers it no more, or its heuristic is another now.
        """
        chosen, instead = self._entry.chosen.get(name), self._entry.instead.get(name)
        if chosen is None or instead != default or chosen not in {*values, default}:
            raise StaleEntryError(
                f"{name}: {instead} -> {chosen} was recorded, {default} of {values} is asked"
            )
        self._left.discard(name)
        return chosen

    def check_all_used(self) -> None:
        """Refuse an entry with a decision that the space asked nobody about.

        Raises
        ------
        StaleEntryError
            If there is one.
        """
        if self._left:
            raise StaleEntryError(f"recorded, and not asked: {', '.join(sorted(self._left))}")


def name_for(target: DeviceTarget) -> str | None:
    """Which records serve a device: by its instruction set and lanes, not by its name; None for none."""
    lanes, fma = target.simd.lanes, target.simd.fma
    if target.arch == "x86_64" and fma and lanes in (8, 16):
        return "x86-avx512" if lanes == 16 else "x86-avx2"
    if target.arch != "aarch64":
        return None
    if target.cpu in IN_ORDER:
        return "cortex-a53"
    return "cortex-a76" if "asimddp" in target.features else "cortex-a72"


def shipped_for(target: DeviceTarget) -> ShippedChoices | None:
    """The choices for a device, None where no records serve it."""
    name = name_for(target)
    return None if name is None else ShippedChoices(CoreRecords.read(name))
