"""The search: from the heuristic's point to neighbours, until none is better.

The spaces are small and the heuristic is near their best, so a walk finds what an evolution would, with a
tenth of the candidates. It knows nothing of what a cost is: time, cycles, instructions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from builder.kernels.design_space import Decisions, DesignSpace

# A tile that is unrolled further than this keeps LLVM busy for minutes, and no register file holds it.
MAX_UNROLLED = 1024
TILE, UNROLLED = {"oc", "ow", "tiles", "rows"}, {"ii", "k"}
LEAST_STEP = 0.99  # a neighbour must be so much cheaper for the walk to go on from it


class Descent:
    """One walk.

    Parameters
    ----------
    space
        Where.
    most
        Points that may be measured.
    seeds
        Points to begin with, besides the heuristic's: decision's name -> value.
    """

    def __init__(self, space: DesignSpace, most: int, seeds: list[Decisions] | None = None) -> None:
        self.space = space
        self.costs: dict[Decisions, float | None] = {}
        self._most = most
        self.seeds = [space.default, *(seeds or [])]
        self._from: Decisions | None = None

    @property
    def best(self) -> Decisions:
        """The cheapest point; the heuristic's while nothing ran."""
        ran = {d: c for d, c in self.costs.items() if c is not None}
        return min(ran, key=lambda d: ran[d]) if ran else self.space.default

    def propose(self) -> list[Decisions]:
        """Points to measure next; none when the walk is over."""
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
        """Take in what points cost, None for one that does not run."""
        self.costs.update(costs)

    def _cost(self, decisions: Decisions) -> float:
        return self.costs.get(decisions) or float("inf")

    def _neighbours(self, at: Decisions) -> Iterator[Decisions]:
        """One decision up or down, or two sides of the register tile in opposite directions."""
        moves = [{i: s} for i in range(len(at)) for s in (1, -1)]
        sides = [i for i, name in enumerate(self.space.names) if name in TILE]
        moves += [{i: 1, j: -1} for i, j in itertools.permutations(sides, 2)]
        for move in moves:
            there = tuple(d + move.get(i, 0) for i, d in enumerate(at))
            if all(0 <= d < len(v) for d, v in zip(there, self.space.values, strict=True)):
                yield there

    def _is_sane(self, at: Decisions) -> bool:
        """Whether the point's register tile fits, and is not so small that nothing could make it good."""
        chosen = {n: v[i] for n, v, i in zip(self.space.names, self.space.values, at, strict=True)}
        default = dict(zip(self.space.names, self.space.default, strict=True))
        usual = {n: v[default[n]] for n, v in zip(self.space.names, self.space.values, strict=True)}
        tile = math.prod(value for name, value in chosen.items() if name in TILE)
        heuristics = math.prod(value for name, value in usual.items() if name in TILE)
        most = max(heuristics, self.space.target.simd.registers - 4)
        unrolled = tile * math.prod(value for name, value in chosen.items() if name in UNROLLED)
        return 2 * tile >= heuristics and tile <= most and unrolled <= MAX_UNROLLED
