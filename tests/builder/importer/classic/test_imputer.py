"""scikit-learn's KNNImputer, exported by skl2onnx: scikit-learn's numbers, whatever is missing in a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builder.compiling.parity import run_as_defined
from builder.importer import ImportedModel, import_onnx

impute = pytest.importorskip("sklearn.impute")
skl2onnx = pytest.importorskip("skl2onnx")

NAN = np.nan
ASKED = np.array(
    [[NAN, 1, 2], [1, NAN, NAN], [NAN, NAN, NAN], [3, 4, 5], [0, 0, NAN], [NAN, -3, NAN]], np.float32
)


def fitted(rows: int, neighbours: int) -> Any:
    random = np.random.default_rng(rows)
    x = random.standard_normal((rows, 3)).astype(np.float32)
    x[random.random(x.shape) < 0.3] = NAN
    x[0] = [1, 2, 3]  # so that no column is empty
    return impute.KNNImputer(n_neighbors=neighbours).fit(x)


def imported(imputer: Any, rows: int) -> ImportedModel:
    model = skl2onnx.to_onnx(imputer, ASKED, target_opset=18)
    return import_onnx(model, input_shapes={"X": [rows, 3]})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "neighbours"), [(30, 3), (3, 9)], ids=["many rows", "more neighbours than rows"]
)
def test_what_is_missing_is_filled(rows: int, neighbours: int) -> None:
    imputer = fitted(rows, neighbours)
    [found] = run_as_defined(imported(imputer, len(ASKED)).onnx, {"X": ASKED})
    np.testing.assert_allclose(found.astype("f4"), imputer.transform(ASKED), rtol=1e-5)


def test_a_row_without_any_number_gets_the_means() -> None:
    imputer = fitted(4, 2)
    [found] = run_as_defined(imported(imputer, 1).onnx, {"X": ASKED[2:3]})
    np.testing.assert_allclose(found.astype("f4"), imputer.transform(ASKED[2:3]), rtol=1e-5)


@pytest.mark.slow
def test_a_compiled_imputer(run_relax: Any) -> None:
    imputer = fitted(12, 3)
    [found] = run_relax(imported(imputer, len(ASKED)).mod, [ASKED])
    np.testing.assert_allclose(found.astype("f4"), imputer.transform(ASKED), rtol=1e-5)
