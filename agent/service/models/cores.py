"""Divides processors among models, so that two models do not compete for the same ones.

No I/O: names and processors in, shares out. A single model gets all processors. Several models get disjoint
sets of nearly equal size, the earlier models the larger ones. If there are more models than processors, each
model gets one, and shares it with as few others as possible.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.worker.frames import Share


@dataclass(frozen=True, slots=True)
class Cores:
    """The processors to divide.

    Attributes
    ----------
    cpus
        Processors that the agent may use.
    threads
        Most threads of one model's kernels; 0 for as many as it has processors.
    apart
        Whether several models get different processors.
    """

    cpus: tuple[int, ...]
    threads: int = 0
    apart: bool = True

    @classmethod
    def detect(cls, environment: Mapping[str, str], *, threads: int, apart: bool) -> Cores:
        """Return this process's processors; EDGE_NUM_THREADS replaces `threads` if that is 0."""
        named = environment.get("EDGE_NUM_THREADS", "")
        if not threads and named.isdecimal() and len(named) < 4:
            threads = int(named)
        return cls(tuple(sorted(os.sched_getaffinity(0))), threads, apart)

    def share_out(self, names: Sequence[str]) -> dict[str, Share]:
        """Return each model's share; the first of `names` get one processor more if some are left."""
        if not self.apart or len(names) < 2:
            return {name: self._share(self.cpus) for name in names}
        if len(names) > len(self.cpus):
            return {
                name: self._share((self.cpus[index % len(self.cpus)],)) for index, name in enumerate(names)
            }
        least, larger = divmod(len(self.cpus), len(names))
        shares, start = {}, 0
        for index, name in enumerate(names):
            end = start + least + (index < larger)
            shares[name] = self._share(self.cpus[start:end])
            start = end
        return shares

    def _share(self, cpus: tuple[int, ...]) -> Share:
        return Share(cpus, min(self.threads, len(cpus)) if self.threads else len(cpus))
