"""The search: from the heuristic's point to neighbouring points, until none is better.

The spaces are small and the heuristic is near their best point, so a descent finds what an evolutionary
search would, with a tenth of the candidates. It works with any cost: time, cycles, instructions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

from builder.kernels.design_space import Decisions, DesignSpace

# LLVM takes minutes to compile a tile that is unrolled further than this, and no registers can hold it.
MAX_UNROLLED: Final = 1024
TILE, UNROLLED = {"oc", "ow", "tiles", "rows"}, {"ii", "k"}
LEAST_STEP: Final = 0.99  # the search moves to a neighbour if it is at least this much cheaper


class Descent:
    """One search, from the heuristic's point and from `seeds`.

    Parameters
    ----------
    space
        The design space.
    most
        The largest number of points to measure.
    seeds
        Points to begin with, besides the heuristic's.
    """

    def __init__(self, space: DesignSpace, most: int, seeds: list[Decisions] | None = None) -> None:
        self.space = space
        self.costs: dict[Decisions, float | None] = {}
        self._most = most
        self.seeds = [space.default, *(seeds or [])]
        self._from: Decisions | None = None

    @property
    def best(self) -> Decisions:
        """The cheapest point so far; the heuristic's if none has run yet."""
        ran = {d: c for d, c in self.costs.items() if c is not None}
        return min(ran, key=lambda d: ran[d]) if ran else self.space.default

    def propose(self) -> list[Decisions]:
        """Return the points to measure next; an empty list when the search is over."""
        if not self.costs:
            around = [*self.seeds, *self._neighbours(self.space.default)]
            self._from = self.space.default
        else:
            best = self.best
            before = self.costs.get(self._from) if self._from is not None else None
            if best == self._from or (before is not None and self._cost(best) > LEAST_STEP * before):
                return []
            self._from = best
            around = list(self._neighbours(best))
        new = [d for d in dict.fromkeys(around) if d not in self.costs and self._is_sane(d)]
        return new[: self._most - len(self.costs)]

    def learn(self, costs: dict[Decisions, float | None]) -> None:
        """Record the costs of points; None for one that does not run."""
        self.costs.update(costs)

    def _cost(self, decisions: Decisions) -> float:
        return self.costs.get(decisions) or float("inf")

    def _neighbours(self, at: Decisions) -> Iterator[Decisions]:
        """Iterate over neighbours: one decision moved, or two of a register tile in opposite directions."""
        moves = [{i: s} for i in range(len(at)) for s in (1, -1)]
        sides = [i for i, name in enumerate(self.space.names) if name in TILE]
        moves += [{i: 1, j: -1} for i, j in itertools.permutations(sides, 2)]
        for move in moves:
            there = tuple(d + move.get(i, 0) for i, d in enumerate(at))
            if all(0 <= d < len(v) for d, v in zip(there, self.space.values, strict=True)):
                yield there

    def _is_sane(self, at: Decisions) -> bool:
        """Whether the point's register tile may fit the registers, and is not hopelessly small."""
        chosen = {n: v[i] for n, v, i in zip(self.space.names, self.space.values, at, strict=True)}
        default = dict(zip(self.space.names, self.space.default, strict=True))
        usual = {n: v[default[n]] for n, v in zip(self.space.names, self.space.values, strict=True)}
        tile = math.prod(value for name, value in chosen.items() if name in TILE)
        heuristics = math.prod(value for name, value in usual.items() if name in TILE)
        most = max(heuristics, self.space.target.simd.registers - 4)
        unrolled = tile * math.prod(value for name, value in chosen.items() if name in UNROLLED)
        return 2 * tile >= heuristics and tile <= most and unrolled <= MAX_UNROLLED
