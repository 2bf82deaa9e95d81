"""What a model file says about itself before it is imported."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from agent.bundle.tensor_spec import TensorSpec
from builder.compiling.outline import Outline, exported_labels, read_outline


def model(shape: tuple[int | str, ...], names: str | None = None) -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)
    w = helper.make_tensor("w", TensorProto.FLOAT, (1,), [1.0])
    weight = helper.make_tensor_value_info("w", TensorProto.FLOAT, (1,))
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", [x, weight], [y], [w])
    made = helper.make_model(graph)
    if names is not None:
        made.metadata_props.add(key="names", value=names)
    return made


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((1, 3, 8), (1, 3, 8)), (("batch", 3, 8), (1, 3, 8)), ((1, 3, "width"), None), ((1, 0, 8), None)],
)
def test_fixed_shapes_are_read(
    tmp_path: Path, shape: tuple[int | str, ...], expected: tuple[int, ...] | None
) -> None:
    onnx.save(model(shape), tmp_path / "m.onnx")
    x, y = (TensorSpec(name, "FP32", expected or ()) for name in "xy")
    assert read_outline(tmp_path / "m.onnx") == (Outline((x,), (y,)) if expected else None)


def test_what_is_no_model_has_no_outline(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"\x08\x07not a model")
    (tmp_path / "m.pt2").write_bytes(b"")
    for name in ("m.onnx", "m.pt2", "absent.onnx"):
        assert read_outline(tmp_path / name) is None


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("{0: 'person', 1: 'traffic\\nlight'}", ("person", "traffic light")),
        ("{1: 'a', 0: 'b'}", ("b", "a")),
        ("{0: 'a', 2: 'b'}", ()),
        ("['a', 'b']", ()),
        ("{0: ''}", ()),
        ("{0: '\x1b[2J'}", ()),
        ("{0: __import__('os')}", ()),
        ("(" * 5000, ()),
        (None, ()),
    ],
)
def test_class_names_of_an_export(names: str | None, expected: tuple[str, ...]) -> None:
    assert exported_labels(model((1,), names)) == expected
