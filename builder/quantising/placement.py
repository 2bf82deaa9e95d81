"""Placement: which units are quantised, and the levels of each tensor at their edges.

A unit that multiplies by weights is quantised unless it is excluded. Another unit is quantised only between
such units: it reads something that a quantised unit makes, and a quantised unit reads what it makes. So what
follows the last convolution or matrix product of a head stays in float: scores, boxes and their decoders, for
which 256 levels are too few. So do norms and softmax, which are no units, and what only they read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import onnx

from builder.quantising.ranges import Levels, Range, levels_of
from builder.quantising.units import Readers, Unit

# A concatenation whose inputs' ranges differ by more stays in float: the smallest would keep 5 bits.
WIDEST_CONCAT: Final = 8.0
# Up to this factor, its inputs share one range: they lose at most a bit, and it only copies.
SHARED_CONCAT: Final = 2.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a graph is quantised.

    `units`: the quantised units, in the graph's order.
    `levels`: tensor -> its levels, for each tensor that is quantised.
    """

    units: tuple[Unit, ...]
    levels: Mapping[str, Levels]

    @property
    def macs(self) -> int:
        """Multiply-adds of the quantised units."""
        return sum(unit.macs for unit in self.units)


def place(
    model: onnx.ModelProto,
    units: Sequence[Unit],
    ranges: Mapping[str, Range],
    excluded: Collection[str] = (),
) -> Placement:
    """Place the levels.

    `ranges`: tensor -> range; a unit with a tensor that has none stays in float.
    """
    readers = Readers(model)
    known = [unit for unit in units if unit.name not in excluded and _has_ranges(unit, ranges)]
    known = [unit for unit in known if unit.kind != "Concat" or _ratio(unit.data, ranges) <= WIDEST_CONCAT]
    chosen = _between(known, readers, {value.name for value in model.graph.input})
    tensors = dict.fromkeys(name for unit in chosen for name in unit.data)
    for unit in chosen:
        if unit.weights is None:
            tensors |= dict.fromkeys(name for name in unit.results if readers.of(name))
    groups = _Groups({name: ranges[name] for name in tensors})
    for unit in chosen:
        inside = [name for name in (*unit.data, *unit.results) if name in tensors]
        copies = unit.kind == "Concat" and groups.ratio(inside) <= SHARED_CONCAT
        if unit.keeps_levels or copies:
            groups.merge(inside)
    return Placement(tuple(chosen), {name: levels_of(groups.range_of(name)) for name in tensors})


def _has_ranges(unit: Unit, ranges: Mapping[str, Range]) -> bool:
    results = () if unit.weights is not None else unit.results
    return all(name in ranges for name in (*unit.data, *results))


def _between(units: Sequence[Unit], readers: Readers, inputs: Collection[str]) -> list[Unit]:
    """The units that multiply by weights, and those that connect them."""
    chosen = list(units)
    while True:
        unit_of = {node: unit.name for unit in chosen for node in unit.nodes}
        data_of = {unit.name: unit.data for unit in chosen}
        wanted: set[str] = set()
        for unit in reversed(chosen):
            read_by = {
                unit_of[node.name]
                for name in unit.results
                for node in readers.of(name)
                if node.name in unit_of and name in data_of[unit_of[node.name]]
            }
            if unit.weights is not None or read_by & wanted:
                wanted.add(unit.name)
        made: set[str] = set()
        kept: list[Unit] = []
        for unit in chosen:
            moves_input = unit.keeps_levels and unit.data[0] in inputs
            fed = unit.weights is not None or moves_input or any(name in made for name in unit.data)
            if fed and unit.name in wanted:
                kept.append(unit)
                # What is only moved from an input on is still that input, for this purpose.
                made |= set() if moves_input else set(unit.results)
                inputs = {*inputs, *unit.results} if moves_input else inputs
        if len(kept) == len(chosen):
            return kept
        chosen = kept


def _ratio(names: Sequence[str], ranges: Mapping[str, Range]) -> float:
    widths = [ranges[name].width for name in names if ranges[name].width > 0]
    return max(widths) / min(widths) if widths else 1.0


class _Groups:
    """Tensors that share a range: a union-find structure."""

    def __init__(self, ranges: Mapping[str, Range]) -> None:
        self._parents = {name: name for name in ranges}
        self._ranges = dict(ranges)
        self._members = {name: [chosen] for name, chosen in ranges.items()}

    def _root(self, name: str) -> str:
        while self._parents[name] != name:
            self._parents[name] = self._parents[self._parents[name]]
            name = self._parents[name]
        return name

    def range_of(self, name: str) -> Range:
        return self._ranges[self._root(name)]

    def ratio(self, names: Sequence[str]) -> float:
        """How much wider the widest member of these tensors' groups is than the narrowest."""
        roots = {self._root(name) for name in names}
        widths = [chosen.width for root in roots for chosen in self._members[root] if chosen.width > 0]
        return max(widths) / min(widths) if widths else 1.0

    def merge(self, names: Sequence[str]) -> None:
        for name in names[1:]:
            first, other = self._root(names[0]), self._root(name)
            if first != other:
                self._parents[other] = first
                self._ranges[first] = self._ranges[first].union(self._ranges[other])
                self._members[first] += self._members[other]
