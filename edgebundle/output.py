"""One tensor of an answer, read from JSON or from raw bytes.

Promises: a tensor is checked when it is read. An array is made when it is asked for; only that needs numpy.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from agent.bundle.tensor_spec import TensorSpec
from agent.errors import FormatError
from agent.wire.tensors import JsonTensor

if TYPE_CHECKING:
    import numpy as np

# The length of an element of BYTES, as in the Open Inference Protocol's binary tensor extension.
_LENGTH: Final = struct.Struct("<I")
# Texts of one answer: an empty one takes four bytes there, and a microsecond here.
_MAX_TEXTS: Final = 1 << 18
# Datatypes as `struct` names them.
_FORMATS: Final = MappingProxyType(
    {
        "BOOL": "?",
        "UINT8": "B",
        "UINT16": "H",
        "UINT32": "I",
        "UINT64": "Q",
        "INT8": "b",
        "INT16": "h",
        "INT32": "i",
        "INT64": "q",
        "FP16": "e",
        "FP32": "f",
        "FP64": "d",
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Output:
    """One tensor of an answer.

    Attributes
    ----------
    name, datatype, shape
        As the Open Inference Protocol names them.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    _data: bytes | tuple[object, ...] = field(repr=False)

    @property
    def values(self) -> np.ndarray[Any, Any]:
        """The values as a read-only array of the tensor's shape; for BYTES an object array of strings."""
        import numpy as np

        if self.datatype == "BYTES":
            array = np.array(self._data, dtype=object)
        else:
            assert isinstance(self._data, bytes)
            array = np.frombuffer(self._data, f"<{_FORMATS[self.datatype]}")
        array = array.reshape(self.shape)
        array.flags.writeable = False
        return array

    def flat(self) -> tuple[Any, ...]:
        """Return the values in row-major order, without numpy."""
        if isinstance(self._data, bytes):
            code = _FORMATS[self.datatype]
            return struct.unpack(f"<{len(self._data) // struct.calcsize(code)}{code}", self._data)
        return self._data

    def first(self, count: int) -> tuple[Any, ...]:
        """Return the first `count` values, or all if there are fewer; the others cost nothing."""
        if isinstance(self._data, bytes):
            code = _FORMATS[self.datatype]
            size = struct.calcsize(code)
            count = min(count, len(self._data) // size)
            return struct.unpack(f"<{count}{code}", self._data[: count * size])
        return self._data[:count]


def json_output(tensor: JsonTensor) -> Output:
    """Read a tensor of a JSON answer.

    Raises
    ------
    FormatError, struct.error
        If its values are not those that its datatype and shape say.
    """
    spec = tensor.spec
    data = tuple(_flat(tensor.data))
    if len(data) != math.prod(spec.shape):
        raise FormatError(f"expected {math.prod(spec.shape)} values of {spec}, got {len(data)}")
    kinds: tuple[type, ...] = (str,) if spec.datatype == "BYTES" else (int, float)
    if not all(isinstance(value, kinds) for value in data):
        raise FormatError(f"expected the values of {spec}, got values of another type")
    if spec.datatype == "BYTES":
        return Output(spec.name, spec.datatype, spec.shape, data)
    # Packed at once: a number that is out of range is found here, and arrays are made in one way.
    return Output(
        spec.name, spec.datatype, spec.shape, struct.pack(f"<{len(data)}{_FORMATS[spec.datatype]}", *data)
    )


def _flat(data: Sequence[object]) -> Iterator[object]:
    """Walk through values that are nested as arrays of arrays; no deeper than a tensor can be."""
    for value in data:
        if isinstance(value, list):
            yield from _flat(value)
        else:
            yield value


def raw_outputs(specs: Iterable[TensorSpec], payload: bytes) -> Iterator[Output]:
    """Cut a payload of little-endian tensors, one after the other, into tensors.

    Raises
    ------
    FormatError, struct.error
        If it is shorter or longer than they are.
    """
    offset = 0
    left = _MAX_TEXTS
    for spec in specs:
        if spec.datatype == "BYTES":
            left -= (count := math.prod(spec.shape))
            if left < 0:
                raise FormatError(f"expected at most {_MAX_TEXTS} texts, got more")
            texts = []
            for _ in range(count):
                (length,) = _LENGTH.unpack_from(payload, offset)
                offset += _LENGTH.size + length
                texts.append(payload[offset - length : offset].decode("utf-8", "replace"))
            yield Output(spec.name, spec.datatype, spec.shape, tuple(texts))
        else:
            end = offset + spec.nbytes
            yield Output(spec.name, spec.datatype, spec.shape, payload[offset:end])
            offset = end
    # A tensor that runs past the end is cut above, and found here.
    if offset != len(payload):
        raise FormatError(f"expected {offset} bytes of tensors, got {len(payload)}")
