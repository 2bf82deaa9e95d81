"""The memory plan: which values of a graph share a storage.

Pure arithmetic on lifetimes, without TVM. Promises that two values with the same `storage_id` are never alive
at the same step, and that a pinned value (an input, a weight, or a value computed at load) does not share its
storage. Values are placed greedily in two orders, and the smaller plan wins: by size, which is near the
optimum for most networks (Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference",
2020), and by time, which is TVM's own order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Lifetime:
    """The size and lifetime of a value.

    `start`, `end`: first and last step, both included, at which the value is written or read. A kernel's
        outputs are alive while it reads its inputs, so an output never shares storage with an input.
    `pinned`: whether the value has a storage to itself.
    """

    nbytes: int
    start: int
    end: int
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Which storage each value uses.

    `storage_id`: the storage of each value; storages are numbered from 0 in order of first use.
    `storage_bytes`: the size of each storage.
    `arena_bytes`: total size of the storages that are not pinned.
    """

    storage_id: tuple[int, ...]
    storage_bytes: tuple[int, ...]
    arena_bytes: int


@dataclass
class _Storage:
    nbytes: int
    pinned: bool = False
    spans: list[tuple[int, int]] = field(default_factory=list)

    def is_free(self, value: Lifetime) -> bool:
        """Whether no value in this storage is alive while `value` is."""
        at = bisect_left(self.spans, (value.start, value.start))
        after = at == len(self.spans) or self.spans[at][0] > value.end
        before = at == 0 or self.spans[at - 1][1] < value.start
        return after and before


def plan(values: Sequence[Lifetime]) -> MemoryPlan:
    """Assign a storage to each value.

    Result: the smaller of the two orders' plans.
    """
    loose = [i for i, value in enumerate(values) if not value.pinned]
    by_size = sorted(loose, key=lambda i: (-values[i].nbytes, values[i].start, i))
    by_time = sorted(loose, key=lambda i: (values[i].start, -values[i].nbytes, i))
    return min((_assign(values, order) for order in (by_size, by_time)), key=lambda p: p.arena_bytes)


def _assign(values: Sequence[Lifetime], order: Sequence[int]) -> MemoryPlan:
    storages: list[_Storage] = []
    chosen: dict[int, _Storage] = {}
    for i in order:
        value = values[i]
        free = [s for s in storages if s.is_free(value)]
        fitting = [s for s in free if s.nbytes >= value.nbytes]
        if fitting:
            storage = min(fitting, key=lambda s: s.nbytes)
        elif free:
            storage = max(free, key=lambda s: s.nbytes)
            storage.nbytes = value.nbytes
        else:
            storage = _Storage(value.nbytes)
            storages.append(storage)
        insort(storage.spans, (value.start, value.end))
        chosen[i] = storage
    arena_bytes = sum(s.nbytes for s in storages)
    ids: dict[int, int] = {}
    sizes: list[int] = []
    storage_id = []
    for i, value in enumerate(values):
        storage = chosen.get(i) or _Storage(value.nbytes, pinned=True)
        chosen[i] = storage
        if id(storage) not in ids:
            ids[id(storage)] = len(sizes)
            sizes.append(storage.nbytes)
        storage_id.append(ids[id(storage)])
    return MemoryPlan(tuple(storage_id), tuple(sizes), arena_bytes)
