"""How busy the machine was with other work during a measurement, and how not to be disturbed."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")
# Figures count as disturbed if other processes used more than this share of the processors.
LIMIT: Final = 0.05
HIGHEST_PRIORITY: Final = -20
# Between engines: the threads of one that has just run spin, OpenMP's for 20 ms, ONNX Runtime's for 60 ms.
PAUSE_S: Final = 0.1


def busy_s() -> float:
    """Return the processor seconds that this machine has been busy since boot, including stolen ones."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / _TICKS


def prefer_this_process() -> None:
    """Give this process, which leads a session, the highest priority if that is permitted.

    If sessions are scheduled as groups (sched_autogroup), a nice value counts only within its session, so the
    session's priority is set too.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, HIGHEST_PRIORITY)
        Path("/proc/self/autogroup").write_text(str(HIGHEST_PRIORITY))


@dataclass(frozen=True, slots=True)
class Noise:
    """How busy the machine was with other work during a series of measurements.

    Attributes
    ----------
    others
        The share of this machine's processors that other processes used meanwhile.
    preempted_per_s
        How often per second a measured thread was preempted.
    load
        The load average of the last minute, at the end.
    """

    others: float
    preempted_per_s: float
    load: float

    @classmethod
    def over(cls, turns: list[tuple[float, float, int]]) -> Noise:
        """Sum up turns, each as (wall seconds, others' processor seconds, preemptions)."""
        wall = sum(turn[0] for turn in turns) or 1.0
        others = sum(turn[1] for turn in turns) / wall / (os.cpu_count() or 1)
        return cls(others, sum(turn[2] for turn in turns) / wall, os.getloadavg()[0])

    @property
    def disturbed(self) -> bool:
        """Whether the figures measured meanwhile deserve a warning."""
        return self.others > LIMIT

    def __str__(self) -> str:
        return (
            f"others used {self.others:.0%} of the processors, "
            f"{self.preempted_per_s:.0f} preemptions per second, load {self.load:.1f}"
        )
