"""Where levels are placed, for ranges that are given."""

from __future__ import annotations

import pytest

from builder.quantising.placement import Placement, place
from builder.quantising.ranges import Range
from builder.quantising.units import find_units
from tests.builder.quantising.networks import Network


def placed(net: Network, output: str, ranges: dict[str, Range] | None = None, *excluded: str) -> Placement:
    model = net.model(output)
    found = find_units(model)
    names = {name for unit in found for name in (*unit.data, *unit.results)}
    return place(model, found, {name: Range(-1, 1) for name in names} | (ranges or {}), excluded)


def kinds(placement: Placement) -> list[str]:
    return [unit.kind for unit in placement.units]


@pytest.mark.parametrize(
    ("ratio", "kept", "scales"), [(1.9, True, 1), (2.1, True, 2), (7.9, True, 2), (8.1, False, 2)]
)
def test_concatenation_goes_by_the_ranges_of_its_inputs(
    ratio: float, kept: bool, scales: int, network: Network
) -> None:
    x = network.input("x", [1, 3, 8, 8])
    a, b = network.conv(x, 3, 4), network.conv(x, 3, 4)
    both = network.op("Concat", a, b, axis=1)
    ranges = {a: Range(-1, 1), b: Range(-ratio, ratio), both: Range(-ratio, ratio)}
    placement = placed(network, network.conv(both, 8, 4), ranges)
    assert ("Concat" in kinds(placement)) == kept
    used = {placement.levels[name].scale for name in (a, b, both) if name in placement.levels}
    assert len(used) == (scales if kept else 1)


def test_levels_pass_through_everything_that_moves_values(network: Network) -> None:
    x = network.op("Transpose", network.input("x", [1, 8, 8, 3]), perm=[0, 3, 1, 2])
    y = network.op("MaxPool", network.conv(x, 3, 4), kernel_shape=[2, 2], strides=[2, 2])
    placement = placed(network, network.conv(y, 4, 4), {y: Range(-0.5, 0.7)})
    assert kinds(placement) == ["Transpose", "Conv", "MaxPool", "Conv"]
    assert len({placement.levels[name] for name in ("x", x)}) == 1
    assert placement.levels[y].high == pytest.approx(1, abs=0.01)


def test_convolution_in_float_does_not_take_its_neighbours_along(network: Network) -> None:
    """A residual sum still reads levels of both, though one of them is computed in float."""
    x = network.op("Relu", network.conv(network.input("x", [1, 3, 8, 8]), 3, 4))
    y = network.conv(x, 4, 4)
    total = network.op("Relu", network.op("Add", x, y))
    out = network.conv(total, 4, 4)
    placement = placed(network, out, None, "node_" + y)
    assert kinds(placement) == ["Conv", "Add", "Conv"]
    assert set(placement.levels) == {"x", x, y, total}


def test_functions_of_an_input_stay_in_float(network: Network) -> None:
    """They are cheap there, and an input's own values need no second rounding."""
    x = network.op("Sqrt", network.op("Abs", network.input("x", [1, 3, 8, 8])))
    placement = placed(network, network.conv(x, 3, 4))
    assert kinds(placement) == ["Conv"]
    assert set(placement.levels) == {x}


def test_unit_without_a_range_stays_in_float(network: Network) -> None:
    x = network.conv(network.input("x", [1, 3, 8, 8]), 3, 4)
    y = network.op("Sigmoid", x)
    out = network.conv(y, 4, 4)
    model = network.model(out)
    placement = place(model, find_units(model), {"x": Range(0, 1), y: Range(0, 1)})
    assert kinds(placement) == ["Conv", "Conv"]
    assert set(placement.levels) == {"x", y}
