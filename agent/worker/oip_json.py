"""The Open Inference Protocol's JSON: fast for tensors, strict for everything else."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from agent.bundle.strict_json import refuse_constant, unique_object
from agent.errors import ExecutionError, InputError
from agent.runtime.storage import Array
from agent.worker.oip import datatype_of

# A list of numbers takes four times the size of its text in memory, a list of empty arrays thirty times: half
# a gigabyte at worst.
MAX_JSON_BYTES: Final = 16 * 1024 * 1024

# Enough digits to read every value of a type back, and half the text that Python would print as float64.
_FORMATS: Final = {"float16": "%.5g", "float32": "%.9g"}


def parse(payload: bytes | bytearray | memoryview) -> object:
    """Parse a request's JSON.

    Raises
    ------
    InputError
        If it is not JSON (RFC 8259: no NaN, no duplicate key), or too large.
    """
    nbytes = payload.nbytes if isinstance(payload, memoryview) else len(payload)
    if nbytes > MAX_JSON_BYTES:
        raise InputError(
            f"expected a JSON request of at most {MAX_JSON_BYTES} bytes, got {nbytes}",
            hint="send large tensors as application/octet-stream",
        )
    try:
        return json.loads(
            str(payload, "utf-8"), object_pairs_hook=unique_object, parse_constant=refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise InputError(f"expected JSON: {error}") from error


def image_bytes(data: object) -> bytes:
    """Return the image in a BYTES tensor's data.

    Parameters
    ----------
    data
        An array of one base64 string (RFC 4648, padded); in CBOR also an array of one byte string.

    Raises
    ------
    InputError
        If it is anything else.
    """
    if isinstance(data, list) and len(data) == 1:
        (data,) = data
    if isinstance(data, bytes):
        return data
    if not isinstance(data, str):
        raise InputError("expected an image as an array of one base64 string, got something else")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"expected an image in base64: {error}") from error


def format_answer(head: Mapping[str, Any], outputs: Mapping[str, Array | tuple[bytes, ...]]) -> bytes:
    """Return the answer's JSON.

    Parameters
    ----------
    head
        Members before the outputs, such as model_name, model_version and id.
    outputs
        Tensors by name, BYTES as a tuple of UTF-8 strings.

    Raises
    ------
    ExecutionError
        If an output has NaN or infinity, which JSON cannot represent.
    """
    parts = []
    for name, value in outputs.items():
        datatype, shape = datatype_of(value)
        meta = json.dumps({"name": name, "datatype": datatype, "shape": shape}, separators=(",", ":"))
        parts.append(f'{meta[:-1]},"data":{_data(name, value)}}}')
    start = json.dumps(dict(head), separators=(",", ":"))
    comma = "," if head else ""
    return f'{start[:-1]}{comma}"outputs":[{",".join(parts)}]}}'.encode()


def _data(name: str, value: Array | tuple[bytes, ...]) -> str:
    if isinstance(value, tuple):
        return json.dumps([each.decode("utf-8", "replace") for each in value], separators=(",", ":"))
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise ExecutionError(
            f"output {name!r} has NaN or infinity, which JSON cannot represent",
            hint="ask for application/octet-stream",
        )
    values = value.ravel().tolist()
    form = _FORMATS.get(str(value.dtype))
    if form is None or not values:
        return json.dumps(values, separators=(",", ":"))
    return f"[{','.join([form] * len(values))}]" % tuple(values)
