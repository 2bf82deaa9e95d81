"""Divides cores among models, so that two models do not compete for the same ones.

No I/O: names and cores in, shares out. A single model gets all cores. Several models get disjoint sets of
nearly equal size, the earlier models the larger ones. If there are more models than cores, each model gets
one, and shares it with as few others as possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.bundle.processors import Processors
from agent.worker.frames import Share


@dataclass(frozen=True, slots=True)
class Cores:
    """The processors that the agent may use, by core.

    A model has at most so many `threads`; 0 for one on each of its cores, as far as the quota goes. `apart`
    says whether several models get different cores.
    """

    processors: Processors
    threads: int = 0
    apart: bool = True

    @classmethod
    def detect(cls, environment: Mapping[str, str], *, threads: int, apart: bool) -> Cores:
        """Return this process's cores; EDGE_NUM_THREADS replaces `threads` if that is 0."""
        named = environment.get("EDGE_NUM_THREADS", "")
        if not threads and named.isdecimal() and len(named) < 4:
            threads = int(named)
        return cls(Processors.detect(), threads, apart)

    def share_out(self, names: Sequence[str]) -> dict[str, Share]:
        """Return each model's share; the first of `names` get one core more if some are left."""
        cores = self.processors.cores
        if not self.apart or len(names) < 2:
            return {name: self._share(cores) for name in names}
        if len(names) > len(cores):
            return {name: self._share((cores[index % len(cores)],)) for index, name in enumerate(names)}
        least, larger = divmod(len(cores), len(names))
        shares, start = {}, 0
        for index, name in enumerate(names):
            end = start + least + (index < larger)
            shares[name] = self._share(cores[start:end])
            start = end
        return shares

    def _share(self, cores: Sequence[tuple[int, ...]]) -> Share:
        cpus = tuple(sorted(cpu for core in cores for cpu in core))
        threads = min(self.threads, len(cpus)) if self.threads else self.processors.threads_of(len(cores))
        return Share(cpus, threads)
