"""Options that do not go together are refused without a model, and without a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.compiling.options import Options
from builder.errors import InputFault

BOUNDS = {"x": ("1..4", 3)}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(precision="int8"), "expected calibration data to quantise with, got none"),
        (Options(precision="int8", calibration="absent"), "no such file or folder: absent"),
        (
            Options(precision="fp16", max_drop=1.0),
            "--max-drop: expected --precision int8 beside it, got fp16",
        ),
        (Options(metric="sqnr"), "--metric: expected --precision int8 beside it, got none"),
        (Options(precision="weights-int4", calibration_labels="a.csv"), "expected calibration data beside"),
        (
            Options(input_shapes=BOUNDS, precision="fp16"),
            "--precision fp16: expected fixed shapes, got bounds",
        ),
        (Options(input_shapes=BOUNDS, states=["x:y"], pad={"x": ("edge", 0.0)}), "--pad: expected no state"),
        (Options(input_shapes={"x": ("0..4", 3)}), "expected bounds from 1, got 0..4"),
        (Options(input_shapes=BOUNDS, preprocess="silero"), "expected fixed shapes with recordings"),
        (Options(input_shapes={"x": (4, 3)}, buckets={"": (4,)}), "--buckets: expected bounds"),
        (Options(postprocess="yolo"), "got 'yolo'"),
        (Options(labels=["a"], postprocess="embedding"), "expected a postprocess that names classes"),
        (Options(columns=["a\n"]), "--columns: expected names"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_options_that_do_not_go_together(
    options: Options, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputFault) as caught:
        options.check()
    assert words in str(caught.value)
    assert caught.value.hint
