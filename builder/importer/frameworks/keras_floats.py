"""Graphs of TensorFlow that compute in float16, bfloat16 or float64, rewritten to compute in float32.

TensorFlow Lite has operators of float32 only. Inputs and outputs keep their types; bfloat16, which NumPy
lacks, becomes float32.
Part of `keras_process.py`, which a Python with TensorFlow runs: it imports nothing of edgebundle.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

# As `types.proto` of TensorFlow numbers them.
FLOAT32: Final = 1
OTHERS: Final = {19: "float16", 14: "bfloat16", 2: "float64"}
_FLOAT64: Final = 2
# A float32 holds all integers of fewer bits.
_LONG_INTEGERS: Final = frozenset({3, 9, 22, 23})


def other_floats(graph: Any) -> list[str]:
    """Return the floating-point types of a graph that are not float32; none if it must stay as it is.

    It must if it reads bits of such a number, or makes long integers float64 that float32 would round.
    """
    found: set[int] = set()
    for node in nodes_of(graph):
        kinds = {kind for value in node.attr.values() for kind in (value.type, *value.list.type)}
        found |= kinds
        source = node.attr["SrcT"].type if node.op == "Cast" else 0
        if (node.op == "Bitcast" and kinds & set(OTHERS)) or (
            source in _LONG_INTEGERS and node.attr["DstT"].type == _FLOAT64
        ):
            return []
    return [name for kind, name in OTHERS.items() if kind in found]


def nodes_of(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph and of its functions."""
    yield from graph.node
    for function in graph.library.function:
        yield from function.node_def


def in_float32(tf: Any, frozen: Any) -> Any:
    """Return a function that computes in float32 what one without variables computes in other types."""
    graph = frozen.graph.as_graph_def()
    renamed = {
        function.signature.name: f"{function.signature.name}_float32" for function in graph.library.function
    }
    for node in nodes_of(graph):
        node.op = renamed.get(node.op, node.op)
        for value in node.attr.values():
            _retype(tf, value, renamed)
    for function in graph.library.function:
        function.signature.name = renamed[function.signature.name]
        for argument in (*function.signature.input_arg, *function.signature.output_arg):
            argument.type = FLOAT32 if argument.type in OTHERS else argument.type
    types = [tf.float32 if old.dtype == tf.bfloat16 else old.dtype for old in frozen.inputs]
    specs = [tf.TensorSpec(old.shape, kind, old.op.name) for old, kind in zip(frozen.inputs, types)]  # noqa: B905
    used = {name.partition(":")[0] for node in graph.node for name in node.input}

    def call(*tensors: Any) -> list[Any]:
        given = {
            old.op.name: tf.cast(new, tf.float32) if new.dtype.is_floating else new
            for old, new in zip(frozen.inputs, tensors)  # noqa: B905
            if old.op.name in used  # TensorFlow refuses others
        }
        found = tf.graph_util.import_graph_def(graph, given, [old.name for old in frozen.outputs], name="")
        return [
            new if old.dtype == tf.bfloat16 else tf.cast(new, old.dtype)
            for old, new in zip(frozen.outputs, found)  # noqa: B905
        ]

    return tf.function(call, autograph=False).get_concrete_function(*specs)


def _retype(tf: Any, value: Any, renamed: dict[str, str]) -> None:
    """Change the types and the functions that an attribute names."""
    if value.type in OTHERS:
        value.type = FLOAT32
    for place, kind in enumerate(value.list.type):
        value.list.type[place] = FLOAT32 if kind in OTHERS else kind
    if value.tensor.dtype in OTHERS:
        value.tensor.CopyFrom(tf.make_tensor_proto(tf.make_ndarray(value.tensor).astype("float32")))
    for function in (value.func, *value.list.func):
        if function.name in renamed:  # to write it would otherwise make the attribute a function
            function.name = renamed[function.name]
