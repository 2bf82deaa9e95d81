"""Pipelines of scikit-learn on a data frame, exported by skl2onnx with one input for each column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from builder.importer import import_onnx

pytestmark = pytest.mark.slow

NUMBERS, TEXTS = ["flow", "temp"], ["site", "kind"]
ROWS = 60


def table() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    columns: dict[str, np.ndarray] = {name: random.normal(10, 3, ROWS) for name in NUMBERS}
    columns["temp"][::7] = np.nan
    columns["site"] = random.choice(["north", "south"], ROWS).astype(object)
    columns["kind"] = random.choice(["pump", "fan", "max"], ROWS).astype(object)
    return columns


def encoders() -> dict[str, Any]:
    sklearn = pytest.importorskip("sklearn.preprocessing")
    return {
        "none": (None, []),
        "one hot, one text": (sklearn.OneHotEncoder(), ["kind"]),
        "one hot, two texts": (sklearn.OneHotEncoder(handle_unknown="ignore"), TEXTS),
        "ordinal": (sklearn.OrdinalEncoder(), TEXTS),
    }


@pytest.mark.parametrize("forest", ["GradientBoostingClassifier", "RandomForestClassifier"])
@pytest.mark.parametrize("encoded", ["none", "one hot, one text", "one hot, two texts", "ordinal"])
def test_a_pipeline_of_a_data_frame(forest: str, encoded: str, run_onnx: Any) -> None:
    skl2onnx = pytest.importorskip("skl2onnx")
    from skl2onnx.common.data_types import DoubleTensorType, StringTensorType
    from sklearn import ensemble
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline

    columns = table()
    encoder, texts = encoders()[encoded]
    names = [*NUMBERS, *texts]
    x = np.stack([columns[name].astype(object) for name in names], axis=1)
    y = np.where((columns["flow"] > 10) ^ (columns["kind"] == "fan"), "fault", "ok")
    steps = [("numbers", SimpleImputer(), [0, 1])]
    steps += [("texts", encoder, list(range(2, len(names))))] if texts else []
    model = getattr(ensemble, forest)(n_estimators=3, random_state=0)
    pipeline = make_pipeline(ColumnTransformer(steps), model).fit(x, y)
    # The types that skl2onnx guesses from one row of a data frame.
    types = [(name, DoubleTensorType([None, 1])) for name in NUMBERS]
    types += [(name, StringTensorType([None, 1])) for name in texts]
    imported = import_onnx(skl2onnx.to_onnx(pipeline, initial_types=types, options={"zipmap": False}))
    assert [spec.name for spec in imported.inputs] == names
    assert list(imported.labels) == ["fault", "ok"]
    for row in range(10):
        feeds = {}
        for spec in imported.inputs:
            value: Any = columns[spec.name][row]
            if spec.name in texts:
                value = imported.texts[spec.name][0].categories.index(value)
            feeds[spec.name] = np.array([[value]], spec.dtype)
        scores = run_onnx(imported.onnx, feeds)[1]
        np.testing.assert_allclose(scores, pipeline.predict_proba(x[row : row + 1]), rtol=1e-5, atol=1e-6)
