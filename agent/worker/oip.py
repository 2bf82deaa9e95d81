"""Requests and answers of the Open Inference Protocol v2, between documents and tensors.

For both JSON and CBOR: a document is what their parsers return. Promises: every tensor of a request is
exactly what the model takes, or an `InputError` names the input, what was expected and what was found. Whole
lists of values are checked and converted at once, never one value after the other in Python.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Final

import numpy as np

from agent.bundle.quantisation import Quantised
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import InputError
from agent.runtime.quantisation import to_input
from agent.runtime.storage import Array
from agent.wire.envelope import MAX_ID_CHARACTERS

# Keys of a request's tensor: a misspelt key must not count as an absent one. Unknown keys of the request
# itself are ignored: they may belong to a protocol extension, or to the agent's envelope.
_TENSOR_KEYS: Final = frozenset({"name", "datatype", "shape", "data", "parameters"})
# What a quantised input takes besides its own integers.
REAL: Final = frozenset({"FP16", "FP32", "FP64"})
# Longer names are cut in error messages.
_SHOWN: Final = 80


@dataclass(frozen=True, slots=True)
class RequestTensor:
    """One input of a request, as it is in the document.

    `data` is a list, nested or flat, or in CBOR the little-endian bytes. `content_type` is for an image in
    BYTES.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Sequence[Any] | bytes
    content_type: str | None


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request's document, after its form was checked: `inputs` have unique names.

    `id` is the requester's name for it, and `outputs` are those to return, or None for all. `is_raw` says
    that its parameter `postprocess` is `none`: the model's own outputs are wanted.
    """

    id: str | None
    inputs: tuple[RequestTensor, ...]
    outputs: tuple[str, ...] | None
    is_raw: bool = False


def parse_request(document: object) -> InferRequest:
    """Check a request's form; what is not an inference request raises InputError."""
    if not isinstance(document, dict):
        raise InputError(f"expected a request, an object with inputs, got {_kind(document)}")
    inputs = document.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise InputError(f"expected inputs, an array of tensors, got {_kind(inputs)}")
    tensors = tuple(_tensor(each, index) for index, each in enumerate(inputs))
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise InputError("expected each input once, got a duplicate")
    name = document.get("id")
    if name is not None and not (isinstance(name, str) and len(name) <= MAX_ID_CHARACTERS and _is_text(name)):
        raise InputError(
            f"expected id, a string of at most {MAX_ID_CHARACTERS} characters, got {_kind(name)}"
        )
    return InferRequest(name, tensors, _wanted(document.get("outputs")), is_raw(document.get("parameters")))


def is_raw(parameters: object) -> bool:
    """Return whether a request's parameters ask for the model's own outputs.

    Any postprocess other than `none` raises InputError.
    """
    value = parameters.get("postprocess") if isinstance(parameters, dict) else None
    if value is not None:
        check_postprocess(value)
    return value is not None


def check_postprocess(value: object) -> None:
    """Check that the value of a request's parameter `postprocess` is `none`, or raise InputError."""
    if value != "none":
        shown = value if isinstance(value, str) else _kind(value)
        raise InputError(
            f"expected postprocess=none, or no postprocess for the declared one, got {shown!r:.{_SHOWN}}"
        )


def fill(out: Array, spec: TensorSpec, tensor: RequestTensor, quantised: Quantised | None = None) -> None:
    """Write a request's tensor into the model's input, whose memory `out` is contiguous.

    An input that is `quantised` takes real numbers, too. Raises InputError if datatype, shape, or the number
    or range of values differ from the input's.
    """
    if quantised is not None and tensor.datatype in REAL:
        given = TensorSpec(spec.name, tensor.datatype, spec.shape)
        real = np.empty(given.shape, given.dtype)
        fill(real, given, tensor)
        fill_real(out, spec, real, quantised)
        return
    if (tensor.datatype, tensor.shape) != (spec.datatype, spec.shape):
        raise InputError(
            f"input {spec.name!r} expects {spec.datatype}{_shape(spec.shape)}, "
            f"got {tensor.datatype:.{_SHOWN}}{_shape(tensor.shape)}"
        )
    if isinstance(tensor.data, bytes):
        fill_raw(out, spec, tensor.data)
        return
    values = _flatten(tensor.data, spec)
    count = math.prod(spec.shape)
    if len(values) != count:
        raise InputError(f"input {spec.name!r} expects {count} values, got {len(values)}")
    out.reshape(-1)[:] = _convert(values, spec)


def fill_real(out: Array, spec: TensorSpec, real: Array, quantised: Quantised) -> None:
    """Write real numbers into a quantised input; NaN and infinity raise InputError."""
    if not np.isfinite(real).all():
        raise InputError(f"input {spec.name!r} is {spec.datatype} and takes finite numbers, got others")
    out[...] = to_input(real, spec.dtype, quantised)


def fill_raw(out: Array, spec: TensorSpec, data: bytes | memoryview) -> None:
    """Write little-endian bytes into the model's input.

    More or fewer bytes than the input has, and a BOOL that is neither 0 nor 1, raise InputError.
    """
    raw = np.frombuffer(data, np.uint8)
    if raw.size != spec.nbytes:
        raise InputError(f"input {spec.name!r} expects {spec.nbytes} bytes, got {raw.size}")
    if spec.datatype == "BOOL" and raw.size and raw.max() > 1:
        raise InputError(f"input {spec.name!r} is BOOL and expects bytes of 0 or 1, got {raw.max()}")
    out.reshape(-1).view(np.uint8)[:] = raw


