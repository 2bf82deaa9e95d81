from __future__ import annotations

import base64
import io
import json
import math
import re
import struct
import sys
import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cbor2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agent.bundle.columns import Column, InputColumns
from agent.bundle.processing import Preprocess
from agent.bundle.quantisation import Quantisation, Quantised
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import ExecutionError, InputError, MediaTypeError, RequestError
from agent.runtime.preprocess import Preprocessor
from agent.runtime.rows import RowReader
from agent.worker import oip_json
from agent.worker.codec import Codec, Decoded, import_cbor
from agent.worker.frames import Request
from tests.agent.worker.conftest import manifest

RAW, JSON, CBOR = "application/octet-stream", "application/json", "application/cbor"
NUMERIC = ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64")


class Bench:
    """A codec and the memory that it fills."""

    def __init__(
        self,
        *specs: TensorSpec,
        preprocess: Preprocess | None = None,
        quantisation: Quantisation | None = None,
    ) -> None:
        self.memory = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in specs}
        declared = manifest({"mod.so": b""}, specs, (TensorSpec("y", "FP32", (1,)),), preprocess=preprocess)
        declared = replace(declared, quantisation=quantisation)
        preprocessor = Preprocessor(preprocess, specs[0], max_pixels=10_000) if preprocess else None
        self.codec = Codec(declared, preprocessor, self.memory.__getitem__, import_cbor())

    def decode(self, payload: bytes, content_type: str = JSON, **fields: Any) -> Decoded:
        return self.codec.decode(Request(1, content_type, **fields), memoryview(payload))

    def json(self, *tensors: Mapping[str, Any], **more: Any) -> Decoded:
        return self.decode(json.dumps({"inputs": tensors} | more).encode())

    def encode(
        self, values: Mapping[str, Any], accept: str = JSON, decoded: Decoded | None = None, **fields: Any
    ) -> tuple[tuple[str, ...], bytes]:
        request = Request(1, accept=accept, **fields)
        tensors, payload = self.codec.encode(
            request, decoded or Decoded(None), self.codec.answer_type(request), values
        )
        return tensors, bytes(payload)


def bench(datatype: str = "FP32", shape: tuple[int, ...] = (2, 3)) -> Bench:
    return Bench(TensorSpec("x", datatype, shape))


def tensor(
    data: object, datatype: str = "FP32", shape: tuple[int, ...] = (2, 3), **more: Any
) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": list(shape), "data": data} | more


# -- JSON in


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "FP64"])
@pytest.mark.parametrize("form", ["json", "raw", "cbor"])
def test_a_quantised_input_takes_real_numbers_and_its_own_integers(datatype: str, form: str) -> None:
    made = Bench(TensorSpec("x", "INT8", (3,)), quantisation=Quantisation((Quantised("x", 0.5, -3),), ()))

    def send(data: list[float], datatype: str) -> list[int]:
        given = tensor(data, datatype, (3,))
        raw = np.array(data, TensorSpec("x", datatype, ()).dtype).tobytes()
        if form == "json":
            made.json(given)
        elif form == "cbor":
            made.decode(cbor2.dumps({"inputs": [given | {"data": raw}]}), CBOR)
        else:
            made.decode(raw, RAW, tensors=(f"x;{datatype};3",))
        return [int(value) for value in made.memory["x"]]

    assert send([0.0, 1.25, 1e4], datatype) == [-3, -1, 127]
    assert send([0, 1, -128], "INT8") == [0, 1, -128]
    with pytest.raises(InputError):
        send([0, 1, 2], "UINT8")
    if form != "json":
        with pytest.raises(InputError, match="finite"):
            send([0.0, float("nan"), 0.0], datatype)


def test_an_input_that_is_not_quantised_takes_no_other_datatype() -> None:
    with pytest.raises(InputError):
        Bench(TensorSpec("x", "INT8", (1,))).json(tensor([1.0], "FP32", (1,)))


@pytest.mark.parametrize("data", [[1, 2, 3, 4.5, -5, 0], [[1, 2, 3], [4.5, -5, 0]]])
def test_flat_and_nested_data_are_the_same_tensor(data: list[Any]) -> None:
    b = bench()
    decoded = b.json(tensor(data), id="mine", reply_to="edge/v1/replies/a/1", parameters={})
    assert b.memory["x"].tolist() == [[1, 2, 3], [4.5, -5, 0]]
    assert decoded == Decoded("mine")


