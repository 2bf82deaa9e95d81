"""The graph while it is being padded: what each value's true lengths are, and the nodes written so far.

Promises that each new node has static types, inferred by ONNX, and that equal lengths have equal names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import numpy as np
import onnx
from numpy.typing import ArrayLike, DTypeLike, NDArray
from onnx import TensorProto, defs, helper, numpy_helper, shape_inference

from builder.errors import UnboundedError
from builder.importer.bounded.length import Entry, Length
from builder.importer.constant_folding import evaluate
from builder.importer.onnx_graph import OnnxGraph, copy_node, value_type
from builder.importer.rewrites.replacement import Attribute
from builder.importer.silence import FOREIGN_FAILURES, first_line

# Elements of one padded value: more is absurd, and means that the model's own bound is missing.
MAX_CAPACITY: Final = 1 << 20
# Constants up to this size are given to the inference of types: shapes and axes.
_SMALL: Final = 64


class PaddedGraph:
    """The new nodes of a model, with the true lengths of their values.

    `model`: the model, whose inputs are static. Its weights are added to; its nodes stay.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = OnnxGraph(model)
        self.nodes: list[onnx.NodeProto] = []
        # Value -> axis -> its true length. An axis that is not listed has its static extent.
        self.lengths: dict[str, Mapping[int, Length]] = {}
        # Elements of small integer tensors that are made of lengths.
        self.contents: dict[str, tuple[Entry, ...]] = {}
        # Indices that are never negative.
        self.natural: set[str] = set()
        self._node = onnx.NodeProto()
        self._returned = {value.name for value in model.graph.output}
        self._derived: dict[tuple[object, ...], Any] = {}
        # Lengths that are another plus a number: equal sums have equal names, however they were added up.
        self._sums: dict[str, tuple[Length, int]] = {}
        # Lengths that are what another lacks of a number, such as 300 - n.
        self._rests: dict[str, tuple[int, Length]] = {}

    def begin(self, node: onnx.NodeProto) -> None:
        """Name the node that the next nodes replace."""
        self._node = node

    def refuse(self, reason: str) -> NoReturn:
        """Refuse the node."""
        raise UnboundedError(self._node, reason)

    # -- types

    def shape(self, name: str) -> tuple[int, ...]:
        """Static shape of a value, with capacities for lengths."""
        found = self.graph.shape_of(name)
        if found is None:
            self.refuse("the shape of its input depends on values that are only known at run time")
        return found

    def dtype(self, name: str) -> np.dtype[Any]:
        """NumPy dtype of a value."""
        found = self.graph.type_of(name)
        if found is None:
            self.refuse("expected tensors")
        return found.dtype

    def elem_type(self, name: str) -> int:
        """TensorProto.DataType of a value."""
        found = self.graph.type_of(name)
        if found is None:
            self.refuse("expected tensors")
        return found.elem_type

    def dims(self, name: str) -> tuple[Entry, ...]:
        """True dimensions of a value."""
        own = self.lengths.get(name, {})
        return tuple(own.get(axis, extent) for axis, extent in enumerate(self.shape(name)))

    def entries(self, name: str) -> tuple[Entry, ...] | None:
        """Elements of a small integer tensor, if they are constants or lengths."""
        if (known := self.contents.get(name)) is not None:
            return known
        value = self.graph.constant(name) if name else None
        if value is None or value.dtype.kind not in "iub" or value.size > _SMALL:
            return None
        return tuple(int(element) for element in value.reshape(-1))

    # -- new nodes

    def op(self, op_type: str, *inputs: str, to: str = "", **attributes: Attribute) -> str:
        """Add a node with one output and return the output's name: `to`, or a new one."""
        output = to or self.graph.fresh(f"{self._node.name}/{op_type}")
        self.add(helper.make_node(op_type, list(inputs), [output], **attributes))
        return output

    def cast(self, x: str, elem_type: int, to: str = "") -> str:
        """Add a Cast, unless the value has that type and needs no other name."""
        if not to and self.elem_type(x) == elem_type:
            return x
        output = to or self.graph.fresh(f"{self._node.name}/Cast")
        self.add(helper.make_node("Cast", [x], [output], to=elem_type))
        return output

    def add(self, node: onnx.NodeProto) -> None:
        """Add a node and infer the types of its outputs."""
        if not node.name:
            node.name = f"{self._node.name}/{node.op_type}_{len(self.nodes)}"
        self.nodes.append(node)
        if not node.domain:
            self._infer(node)

    def settle(self, name: str) -> None:
        """Turn a value into a constant if all its elements turn out to be known."""
        known = self.contents.get(name)
        if known is None or name in self._returned or any(isinstance(entry, Length) for entry in known):
            return
        for place in range(len(self.nodes) - 1, -1, -1):
            if list(self.nodes[place].output) == [name]:
                del self.nodes[place]
                value = np.asarray(known, self.dtype(name)).reshape(self.shape(name))
                self.graph.set_initializer(numpy_helper.from_array(value, name))
                return

    def learn_types(self, node: onnx.NodeProto) -> None:
        """Infer the types of a node of constants: those of branches that are written out are not recorded."""
        constants = all(self.graph.is_constant(name) for name in node.input if name)
        if constants and node.input and not node.domain and defs.has(node.op_type, self.graph.opset, ""):
            self._infer(node)

    def fold(self, node: onnx.NodeProto) -> bool:
        """Compute a node whose inputs are all constants; return whether it was done."""
        values = evaluate(self.graph, node)
        for name, value in values.items():
            self.graph.set_initializer(numpy_helper.from_array(value, name))
        return bool(values)

    def copy(self, node: onnx.NodeProto, inputs: Sequence[str] | None = None) -> onnx.NodeProto:
        """Add a copy of a node, with other inputs if they are given."""
        copy = copy_node(node)
        if inputs is not None:
            copy.input[:] = inputs
        self.add(copy)
        return copy

    def constant(self, values: ArrayLike, dtype: DTypeLike) -> str:
        """Add a weight and return its name; equal small weights are added once."""
        array = np.asarray(values, dtype)
        if array.nbytes > 1 << 16:
            return self._new_constant(array)
        key = ("constant", str(array.dtype), array.shape, array.tobytes())
        return str(self.derived(key, lambda: self._new_constant(array)))

    def _new_constant(self, array: NDArray[Any]) -> str:
        name = self.graph.add_constant(array, f"{self._node.name}/constant")
        self.graph.set_type(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        return name

    def ints(self, *values: int) -> str:
        """Add a weight of INT64, the type of shapes and axes."""
        return self.constant(values, np.int64)

    def derived(self, key: tuple[object, ...], make: Callable[[], Any]) -> Any:  # noqa: ANN401 - names or lengths
        """Return what `make` returned the first time that it was asked for with this key."""
        if key not in self._derived:
            self._derived[key] = make()
        return self._derived[key]

    def _infer(self, node: onnx.NodeProto) -> None:
        schema = defs.get_schema(node.op_type, self.graph.opset, "")
        types: dict[str, onnx.TypeProto] = {}
        data: dict[str, TensorProto] = {}
        for name in node.input:
            if not name:
                continue
            found = self.graph.type_of(name)
            if found is None or found.static_shape is None:
                self.refuse("the shape of its input depends on values that are only known at run time")
            types[name] = helper.make_tensor_type_proto(found.elem_type, found.static_shape)
            value = self.graph.constant(name)
            if value is not None and value.size <= _SMALL:
                data[name] = numpy_helper.from_array(np.asarray(value), name)
        imports = [helper.make_opsetid("", self.graph.opset)]
        try:
            made = shape_inference.infer_node_outputs(
                schema, node, types, data, opset_imports=imports, ir_version=self.graph.model.ir_version
            )
        except FOREIGN_FAILURES as error:
            self.refuse(first_line(error))
        for name in node.output:
            if not name:
                continue
            kind = value_type(onnx.ValueInfoProto(name=name, type=made.get(name, onnx.TypeProto())))
            if kind is None or kind.static_shape is None:
                self.refuse("the shape of its output depends on values that are only known at run time")
            self.graph.set_type(name, kind.elem_type, kind.static_shape)

    # -- lengths

    def scalar(self, entry: Entry) -> str:
        """Name of a length as INT64 of shape [1]."""
        return entry.name if isinstance(entry, Length) else self.ints(entry)

    def arithmetic(self, op_type: str, a: Entry, b: Entry, capacity: int) -> Entry:
        """A length computed from two others, such as `Min`."""
        if isinstance(a, int) and isinstance(b, int):
            return {"Add": a + b, "Sub": a - b, "Mul": a * b, "Min": min(a, b), "Max": max(a, b)}[op_type]
        neutral = {"Add": 0, "Sub": 0, "Mul": 1}.get(op_type)
        if b == neutral:
            return a
        if a == neutral and op_type != "Sub":
            return b
        if a == b and op_type in ("Min", "Max"):
            return a
        if op_type == "Sub" and isinstance(a, Length) and isinstance(b, Length):
            (first, more), (second, less) = self._sum_of(a), self._sum_of(b)
            if first.name == second.name:
                return more - less
        if op_type == "Sub" and isinstance(a, Length) and isinstance(b, int):
            return self._plus(a, -b)
        if op_type == "Add" and (isinstance(a, int) or isinstance(b, int)):
            return self._plus(a, b) if isinstance(a, Length) else self._plus(b, a)  # type: ignore[arg-type]
        if op_type == "Min" and isinstance(a, Length) and isinstance(b, int) and b >= a.capacity:
            return a
        if op_type == "Min" and isinstance(b, Length) and isinstance(a, int) and a >= b.capacity:
            return b

        def make() -> Length:
            return Length(self.op(op_type, self.scalar(a), self.scalar(b)), capacity)

        made = self.derived((op_type, a, b, capacity), make)
        assert isinstance(made, Length)
        if op_type == "Sub" and isinstance(a, int) and isinstance(b, Length):
            self._rests[made.name] = a, b
        if op_type == "Mul" and (isinstance(a, int) or isinstance(b, int)):
            rest, factor = (b, a) if isinstance(a, int) else (a, b)
            if isinstance(rest, Length) and isinstance(factor, int) and rest.name in self._rests:
                total, lacks = self._rests[rest.name]
                product = self.arithmetic("Mul", lacks, factor, lacks.capacity * factor)
                if isinstance(product, Length):
                    self._rests[made.name] = total * factor, product
        return made

    def filled_up(self, length: Length, more: Entry) -> int | None:
        """The number that a length and another add up to, as n and 300 - n do; None for any others."""
        total, lacks = self._rests.get(more.name, (0, None)) if isinstance(more, Length) else (0, None)
        return total if lacks is not None and lacks.name == length.name and total >= length.capacity else None

    def _sum_of(self, length: Length) -> tuple[Length, int]:
        return self._sums.get(length.name, (length, 0))

    def _plus(self, length: Length, number: int) -> Length:
        base, offset = self._sum_of(length)
        total = offset + number
        if not total:
            return base
        name = str(
            self.derived(("sum", base.name, total), lambda: self.op("Add", base.name, self.ints(total)))
        )
        self._sums[name] = base, total
        return Length(name, base.capacity + total)

    def is_negative(self, length: Length) -> bool:
        """Whether a length may be negative: a difference that nothing keeps above zero."""
        return self._sum_of(length)[1] < 0

    def quotient(self, length: Length, divisor: int) -> Length:
        """A length divided by a number, rounded down."""

        def make() -> Length:
            return Length(self.op("Div", length.name, self.ints(divisor)), max(length.capacity // divisor, 0))

        made = self.derived(("Div", length, divisor), make)
        assert isinstance(made, Length)
        return made

    def iota(self, extent: int) -> str:
        """The numbers from 0, INT64."""
        self.limit(extent)
        return self.constant(np.arange(extent), np.int64)

    def there(self, length: Length, rank: int = 1, axis: int = 0) -> str:
        """Which elements of a padded axis are real, BOOL; all other axes have extent 1."""

        def make() -> str:
            mask = self.op("Less", self.iota(length.capacity), length.name)
            if rank == 1:
                return mask
            return self.op("Reshape", mask, self.ints(*(-1 if i == axis else 1 for i in range(rank))))

        return str(self.derived(("there", length, rank, axis), make))

    def mask(self, name: str, axes: Sequence[int] | None = None) -> str:
        """Which elements of a value are real, BOOL, to be broadcast; empty if all are."""
        rank = len(self.shape(name))
        masks = [
            self.there(length, rank, axis)
            for axis, length in self.lengths.get(name, {}).items()
            if axes is None or axis in axes
        ]
        if not masks:
            return ""
        result = masks[0]
        for other in masks[1:]:
            result = self.op("And", result, other)
        return result

    def filled(self, name: str, value: float, axes: Sequence[int] | None = None, to: str = "") -> str:
        """A value with its padding replaced by a number."""
        mask = self.mask(name, axes)
        if not mask:
            return name if not to else self.op("Identity", name, to=to)
        return self.op("Where", mask, name, self.constant(value, self.dtype(name)), to=to)

    def bound(self, name: str, lengths: Mapping[int, Length]) -> None:
        """Record a value's true lengths."""
        if not lengths:
            return
        self.lengths[name] = dict(sorted(lengths.items()))
        for length in lengths.values():
            self.limit(length.capacity)

    def limit(self, capacity: int) -> None:
        """Refuse a capacity that is too large, before anything of that size is made."""
        if capacity > MAX_CAPACITY:
            self.refuse(
                f"a length that is only known at run time: expected a bound of at most {MAX_CAPACITY}, "
                f"got {capacity}"
            )

    def positions(self, mask: str) -> tuple[str, Length]:
        """Where a mask, BOOL [n], is true: INT64 [n], padded with 0, and how often it is."""

        def make() -> tuple[str, Length]:
            extent = self.shape(mask)[0]
            self.limit(extent)
            ones = self.cast(mask, TensorProto.INT64)
            sums = self.op("CumSum", ones, self.constant(0, np.int64))
            count = self.op("ReduceSum", ones, self.ints(0), keepdims=1)
            # A place of its own, behind the last one, takes what is not selected.
            to = self.op("Where", mask, self.op("Sub", sums, self.ints(1)), self.ints(extent))
            room = self.constant(np.zeros(extent + 1), np.int64)
            placed = self.op("ScatterElements", room, to, self.iota(extent), axis=0)
            found = self.op("Slice", placed, self.ints(0), self.ints(extent), self.ints(0))
            length = Length(count, extent)
            self.bound(found, {0: length})
            self.natural.add(found)
            return found, length

        found, length = self.derived(("positions", mask), make)
        return str(found), length
