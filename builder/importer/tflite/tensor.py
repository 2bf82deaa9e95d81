"""A tensor of a TFLite file: shape, datatype, quantisation and, if it is constant, its data."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import tflite
from numpy.typing import NDArray

# TFLite's datatypes that ONNX and the bundle have, too. INT4, two numbers a byte, is read as int8.
DTYPES: Final = MappingProxyType(
    {
        tflite.TensorType.FLOAT32: "float32",
        tflite.TensorType.FLOAT16: "float16",
        tflite.TensorType.FLOAT64: "float64",
        tflite.TensorType.INT4: "int8",
        tflite.TensorType.INT8: "int8",
        tflite.TensorType.INT16: "int16",
        tflite.TensorType.INT32: "int32",
        tflite.TensorType.INT64: "int64",
        tflite.TensorType.UINT8: "uint8",
        tflite.TensorType.UINT16: "uint16",
        tflite.TensorType.UINT32: "uint32",
        tflite.TensorType.UINT64: "uint64",
        tflite.TensorType.BOOL: "bool",
    }
)
TYPE_NAMES: Final = MappingProxyType(
    {value: name for name, value in vars(tflite.TensorType).items() if not name.startswith("_")}
)
# What a quantised value is computed with; int32 and int64 are biases.
QUANTISED: Final = frozenset({"int8", "uint8", "int16"})


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How numbers stand for real numbers: `(number - zero_point) * scale`.

    `scales`: float32 [n], each positive and finite; n is 1, or the extent of `axis`.
    `zero_points`: int64 [n].
    `axis`: the axis of the scales, if there are several.
    """

    scales: NDArray[np.float32]
    zero_points: NDArray[np.int64]
    axis: int

    @property
    def is_per_axis(self) -> bool:
        """Whether slices along the axis have scales of their own."""
        return self.scales.size > 1

    def equals(self, other: Quantisation | None) -> bool:
        """Whether both are per tensor and the same."""
        return (
            other is not None
            and not self.is_per_axis
            and not other.is_per_axis
            and bool(self.scales[0] == other.scales[0])
            and bool(self.zero_points[0] == other.zero_points[0])
        )


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as the file describes it.

    `name`: as in the file, without control characters.
    `type`: a `tflite.TensorType`.
    `shape`: as in the file, where 1 stands for an unknown dimension. Only that of inputs and constants is
        relied on: shapes of results follow from the operators.
    `data`: the constant's value, of `shape`, or None. 4-bit numbers are unpacked.
    `quantisation`: None for tensors that are not quantised.
    `obstacle`: why the tensor cannot be used, such as its datatype, or None.
    `open_axes`: the axes whose extents the file leaves open; None if it leaves the rank open too.
    """

    index: int
    name: str
    type: int
    shape: tuple[int, ...]
    data: NDArray[Any] | None
    quantisation: Quantisation | None
    obstacle: str | None
    open_axes: tuple[int, ...] | None

    @property
    def is_static(self) -> bool:
        """Whether the file says that all dimensions are known."""
        return self.open_axes == ()

    @property
    def dtype(self) -> str:
        """The NumPy dtype's name, or an empty string for datatypes that cannot be used."""
        return DTYPES.get(self.type, "")

    @property
    def type_name(self) -> str:
        """The datatype's name in TFLite's schema."""
        return str(TYPE_NAMES.get(self.type, self.type))

    @property
    def is_complex(self) -> bool:
        """Whether its numbers are complex."""
        return self.type == int(tflite.TensorType.COMPLEX64)

    @property
    def is_quantised(self) -> bool:
        """Whether its numbers stand for real numbers."""
        return self.quantisation is not None and self.dtype in QUANTISED


def value_name(tensor: Tensor) -> str:
    """The tensor's name as a bundle has it.

    The converter joins the names of operators that it fused by semicolons; the first one names the result.
    """
    return tensor.name.partition(";")[0] or f"tensor_{tensor.index}"