@given(data=st.data(), datatype=st.sampled_from(NUMERIC))
def test_every_value_of_every_datatype_arrives(data: st.DataObject, datatype: str) -> None:
    b = bench(datatype, (4,))
    array = b.memory["x"]
    if array.dtype.kind == "f":
        elements = st.floats(width=array.dtype.itemsize * 8, allow_nan=False, allow_infinity=False)  # type: ignore[arg-type]
        values: list[Any] = data.draw(st.lists(elements, min_size=4, max_size=4))
    else:
        limits = np.iinfo(array.dtype)
        values = data.draw(st.lists(st.integers(limits.min, limits.max), min_size=4, max_size=4))
    b.json(tensor(values, datatype, (4,)))
    assert array.tolist() == values


def test_booleans_arrive_and_numbers_for_them_do_not() -> None:
    b = bench("BOOL", (2,))
    b.json(tensor([True, False], "BOOL", (2,)))
    assert b.memory["x"].tolist() == [True, False]
    with pytest.raises(InputError, match="BOOL and takes bool, got int"):
        b.json(tensor([1, 0], "BOOL", (2,)))


def test_scalars_and_empty_tensors_arrive() -> None:
    b = bench("INT64", ())
    b.json(tensor([7], "INT64", ()))
    assert b.memory["x"] == 7
    bench("FP32", (0, 4)).json(tensor([], "FP32", (0, 4)))


@pytest.mark.parametrize(
    ("data", "datatype", "words"),
    [
        ([1, 2, 3], "FP32", "input 'x' expects 6 values, got 3"),
        ([], "FP32", "expects 6 values, got 0"),
        ([[1, 2], [3, 4], [5, 6]], "FP32", r"expects arrays nested as \[2,3\], got others"),
        ([[1, 2, 3], [4, 5]], "FP32", "arrays nested as"),
        ([[1, 2, 3], 4], "FP32", "arrays nested as"),
        ([[[1], 2, 3], [4, 5, 6]], "FP32", "takes float or int, got list"),
        ([1, 2, 3, 4, 5, True], "FP32", "takes float or int, got bool"),
        ([1, 2, 3, 4, 5, "6"], "FP32", "got str"),
        ([1, 2, 3, 4, 5, None], "FP32", "got NoneType"),
        ([1, 2, 3, 4, 5, {}], "FP32", "got dict"),
        ([1, 2, 3, 4, 5, 1e39], "FP32", "out of its range"),
        ([1, 2, 3, 4, 5, 10**400], "FP32", "out of its range"),
        ([1, 2, 3, 4, 5, 70000], "FP16", "out of its range"),
        ([1, 2, 3, 4, 5, 0.5], "INT32", "INT32 and takes int, got float"),
        ([1, 2, 3, 4, 5, 128], "INT8", "takes -128 to 127, got 128"),
        ([1, 2, 3, 4, 5, -1], "UINT64", "got -1"),
        ([1, 2, 3, 4, 5, 2**64], "UINT64", "got 18446744073709551616"),
        ([1, 2, 3, 4, 5, 10**4000], "INT64", "a number of 13288 bits"),
    ],
)
def test_values_that_do_not_fit_are_refused(data: list[Any], datatype: str, words: str) -> None:
    b = bench(datatype)
    with pytest.raises(InputError, match=words):
        b.json(tensor(data, datatype))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "expected a request, an object with inputs, got an array"),
        ({}, "inputs, an array of tensors, got nothing"),
        ({"inputs": []}, "inputs, an array"),
        ({"inputs": [1]}, r"expected inputs\[0\] to be an object, got int"),
        ({"inputs": [tensor([1] * 6) | {"dtype": "x"}]}, "unknown key dtype"),
        ({"inputs": [{"name": "x"}]}, "expected name and datatype, strings"),
        ({"inputs": [tensor([1] * 6) | {"shape": [2, -3]}]}, "non-negative integers"),
        ({"inputs": [tensor([1] * 6) | {"shape": [2, True]}]}, "integers"),
        ({"inputs": [tensor("AAAA")]}, "expected data, an array, got a string"),
        ({"inputs": [tensor([1] * 6) | {"parameters": []}]}, "parameters"),
        ({"inputs": [tensor([1] * 6)] * 2}, "expected each input once"),
        ({"inputs": [tensor([1] * 6) | {"name": "z"}]}, "expected the inputs 'x', got 'z'"),
        ({"inputs": [tensor([1] * 6, "FP64")]}, r"expects FP32\[2,3\], got FP64\[2,3\]"),
        ({"inputs": [tensor([1] * 6, shape=(3, 2))]}, r"expects FP32\[2,3\], got FP32\[3,2\]"),
        ({"inputs": [tensor([1] * 6, shape=(10**50, 2))]}, r"got FP32\[a number of 167 bits,2\]"),
        ({"inputs": [tensor(["AAAA"], "BYTES", (1,))]}, "this input takes no image"),
        ({"inputs": [tensor([1] * 6)], "id": 5}, "expected id, a string"),
        ({"inputs": [tensor([1] * 6)], "outputs": "y"}, "expected outputs, an array"),
        ({"inputs": [tensor([1] * 6)], "outputs": [{"name": 1}]}, "expected outputs, an array of objects"),
    ],
)
def test_document_that_is_not_a_request_is_refused_with_the_reason(document: object, words: str) -> None:
    b = bench()
    with pytest.raises(InputError, match=words) as raised:
        b.decode(json.dumps(document).encode())
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2,3],"data":[1,2,3,4,5,NaN]}]}',
        b'{"inputs":[{"name":"x","datatype":"FP32","shape":[2,3],"data":[1,2,3,4,5,-Infinity]}]}',
        b'{"inputs":[],"inputs":[]}',
        b'{"inputs":' + b"9" * 5000 + b"}",
    ],
)
def test_payload_that_is_not_json_is_refused(payload: bytes) -> None:
    b = bench()
    with pytest.raises(InputError, match="expected JSON"):
        b.decode(payload)


