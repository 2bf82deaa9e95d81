"""Options that do not go together are refused without a model, and without a compiler."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

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


@pytest.mark.parametrize("names", [("input", "state", "sr"), ("input", "state")])
def test_a_preset_gives_values_only_to_inputs_that_the_model_has(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in (*names, "y")]
    node = helper.make_node("Sum", list(names), ["y"])
    graph = helper.make_graph([node], "g", ends[:-1], ends[-1:])
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
    found = Options(preprocess="silero").fixed_inputs(tmp_path / "m.onnx")
    assert found["input_values"] == ({"sr": 16000} if "sr" in names else None)
    assert found["input_shapes"] == {"input": (1, 576), "state": (2, 1, 128)}
