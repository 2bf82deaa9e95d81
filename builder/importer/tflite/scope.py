"""The tensors of one subgraph as values of the ONNX graph, in both layouts.

TFLite keeps the channels of pictures last (NHWC), ONNX's convolutions want them first (NCHW). A tensor has
up to two values, one for each layout, and the second is made only if an operator asks for it. Operators
that do not care for the layout take the one that exists. So a network of convolutions has transposes only
at its edges.

A quantised tensor likewise has its numbers and the real numbers that they stand for: DequantizeLinear gives
the one from the other, QuantizeLinear the other from the one. Operators compute with real numbers, and
operators that only move values move the numbers.

A complex tensor, which only Fourier transforms make, is a pair: its real and its imaginary parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from builder.errors import FIX_HINT, RefusalError
from builder.importer.tflite.graph_builder import FLOAT, FLOAT16, GraphBuilder
from builder.importer.tflite.schema import Subgraph
from builder.importer.tflite.tensor import Quantisation, Tensor

# Below this rank, both layouts are the same.
LEAST_RANK: Final = 3


class Layout(Enum):
    """Where the channels are."""

    LAST = "last"  # as in the file
    FIRST = "first"  # after the batch


def to_first(rank: int) -> tuple[int, ...]:
    """The permutation from channels last to channels first."""
    return (0, rank - 1, *range(1, rank - 1)) if rank >= LEAST_RANK else tuple(range(rank))


def to_last(rank: int) -> tuple[int, ...]:
    """The permutation from channels first to channels last."""
    return (0, *range(2, rank), 1) if rank >= LEAST_RANK else tuple(range(rank))


def axis_in(layout: Layout, axis: int, rank: int) -> int:
    """Where an axis of the file, counted from 0, is in a layout."""
    return axis if layout is Layout.LAST else to_first(rank).index(axis)


class Scope:
    """The tensors of a subgraph."""

    def __init__(self, graph: GraphBuilder, subgraph: Subgraph) -> None:
        self.graph = graph
        self.subgraph = subgraph
        self._values: dict[tuple[int, Layout], str] = {}
        self._reals: dict[tuple[int, Layout], str] = {}
        self._pairs: dict[int, tuple[str, str]] = {}
        # What PAD makes: the tensor that is padded with zeros, and ONNX's pads of its picture. A convolution
        # without padding of its own takes the tensor and the pads instead.
        self.padded: dict[int, tuple[Tensor, list[int]]] = {}

    def is_known(self, tensor: Tensor) -> bool:
        """Whether the tensor has a value: it is constant or was made."""
        return tensor.data is not None or any((tensor.index, layout) in self._values for layout in Layout)

    def has(self, tensor: Tensor, layout: Layout) -> bool:
        """Whether the tensor already has a value in a layout."""
        return (tensor.index, layout) in self._values

    def forget(self, tensor: Tensor) -> None:
        """Drop the tensor's values, so that it can get others."""
        for layout in Layout:
            self._values.pop((tensor.index, layout), None)
            self._reals.pop((tensor.index, layout), None)

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """The tensor's shape, with the channels last."""
        if tensor.index in self._pairs:
            return self.graph.shape_of(self._pairs[tensor.index][0])
        for layout in Layout:
            if (tensor.index, layout) in self._values:
                shape = self.graph.shape_of(self._values[tensor.index, layout])
                return shape if layout is Layout.LAST else tuple(shape[i] for i in to_last(len(shape)))
        return tensor.shape

    def rank(self, tensor: Tensor) -> int:
        """The number of the tensor's dimensions."""
        return len(self.shape(tensor))

    def constant(self, tensor: Tensor) -> NDArray[Any] | None:
        """The tensor's numbers, if they are known now."""
        if tensor.data is not None:
            return tensor.data
        name = self._values.get((tensor.index, Layout.LAST))
        return None if name is None else self.graph.constant_of(name)

    def known(self, tensor: Tensor, what: str) -> NDArray[Any]:
        """A setting that ONNX needs as a constant.

        Raises `RefusalError` if its value is only known at run time.
        """
        found = self.constant(tensor)
        if found is None:
            raise RefusalError(
                f"its {what} '{tensor.name}' depends on values that are only known at run time", hint=FIX_HINT
            )
        return found

    def integers(self, tensor: Tensor, what: str) -> list[int]:
        """A setting of whole numbers, flattened."""
        return [int(value) for value in self.known(tensor, what).reshape(-1)]

    def value(self, tensor: Tensor, layout: Layout = Layout.LAST) -> str:
        """The name of the tensor's numbers as the file stores them.

        Raises `RefusalError` if nothing makes the tensor, or it cannot be read.
        """
        key = (tensor.index, layout)
        if key in self._values:
            return self._values[key]
        if tensor.data is not None:
            return self._constant(tensor, tensor.data, layout, self._values)
        other = Layout.FIRST if layout is Layout.LAST else Layout.LAST
        if (tensor.index, other) not in self._values:
            raise RefusalError(tensor.obstacle or f"nothing makes its input '{tensor.name}'")
        self._values[key] = self._transpose(self._values[tensor.index, other], layout)
        return self._values[key]

    def real(self, tensor: Tensor, layout: Layout = Layout.LAST) -> str:
        """The name of the tensor's real numbers: float32, unless its numbers are integers without a scale."""
        key = (tensor.index, layout)
        if key in self._reals:
            return self._reals[key]
        if tensor.dtype == "float16":
            if tensor.data is not None:
                return self._constant(tensor, tensor.data.astype(np.float32), layout, self._reals)
            self._reals[key] = self.graph.node("Cast", self.value(tensor, layout), to=FLOAT)
            return self._reals[key]
        if not tensor.is_quantised:
            return self.value(tensor, layout)
        quantisation = tensor.quantisation
        assert quantisation is not None
        rank = self.rank(tensor)
        axis = axis_in(layout, quantisation.axis, rank) if quantisation.is_per_axis else 0
        self._reals[key] = self.dequantise(
            self.value(tensor, layout), quantisation, np.dtype(tensor.dtype), axis
        )
        return self._reals[key]

    def pair(self, tensor: Tensor) -> tuple[str, str]:
        """The names of a complex tensor's real and imaginary parts."""
        if tensor.index not in self._pairs:
            raise RefusalError(f"expected complex numbers that an operator makes, got '{tensor.name}'")
        return self._pairs[tensor.index]

    def put_pair(self, tensor: Tensor, real: str, imaginary: str) -> None:
        """Give a complex tensor its parts."""
        if not tensor.is_complex:
            raise RefusalError(f"expected its result to be {tensor.type_name}, got complex numbers")
        self._pairs[tensor.index] = real, imaginary

    def dequantise(self, value: str, quantisation: Quantisation, dtype: np.dtype[Any], axis: int = 0) -> str:
        """Add DequantizeLinear for numbers with these scales along `axis`."""
        scale, zero = self._parameters(quantisation, dtype)
        attributes = {"axis": axis} if quantisation.is_per_axis else {}
        return self.graph.node("DequantizeLinear", value, scale, zero, **attributes)

    def put(self, tensor: Tensor, value: str, layout: Layout = Layout.LAST) -> None:
        """Give a tensor its value, as the file would store it.

        Raises `RefusalError` if the datatype is another.
        """
        if self.graph.dtype_of(value) != np.dtype(tensor.dtype or "V1"):
            raise RefusalError(
                f"expected its result to be {tensor.type_name}, got {self.graph.dtype_of(value)}"
            )
        self._values[tensor.index, layout] = value

    def put_real(self, tensor: Tensor, value: str, layout: Layout = Layout.LAST) -> None:
        """Give a tensor its value from real numbers, which are quantised if the tensor is."""
        if tensor.dtype == "float16":
            value = self.graph.node("Cast", value, to=FLOAT16)
        if tensor.is_quantised:
            value = self.quantise(value, tensor)
        self.put(tensor, value, layout)

    def quantise(self, value: str, tensor: Tensor) -> str:
        """Add QuantizeLinear with the scale of a quantised tensor.

        Raises `RefusalError` if the tensor has several scales.
        """
        quantisation = tensor.quantisation
        assert quantisation is not None
        if quantisation.is_per_axis:
            raise RefusalError("its result has a scale for each slice of an axis")
        return self.graph.node(
            "QuantizeLinear", value, *self._parameters(quantisation, np.dtype(tensor.dtype))
        )

    def layout_of(self, *tensors: Tensor) -> Layout:
        """The layout in which operators that do not care for it should compute.

        Channels first if a tensor exists only so, and all that are not constant have that tensor's rank.
        """
        moving = [tensor for tensor in tensors if self.constant(tensor) is None]
        only_first = [
            tensor
            for tensor in moving
            if (tensor.index, Layout.FIRST) in self._values
            and (tensor.index, Layout.LAST) not in self._values
        ]
        ranks = {self.rank(tensor) for tensor in moving}
        most = max((self.rank(tensor) for tensor in tensors), default=0)
        return Layout.FIRST if only_first and ranks == {most} else Layout.LAST

    def operand(self, tensor: Tensor, rank: int, layout: Layout) -> str:
        """Real numbers of an operand that is broadcast to `rank` dimensions."""
        return self._broadcast(tensor, rank, layout, real=True)

    def numbers(self, tensor: Tensor, rank: int, layout: Layout) -> str:
        """Numbers, as the file stores them, of an operand that is broadcast to `rank` dimensions."""
        return self._broadcast(tensor, rank, layout, real=False)

    def _broadcast(self, tensor: Tensor, rank: int, layout: Layout, *, real: bool) -> str:
        own = self.rank(tensor)
        get = self.real if real else self.value
        if layout is Layout.LAST or own == rank:
            return get(tensor, layout)
        if own == 0 or tensor.data is None:
            # layout_of allows other ranks only for constants.
            name = get(tensor, Layout.LAST)
            shape = (1,) * (rank - own) + self.shape(tensor)
            return self._transpose(self.graph.node("Reshape", name, self.graph.constant(list(shape))), layout)
        shape = (1,) * (rank - own) + tensor.data.shape
        if real and tensor.is_quantised:
            quantisation = tensor.quantisation
            assert quantisation is not None
            axis = axis_in(layout, quantisation.axis + rank - own, rank) if quantisation.is_per_axis else 0
            moved = self.graph.constant(tensor.data.reshape(shape).transpose(to_first(rank)))
            return self.dequantise(moved, quantisation, tensor.data.dtype, axis)
        data = tensor.data.astype(np.float32) if real and tensor.dtype == "float16" else tensor.data
        return self.graph.constant(data.reshape(shape).transpose(to_first(rank)))

    def _constant(
        self, tensor: Tensor, data: NDArray[Any], layout: Layout, names: dict[tuple[int, Layout], str]
    ) -> str:
        if layout is Layout.FIRST:
            data = data.transpose(to_first(data.ndim))
        names[tensor.index, layout] = self.graph.constant(data)
        return names[tensor.index, layout]

    def _transpose(self, name: str, layout: Layout) -> str:
        shape = self.graph.shape_of(name)
        rank = len(shape)
        if rank < LEAST_RANK:
            return name
        order = to_first(rank) if layout is Layout.FIRST else to_last(rank)
        if [axis for axis in order if shape[axis] != 1] == [axis for axis in range(rank) if shape[axis] != 1]:
            # Only axes of one element change places, so no element moves.
            return self.graph.node("Reshape", name, self.graph.constant([shape[axis] for axis in order]))
        return self.graph.node("Transpose", name, perm=list(order))

    def _parameters(self, quantisation: Quantisation, dtype: np.dtype[Any]) -> tuple[str, str]:
        scales, zeros = quantisation.scales, quantisation.zero_points.astype(dtype)
        if not quantisation.is_per_axis:
            scales, zeros = scales.reshape(()), zeros.reshape(())
        return self.graph.constant(scales), self.graph.constant(zeros)

    def tensors(self, indices: Sequence[int]) -> list[Tensor | None]:
        """The tensors with these numbers; None for one that is absent."""
        return [None if index < 0 else self.subgraph.tensors[index] for index in indices]