def test_json_over_its_limit_is_refused_before_it_is_parsed() -> None:
    b = bench()
    with pytest.raises(InputError, match="at most 16777216 bytes"):
        b.decode(b" " * (oip_json.MAX_JSON_BYTES + 1))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["inputs", "name", "datatype", "shape", "data", "parameters", "id", "outputs"]),
            inner,
        )
    ),
    max_leaves=20,
)


@pytest.mark.slow
@given(document=json_values)
def test_any_document_is_a_request_or_refused(document: object) -> None:
    b = bench("FP32", (1,))
    try:
        b.decode(json.dumps(document).encode())
    except InputError as error:
        assert "\n" not in str(error)


@pytest.mark.slow
@given(first=json_values, second=json_values)
def test_any_tensor_is_taken_or_refused(first: object, second: object) -> None:
    b = bench("FP32", (1,))
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": second, "data": [first]}]}
    try:
        b.decode(json.dumps(body).encode())
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert math.isfinite(b.memory["x"][0])


@pytest.mark.no_cover
def test_reading_600_kb_of_json_takes_little_longer_than_parsing_it() -> None:
    b = bench("FP32", (1, 3, 128, 128))
    values = np.random.default_rng(1).random(3 * 128 * 128).round(9).tolist()
    payload = json.dumps({"inputs": [tensor(values, "FP32", (1, 3, 128, 128))]}).encode()
    assert len(payload) > 550_000
    ours = parsing = math.inf
    for _ in range(10):
        start = time.thread_time()
        b.decode(payload)
        read = time.thread_time()
        json.loads(payload)
        ours, parsing = min(ours, read - start), min(parsing, time.thread_time() - read)
    # Typically 1.5 to 2; a loop in Python over the values takes as long as parsing at the least.
    assert ours < 3.5 * parsing, (ours, parsing)
    np.testing.assert_array_equal(b.memory["x"].ravel(), np.array(values, np.float32))


# -- raw tensors in


def two() -> Bench:
    return Bench(TensorSpec("a", "INT64", (2,)), TensorSpec("b", "FP32", ()))


A, B = np.array([1, -2], "<i8").tobytes(), np.array(0.5, "<f4").tobytes()


@pytest.mark.parametrize(
    ("properties", "payload"),
    [(("a;INT64;2", "b;FP32;"), A + B), (("b;FP32;", "a;INT64;2"), B + A), ((), A + B)],
)
def test_raw_tensors_arrive_in_the_order_of_their_properties(
    properties: tuple[str, ...], payload: bytes
) -> None:
    t = two()
    t.decode(payload, RAW, tensors=properties)
    assert t.memory["a"].tolist() == [1, -2]
    assert t.memory["b"] == 0.5


@pytest.mark.parametrize(
    ("properties", "payload", "words"),
    [
        (("a;INT64;2",), A, "expected the inputs 'a', 'b', got 'a'"),
        (("a;INT64;2", "b;FP32;", "c;FP32;"), A + B, "got 'a', 'b', 'c'"),
        (("a;INT64;2", "a;INT64;2"), A + A, "expected each input once"),
        (("a;INT32;2", "b;FP32;"), A + B, r"expected a INT64\[2\], got a INT32\[2\]"),
        (("a;INT64;1,2", "b;FP32;"), A + B, r"got a INT64\[1,2\]"),
        (("a;INT64;2", "b;FP32;"), A, "expected 20 bytes of .*, got 16"),
        (("a;INT64;2", "b;FP32;"), A + B + b"x", "got 21"),
        ((), b"", "expected 20 bytes"),
        (("a;INT64", "b;FP32;"), A + B, "described as name;FP32;1,3,4"),
        (("a;INT64;02", "b;FP32;"), A + B, "described as"),
        (("a;INT64;2;", "b;FP32;"), A + B, "described as"),
        (("a;INT64;9999999999,9999999999", "b;FP32;"), A + B, "tensor 'a;INT64"),
    ],
)
def test_raw_tensors_that_do_not_fit_are_refused(
    properties: tuple[str, ...], payload: bytes, words: str
) -> None:
    t = two()
    with pytest.raises(InputError, match=words):
        t.decode(payload, RAW, tensors=properties)


