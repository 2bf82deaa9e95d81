"""Read and edit an ONNX graph: the nodes that make values, constants, types and shapes.

Works in place. Leaves subgraphs of control flow to `control_flow` and `rewrites.loops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import defs, helper, numpy_helper

# Both names mean the domain of ONNX's own operators.
DEFAULT_DOMAINS: Final = ("", "ai.onnx")
# A rewrite needs no larger constant; a hostile shape may ask for one.
MAX_CONSTANT_BYTES: Final = 1 << 30
# Limits the work of passes over the graph; the largest known exports have some ten thousand nodes.
MAX_NODES: Final = 200_000


@dataclass(frozen=True, slots=True)
class ValueType:
    """Element type and shape of a value.

    `elem_type`: a TensorProto.DataType.
    `shape`: the dimensions, None for an unknown one; None if the rank is unknown.
    """

    elem_type: int
    shape: tuple[int | None, ...] | None

    @property
    def static_shape(self) -> tuple[int, ...] | None:
        """The shape if all of it is known, else None."""
        if self.shape is None or any(dim is None for dim in self.shape):
            return None
        return tuple(dim for dim in self.shape if dim is not None)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype."""
        dtype: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(self.elem_type))
        return dtype


def is_known_type(elem_type: int) -> bool:
    """Whether an element type is a TensorProto.DataType other than UNDEFINED."""
    return elem_type != onnx.TensorProto.UNDEFINED and elem_type in onnx.TensorProto.DataType.values()


def value_type(info: onnx.ValueInfoProto) -> ValueType | None:
    """Type of a value, or None if it is not a tensor or its element type is unknown."""
    tensor = info.type.tensor_type
    if info.type.WhichOneof("value") != "tensor_type" or not is_known_type(tensor.elem_type):
        return None
    if not tensor.HasField("shape"):
        return ValueType(tensor.elem_type, None)
    # Some exporters write an unknown dimension as -1.
    dims = (dim.dim_value if dim.WhichOneof("value") == "dim_value" else None for dim in tensor.shape.dim)
    return ValueType(tensor.elem_type, tuple(dim if dim is None or dim >= 0 else None for dim in dims))


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Attributes of a node as name -> Python value; strings are decoded."""
    result: dict[str, Any] = {}
    for attribute in node.attribute:
        value = helper.get_attribute_value(attribute)
        result[attribute.name] = value.decode(errors="replace") if isinstance(value, bytes) else value
    return result


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Graphs in the attributes of a node (branches and loop bodies), without the graphs nested in them."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == onnx.AttributeProto.GRAPHS:
            yield from attribute.graphs


def walk_nodes(graph: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.NodeProto]:
    """All nodes of a graph or a function, including those in subgraphs."""
    for node in graph.node:
        yield node
        for subgraph in subgraphs(node):
            yield from walk_nodes(subgraph)


def outer_values(graph: onnx.GraphProto) -> set[str]:
    """Names that a subgraph reads from the graphs around it."""
    known = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    free: set[str] = set()
    for node in graph.node:
        free |= set(reads(node)) - known
        known |= set(node.output)
    return (free | {output.name for output in graph.output}) - known


def reads(node: onnx.NodeProto) -> set[str]:
    """Names of values that a node reads, including those that its subgraphs read from outside."""
    names = {name for name in node.input if name}
    for subgraph in subgraphs(node):
        names |= outer_values(subgraph)
    return names


class OnnxGraph:
    """An index over the graph of a model, kept up to date while nodes are replaced.

    Parameters
    ----------
    model
        The model, changed in place.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.proto = model.graph
        self._initializers = {tensor.name: tensor for tensor in self.proto.initializer}
        infos = (*self.proto.value_info, *self.proto.input, *self.proto.output)
        self._types = {info.name: found for info in infos if (found := value_type(info)) is not None}
        self._names = {name for node in walk_nodes(self.proto) for name in (*node.output, *node.input)}
        self._names |= set(self._initializers) | {value.name for value in self.proto.input}
        self._makers = {name: node for node in self.proto.node for name in node.output if name}
        self._counter = 0

    @property
    def opset(self) -> int:
        """Version of ONNX's own operators."""
        return next((o.version for o in self.model.opset_import if o.domain in DEFAULT_DOMAINS), 1)

    def type_of(self, name: str) -> ValueType | None:
        """Type of a value, or None if it is unknown."""
        tensor = self._initializers.get(name)
        if tensor is not None:
            return ValueType(tensor.data_type, tuple(tensor.dims))
        return self._types.get(name)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Shape of a value, or None if not all of it is known."""
        found = self.type_of(name)
        return found.static_shape if found else None

    def maker_of(self, name: str) -> onnx.NodeProto | None:
        """The node that makes a value, or None for inputs and weights."""
        return self._makers.get(name)

    def is_constant(self, name: str) -> bool:
        """Whether a value is a weight or the output of a Constant node."""
        maker = self._makers.get(name)
        return name in self._initializers or (maker is not None and maker.op_type == "Constant")

    def constant(self, name: str) -> NDArray[Any] | None:
        """A constant's value, or None if the value is not a constant tensor of numbers."""
        tensor = self._initializers.get(name)
        if tensor is not None:
            return np.asarray(numpy_helper.to_array(tensor))
        maker = self._makers.get(name)
        if maker is None or maker.op_type != "Constant" or not maker.attribute:
            return None
        return constant_node_value(maker)

    def fresh(self, stem: str) -> str:
        """A new name that begins with `stem`."""
        while True:
            self._counter += 1
            name = f"{stem}__{self._counter}"
            if name not in self._names:
                self._names.add(name)
                return name

    def add_constant(self, values: NDArray[Any], stem: str = "constant") -> str:
        """Add a weight and return its name.

        Raises
        ------
        ValueError
            If it is larger than `MAX_CONSTANT_BYTES`.
        """
        if values.nbytes > MAX_CONSTANT_BYTES:
            raise ValueError(
                f"expected a constant of at most {MAX_CONSTANT_BYTES} bytes, got {values.nbytes}"
            )
        tensor = numpy_helper.from_array(np.asarray(values), self.fresh(stem))
        self.set_initializer(tensor)
        return str(tensor.name)

    def set_initializer(self, tensor: onnx.TensorProto) -> None:
        """Add a weight under its own name."""
        self.proto.initializer.append(tensor)
        self._initializers[tensor.name] = self.proto.initializer[-1]
        self._names.add(tensor.name)

    def set_type(self, name: str, elem_type: int, shape: Sequence[int] | None) -> None:
        """Record the type of a value, such as the result of a rewrite."""
        self._types[name] = ValueType(elem_type, None if shape is None else tuple(shape))

    def rewrite(self, replace: Callable[[onnx.NodeProto], Sequence[onnx.NodeProto] | None]) -> int:
        """Call `replace` for every node, in order, and put what it returns in the node's place.

        Parameters
        ----------
        replace
            Returns the nodes that replace a node (possibly an empty list), or None to keep it.

        Returns
        -------
        int
            How many nodes were replaced.
        """
        nodes: list[onnx.NodeProto] = []
        replaced = 0
        for node in list(self.proto.node):
            new = replace(node)
            if new is None:
                nodes.append(node)
                continue
            replaced += 1
            for fresh in new:
                nodes.append(fresh)
                self._makers.update({name: fresh for name in fresh.output if name})
        if replaced:
            # The list refers to elements of the repeated field: copy them before it is cleared.
            kept = [copy_node(node) for node in nodes]
            del self.proto.node[:]
            self.proto.node.extend(kept)
            self._makers = {name: node for node in self.proto.node for name in node.output if name}
        return replaced


