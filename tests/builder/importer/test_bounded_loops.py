"""Loops whose number of steps is only known at run time, with the largest number that the user names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper

from agent.runtime.lengths import cut
from benchmarks.conformance.sources.onnx_nodes import collected
from benchmarks.conformance.unchecked import run_as_shipped
from builder.compiling.sample_inputs import make_inputs
from builder.errors import ModelError, UnsupportedOperatorError
from builder.importer import ImportedModel, import_onnx, load
from tests.builder.importer.conftest import ModelMaker, Runner
from tests.builder.importer.rewrites.cases import BOOL, INT64, operators

MOST = 5
# Doubles a state, counts the steps and collects what it was; ends when the count or the state says so.
COUNTED = """<ir_version: 8, opset_import: ["" : 17]> g (int64 trips, float[2] x)
=> (float[2] y, int64 steps, float[n,2] all) {
    zero = Constant<value_int = 0>() yes = Constant<value = bool {1}>()
    y, steps, all = Loop(trips, yes, x, zero) <
        body = step (int64 place, bool on, float[2] state, int64 done)
            => (bool more, float[2] next, int64 count, float[2] seen) {
            next = Add(state, state) top = ReduceMax<keepdims = 0>(next)
            limit = Constant<value_float = 100.0>() more = Less(top, limit)
            one = Constant<value_int = 1>() count = Add(done, one) seen = Neg(next)
        }
    >
}"""
# The same without a count.
WHILE = COUNTED.replace("Loop(trips,", "Loop(,").replace("int64 trips, ", "")


def cut_outputs(imported: ImportedModel, feeds: dict[str, Any], run_onnx: Runner) -> list[NDArray[Any]]:
    names = [spec.name for spec in imported.outputs]
    values = dict(zip(names, run_onnx(imported.onnx, feeds), strict=True))
    return [np.asarray(value) for value in cut(values, values, imported.lengths).values()]


def equal(found: Sequence[NDArray[Any]], wanted: Sequence[NDArray[Any]]) -> None:
    for got, expected in zip(found, wanted, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def test_each_number_of_steps(run_onnx: Runner) -> None:
    """Up to the largest one; floats that need more are not numbers."""
    model = onnx.parser.parse_model(COUNTED)
    imported = import_onnx(model, max_iterations=MOST)
    for first in (1.0, 30.0, 200.0):
        for trips in range(MOST + 1):
            feeds = {"trips": np.array(trips), "x": np.array([first, 0.5], np.float32)}
            equal(cut_outputs(imported, feeds, run_onnx), run_onnx(model, feeds))
    feeds = {"trips": np.array(MOST + 1), "x": np.array([1.0, 0.5], np.float32)}
    y, steps, everything = cut_outputs(imported, feeds, run_onnx)
    assert np.isnan(y).all() and np.isnan(everything).all()
    assert steps == MOST


def test_a_loop_that_only_its_condition_ends(run_onnx: Runner) -> None:
    model = onnx.parser.parse_model(WHILE)
    imported = import_onnx(model, max_iterations=MOST)
    for first in (4.0, 30.0, 200.0):
        feeds = {"x": np.array([first, 0.5], np.float32)}
        equal(cut_outputs(imported, feeds, run_onnx), run_onnx(model, feeds))
    y, _, everything = cut_outputs(imported, {"x": np.array([1.0, 0.5], np.float32)}, run_onnx)
    assert np.isnan(y).all() and np.isnan(everything).all()


def test_a_count_that_is_no_promise(run_onnx: Runner) -> None:
    """Exporters write the largest integer where only the condition ends a loop."""
    model = onnx.parser.parse_model(COUNTED)
    feeds = {"x": np.array([8.0, 0.5], np.float32)}
    imported = import_onnx(model, input_values={"trips": 2**63 - 1}, max_iterations=MOST)
    wanted = run_onnx(model, feeds | {"trips": np.array(2**63 - 1)})
    equal(run_onnx(imported.onnx, feeds)[:2], wanted[:2])


def test_a_note_says_so_and_without_a_bound_the_hint_does(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(COUNTED), path)
    with pytest.raises(UnsupportedOperatorError) as caught:
        load(path)
    assert "--max-iterations" in (caught.value.hint or "")
    notes = load(path, max_iterations=MOST).notes
    assert any("takes at most 5 steps: floats beyond that become NaN" in note for note in notes)


def test_more_steps_than_can_be_written_out() -> None:
    with pytest.raises(ModelError, match=r"at most \d+ steps of its \d+ nodes, got 100000") as caught:
        import_onnx(onnx.parser.parse_model(COUNTED), max_iterations=100_000)
    most = int(str(caught.value.hint).split()[-1])
    assert 500 < most < 5000


def test_samples_take_some_of_the_steps() -> None:
    """Not one of them, as a mask would, nor more than there are, which would compare NaN with NaN."""
    imported = import_onnx(onnx.parser.parse_model(COUNTED), max_iterations=MOST)
    drawn = {int(make_inputs(imported.inputs, imported.onnx, seed=seed)["trips"]) for seed in range(60)}
    assert drawn == set(range(1, MOST + 1))


def test_a_state_whose_shape_changes_is_refused(make_model: ModelMaker) -> None:
    """The sixth step would add a slice from behind the end."""
    value = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("Add", ["i", "one"], ["end"]),
            helper.make_node("Unsqueeze", ["i", "axis"], ["from"]),
            helper.make_node("Unsqueeze", ["end", "axis"], ["to"]),
            helper.make_node("Slice", ["row", "from", "to"], ["part"]),
            helper.make_node("Add", ["s", "part"], ["t"]),
        ],
        "body",
        [value("i", INT64, []), value("go", BOOL, []), value("s", 1, [1])],
        [value("on", BOOL, []), value("t", 1, [1])],
    )
    node = helper.make_node("Loop", ["count", "", "x"], ["y"], name="repeat", body=body)
    weights = {"one": np.array(1), "axis": np.array([0]), "row": np.arange(5, dtype=np.float32)}
    model = make_model([node], {"count": ([], INT64), "x": [1]}, {"y": [1]}, weights)
    assert "Loop" not in operators(import_onnx(model, max_iterations=5).onnx)
    with pytest.raises(UnsupportedOperatorError, match="Loop"):
        import_onnx(model, max_iterations=6)


def test_a_loop_that_divides_by_a_real_number(run_onnx: Runner) -> None:
    """Newton's method: it reads its state twice in each step."""
    text = COUNTED.replace("next = Add(state, state)", "part = Div(state, state) next = Add(state, part)")
    model = onnx.parser.parse_model(text)
    imported = import_onnx(model, max_iterations=MOST)
    feeds = {"trips": np.array(3), "x": np.array([1.0, 0.5], np.float32)}
    equal(cut_outputs(imported, feeds, run_onnx), run_onnx(model, feeds))