def test_a_raw_boolean_is_0_or_1() -> None:
    b = bench("BOOL", (2,))
    b.decode(b"\1\0", RAW)
    with pytest.raises(InputError, match="0 or 1, got 2"):
        b.decode(b"\1\2", RAW)


@given(
    properties=st.lists(st.text(alphabet="ab;INT64FP32,0129 ", max_size=30), max_size=3),
    payload=st.binary(max_size=40),
)
def test_any_properties_are_taken_or_refused(properties: list[str], payload: bytes) -> None:
    t = two()
    try:
        t.decode(payload, RAW, tensors=tuple(properties))
    except InputError:
        return
    assert len(payload) == 20


# -- images in

PICTURE = Image.new("RGB", (4, 2), (255, 0, 51))
TO_4X2 = Preprocess("x", "RGB", None, "stretch", "bilinear", None, 1 / 255, (0.0,), (1.0,), "NCHW")


def png(image: Image.Image = PICTURE) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def image_bench() -> Bench:
    return Bench(TensorSpec("x", "FP32", (1, 3, 2, 4)), preprocess=TO_4X2)


def image_tensor(data: bytes, content_type: str | None = "image/png", **more: Any) -> dict[str, Any]:
    parameters = {} if content_type is None else {"parameters": {"content_type": content_type}}
    return tensor([base64.b64encode(data).decode()], "BYTES", (1,)) | parameters | more


def test_an_image_is_the_input_by_its_content_type() -> None:
    b = image_bench()
    decoded = b.decode(png(), "image/png")
    np.testing.assert_allclose(b.memory["x"][0, :, 0, 0], [1, 0, 0.2], rtol=1e-6)
    assert decoded.placement is not None
    assert (decoded.placement.width, decoded.placement.height) == (4, 2)


def test_an_image_in_json_is_the_same() -> None:
    b = image_bench()
    decoded = b.json(image_tensor(png(), "Image/PNG; q=1"))
    np.testing.assert_allclose(b.memory["x"][0, :, 1, 3], [1, 0, 0.2], rtol=1e-6)
    assert decoded.placement is not None


def test_a_model_that_takes_images_takes_tensors_too() -> None:
    b = image_bench()
    b.json(tensor(list(range(24)), "FP32", (1, 3, 2, 4)))
    assert b.memory["x"].ravel().tolist() == list(range(24))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (image_tensor(b"not an image"), "cannot be read"),
        (image_tensor(png()) | {"data": ["AA=A"]}, "base64"),
        (image_tensor(png()) | {"data": ["\u00e4"]}, "base64"),
        (image_tensor(png()) | {"data": [5]}, "an array of one base64 string"),
        (image_tensor(png()) | {"data": ["", ""]}, "an array of one base64 string"),
        (image_tensor(png()) | {"shape": [2]}, r"BYTES of shape \[1\]"),
        (image_tensor(png(), None), "expected image/jpeg or image/png as content_type .* got None"),
        (image_tensor(png(), "image/gif"), "got 'image/gif'"),
    ],
)
def test_invalid_image_in_json_is_refused(body: dict[str, Any], words: str) -> None:
    b = image_bench()
    with pytest.raises(InputError, match=words):
        b.json(body)


def test_an_image_for_a_model_without_preprocessing_is_415() -> None:
    with pytest.raises(
        MediaTypeError, match=r"expected tensors, got image/png: .* takes no images"
    ) as caught:
        bench().decode(png(), "image/png")
    assert "send tensors" in (caught.value.hint or "")
    with pytest.raises(
        MediaTypeError, match=r"expected a picture, got audio/wav: .* no recordings"
    ) as caught:
        image_bench().decode(b"RIFF", "audio/wav")
    assert "JPEG or a PNG" in (caught.value.hint or "")


def test_an_image_for_one_of_two_inputs_is_refused() -> None:
    b = Bench(TensorSpec("x", "FP32", (1, 3, 2, 4)), TensorSpec("z", "FP32", (1,)), preprocess=TO_4X2)
    with pytest.raises(InputError, match="expected the inputs 'x', 'z', got one image"):
        b.decode(png(), "image/png")
    b.json(image_tensor(png()), tensor([1], "FP32", (1,)) | {"name": "z"})
    assert b.memory["z"][0] == 1


# -- CBOR


