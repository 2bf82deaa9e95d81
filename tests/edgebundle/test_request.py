"""What a picture, an array or a file becomes before it is sent."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agent.bundle.tensor_spec import TensorSpec
from edgebundle import Request, UsageError
from edgebundle.request import MAX_REQUEST_BYTES
from tests import damaged_archives
from tests.edgebundle.rig import PNG


def test_file_becomes_a_request_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(PNG)
    assert Request.from_file(tmp_path / "a.bin").content_type == "image/png"
    (tmp_path / "a.json").write_bytes(b'{"inputs":[]}')
    assert Request.from_file(tmp_path / "a.json").content_type == "application/json"
    np.savez(tmp_path / "a.npz", x=np.zeros((1, 2), np.float32))
    assert Request.from_file(tmp_path / "a.npz").tensors == ("x;FP32;1,2",)
    (tmp_path / "b.bin").write_bytes(b"hello")
    with pytest.raises(UsageError, match="expected a JPEG or PNG"):
        Request.from_file(tmp_path / "b.bin")
    (tmp_path / "b.npz").write_bytes(b"hello")
    with pytest.raises(UsageError, match="cannot be read as"):
        Request.from_file(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", x=np.array([{}], dtype=object))
    with pytest.raises(UsageError):
        Request.from_file(tmp_path / "c.npz")
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate(MAX_REQUEST_BYTES + 1)
    with pytest.raises(UsageError, match="expected at most"):
        Request.from_file(tmp_path / "large.png")
    with pytest.raises(OSError, match="No such file"):
        Request.from_file(tmp_path / "absent.png")


@pytest.mark.parametrize("which", damaged_archives.DAMAGED)
def test_damaged_arrays_give_one_line(which: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"damaged\.npz cannot be read as \.npz: ") as caught:
        Request.from_file(damaged_archives.write(tmp_path, which))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 1), (3, 5, 3), (3, 5, 4), (1, 1, 3)])
def test_pixels_are_sent_without_loss(shape: tuple[int, ...]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    for given in (pixels, pixels[::-1][::-1], np.asfortranarray(pixels)):
        request = Request.pixels(given)
        assert request.content_type == "image/png"
        with Image.open(io.BytesIO(request.body)) as image:
            image.load()
            np.testing.assert_array_equal(np.asarray(image).reshape(shape), pixels)


def test_palette_of_pillow_is_sent_in_its_colours() -> None:
    image = Image.new("P", (2, 1), 1)
    image.putpalette([0, 0, 0, 10, 20, 30])
    with Image.open(io.BytesIO(Request.pixels(image).body)) as sent:
        assert sent.getpixel((0, 0)) == (10, 20, 30)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((2, 2, 2), "uint8"), ((2, 2, 3), "float64"), ((3,), "uint8"), ((0, 2), "uint8")]
)
def test_other_arrays_are_no_picture(shape: tuple[int, ...], dtype: str) -> None:
    pixels = np.zeros(shape, dtype)
    with pytest.raises(UsageError, match="a picture: expected uint8"):
        Request.pixels(pixels)


X = TensorSpec("x", "FP32", (1, 2, 3))


@pytest.mark.parametrize(
    ("spec", "given"),
    [
        (X, np.ones((1, 2, 3))),
        (X, np.ones((2, 3), np.int64)),
        (X, [[1, 1, 1], [1, 1, 1]]),
        (X, np.ones((1, 2, 3), ">f4")),
        (X, np.ones((1, 2, 3), np.float16)),
        (X, np.asfortranarray(np.ones((2, 3), np.float32))),
        (X, np.full((2, 3), True)),
    ],
)
def test_array_is_converted_to_what_the_input_takes(spec: TensorSpec, given: Any) -> None:
    request = Request.arrays({"x": given}, [spec])
    assert request.tensors == ("x;FP32;1,2,3",)
    assert request.body == np.ones(6, "<f4").tobytes()


@pytest.mark.parametrize(
    ("datatype", "given"),
    [
        ("INT32", np.array([2**31])),
        ("INT32", np.array([0.5])),
        ("UINT8", np.array([-1])),
        ("UINT8", np.array([256])),
        ("FP16", np.array([1e6])),
        ("FP32", np.array([1e300])),
        ("FP32", np.array([1j])),
        ("FP32", np.array(["1"])),
        ("BOOL", np.array([1])),
        ("BYTES", np.array([1])),
    ],
)
def test_array_whose_values_would_change_is_refused(datatype: str, given: np.ndarray) -> None:
    with pytest.raises(UsageError, match="input x"):
        Request.arrays({"x": given}, [TensorSpec("x", datatype, (1,))])


@pytest.mark.parametrize(
    ("datatype", "given"),
    [("INT32", np.array([2**31 - 1])), ("UINT8", np.array([255])), ("FP32", np.array([np.nan, np.inf]))],
)
def test_values_at_the_edge_are_kept(datatype: str, given: np.ndarray) -> None:
    spec = TensorSpec("x", datatype, given.shape)
    np.testing.assert_array_equal(
        np.frombuffer(Request.arrays({"x": given}, [spec]).body, spec.dtype).astype(given.dtype), given
    )


def test_batch_for_a_model_of_one_is_refused_with_the_way() -> None:
    with pytest.raises(UsageError, match=r"expected a batch of 1, got 8 \(send the items .*model.map"):
        Request.arrays({"x": np.zeros((8, 2, 3))}, [X])
    with pytest.raises(UsageError, match=r"does not have an input 'y' \(its inputs are x FP32\[1,2,3\]"):
        Request.arrays({"y": np.zeros((1, 2, 3))}, [X])
    with pytest.raises(UsageError, match="expected a request of at most"):
        Request("image/png", bytes(MAX_REQUEST_BYTES + 1))


def test_arrays_for_a_model_whose_shapes_change_have_any_size_in_the_bounds() -> None:
    spec = (TensorSpec("ids", "INT64", (4, 512)),)
    smallest = ((1, 1),)
    for given, sent in (
        ((7,), "1,7"),
        ((3, 7), "3,7"),
        ((4, 512), "4,512"),
        ((600,), "600"),
        ((9, 7), "9,7"),
    ):
        made = Request.arrays({"ids": np.ones(given, np.int32)}, spec, smallest)
        assert made.tensors == (f"ids;INT64;{sent}",)


def test_json_for_mqtt_3_1_1_has_finite_numbers_and_one_image() -> None:
    request = Request.arrays({"x": np.array([1.5], np.float32)})
    assert json.loads(request.to_json([])) == {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.5]}]
    }
    with pytest.raises(UsageError, match="expected finite numbers"):
        Request.arrays({"x": np.array([np.nan], np.float32)}).to_json([])
    with pytest.raises(UsageError, match="expected a model with one input"):
        Request.image(PNG).to_json([X, X])


class Series:
    """A row of pandas, as far as it matters: no mapping, but it becomes one."""

    def to_dict(self) -> dict[object, object]:
        return {"a": np.float32(1.5), 2: np.int64(3), "c": np.nan, "d": np.bool_(True)}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"a": 1, "b": None, "c": "red", "d": True}, {"a": 1, "b": None, "c": "red", "d": True}),
        (Series(), {"a": 1.5, "2": 3, "c": None, "d": True}),
        ([1, 2.5, float("nan")], [1, 2.5, None]),
        ((1,), [1]),
        (np.array([1.5, np.nan], np.float32), [1.5, None]),
        ({"id": 7, "reply_to": 1}, {"id": 7, "reply_to": 1}),
    ],
)
def test_a_row_is_json_that_the_envelope_does_not_touch(row: object, expected: object) -> None:
    request = Request.row(row)
    assert request.content_type == "application/json"
    assert json.loads(request.body) == {"row": expected}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a", "a row: expected a mapping or a sequence"),
        (7, "a row: expected a mapping or a sequence"),
        ({"a": float("inf")}, "a row: a: expected a finite number"),
        ({"a": [1]}, "a row: a: expected a number, a truth value or a text, got list"),
        ([1, b"x"], "a row: 1: expected a number"),
        (np.zeros((2, 2)), "a row: 0: expected a number"),
    ],
)
def test_values_that_no_row_has(row: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Request.row(row)


def test_floats_for_a_quantised_input_are_sent_as_they_are() -> None:
    inputs = (TensorSpec("x", "INT8", (1, 3)),)
    request = Request.arrays({"x": [0.5, 1.5, -2.0]}, inputs, quantised=["x"])
    assert request.tensors == ("x;FP32;1,3",)
    assert Request.arrays({"x": np.array([1, 2, 3], np.int8)}, inputs, quantised=["x"]).tensors == (
        "x;INT8;1,3",
    )
    with pytest.raises(UsageError, match="expected int8, got float64"):
        Request.arrays({"x": [0.5, 1.5, -2.0]}, inputs)