def copy_node(node: onnx.NodeProto) -> onnx.NodeProto:
    """Copy a node; the copy belongs to no graph."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    return copy


def set_attributes(node: onnx.NodeProto, without: Sequence[str], changed: Mapping[str, object]) -> None:
    """Replace attributes of a node, in place; `without` names those that are dropped."""
    kept = [one for one in copy_node(node).attribute if one.name not in without and one.name not in changed]
    del node.attribute[:]
    node.attribute.extend(kept)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in changed.items())


def constant_node_value(node: onnx.NodeProto) -> NDArray[Any] | None:
    """Value of a Constant node, or None if it is a string or a sparse tensor."""
    attribute = node.attribute[0]
    match attribute.name:
        case "value":
            return np.asarray(numpy_helper.to_array(attribute.t))
        case "value_float":
            return np.array(attribute.f, np.float32)
        case "value_floats":
            return np.array(attribute.floats, np.float32)
        case "value_int":
            return np.array(attribute.i, np.int64)
        case "value_ints":
            return np.array(attribute.ints, np.int64)
    return None


def name_nodes(graph: onnx.GraphProto) -> None:
    """Give every node a unique name: messages need one, and ONNX Runtime refuses duplicates."""
    taken: set[str] = set()
    for index, node in enumerate(graph.node):
        name = node.name or f"{node.op_type}_{index}"
        while name in taken:
            name += "_"
        node.name = name
        taken.add(name)


def remove_dead_nodes(graph: onnx.GraphProto) -> None:
    """Drop nodes and weights whose values are not used."""
    needed = {output.name for output in graph.output}
    alive: list[onnx.NodeProto] = []
    changed = False
    for node in reversed(graph.node):
        if needed & set(node.output):
            alive.append(copy_node(node))
            needed |= reads(node)
            changed |= _drop_unread_outputs(alive[-1], needed)
    if changed or len(alive) != len(graph.node):
        del graph.node[:]
        graph.node.extend(reversed(alive))
    _keep(graph.initializer, lambda tensor: tensor.name in needed)
    made = {name for node in graph.node for name in node.output}
    _keep(graph.value_info, lambda info: info.name in needed or info.name in made)


def _drop_unread_outputs(node: onnx.NodeProto, needed: set[str]) -> bool:
    """Drop unused optional outputs at the end: some converters do not support them."""
    dropped = False
    while len(node.output) > 1 and node.output[-1] not in needed and _is_optional_output(node):
        del node.output[-1]
        dropped = True
    return dropped


def _is_optional_output(node: onnx.NodeProto) -> bool:
    if node.domain or not defs.has(node.op_type, ""):
        return False
    outputs = defs.get_schema(node.op_type, "").outputs
    index = len(node.output) - 1
    return index < len(outputs) and outputs[index].option == defs.OpSchema.FormalParameterOption.Optional


def _keep(field: Any, wanted: Callable[[Any], bool]) -> None:  # noqa: ANN401 - protobuf's repeated fields have no type
    for index in range(len(field) - 1, -1, -1):
        if not wanted(field[index]):
            del field[index]


def names_of(nodes: Iterable[onnx.NodeProto]) -> tuple[str, ...]:
    """Names of nodes; a node without one is called after its outputs."""
    return tuple(node.name or f"(makes {', '.join(node.output)})" for node in nodes)


def describe(nodes: Iterable[onnx.NodeProto], limit: int = 3) -> str:
    """Names of nodes for a message; only the first `limit` are listed."""
    names = names_of(nodes)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
