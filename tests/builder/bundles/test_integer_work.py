"""The line that says how much of a quantised model is computed with integers."""

from __future__ import annotations

from builder.bundles.integer_work import FloatLayer, IntegerWork


def test_all_of_it() -> None:
    assert IntegerWork(2_500_000, ()).summary(3) == "100.0% of 2.5 million multiply-adds computed in integers"


def test_layers_in_float_are_named_and_counted() -> None:
    floats = tuple(FloatLayer(name, "Conv", 100_000) for name in ("/a", "/b", "/c"))
    line = IntegerWork(1_000_000, floats).summary(2)
    assert line.startswith(
        "70.0% of 1.0 million multiply-adds computed in integers; in float32: Conv /a (10.0%), "
    )
    assert line.endswith(" Conv /b (10.0%) and 1 more")