def test_cbor_is_jsons_form_with_bytes_for_tensors() -> None:
    b = bench()
    values = np.arange(6, dtype=np.float32)
    b.decode(cbor2.dumps({"inputs": [tensor(values.tobytes())]}), CBOR)
    np.testing.assert_array_equal(b.memory["x"].ravel(), values)
    b.decode(cbor2.dumps({"inputs": [tensor([5.0] * 6)]}), CBOR)
    assert b.memory["x"].ravel().tolist() == [5] * 6
    _, payload = b.encode({"y": values, "labels": (b"cat",)}, CBOR)
    outputs = cbor2.loads(payload)["outputs"]
    assert outputs[0] == {"name": "y", "datatype": "FP32", "shape": [6], "data": values.tobytes()}
    assert outputs[1] == {"name": "labels", "datatype": "BYTES", "shape": [1], "data": [b"cat"]}
    i = image_bench()
    i.decode(cbor2.dumps({"inputs": [image_tensor(png()) | {"data": [png()]}]}), CBOR)
    assert i.memory["x"][0, 0, 0, 0] == 1
    for bad in (
        b"",
        b"\xff",
        b"\x9b" + b"\xff" * 8,
        b"\x81" * 5000,
        cbor2.dumps([1]),
        cbor2.dumps({"inputs": [tensor(b"")]}),
    ):
        with pytest.raises(InputError):
            b.decode(bad, CBOR)


@given(payload=st.binary(max_size=60))
def test_any_cbor_is_a_request_or_refused(payload: bytes) -> None:
    try:
        bench().decode(payload, CBOR)
    except InputError as error:
        assert "\n" not in str(error)


def test_without_cbor2_cbor_is_415(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cbor2", None)
    b = bench()
    with pytest.raises(MediaTypeError, match="got 'application/cbor'"):
        b.decode(b"\xa0", CBOR)
    with pytest.raises(MediaTypeError, match="got 'application/cbor'"):
        b.codec.answer_type(Request(1, accept=CBOR))


# -- content types


JPEG_START = b"\xff\xd8\xff\xe0\x00\x10JFIF"


@pytest.mark.parametrize(
    ("payload", "content_type", "words", "hint"),
    [
        (b"", "", "expected JSON.*; the payload is empty", "as the message's payload"),
        (b"", "image/png", "cannot be read.*; the payload is empty", "as the message's payload"),
        (JPEG_START, "", "the payload is a JPEG picture", "set the Content Type to image/jpeg"),
        (JPEG_START, "application/octet-stream", "expected 96 bytes.*a JPEG picture", "image/jpeg"),
        (JPEG_START, "image/png", "not a PNG file; the payload is a JPEG picture", "image/jpeg"),
        (JPEG_START, "text/plain", "got 'text/plain'; the payload is a JPEG", "image/jpeg"),
        (base64.b64encode(JPEG_START), "image/png", "a JPEG picture in base64", "the bytes of the file"),
        (b"data:image/png;base64,iVBORw0KGgo=", "", "the payload is a data URL", "the bytes of the file"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image/webp", "a WebP picture", "convert it to JPEG or PNG"),
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", "", "a WAV recording", "audio/wav"),
        (b"RF64\xff\xff\xff\xffWAVEds64", "", "a WAV recording", "audio/wav"),
        (b"\x00\x00\x00\x18ftypheic", "", "a HEIF, AVIF or MP4 file", "convert it"),
    ],
)
def test_what_a_refused_payload_really_is_is_told(
    payload: bytes, content_type: str, words: str, hint: str
) -> None:
    with pytest.raises((InputError, MediaTypeError), match=words) as caught:
        image_bench().decode(payload, content_type)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("payload", "content_type"), [(JPEG_START, "image/jpeg"), (b"{", ""), (b"\x00" * 5, "image/png")]
)
def test_a_payload_of_the_declared_kind_or_of_none_gets_no_guess(payload: bytes, content_type: str) -> None:
    with pytest.raises(InputError) as caught:
        image_bench().decode(payload, content_type)
    assert "the payload is" not in str(caught.value)
    assert caught.value.__cause__ is not caught.value  # or to follow the causes would never end


def test_a_data_url_in_json_is_told_what_to_leave_out() -> None:
    url = image_tensor(b"") | {"data": ["data:image/png;base64," + base64.b64encode(png()).decode()]}
    with pytest.raises(InputError, match="expected an image in base64") as caught:
        image_bench().json(url)
    assert "up to the comma" in (caught.value.hint or "")


@pytest.mark.parametrize("content_type", ["image/x-png", "IMAGE/PNG; q=1"])
def test_other_names_of_a_picture_are_taken(content_type: str) -> None:
    image_bench().decode(png(), content_type)


@pytest.mark.parametrize("content_type", ["text/plain", "image/gif", "application/jsonx"])
def test_another_content_type_is_415(content_type: str) -> None:
    with pytest.raises(MediaTypeError, match=re.escape(repr(content_type))):
        bench().decode(b"", content_type)


def test_missing_content_type_means_json() -> None:
    with pytest.raises(InputError, match="expected JSON"):
        bench().decode(b"", "")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, JSON),
        ({"content_type": "Application/JSON; charset=utf-8"}, JSON),
        ({"content_type": "image/png"}, JSON),
        ({"content_type": RAW}, RAW),
        ({"content_type": RAW, "accept": JSON}, JSON),
        ({"content_type": JSON, "accept": RAW}, RAW),
        ({"content_type": RAW, "accept": "*/*"}, RAW),
        ({"content_type": RAW, "accept": RAW, "client_json": True}, JSON),
    ],
)
def test_answer_has_the_content_type_that_was_asked_for(fields: dict[str, Any], expected: str) -> None:
    assert bench().codec.answer_type(Request(1, **fields)) == expected


