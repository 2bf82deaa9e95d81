"""One operator of a TFLite file while it is written as ONNX: its tensors, its options, common steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import flatbuffers
import numpy as np
import tflite
from numpy.typing import NDArray

from builder.errors import RefusalError
from builder.importer.tflite.graph_builder import GraphBuilder, element_type
from builder.importer.tflite.schema import Operator
from builder.importer.tflite.scope import Layout, Scope, axis_in
from builder.importer.tflite.tensor import Quantisation, Tensor

_ACTIVATION: Final = tflite.ActivationFunctionType
_ACTIVATION_NAMES: Final = {v: k for k, v in vars(_ACTIVATION).items() if not k.startswith("_")}
# Bounds of the activations that only clamp.
_BOUNDS: Final = {
    _ACTIVATION.RELU: (0.0, None),
    _ACTIVATION.RELU6: (0.0, 6.0),
    _ACTIVATION.RELU_N1_TO_1: (-1.0, 1.0),
}
# A variable's name: control_flow knows what it stands for.
_RESOURCE: Final = tflite.TensorType.RESOURCE
# ONNX Runtime's kernels for these lack 16-bit numbers, and some lack others. Such numbers are moved as real
# ones, which is exact: quantising a dequantised number gives it back.
# ONNX Runtime compares and selects only some whole numbers; int32 holds the small ones exactly.
SMALL: Final = frozenset({"int8", "uint8", "int16", "uint16", "bool"})
_NARROW: Final = frozenset({"int16", "uint16"})
_SCALES_HINT: Final = "quantise the model again, with a scale per channel or per tensor"


class Operation:
    """An operator with its tensors.

    `scope`, `graph`: where its tensors' values are, and where nodes go.
    Raises `RefusalError` if an input cannot be read.
    """

    def __init__(self, scope: Scope, operator: Operator) -> None:
        self.scope = scope
        self.graph: GraphBuilder = scope.graph
        self.operator = operator
        self._inputs = scope.tensors(operator.inputs)
        for tensor in self._inputs:
            if tensor is not None and tensor.obstacle and tensor.type != _RESOURCE and not tensor.is_complex:
                # A known datatype with an obstacle has scales of another kind.
                raise RefusalError(
                    f"its input '{tensor.name}' cannot be read: {tensor.obstacle}",
                    hint=_SCALES_HINT if tensor.dtype else None,
                )
        self._outputs = [scope.subgraph.tensors[index] for index in operator.outputs]

    @property
    def count(self) -> int:
        """The number of inputs, absent ones included."""
        return len(self._inputs)

    @property
    def outputs(self) -> Sequence[Tensor]:
        """All outputs."""
        return self._outputs

    @property
    def output(self) -> Tensor:
        """The first output.

        Raises `RefusalError` if there is none.
        """
        if not self._outputs:
            raise RefusalError("expected an output, got none")
        return self._outputs[0]

    def input(self, index: int) -> Tensor:
        """An input that must be there."""
        found = self.optional(index)
        if found is None:
            raise RefusalError(f"expected at least {index + 1} inputs, got {len(self._inputs)}")
        return found

    def optional(self, index: int) -> Tensor | None:
        """An input, or None if it is absent."""
        return self._inputs[index] if index < len(self._inputs) else None

    def inputs(self) -> list[Tensor]:
        """All inputs that are there."""
        return [tensor for tensor in self._inputs if tensor is not None]

    def options(self, name: str) -> Any:  # noqa: ANN401 - the schema's classes have no types
        """The options, or their defaults if the file has none.

        `name`: the class in the schema, such as `Conv2DOptions`.
        Raises `RefusalError` if the file has options of another class.
        """
        if self.operator.options is None:
            return getattr(tflite, name).GetRootAs(_empty_table(), 0)
        if self.operator.options_name != name:
            raise RefusalError(f"expected {name}, got {self.operator.options_name}")
        return self.operator.options

    def shape(self, index: int) -> tuple[int, ...]:
        """The shape of an input, channels last."""
        return self.scope.shape(self.input(index))

    def value(self, index: int, layout: Layout = Layout.LAST) -> str:
        """Numbers of an input, as the file stores them."""
        return self.scope.value(self.input(index), layout)

    def real(self, index: int, layout: Layout = Layout.LAST) -> str:
        """Real numbers of an input."""
        return self.scope.real(self.input(index), layout)

    def integers(self, index: int, what: str) -> list[int]:
        """Whole numbers of an input that must be known now."""
        return self.scope.integers(self.input(index), what)

    def axis(self, axis: int, rank: int) -> int:
        """An axis counted from 0."""
        if not -rank <= axis < rank:
            raise RefusalError(f"expected an axis of {rank} dimensions, got {axis}")
        return axis % rank

    def put(self, value: str, layout: Layout = Layout.LAST) -> None:
        """Give the first output its numbers."""
        self.scope.put(self.output, value, layout)

    def put_real(self, value: str, layout: Layout = Layout.LAST) -> None:
        """Give the first output its real numbers."""
        self.scope.put_real(self.output, value, layout)

    def layout(self) -> Layout:
        """The layout in which the operator should compute, if it does not care."""
        return self.scope.layout_of(*self.inputs())

    def is_move(self, *operators: str) -> bool:
        """Whether the numbers themselves can be moved: all tensors have the same scale, and none is complex.

        `operators`: ONNX operators that are used; none means that they take every datatype.
        """
        if self.input(0).is_complex:
            return False
        quantised = [t for t in (*self.inputs()[:1], *self._outputs) if t.is_quantised]
        if not quantised:
            return True
        if operators and self.output.dtype in _NARROW:
            return False
        first = quantised[0].quantisation
        return len(quantised) == 1 + len(self._outputs) and all(
            first is not None and first.equals(tensor.quantisation) for tensor in quantised
        )

    def _keeps_integers(self, *operators: str) -> bool:
        """Whether LiteRT moves integers although the output has another scale, as some converters write."""
        return not (operators and self.output.dtype in _NARROW) and all(
            each.quantisation is not None
            and each.is_quantised
            and not each.quantisation.is_per_axis
            and each.dtype == self.output.dtype
            for each in (self.input(0), *self._outputs)
        )

    def move(
        self, change: Callable[[str, Layout], str], *operators: str, layout: Layout = Layout.LAST
    ) -> None:
        """Make the output from the first input by moving its values.

        LiteRT moves the integers of quantised tensors as they are, and the output's scale then says what they
        are, also where a converter gave it another one.

        `change`: adds nodes: from the input's name and layout to the output's name, in the same layout.
        `layout`: the layout that `change` gets.
        """
        if self.input(0).is_complex:
            real, imaginary = (change(part, Layout.LAST) for part in self.scope.pair(self.input(0)))
            self.scope.put_pair(self.output, real, imaginary)
        elif self.is_move(*operators) or self._keeps_integers(*operators):
            self.put(change(self.value(0, layout), layout), layout)
        else:
            self.put_real(change(self.real(0, layout), layout), layout)

    def activate(self, value: str, code: int) -> str:
        """Apply a fused activation."""
        if code == _ACTIVATION.NONE:
            return value
        if code not in _BOUNDS:
            raise RefusalError(f"its activation is {_ACTIVATION_NAMES.get(code, code)}")
        return self.clamp(value, *_BOUNDS[code])

    def clamp(self, value: str, low: float | None, high: float | None) -> str:
        """Limit numbers to a range."""
        dtype = str(self.graph.dtype_of(value))
        if (low, high) == (0.0, None) and dtype == "float32":
            return self.graph.node("Relu", value)
        bounds = ["" if bound is None else self.graph.constant(bound, dtype) for bound in (low, high)]
        return self.graph.node("Clip", value, *bounds)

    def weight(self, tensor: Tensor, permutation: Sequence[int]) -> str:
        """Real numbers of a weight whose axes are permuted."""
        if tensor.data is None:
            return self.graph.node("Transpose", self.scope.real(tensor), perm=list(permutation))
        if tensor.data.ndim != len(permutation):
            raise RefusalError(
                f"expected a weight of {len(permutation)} dimensions, got {list(tensor.data.shape)}"
            )
        data = tensor.data.transpose(permutation)
        quantisation = tensor.quantisation
        if not tensor.is_quantised or quantisation is None:
            return self.graph.constant(data.astype(np.float32) if tensor.dtype == "float16" else data)
        axis = list(permutation).index(quantisation.axis) if quantisation.is_per_axis else 0
        return self.scope.dequantise(self.graph.constant(data), quantisation, data.dtype, axis)

    def bias(self, tensor: Tensor, data: Tensor, weight: Tensor) -> str:
        """Real numbers of a bias, whose scale is the product of those of the data and of the weight.

        Source: TensorFlow Lite 8-bit quantization specification, bias of CONV_2D and FULLY_CONNECTED.

        Raises `RefusalError` if it is a whole number, and data or weights are not quantised.
        """
        if tensor.dtype not in ("int32", "int64"):
            return self.scope.real(tensor)
        if data.quantisation is None or weight.quantisation is None:
            raise RefusalError("expected a bias of real numbers, got whole ones")
        scales = data.quantisation.scales[0] * weight.quantisation.scales
        known = tensor.data
        if known is None or tensor.dtype == "int64":
            # ONNX has no 64-bit DequantizeLinear.
            if known is None:
                real = self.graph.node("Cast", self.scope.value(tensor), to=1)
                return self.graph.node("Mul", real, self.graph.constant(scales.astype(np.float32)))
            exact: NDArray[Any] = known.astype(np.float64) * scales.astype(np.float64)
            return self.graph.constant(exact.astype(np.float32))
        if scales.size not in (1, known.size):
            raise RefusalError(f"expected {known.size} scales for its weight, got {scales.size}")
        zeros = np.zeros(scales.size, np.int64)
        own = Quantisation(scales.astype(np.float32), zeros, 0)
        return self.scope.dequantise(self.graph.constant(known), own, np.dtype(np.int32))

    def reshape(self, value: str, shape: Sequence[int]) -> str:
        """Give a value another shape of as many elements."""
        if tuple(shape) == self.graph.shape_of(value):
            return value
        return self.graph.node("Reshape", value, self.graph.constant(list(shape)), allowzero=int(0 in shape))

    def cast(self, value: str, dtype: str) -> str:
        """Convert a value's datatype."""
        if self.graph.dtype_of(value) == np.dtype(dtype):
            return value
        return self.graph.node("Cast", value, to=element_type(dtype))

    def where(self, condition: str, first: str, second: str) -> str:
        """Choose between numbers; ONNX Runtime's kernel lacks the small ones."""
        dtype = str(self.graph.dtype_of(first))
        if dtype in SMALL:
            first, second = self.cast(first, "int32"), self.cast(second, "int32")
        return self.cast(self.graph.node("Where", condition, first, second), dtype)

    def gather(self, value: str, indices: Sequence[int], axis: int) -> str:
        """Take slices along an axis at indices that are known now; `indices` may be a range."""
        self.graph.check_made(max(len(indices), self.graph.shape_of(value)[axis]))
        if list(indices) == list(range(self.graph.shape_of(value)[axis])):
            return value
        return self.graph.node("Gather", value, self.graph.constant(list(indices)), axis=axis)


def channel_axis(layout: Layout, rank: int) -> int:
    """The axis of the channels."""
    return axis_in(layout, rank - 1, rank)


def _empty_table() -> bytes:
    """A FlatBuffer whose root is a table without fields: every field has its default."""
    builder = flatbuffers.Builder(16)
    builder.StartObject(0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())
