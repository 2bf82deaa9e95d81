"""Write an ONNX graph node by node, with the type and shape of every value known at once.

Promises static shapes, and that values which follow from small constants are constants themselves: a
converter often computes the shape that it reshapes to. A state is an input and an output, as every bundle has
it. Leaves layouts and quantisation to `scope`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, defs, helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

from agent.bundle.state import State
from agent.bundle.tensor_spec import MAX_TENSOR_BYTES
from builder.errors import RefusalError
from builder.importer.bounded import suppression
from builder.importer.onnx_graph import ValueType, value_type
from builder.importer.silence import FOREIGN_FAILURES, first_line, quiet

# The first opset with QuantizeLinear and DequantizeLinear on 16-bit numbers.
OPSET: Final = 21
IR_VERSION: Final = 10
# Operators that are newer, the opset that has them, and its IR version. Between these opsets, the others only
# took more datatypes.
_NEWER: Final = frozenset({"BitCast"})
_NEWER_OPSET: Final = 26
_NEWER_IR_VERSION: Final = 13
# Shapes, axes, indices and masks are smaller. Larger constants are folded later, by ONNX Runtime.
MAX_FOLDED: Final = 4096
# ONNX's inference reads shapes, axes and pads from inputs, and a list of as many sizes as a Split has parts,
# up to MAX_FOLDED; larger ones are data.
_READ_BY_INFERENCE: Final = 256
# What computes shapes and counts. The evaluator's cost for these is that of their inputs and outputs; a
# pooling of one number over a window of a billion would cost more. Quantised weights stay whole numbers.
_FOLDED: Final = frozenset(
    {
        "Abs", "Add", "And", "Cast", "Ceil", "Clip", "Concat", "Div", "Equal", "Expand", "Floor", "Gather",
        "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or",
        "Pad", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "Relu", "Reshape", "Sign",
        "Slice",
        "Split", "Sub", "Transpose", "Where", "Xor",
    }
)  # fmt: skip
# Index lists and masks that converters make; those of real models are a thousandth of this.
MAX_MADE: Final = 1 << 22


class GraphBuilder:
    """A graph to which nodes, constants, inputs and outputs are added."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._nodes: list[onnx.NodeProto] = []
        self._types: dict[str, ValueType] = {}
        self._constants: dict[str, NDArray[Any]] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._names: set[str] = set()
        self._shared: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._counter = 0
        # Input of a state -> its name, the value that it gets, and its declaration's initial value.
        self._states: dict[str, tuple[str, str, float | None]] = {}
        self._started = ""

    def check_made(self, count: int) -> None:
        """Check the size of what a converter is about to make in memory.

        Raises `RefusalError` if it is larger than `MAX_MADE` elements.
        """
        if count > MAX_MADE:
            raise RefusalError(f"expected an index or mask of at most {MAX_MADE} elements, got {count}")

    def note(self, text: str) -> None:
        """Tell the user about a choice, once."""
        if text not in self.notes:
            self.notes.append(text)

    def fresh(self, stem: str) -> str:
        """A new name that begins with `stem`."""
        name = stem
        while name in self._names or not name:
            self._counter += 1
            name = f"{stem}__{self._counter}"
        self._names.add(name)
        return name

    def add_input(self, name: str, dtype: str, shape: Sequence[int]) -> str:
        """Add an input and return its name, which is `name` if no other value has it."""
        name = self.fresh(name)
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        self._types[name] = ValueType(kind, tuple(shape))
        self._inputs.append(helper.make_tensor_value_info(name, kind, list(shape)))
        return name

    def add_output(self, value: str, name: str) -> str:
        """Make a value an output and return its name, which is `name` if no other value has it."""
        name = self.fresh(name)
        found = self._types[value]
        self._nodes.append(helper.make_node("Identity", [value], [name]))
        self._outputs.append(helper.make_tensor_value_info(name, found.elem_type, found.static_shape))
        return name

    def add_state(self, name: str, first: str) -> tuple[str, str]:
        """Add a value that one run leaves to the next; without `set_state`, it stays as it is.

        `first`: the value that it has before the first run.
        Result: the state's input, as `set_state` takes it, and the value in this run.
        """
        shape, dtype = self.shape_of(first), self.dtype_of(first)
        known = self._constants.get(first)
        initial = None if known is None else _filling(known)
        if initial is not None:
            entry = self.add_input(f"{name}_before", str(dtype), shape)
            self._states[entry] = (name, entry, initial)
            return entry, entry
        # A bundle's states begin with one number; what does not is chosen here in the first run.
        if not self._started:
            self._started = self.add_input("started_before", "int32", (1,))
            after = self.node("Max", self._started, self.constant(np.ones(1, np.int32)))
            self._states[self._started] = ("started", after, None)
        entry = self.add_input(f"{name}_before", str(dtype), shape)
        is_later = self.node("Greater", self._started, self.constant(np.zeros(1, np.int32)))
        is_later = self.node("Reshape", is_later, self.constant([1] * len(shape)))
        value = self.node("Where", is_later, entry, first)
        self._states[entry] = (name, value, None)
        return entry, value

    def set_state(self, entry: str, value: str) -> None:
        """Set what a state has in the next run.

        Raises `RefusalError` if it has another shape or datatype.
        """
        if self._types[value] != self._types[entry]:
            raise RefusalError(
                f"expected {self.dtype_of(entry)}{list(self.shape_of(entry))}, as its variable has, "
                f"got {self.dtype_of(value)}{list(self.shape_of(value))}"
            )
        name, _, initial = self._states[entry]
        self._states[entry] = (name, value, initial)

    def add_states(self) -> tuple[State, ...]:
        """Make the states' next values outputs, and declare them."""
        return tuple(
            State(entry, self.add_output(value, f"{name}_after"), initial or None)
            for entry, (name, value, initial) in self._states.items()
        )

    def constant(self, values: NDArray[Any] | Sequence[int] | float, dtype: str | None = None) -> str:
        """Add a constant and return its name; equal small constants are added once.

        `values`: the value; integers in a list become int64.
        `dtype`: a NumPy dtype, or None to keep that of `values`.
        """
        array = np.asarray(values) if dtype is None else np.asarray(values, dtype)
        if not isinstance(values, np.ndarray) and dtype is None:
            array = array.astype(np.int64)
        key = (str(array.dtype), array.shape, array.tobytes()) if array.size <= _READ_BY_INFERENCE else None
        if key is not None and key in self._shared:
            return self._shared[key]
        name = self.fresh("constant")
        self._constants[name] = array
        self._types[name] = ValueType(helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        if key is not None:
            self._shared[key] = name
        return name

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:  # noqa: ANN401 - as ONNX has them
        """Add a node with one output and return its name. An empty input is an optional one that is absent.

        Raises `RefusalError` if ONNX does not allow these inputs and attributes.
        """
        return self.nodes(operator, inputs, 1, **attributes)[0]

    def nodes(self, operator: str, inputs: Sequence[str], outputs: int, **attributes: Any) -> list[str]:  # noqa: ANN401
        """Add a node with several outputs and return their names."""
        names = [self.fresh(operator.lower()) for _ in range(outputs)]
        node = helper.make_node(operator, list(inputs), names, **attributes)
        for name, found in zip(names, self._infer(node), strict=True):
            self._types[name] = found
        if not self._fold(node):
            self._nodes.append(node)
        return names

    def suppress(
        self, boxes: str, scores: str, most: int, limits: tuple[float, float], capacity: int
    ) -> tuple[str, str]:
        """Add a suppression of boxes that overlap others with a higher score.

        `boxes`, `scores`, `capacity`: as in `bounded.suppression.make_node`; boxes are corners.
        `most`: the largest number of boxes of a class.
        `limits`: the largest overlap and the lowest score.
        Result: the chosen boxes and their number, as `make_node` describes them.
        """
        numbers = (
            self.constant([most]),
            *(self.constant(np.asarray([limit], np.float32)) for limit in limits),
        )
        inputs = [boxes, scores, *numbers, self.constant([self.shape_of(boxes)[1]])]
        names = self.fresh("chosen"), self.fresh("number")
        node = suppression.make_node(inputs, names, names[0], 0, capacity)
        for name, kind in zip(names, suppression.output_types(node), strict=True):
            self._types[name] = ValueType(*kind)
        self._nodes.append(node)
        return names

    def constant_of(self, name: str) -> NDArray[Any] | None:
        """A value that is known now, or None."""
        return self._constants.get(name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a value."""
        shape = self._types[name].static_shape
        assert shape is not None
        return shape

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """The NumPy dtype of a value."""
        return self._types[name].dtype

    def model(self, name: str) -> onnx.ModelProto:
        """The graph as a model; constants that no node reads are left out."""
        nodes, read = self._alive()
        weights = [
            numpy_helper.from_array(np.ascontiguousarray(values).reshape(values.shape), constant)
            for constant, values in self._constants.items()
            if constant in read
        ]
        graph = helper.make_graph(nodes, name, self._inputs, self._outputs, initializer=weights)
        is_newer = any(node.op_type in _NEWER for node in nodes)
        opset = [helper.make_opsetid("", _NEWER_OPSET if is_newer else OPSET)]
        model = helper.make_model(
            graph,
            opset_imports=opset,
            ir_version=_NEWER_IR_VERSION if is_newer else IR_VERSION,
            producer_name="edgebundle",
        )
        suppression.define(model)
        return model

    def _alive(self) -> tuple[list[onnx.NodeProto], set[str]]:
        """The nodes that outputs depend on, and the values that these read."""
        read = {output.name for output in self._outputs}
        nodes = []
        for node in reversed(self._nodes):
            if not read.isdisjoint(node.output):
                nodes.append(node)
                read.update(node.input)
        return nodes[::-1], read

    def _infer(self, node: onnx.NodeProto) -> list[ValueType]:
        types, data = {}, {}
        for name in node.input:
            if not name:
                continue
            found = self._types[name]
            types[name] = helper.make_tensor_type_proto(found.elem_type, found.static_shape)
            known = self._constants.get(name)
            if known is not None and known.size <= (MAX_FOLDED if known.ndim == 1 else _READ_BY_INFERENCE):
                data[name] = numpy_helper.from_array(np.ascontiguousarray(known).reshape(known.shape), name)
        opset = _NEWER_OPSET if node.op_type in _NEWER else OPSET
        try:
            inferred = shape_inference.infer_node_outputs(
                defs.get_schema(node.op_type, opset, node.domain),
                node,
                types,
                data,
                opset_imports=[helper.make_opsetid("", opset)],
                ir_version=IR_VERSION,
            )
        except FOREIGN_FAILURES as error:
            raise RefusalError(f"its tensors do not fit together ({first_line(error)})") from error
        result = []
        for name in node.output:
            found_type = value_type(onnx.ValueInfoProto(name=name, type=inferred.get(name)))
            shape = None if found_type is None else found_type.static_shape
            if found_type is None or shape is None:
                raise RefusalError(
                    "the shape of its result depends on values that are only known at run time"
                )
            if math.prod(shape) * found_type.dtype.itemsize > MAX_TENSOR_BYTES:
                raise RefusalError(
                    f"expected a result of at most {MAX_TENSOR_BYTES} bytes, got {list(shape)}"
                )
            result.append(found_type)
        return result

    def _fold(self, node: onnx.NodeProto) -> bool:
        """Compute a node whose inputs are small constants; its results become constants."""
        if node.op_type not in _FOLDED:
            return False
        names = [name for name in node.input if name]
        sizes = [self._constants[name].size if name in self._constants else MAX_FOLDED + 1 for name in names]
        sizes += [math.prod(self.shape_of(name)) for name in node.output]
        if any(size > MAX_FOLDED for size in sizes):
            return False
        feeds = {name: self._constants[name] for name in names}
        model = helper.make_model(
            helper.make_graph(
                [node],
                "constant",
                [
                    helper.make_tensor_value_info(n, self._types[n].elem_type, v.shape)
                    for n, v in feeds.items()
                ],
                [
                    helper.make_tensor_value_info(n, self._types[n].elem_type, self.shape_of(n))
                    for n in node.output
                ],
            ),
            opset_imports=[helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
        )
        try:
            with quiet():
                values = ReferenceEvaluator(model).run(None, feeds)
        except (*FOREIGN_FAILURES, NotImplementedError):
            return False
        for name, value in zip(node.output, values, strict=True):
            self._constants[name] = np.asarray(value, self._types[name].dtype).reshape(self.shape_of(name))
        return True


def element_type(dtype: str) -> int:
    """ONNX's number of a NumPy dtype."""
    return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))


FLOAT: Final = TensorProto.FLOAT
FLOAT16: Final = TensorProto.FLOAT16


def _filling(values: NDArray[Any]) -> float | None:
    """The number that fills an array, or None if there is none that JSON can hold."""
    if not values.size:
        return 0.0
    number = float(values.reshape(-1)[0])
    if not math.isfinite(number):
        return None
    same = np.full(values.shape, number or 0, values.dtype).tobytes() == values.tobytes()
    return number if same else None