def test_asking_for_a_content_type_that_is_not_served_is_415() -> None:
    with pytest.raises(MediaTypeError, match="got 'image/png'"):
        bench().codec.answer_type(Request(1, accept="image/png"))


@pytest.mark.parametrize(
    ("accept", "is_raw"),
    [
        (None, False),
        ("application/json; charset=utf-8", False),
        (f"{RAW};postprocess=none", True),
        ("*/*; q=1; PostProcess = None", True),
    ],
)
def test_the_models_own_outputs_are_asked_for_by_a_parameter(accept: str | None, is_raw: bool) -> None:
    b = bench()
    x = np.zeros((2, 3), np.float32).tobytes()
    assert b.decode(x, RAW, tensors=("x;FP32;2,3",), accept=accept).is_raw is is_raw
    assert b.codec.answer_type(Request(1, RAW, accept=accept)) in (RAW, JSON)


def test_the_models_own_outputs_are_asked_for_in_the_json() -> None:
    none, other = {"postprocess": "none"}, {"priority": 1}
    for parameters, is_raw in ((none, True), (none | other, True), (other, False), ({}, False), ("x", False)):
        assert bench().json(tensor([0] * 6), parameters=parameters).is_raw is is_raw
    row = {"temperature": 1, "id": 7, "wall": "red"}
    b = RowBench()
    assert b.decode(json.dumps({"row": row, "parameters": none}).encode()).is_raw
    # Another column of a row, which the model does not take.
    assert not b.decode(json.dumps({**row, "parameters": none}).encode()).is_raw


def test_another_postprocess_than_none_is_refused() -> None:
    b = bench()
    with pytest.raises(InputError, match=r"expected postprocess=none, .* got 'softmax'"):
        b.decode(bytes(24), RAW, accept=f"{RAW};postprocess=softmax")
    for value in (7, ["none"], "n" * 200):
        with pytest.raises(InputError, match="expected postprocess=none") as caught:
            b.json(tensor([0] * 6), parameters={"postprocess": value})
        assert len(str(caught.value)) < 200


# -- answers


def test_json_answer_has_the_form_of_the_protocol() -> None:
    values: dict[str, Any] = {
        "y": np.array([[1, 0.1], [-2.5e-8, 3e20]], np.float32),
        "n": np.array([2**63 - 1, -1], np.int64),
        "t": np.array([True, False]),
        "half": np.array(0.1, np.float16),
        "wide": np.array([0.1], np.float64),
        "none": np.zeros((0, 4), np.float32),
        "labels": (b"cat", "größer".encode(), b"\xff"),
    }
    _, payload = bench().encode(values, decoded=Decoded("mine"))
    answer = json.loads(payload)
    outputs = {output["name"]: output for output in answer.pop("outputs")}
    assert answer == {"model_name": "probe", "model_version": "1.2.3", "id": "mine"}
    assert outputs["y"]["shape"] == [2, 2]
    np.testing.assert_array_equal(np.array(outputs["y"]["data"], np.float32), values["y"].ravel())
    assert len(json.dumps(outputs["y"]["data"])) < 50
    assert (outputs["n"]["datatype"], outputs["n"]["data"]) == ("INT64", [2**63 - 1, -1])
    assert outputs["t"] == {"name": "t", "datatype": "BOOL", "shape": [2], "data": [True, False]}
    assert np.float16(outputs["half"]["data"][0]) == np.float16(0.1)
    assert outputs["wide"]["data"] == [0.1]
    assert outputs["none"] == {"name": "none", "datatype": "FP32", "shape": [0, 4], "data": []}
    assert outputs["labels"] == {
        "name": "labels",
        "datatype": "BYTES",
        "shape": [3],
        "data": ["cat", "größer", "\ufffd"],
    }