def check_names(given: Sequence[str], inputs: Mapping[str, TensorSpec]) -> None:
    """Check that a request has exactly the model's inputs, or raise InputError."""
    unknown = [name for name in given if name not in inputs]
    missing = [name for name in inputs if name not in given]
    if unknown or missing:
        expected = ", ".join(map(repr, inputs))
        got = ", ".join(f"{name!r:.{_SHOWN}}" for name in given)
        raise InputError(f"expected the inputs {expected}, got {got or 'none'}")


def datatype_of(value: Array | tuple[bytes, ...]) -> tuple[str, tuple[int, ...]]:
    """Return datatype and shape of a result; a tuple is BYTES."""
    if isinstance(value, tuple):
        return "BYTES", (len(value),)
    return _datatype(value.dtype), value.shape


@functools.lru_cache(maxsize=16)
def _datatype(dtype: np.dtype[Any]) -> str:
    # numpy builds a dtype's name at each call, which takes 6 us.
    return TensorSpec.from_dtype("-", str(dtype), ()).datatype


def _tensor(document: object, index: int) -> RequestTensor:
    where = f"inputs[{index}]"
    if not isinstance(document, dict):
        raise InputError(f"expected {where} to be an object, got {_kind(document)}")
    unknown = document.keys() - _TENSOR_KEYS
    if unknown:
        raise InputError(f"{where}: unknown key {next(iter(unknown))!s:.{_SHOWN}}")
    name, datatype, shape = (document.get(key) for key in ("name", "datatype", "shape"))
    if not isinstance(name, str) or not isinstance(datatype, str):
        raise InputError(
            f"{where}: expected name and datatype, strings, got {_kind(name)} and {_kind(datatype)}"
        )
    if not isinstance(shape, list) or any(type(dim) is not int or dim < 0 for dim in shape):
        raise InputError(
            f"input {name!r:.{_SHOWN}}: expected shape, an array of non-negative integers, got {_kind(shape)}"
        )
    data = document.get("data")
    if not isinstance(data, list | bytes):
        raise InputError(f"input {name!r:.{_SHOWN}}: expected data, an array, got {_kind(data)}")
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InputError(f"input {name!r:.{_SHOWN}}: expected parameters, an object, got {_kind(parameters)}")
    content_type = parameters.get("content_type")
    if content_type is not None and not isinstance(content_type, str):
        raise InputError(
            f"input {name!r:.{_SHOWN}}: expected content_type, a string, got {_kind(content_type)}"
        )
    return RequestTensor(name, datatype, tuple(shape), data, content_type)


def _wanted(document: object) -> tuple[str, ...] | None:
    if document is None:
        return None
    if not isinstance(document, list):
        raise InputError(f"expected outputs, an array, got {_kind(document)}")
    names = [each.get("name") if isinstance(each, dict) else None for each in document]
    wanted = tuple(name for name in names if isinstance(name, str))
    if len(wanted) != len(names) or len(set(wanted)) != len(wanted):
        raise InputError("expected outputs, an array of objects with different names, got others")
    return wanted or None


def _flatten(data: Sequence[Any], spec: TensorSpec) -> Sequence[Any]:
    """Flatten nested arrays level by level; a flat one is returned as it is."""
    if not data or type(data[0]) is not list:
        return data
    rows = 1
    for dim, below in pairwise(spec.shape):
        rows *= dim
        # Types are checked before lengths: a row that is not an array has no length.
        if len(data) != rows or set(map(type, data)) != {list} or set(map(len, data)) != {below}:
            raise InputError(f"input {spec.name!r} expects arrays nested as {_shape(spec.shape)}, got others")
        data = list(chain.from_iterable(data))
    return data


def _convert(values: Sequence[Any], spec: TensorSpec) -> Array:
    kinds = set(map(type, values))
    dtype = np.dtype(spec.dtype)
    allowed = {bool} if dtype.kind == "b" else {int, float} if dtype.kind == "f" else {int}
    if kinds - allowed:
        odd = min(kind.__name__ for kind in kinds - allowed)
        names = " or ".join(sorted(kind.__name__ for kind in allowed))
        raise InputError(f"input {spec.name!r} is {spec.datatype} and takes {names}, got {odd}")
    if dtype.kind in "iu" and values:
        limits = np.iinfo(dtype)
        low, high = min(values), max(values)
        if low < limits.min or high > limits.max:
            raise InputError(
                f"input {spec.name!r} is {spec.datatype} and takes {limits.min} to {limits.max}, "
                f"got {_short(low if low < limits.min else high)}"
            )
    try:
        # A value out of float32's range becomes infinite, which is checked below.
        with np.errstate(over="ignore"):
            array: Array = np.array(values, dtype=np.float64 if dtype.kind == "f" else dtype).astype(dtype)
    except OverflowError as error:
        raise InputError(f"input {spec.name!r} is {spec.datatype}, got a value out of its range") from error
    if dtype.kind == "f" and not np.isfinite(array).all():
        raise InputError(f"input {spec.name!r} is {spec.datatype}, got a value out of its range")
    return array


def _is_text(text: str) -> bool:
    # JSON can write half of a surrogate pair, which no other encoding can.
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _short(number: int) -> str:
    # An integer of a million digits takes seconds to print, and Python refuses more than 4300.
    return str(number) if abs(number) < 1 << 128 else f"a number of {number.bit_length()} bits"


def _shape(shape: Sequence[int]) -> str:
    return f"[{','.join(map(_short, shape)):.{_SHOWN}}]"


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", type(None): "nothing"}
    return names.get(type(value), type(value).__name__)