def test_a_loop_of_no_steps(run_onnx: Runner) -> None:
    model = onnx.parser.parse_model(COUNTED)
    imported = import_onnx(model, input_values={"trips": 0})
    feeds = {"x": np.array([1.0, 0.5], np.float32)}
    equal(run_onnx(imported.onnx, feeds), run_onnx(model, feeds | {"trips": np.array(0)}))


def test_a_loop_of_a_known_number_of_steps_that_is_too_long() -> None:
    """A limit would be no help, and is not named as one."""
    text = COUNTED.replace("more = Less(top, limit)", "more = Identity(on)")
    with pytest.raises(
        UnsupportedOperatorError, match=r"its 5000 steps of \d+ nodes are more than"
    ) as caught:
        import_onnx(onnx.parser.parse_model(text), input_values={"trips": 5000})
    assert "--max-iterations" not in (caught.value.hint or "")


@pytest.mark.slow
def test_the_node_test_of_onnx() -> None:
    """As it ships: the number of steps and the condition are inputs."""
    [case] = [case for case in collected(["loop"]) if case.name == "test_loop11"]
    inputs, expected = case.data_sets[0]
    feeds = dict(zip(("trip_count", "cond", "y"), map(np.asarray, inputs), strict=True))
    found = run_as_shipped(case.model, feeds, max_iterations=5)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