@pytest.mark.slow
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=20))
def test_every_float_can_be_read_back_from_a_json_answer(values: list[float]) -> None:
    array = np.array(values, np.float32)
    _, payload = bench().encode({"y": array})
    np.testing.assert_array_equal(np.array(json.loads(payload)["outputs"][0]["data"], np.float32), array)


def test_a_client_without_properties_finds_its_status_in_the_json() -> None:
    _, payload = bench().encode({}, client_json=True, decoded=Decoded("i"))
    head = {"model_name": "probe", "model_version": "1.2.3", "id": "i", "status": 200, "message": ""}
    assert json.loads(payload) == head | {"outputs": []}


def test_nan_cannot_be_answered_in_json() -> None:
    with pytest.raises(ExecutionError, match="'y' has NaN or infinity"):
        bench().encode({"y": np.array([np.nan], np.float32)})
    _, payload = bench().encode({"y": np.array([np.nan], np.float32)}, RAW)
    assert np.isnan(np.frombuffer(payload, np.float32)).all()


def test_a_raw_answer_is_its_tensors_one_after_the_other() -> None:
    y, n = np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7, np.int64)
    properties, payload = bench().encode({"y": y.T, "labels": (b"cat", b""), "n": n}, RAW)
    assert properties == ("y;FP32;3,2", "labels;BYTES;2", "n;INT64;")
    labels = struct.pack("<I", 3) + b"cat" + struct.pack("<I", 0)
    assert payload == y.T.tobytes() + labels + n.tobytes()


def test_a_single_raw_tensor_is_not_copied() -> None:
    b, y = bench(), np.arange(4, dtype=np.float32)
    _, payload = b.codec.encode(Request(1, RAW), Decoded(None), RAW, {"y": y})
    y[0] = 9
    assert np.frombuffer(payload, np.float32)[0] == 9


def test_a_request_may_choose_outputs() -> None:
    b = bench()
    decoded = b.json(tensor([0] * 6), outputs=[{"name": "b"}])
    values = {"a": np.zeros(1, np.float32), "b": np.ones(1, np.float32)}
    _, payload = b.encode(values, decoded=decoded)
    assert [output["name"] for output in json.loads(payload)["outputs"]] == ["b"]
    with pytest.raises(InputError, match="expected outputs among 'a', 'b', got 'c'"):
        b.encode(values, decoded=Decoded(None, ("c",)))


def test_every_refusal_has_its_status() -> None:
    assert {error.status for error in (InputError, MediaTypeError, ExecutionError)} == {400, 415, 500}
    assert issubclass(InputError, RequestError)


