"""Gather and scatter: constant indices, and indices that come with a request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builder.errors import ModelError
from builder.importer import import_onnx
from tests.builder.importer.rewrites.cases import INT64, Case, ModelMaker, check_case, one, operators

CASES: dict[str, Case] = {
    "gather one": (one("Gather", ["x", "i"], axis=1), {"i": np.array(-1)}, [2, 4]),
    "gather a run": (one("Gather", ["x", "i"], axis=2), {"i": np.array([1, 2])}, [2, 3, 2]),
    "gather others": (one("Gather", ["x", "i"], axis=2), {"i": np.array([[3, 0], [1, 1]])}, [2, 3, 2, 2]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_single_operators(make_model: ModelMaker, noise: Any, agrees: Any, case: str) -> None:
    check_case(make_model, noise, agrees, *CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "indices", "shape"),
    [
        ("Gather", [[0, 2], [-1, 1]], [2, 2, 4]),
        ("GatherElements", [[0, 2, 1, -3]], [1, 4]),
        ("GatherND", [[0, 3], [-1, -4]], [2]),
    ],
)
def test_indices_that_come_with_a_request_select_and_stay_in_bounds(
    make_model: ModelMaker, noise: Any, agrees: Any, run_relax: Any, op: str, indices: Any, shape: list[int]
) -> None:
    table, places = noise(3, 4), np.array(indices)
    model = make_model([one(op, ["t", "i"])], {"i": (list(places.shape), INT64)}, {"y": shape}, {"t": table})
    agrees(model, places)
    far = np.full_like(places, 2**40)
    found = run_relax(import_onnx(model).mod, [far])[0]
    assert np.isin(found, table).all()


def test_scattering_beyond_the_tensor_stays_inside(
    make_model: ModelMaker, noise: Any, run_relax: Any
) -> None:
    node = one("ScatterElements", ["x", "i", "u"], axis=0)
    model = make_model(
        [node], {"x": [3, 2], "i": ([1, 2], INT64)}, {"y": [3, 2]}, {"u": np.full((1, 2), 9, np.float32)}
    )
    found = run_relax(import_onnx(model).mod, [noise(3, 2), np.array([[2**40, -(2**40)]])])[0]
    assert found[2, 0] == found[0, 1] == 9


@pytest.mark.parametrize("is_given", [True, False], ids=["constant", "given"])
@pytest.mark.parametrize(
    ("places", "axis"), [([4, 2, 1], 2), ([2, 3, 1], 0), ([1, 3, 2], -2), ([4, 2, 2], 1)], ids=str
)
def test_updates_that_are_shorter_on_other_axes(
    make_model: ModelMaker,
    noise: Any,
    agrees: Any,
    run_relax: Any,
    places: list[int],
    axis: int,
    is_given: bool,
) -> None:
    node = one("ScatterElements", ["x", "i", "u"], axis=axis)
    indices = np.broadcast_to(
        np.arange(-1, places[axis] - 1).reshape([-1 if at == axis % 3 else 1 for at in range(3)]), places
    )
    weights = {"u": noise(*places), "i": indices}
    if not is_given:
        given = {"x": [5, 3, 2], "i": (places, INT64)}
        model = make_model([node], given, {"y": [5, 3, 2]}, {"u": weights["u"]})
        agrees(model, noise(5, 3, 2), indices)
        far = np.where(indices < 0, -(2**40), 2**40)
        found = run_relax(import_onnx(model).mod, [np.zeros((5, 3, 2), np.float32), far])[0]
        assert np.isin(found, [0, *weights["u"].ravel()]).all()
        return
    agrees(make_model([node], {"x": [5, 3, 2]}, {"y": [5, 3, 2]}, weights), noise(5, 3, 2))


@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
def test_updates_that_are_shorter_are_reduced(
    make_model: ModelMaker, noise: Any, agrees: Any, reduction: str
) -> None:
    node = one("ScatterElements", ["x", "i", "u"], axis=0, reduction=reduction)
    weights = {"u": noise(6, 2, 1), "i": np.zeros((6, 2, 1), np.int64)}
    model = make_model([node], {"x": [5, 3, 2]}, {"y": [5, 3, 2]}, weights)
    model.opset_import[0].version = 18
    agrees(model, noise(5, 3, 2))


@pytest.mark.parametrize("reduction", ["max", "min"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_largest_of_rows_that_are_scattered(
    make_model: ModelMaker, noise: Any, agrees: Any, reduction: str, depth: int
) -> None:
    shape = [5, 3, 2]
    indices = np.random.default_rng(depth).integers([-n for n in shape[:depth]], shape[:depth], (3, 2, depth))
    weights = {"u": noise(3, 2, *shape[depth:])}
    node = one("ScatterND", ["x", "i", "u"], reduction=reduction)
    model = make_model([node], {"x": shape, "i": ([3, 2, depth], INT64)}, {"y": shape}, weights)
    model.opset_import[0].version = 18
    agrees(model, noise(*shape), indices)


@pytest.mark.parametrize(("reduction", "wanted"), [("none", 3.0), ("add", 5.0), ("mul", 6.0)])
@pytest.mark.parametrize("shape", [[], [1]])
def test_scalars_are_scattered(
    make_model: ModelMaker, run_onnx: Any, reduction: str, wanted: float, shape: list[int]
) -> None:
    node = one("ScatterElements", ["x", "i", "u"], axis=0, reduction=reduction)
    imported = import_onnx(make_model([node], {"x": [], "i": (shape, INT64), "u": shape}, {"y": []}))
    assert imported.outputs[0].shape == ()
    feeds = {"x": np.float32(2), "i": np.zeros(shape, np.int64), "u": np.full(shape, 3, np.float32)}
    assert run_onnx(imported.onnx, {name: np.asarray(v) for name, v in feeds.items()})[0] == wanted


def test_scalars_are_gathered(make_model: ModelMaker, run_onnx: Any) -> None:
    node = one("GatherElements", ["x", "i"], axis=0)
    imported = import_onnx(make_model([node], {"x": [], "i": ([], INT64)}, {"y": []}))
    feeds = {"x": np.asarray(7, np.float32), "i": np.asarray(0, np.int64)}
    assert run_onnx(imported.onnx, feeds)[0] == 7


@pytest.mark.parametrize(
    ("op", "indices", "updates"),
    [("ScatterElements", [0, 3], [0, 3]), ("ScatterND", [0, 2], [0]), ("ScatterND", [0, 1], [0, 3])],
)
def test_without_indices_nothing_is_scattered(
    make_model: ModelMaker, noise: Any, agrees: Any, op: str, indices: list[int], updates: list[int]
) -> None:
    weights = {"i": np.zeros(indices, np.int64), "u": np.zeros(updates, np.float32)}
    model = agrees(make_model([one(op, ["x", "i", "u"])], {"x": [2, 3]}, {"y": [2, 3]}, weights), noise(2, 3))
    assert op not in operators(model)


def test_the_largest_in_any_order_are_those_in_order(
    make_model: ModelMaker, noise: Any, run_onnx: Any
) -> None:
    node = one("TopK", ["x", "k"], ["y", "i"], sorted=0)
    model = make_model([node], {"x": [3, 9]}, {"y": [3, 4], "i": ([3, 4], INT64)}, {"k": np.array([4])})
    x = {"x": noise(3, 9)}
    found, wanted = run_onnx(import_onnx(model).onnx, x), run_onnx(model, x)
    np.testing.assert_array_equal(found[0], np.sort(wanted[0])[:, ::-1])


@pytest.mark.parametrize("depth", [-1, 0, np.nan, np.inf])
def test_a_depth_that_holds_no_class_is_refused(make_model: ModelMaker, depth: float) -> None:
    weights = {"depth": np.array(depth), "values": np.array([0, 1])}
    node = one("OneHot", ["i", "depth", "values"])
    with pytest.raises(ModelError, match=f"expected a depth of 1 or more, got {depth}") as caught:
        import_onnx(make_model([node], {"i": ([5], INT64)}, {"y": [5, None]}, weights))
    assert "one_hot(x, NUMBER)" in str(caught.value.hint)
