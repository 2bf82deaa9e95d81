"""The Open Inference Protocol's JSON: fast for tensors, strict for everything else."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Final

import numpy as np

from agent.bundle.strict_json import refuse_constant, unique_object
from agent.errors import ExecutionError, InputError
from agent.runtime.storage import Array
from agent.wire.content_types import RAW
from agent.worker.channel import MAX_PAYLOAD_BYTES
from agent.worker.oip import datatype_of

# A list of numbers takes four times the size of its text in memory, a list of empty arrays thirty times: half
# a gigabyte at worst.
MAX_JSON_BYTES: Final = 16 * 1024 * 1024

# Enough digits to read every value of a type back, and half the text that Python would print as float64.
_FORMATS: Final = {"float16": "%.5g", "float32": "%.9g"}
# Written at once: a value takes about 100 bytes until it is text, and large outputs would need gigabytes.
_PIECE_VALUES: Final = 1 << 16


def parse(payload: bytes | bytearray | memoryview) -> object:
    """Parse a request's JSON (RFC 8259: no NaN, no duplicate key).

    Anything else, or too much of it, raises InputError.
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
    """Return the image in a BYTES tensor's data: an array of one base64 string (RFC 4648, padded).

    In CBOR it may also be an array of one byte string. Anything else raises InputError.
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
        hint = "leave out what is before the base64, up to the comma" if data.startswith("data:") else None
        raise InputError(f"expected an image in base64: {error}", hint=hint) from error


def format_answer(
    head: Mapping[str, Any],
    outputs: Mapping[str, Array | tuple[bytes, ...]],
    max_bytes: int = MAX_PAYLOAD_BYTES,
) -> bytes:
    """Return the answer's JSON, in ASCII.

    `head` has the members before the outputs, such as model_name, model_version and id; `outputs` are by
    name, BYTES as a tuple of UTF-8 strings. No more than `max_bytes` is kept while it is written. Raises
    ExecutionError if the JSON would be longer, or an output has NaN or infinity, which JSON cannot represent.
    """
    start = json.dumps(dict(head), separators=(",", ":"))
    parts = [f'{start[:-1]}{"," if head else ""}"outputs":['.encode()]
    left = max_bytes - len(parts[0])
    for name, value in outputs.items():
        datatype, shape = datatype_of(value)
        meta = json.dumps({"name": name, "datatype": datatype, "shape": shape}, separators=(",", ":"))
        comma = "," if len(parts) > 1 else ""
        for text in chain((f'{comma}{meta[:-1]},"data":[',), _data(name, value), ("]}",)):
            parts.append(text.encode())
            left -= len(parts[-1])
            if left < 2:  # for the last brackets
                size = len(value) if isinstance(value, tuple) else value.size
                raise ExecutionError(
                    f"expected an answer of at most {max_bytes} bytes, got more as JSON: output {name!r:.80} "
                    f"has {size} values",
                    hint=f"ask for {RAW}",
                )
    parts.append(b"]}")
    return b"".join(parts)


def _data(name: str, value: Array | tuple[bytes, ...]) -> Iterator[str]:
    """Yield the values of an output in pieces, with the commas between them."""
    if isinstance(value, tuple):
        yield json.dumps([each.decode("utf-8", "replace") for each in value], separators=(",", ":"))[1:-1]
        return
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise ExecutionError(
            f"output {name!r} has NaN or infinity, which JSON cannot represent",
            hint=f"ask for {RAW}",
        )
    form = _FORMATS.get(str(value.dtype))
    flat = value.ravel()
    for begin in range(0, flat.size, _PIECE_VALUES):
        values = flat[begin : begin + _PIECE_VALUES].tolist()
        if begin:
            yield ","
        if form is None:
            yield json.dumps(values, separators=(",", ":"))[1:-1]
        else:
            yield ",".join([form] * len(values)) % tuple(values)