def test_large_outputs_are_written_in_pieces_that_join(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {
        "f": np.linspace(0, 1, 10, dtype=np.float32),
        "i": np.arange(7).reshape(7, 1),
        "b": np.array([True] * 4),
        "one": np.array(3.5, np.float32),
        "labels": (b"a",) * 9,
    }
    _, whole = bench().encode(values)
    monkeypatch.setattr(oip_json, "_PIECE_VALUES", 3)
    _, pieces = bench().encode(values)
    assert pieces == whole
    assert [len(output["data"]) for output in json.loads(whole)["outputs"]] == [10, 7, 4, 1, 9]


def test_json_answer_takes_its_limit_and_not_more() -> None:
    outputs = {"y": np.arange(5), "z": np.arange(3)}
    exact = oip_json.format_answer({"id": "a"}, outputs)
    assert oip_json.format_answer({"id": "a"}, outputs, len(exact)) == exact
    with pytest.raises(ExecutionError, match=f"at most {len(exact) - 1} bytes"):
        oip_json.format_answer({"id": "a"}, outputs, len(exact) - 1)


@pytest.mark.slow
def test_memory_for_a_json_answer_is_bounded_however_large_the_output() -> None:
    limit = 1 << 20
    huge = np.zeros(8 << 20, np.uint8)  # as text it would take 16 MiB, and as Python's objects 64
    tracemalloc.start()
    try:
        with pytest.raises(ExecutionError):
            oip_json.format_answer({}, {"y": huge}, limit)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * limit


# -- rows in


class RowBench:
    """The codec of a model that declares columns: two numbers, and a text."""

    def __init__(self, fit: Any = None) -> None:
        specs = (TensorSpec("x", "FP32", (1, 2)), TensorSpec("colour", "INT64", (1, 1)))
        declared = (
            InputColumns("x", (Column("temperature"), Column("id")), missing=True),
            InputColumns("colour", (Column("wall", ("red", "blue")),)),
        )
        self.memory = {spec.name: np.zeros(spec.shape, spec.dtype) for spec in specs}
        made = manifest({"mod.so": b""}, specs, (TensorSpec("y", "FP32", (1,)),), columns=declared)
        reader = RowReader(declared, specs)
        self.codec = Codec(made, None, self.memory.__getitem__, import_cbor(), fit, reader)

    def decode(self, payload: bytes, content_type: str = JSON, **fields: Any) -> Decoded:
        return self.codec.decode(Request(1, content_type, **fields), memoryview(payload))

    @property
    def values(self) -> list[Any]:
        return [*self.memory["x"].reshape(-1).tolist(), *self.memory["colour"].reshape(-1).tolist()]


@pytest.mark.parametrize(
    "text",
    [
        '{"temperature": 21.5, "id": 7, "wall": "blue"}',
        '{"wall": "blue", "id": 7, "temperature": 21.5, "linkquality": 120, "reply_to": "x"}',
        '{"row": {"temperature": 21.5, "id": 7, "wall": "blue"}, "id": "mine"}',
        '{"rows": [[21.5, 7, "blue"]]}',
        '[21.5, 7, "blue"]',
        '[{"temperature": 21.5, "id": 7, "wall": "blue"}]',
    ],
)
def test_a_row_is_the_model_s_inputs(text: str) -> None:
    b = RowBench()
    assert b.decode(text.encode(), id="given") == Decoded("given")
    assert b.values == [21.5, 7, 1]
    packed = cbor2.dumps(json.loads(text))
    b = RowBench()
    b.decode(packed, CBOR)
    assert b.values == [21.5, 7, 1]


def test_a_row_s_missing_value_is_nan() -> None:
    b = RowBench()
    b.decode(b'{"temperature": null, "id": 7, "wall": "red"}')
    assert math.isnan(b.values[0])
    b.decode(cbor2.dumps({"temperature": math.nan, "id": 7, "wall": "red"}), CBOR)
    assert math.isnan(b.values[0])


def test_a_model_with_columns_still_takes_tensors() -> None:
    b = RowBench()
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]},
        {"name": "colour", "datatype": "INT64", "shape": [1, 1], "data": [0]},
    ]
    b.decode(json.dumps({"inputs": inputs}).encode())
    assert b.values == [1, 2, 0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"temperature": NaN, "id": 7, "wall": "red"}', "expected JSON: NaN"),
        ('{"temperature": 1, "temperature": 2, "id": 7, "wall": "red"}', "duplicate key"),
        ('{"temperature": 1e999, "id": 7, "wall": "red"}', "column 'temperature': expected a number of FP32"),
        ('{"temperature": "1", "id": 7, "wall": "red"}', "column 'temperature': expected a number, got '1'"),
        ('{"temperature": 1, "id": 7}', "expected 3 columns, missing 'wall'"),
        ('{"temperature": 1, "id": 7, "wall": null}', "column 'wall': expected a value, got none"),
        ('{"rows": [[1, 2, "red"], [1, 2, "red"]]}', "expected one row, got 2: model probe takes one"),
        ('{"rows": []}', "expected a row, got none"),
        ("{}", "expected 3 columns, missing"),
        ("7", "expected a request"),
        ('{"k": [' + "[" * 50_000, "expected JSON"),
        ("{" + ",".join(f'"k{place}": {place}' for place in range(50_000)) + "}", "missing 'temperature'"),
        ('[1, 2, "' + "x" * 1_000_000 + '"]', "column 'wall': expected one of 'red', 'blue', got 'xxx"),
        ("[1, " + "9" * 4000 + ', "red"]', "column 'id': expected a number of FP32"),
    ],
)
def test_rows_that_are_refused(text: str, message: str) -> None:
    b = RowBench()
    with pytest.raises(InputError, match=message) as caught:
        b.decode(text.encode())
    assert len(str(caught.value)) < 700


def test_too_many_rows_are_refused_before_they_are_read() -> None:
    def fit(given: Mapping[str, tuple[int, ...]], _nbytes: int | None) -> Mapping[str, TensorSpec]:
        raise InputError(f"expected at most 8 rows, got {given['x'][0]}")

    with pytest.raises(InputError, match="expected at most 8 rows, got 9"):
        RowBench(fit).decode(b'{"rows": [' + b'"no row",' * 8 + b'"no row"]}')


def test_several_rows_choose_the_bucket() -> None:
    shapes: list[Any] = []

    def fit(given: Mapping[str, tuple[int, ...]], _nbytes: int | None) -> Mapping[str, TensorSpec]:
        shapes.append(given)
        b.memory["x"], b.memory["colour"] = np.zeros((2, 2), np.float32), np.zeros((2, 1), np.int64)
        return {}

    b = RowBench(fit)
    b.decode(b'{"rows": [[1, 2, "red"], [3, 4, "blue"]]}')
    assert shapes == [{"x": (2, 2), "colour": (2, 1)}]
    assert b.values == [1, 2, 3, 4, 0, 1]
