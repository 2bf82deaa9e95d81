"""The processors that this process may use, and how many threads of a kernel they are good for.

Promises to count a core once, however many processors it appears as, and no more threads than the control
groups allow processor time for. Looks once, so that a launch of a kernel need not.

Two threads of a kernel on one core share its arithmetic units, which one thread already keeps busy: ONNX
Runtime and OpenVINO, too, count cores by default.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agent.bundle.control_group import ControlGroup


@dataclass(frozen=True, slots=True)
class Processors:
    """Processors of this process.

    Attributes
    ----------
    cores
        The processors of each core, both sorted by number.
    quota
        Processor time for each second that control groups allow, in seconds; None for no limit.
    """

    cores: tuple[tuple[int, ...], ...]
    quota: float | None = None

    @classmethod
    def detect(cls, root: str | os.PathLike[str] = "/") -> Processors:
        """Detect the processors.

        Parameters
        ----------
        root
            Folder that contains proc and sys. The processors that this process may run on are always this
            machine's.
        """
        return cls(cores_of(os.sched_getaffinity(0), root), ControlGroup.detect(root).processors)

    @property
    def threads(self) -> int:
        """Threads of a kernel that can compute at the same time, at least 1."""
        return self.threads_of(len(self.cores))

    def threads_of(self, cores: int) -> int:
        """Return the threads for a part of the cores, which gets as large a part of the quota.

        A quota is rounded to the nearest number, halves up: docs/decisions/0026 has the measurements.
        """
        if self.quota is None:
            return cores
        return max(1, min(cores, math.floor(self.quota * cores / len(self.cores) + 0.5)))


def cores_of(cpus: Iterable[int], root: str | os.PathLike[str] = "/") -> tuple[tuple[int, ...], ...]:
    """Group processors by core; one whose core is unknown counts as a core."""
    topology = Path(root) / "sys/devices/system/cpu"
    cores: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        try:
            siblings = (topology / f"cpu{cpu}/topology/thread_siblings_list").read_text("ascii").strip()
        except (OSError, UnicodeDecodeError):
            siblings = ""
        cores.setdefault(siblings or f"cpu {cpu}", []).append(cpu)
    return tuple(tuple(core) for core in cores.values())
