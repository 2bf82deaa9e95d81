"""Raw tensors: little-endian bytes one after the other, described by user properties `name;FP32;1,3,4`.

Each element of BYTES, which only answers have, follows its length as u32 (the Open Inference Protocol's
binary tensor extension).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from agent.bundle.quantisation import Quantised
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import ExecutionError, InputError
from agent.runtime.storage import Array
from agent.wire.content_types import JSON
from agent.wire.tensors import format_tensor, parse_tensor
from agent.worker.oip import REAL, check_names, datatype_of, fill_raw, fill_real

# From the shapes of a request's inputs by name, or from the bytes of all of them together, to the inputs that
# it must have by name; raises InputError.
Fit = Callable[[Mapping[str, tuple[int, ...]], int | None], Mapping[str, TensorSpec]]

_LENGTH: Final = struct.Struct("<I")
# They travel in the header of a frame, whose limit is 64 KiB: names may have characters that JSON escapes.
MAX_DESCRIPTION_CHARACTERS: Final = 24 * 1024


def fill_inputs(
    payload: memoryview,
    properties: Sequence[str],
    inputs: Mapping[str, TensorSpec],
    target: Callable[[str], Array],
    fit: Fit | None = None,
    quantised: Mapping[str, Quantised] = MappingProxyType({}),
) -> None:
    """Copy a payload's tensors straight into the model's inputs.

    `payload` has the bytes of all tensors in the order of `properties`, or in that of `inputs` if there are
    none. `target` returns the memory of an input by its name. `fit` is for a model whose shapes change: it
    returns the inputs that a request must have, see `Fit`. Inputs that are `quantised` take real numbers,
    too. Tensors or a payload that do not fit raise InputError.
    """
    specs = [_parse(each) for each in properties]
    if fit is not None:
        inputs = fit({spec.name: spec.shape for spec in specs}, None if properties else payload.nbytes)
    if not properties:
        specs = list(inputs.values())
    else:
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise InputError("expected each input once, got a duplicate")
        check_names(names, inputs)
        for spec in specs:
            if spec != inputs[spec.name] and not _is_real(spec, inputs[spec.name], quantised):
                raise InputError(f"expected {inputs[spec.name]}, got {spec}")
    total = sum(spec.nbytes for spec in specs)
    if payload.nbytes != total:
        expected = ", ".join(map(str, specs))
        raise InputError(f"expected {total} bytes of {expected:.200}, got {payload.nbytes}")
    offset = 0
    for spec in specs:
        data = payload[offset : offset + spec.nbytes]
        offset += spec.nbytes
        wanted = inputs[spec.name]
        if spec.datatype == wanted.datatype:
            fill_raw(target(spec.name), spec, data)
            continue
        real = np.empty(spec.shape, spec.dtype)
        fill_raw(real, spec, data)
        fill_real(target(spec.name), wanted, real, quantised[spec.name])


def format_answer(
    outputs: Mapping[str, Array | tuple[bytes, ...]],
) -> tuple[tuple[str, ...], bytes | memoryview]:
    """Return the user properties and the payload of an answer.

    A single contiguous tensor is not copied: the payload is its memory. More tensors than the properties have
    room for raise ExecutionError.
    """
    properties = []
    parts: list[bytes | memoryview] = []
    for name, value in outputs.items():
        datatype, shape = datatype_of(value)
        properties.append(format_tensor(name, datatype, shape))
        if isinstance(value, tuple):
            parts.extend(piece for each in value for piece in (_LENGTH.pack(len(each)), each))
        else:
            parts.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    described = sum(map(len, properties))
    if described > MAX_DESCRIPTION_CHARACTERS:
        raise ExecutionError(
            f"expected descriptions of at most {MAX_DESCRIPTION_CHARACTERS} characters for all tensors, "
            f"got {described}",
            hint=f"ask for {JSON}",
        )
    return tuple(properties), parts[0] if len(parts) == 1 else b"".join(parts)


def size_of(value: Array | tuple[bytes, ...]) -> int:
    """Return how many bytes a result takes among raw tensors."""
    if isinstance(value, tuple):
        return sum(map(len, value)) + _LENGTH.size * len(value)
    return int(value.nbytes)


def _is_real(given: TensorSpec, wanted: TensorSpec, quantised: Mapping[str, Quantised]) -> bool:
    return given.name in quantised and given.datatype in REAL and given.shape == wanted.shape


def _parse(text: str) -> TensorSpec:
    try:
        return parse_tensor(text)
    except ValueError as error:
        raise InputError(str(error)) from error
