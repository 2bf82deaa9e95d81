"""The points of a design space that have not been measured."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Final

from builder.kernels.design_space import Decisions, DesignSpace, Point

MAX_LISTED: Final = 1 << 16  # a larger space is represented by so many random points


class Unvisited:
    """Points that have not been measured; each is handed out once, in order (`seed` None) or shuffled."""

    def __init__(self, space: DesignSpace, visited: Iterable[Decisions], seed: int | None) -> None:
        self.space = space
        self._visited = set(visited)
        shuffle = random.Random(0 if seed is None else seed)  # noqa: S311 - a search, not a secret
        if space.size <= MAX_LISTED:
            self._listed = list(space.all_decisions())
            if seed is not None:
                shuffle.shuffle(self._listed)
        else:
            draws = (tuple(shuffle.randrange(len(v)) for v in space.values) for _ in range(MAX_LISTED))
            self._listed = list(dict.fromkeys(draws))
        self._next = 0

    def left(self) -> list[Decisions]:
        """Return the listed points that have not been visited."""
        return [d for d in self._listed[self._next :] if d not in self._visited]

    def is_new(self, decisions: Decisions) -> bool:
        """Whether a point has been neither measured nor handed out."""
        return decisions not in self._visited

    def mark(self, decisions: Decisions) -> None:
        """Mark a point as handed out."""
        self._visited.add(decisions)

    def visit(self, wanted: Sequence[Decisions], count: int) -> list[Point]:
        """Hand out the first `count` points of `wanted` that are new and can be scheduled."""
        points: list[Point] = []
        for decisions in wanted:
            if len(points) >= count:
                break
            if decisions in self._visited:
                continue
            self._visited.add(decisions)
            if (point := self.space.point(decisions)) is not None:
                points.append(point)
        return points

    def propose(self, count: int) -> list[Point]:
        """Hand out the next `count` points."""
        points: list[Point] = []
        while len(points) < count and self._next < len(self._listed):
            decisions = self._listed[self._next]
            self._next += 1
            points += self.visit([decisions], 1)
        return points

    def learn(self, points: Sequence[Point], seconds: Sequence[float | None]) -> None:
        """Do nothing: the order does not depend on the times."""
