"""A tensor's name, datatype and shape, in the terms of the Open Inference Protocol.

Promises that all three are valid and bounded. Leaves the contents to others, and does without numpy.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

# Open Inference Protocol v2, "Tensor Data Types": datatype -> (dtype, bytes per element). BYTES has no fixed
# size and is not listed.
_DATATYPES: Final = MappingProxyType(
    {
        "BOOL": ("bool", 1),
        "UINT8": ("uint8", 1),
        "UINT16": ("uint16", 2),
        "UINT32": ("uint32", 4),
        "UINT64": ("uint64", 8),
        "INT8": ("int8", 1),
        "INT16": ("int16", 2),
        "INT32": ("int32", 4),
        "INT64": ("int64", 8),
        "FP16": ("float16", 2),
        "FP32": ("float32", 4),
        "FP64": ("float64", 8),
    }
)
_DTYPES: Final = MappingProxyType({dtype: datatype for datatype, (dtype, _) in _DATATYPES.items()})

# Names in long exports stay well below this. A name is also sent in an MQTT user property.
MAX_NAME_CHARS: Final = 256
# The classic reader has no limit, numpy's is 32, and ONNX models have fewer than 8.
MAX_DIMENSIONS: Final = 16
# No tensor that fits a device's memory reaches 4 GiB; products of dimensions stay far below 2**63.
MAX_TENSOR_BYTES: Final = 1 << 32
# Printable ASCII without the semicolon, which separates name, datatype and shape in an MQTT user property.
_NAME: Final = re.compile(rf"[ -:<-~]{{1,{MAX_NAME_CHARS}}}")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, datatype and shape of one tensor.

    Attributes
    ----------
    name
        1 to 256 printable ASCII characters, no semicolon.
    datatype
        `BOOL`, `UINT8` to `UINT64`, `INT8` to `INT64`, `FP16`, `FP32`, `FP64` or `BYTES`.
    shape
        At most 16 dimensions, none negative; `()` is a scalar.

    Raises
    ------
    ValueError
        If a field breaks these rules, or the tensor would be larger than 4 GiB.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(
                f"a tensor's name: expected 1 to {MAX_NAME_CHARS} printable ASCII characters without ';', "
                f"got {self.name!r:.80}"
            )
        if self.datatype != "BYTES" and self.datatype not in _DATATYPES:
            raise ValueError(
                f"datatype: expected BYTES or one of {', '.join(_DATATYPES)}, got {self.datatype!r:.80}"
            )
        if not isinstance(self.shape, tuple) or len(self.shape) > MAX_DIMENSIONS:
            raise ValueError(
                f"shape: expected a tuple of at most {MAX_DIMENSIONS} dimensions, got {self.shape!r:.80}"
            )
        if any(type(dim) is not int or dim < 0 or dim > MAX_TENSOR_BYTES for dim in self.shape):
            raise ValueError(
                f"shape: expected each dimension from 0 to {MAX_TENSOR_BYTES}, got {self.shape!r:.80}"
            )
        if math.prod(self.shape) * self.itemsize > MAX_TENSOR_BYTES:
            raise ValueError(
                f"expected a tensor of at most {MAX_TENSOR_BYTES} bytes, got {self.name} {self.shape}"
            )

    @classmethod
    def from_dtype(cls, name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
        """Make a spec from a dtype in numpy's and TVM's terms, such as `float32` for `FP32`.

        Raises
        ------
        ValueError
            If no datatype has that dtype, or another field breaks its rules.
        """
        return cls(name, datatype_of(dtype), shape)

    @property
    def dtype(self) -> str:
        """The datatype in numpy's and TVM's terms, such as `float32` for `FP32`.

        Raises
        ------
        ValueError
            If the datatype is `BYTES`, which no kernel takes.
        """
        if self.datatype == "BYTES":
            raise ValueError(f"{self.name} holds BYTES, which has no dtype")
        return _DATATYPES[self.datatype][0]

    @property
    def itemsize(self) -> int:
        """Bytes per element; 1 for `BYTES`, whose elements have no fixed size."""
        return 1 if self.datatype == "BYTES" else _DATATYPES[self.datatype][1]

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in bytes, without alignment."""
        return math.prod(self.shape) * self.itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.datatype}[{','.join(map(str, self.shape))}]"


def datatype_of(dtype: str) -> str:
    """Return the protocol's datatype for a dtype: `FP32` for `float32`.

    Raises
    ------
    ValueError
        If the protocol has none.
    """
    try:
        return _DTYPES[dtype]
    except (KeyError, TypeError):
        raise ValueError(f"dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r:.80}") from None
