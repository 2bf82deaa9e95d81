"""A small forest is measured with the engines that are installed; wrong numbers are not measured."""

from __future__ import annotations

import numpy as np
import pytest

from tests.needs import needed_lightgbm

needed_lightgbm()

from benchmarks import trees  # noqa: E402 - it imports LightGBM
from benchmarks.trees import Predict, Result, compare, measure  # noqa: E402


@pytest.mark.slow
def test_a_forest_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "BLOCK_S", 1e-5)
    one, many = compare(3, 3, 6, 2, (1, 5))
    assert (one.batch, many.batch) == (1, 5)
    assert {"edgebundle", "ONNX Runtime"} <= set(one.least_us)
    assert 0 < one.least_us["edgebundle"] <= one.median_us["edgebundle"]


def test_an_engine_with_other_numbers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "ENGINES", {"wrong": lambda *_: lambda x: np.zeros(len(x))})
    with pytest.raises(ValueError, match="wrong: expected LightGBM's numbers"):
        compare(3, 3, 6, 1, (4,))


def test_the_share_is_of_the_best_other_engine() -> None:
    times = {"edgebundle": 3.0, "ONNX Runtime": 6.0, "lleaves": 4.0}
    assert Result(1, 1, 1, 1, times, times).share(times) == 0.75


def test_engines_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "BLOCK_S", 0.0)
    called: list[str] = []
    engines: dict[str, Predict] = {name: lambda _, name=name: called.append(name) for name in "ab"}  # type: ignore[misc]
    measure(engines, [np.zeros((1, 1), np.float32)], 3)
    assert called[4:] == ["a", "a", "b", "b"] * 3
