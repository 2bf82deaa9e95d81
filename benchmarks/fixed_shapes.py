"""Writes out the shapes in onnx2torch's graphs, so that torch.export, and LiteRT's converter, can trace them.

onnx2torch computes shapes from the values of tensors at run time. With fixed inputs they are always the same:
one run records them, and the nodes become plain reshapes, expansions and slices.
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch
from torch import fx

RESHAPING: Final = frozenset({"OnnxReshape", "OnnxSqueezeDynamicAxes", "OnnxUnsqueezeDynamicAxes"})


def write_out(network: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    """Change `network` in place so that it only accepts inputs of these shapes, and return it."""
    seen: dict[str, Any] = {}

    class Recorder(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            seen[n.name] = super().run_node(n)
            return seen[n.name]

    with torch.no_grad():
        Recorder(network).run(*inputs)
    for node in list(network.graph.nodes):
        if node.op != "call_module":
            continue
        kind = type(network.get_submodule(node.target)).__name__
        source, result = node.args[0] if node.args else None, seen[node.name]
        if not isinstance(source, fx.Node):
            continue
        with network.graph.inserting_before(node):
            if kind in RESHAPING:
                new = network.graph.call_method("reshape", (source, tuple(result.shape)))
            elif kind == "OnnxExpand":
                new = network.graph.call_method("expand", (source, tuple(result.shape)))
            elif kind == "OnnxSlice":
                index = _index(seen[source.name].dim(), [_value(seen, each) for each in node.args[1:]])
                new = network.graph.call_function(operator.getitem, (source, index))
            else:
                continue
        seen[new.name] = result
        node.replace_all_uses_with(new)
        network.graph.erase_node(node)
    network.graph.eliminate_dead_code()
    network.recompile()
    return network


def _value(seen: dict[str, Any], argument: fx.Node | None) -> list[int] | None:
    return None if argument is None else [int(each) for each in seen[argument.name]]


def _index(rank: int, arguments: list[list[int] | None]) -> tuple[slice, ...]:
    """Return the index of an ONNX Slice, of starts, ends, and perhaps axes and steps."""
    starts, ends, axes, steps = (*arguments, None, None)[:4]
    assert starts is not None
    assert ends is not None
    index = [slice(None)] * rank
    for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = axes[place] if axes is not None else place
        index[axis] = slice(start, end, steps[place] if steps is not None else 1)
    return tuple(index)
