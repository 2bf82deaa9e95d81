"""Names in what PyTorch exports: nodes after modules, outputs after their places in what `forward` returns.

Part of `pytorch_process.py`, which a Python with PyTorch runs: it imports nothing of edgebundle.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any


def name_nodes(graph: Any) -> None:
    """Name nodes after the modules that they come from.

    `layer1.0.conv1` is the only node of that module, `layer1.0/Add` one of several.
    What only prepares constants does not count. A quantised program does not know its modules: there, a node
    is named after its parameters or, without any, after its operator in PyTorch.
    """
    constants = {tensor.name for tensor in graph.initializer}
    scopes: list[str] = []
    several: Counter[str] = Counter()
    for node in graph.node:
        scope = _scope(node) or _owner(node, constants) or _fx_name(node)
        scopes.append(scope)
        first = node.input[:1] if node.op_type in ("CastLike", "Shape") else node.input
        if node.op_type in ("Constant", "Shape") or all(name in constants or not name for name in first):
            constants.update(node.output)
        else:
            several[scope] += 1
    used: Counter[str] = Counter()
    for node, scope in zip(graph.node, scopes):  # noqa: B905 - as long as each other
        is_constant = all(name in constants for name in node.output)
        is_only = several[scope] == 1 and not is_constant
        name = scope if scope and is_only else f"{scope}/{node.op_type}".strip("/")
        used[name] += 1
        node.name = name if used[name] == 1 else f"{name}_{used[name] - 1}"
        del node.metadata_props[:]
        node.doc_string = ""


def _properties(node: Any) -> dict[str, str]:
    return {entry.key: entry.value for entry in node.metadata_props}


def _scope(node: Any) -> str:
    """Return the path of the module that a node comes from; empty if it is not known, or the model itself."""
    found = re.findall(r"'([^']*)'", _properties(node).get("pkg.torch.onnx.name_scopes", ""))
    return found[-2] if len(found) > 1 else ""


def _owner(node: Any, constants: set[str]) -> str:
    """Return the path of the module whose parameters a node reads; empty if it reads none."""
    owners = [name.rpartition(".")[0] for name in node.input if name in constants and "." in name]
    return owners[0] if owners else ""


def _fx_name(node: Any) -> str:
    """Return the name that a node has in PyTorch's own graph."""
    found = re.match(r"%?(\w+)", _properties(node).get("pkg.torch.onnx.fx_node", ""))
    return found[1] if found else ""


def name_outputs(graph: Any, names: Sequence[str]) -> None:
    """Give outputs the names of their places in what `forward` returns."""
    import onnx

    taken = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    values = {name for node in graph.node for name in (*node.input, *node.output)}
    renamed: dict[str, str] = {}
    for value, wanted in zip(graph.output, names):  # noqa: B905 - the exporter may merge equal outputs
        name = wanted
        while name in taken or (name in values and name != value.name):
            name += "_"
        taken.add(name)
        if value.name in renamed or value.name not in {o for node in graph.node for o in node.output}:
            # Twice the same value, or an input or a weight that is returned as it is.
            source = renamed.get(value.name, value.name)
            graph.node.append(onnx.helper.make_node("Identity", [source], [name], name=f"{name}/Identity"))
            value.name = name
            continue
        renamed[value.name] = name
        value.name = name
    for node in graph.node:
        for names_of in (node.input, node.output):
            for place, name in enumerate(names_of):
                names_of[place] = renamed.get(name, name)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename_inside(attribute.g, renamed)
    for value in graph.value_info:
        value.name = renamed.get(value.name, value.name)


def _rename_inside(graph: Any, renamed: dict[str, str]) -> None:
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = renamed.get(name, name)
        for attribute in node.attribute:
            if attribute.HasField("g"):
                _rename_inside(attribute.g, renamed)
    for value in graph.output:
        value.name = renamed.get(value.name, value.name)


def output_names(spec: Any, count: int) -> list[str]:
    """Return a name for each place: `output`, `output_1`, or the keys that lead to it."""
    from torch.utils import _pytree

    if spec is None:
        return [f"output_{place}" for place in range(count)]
    paths, _ = _pytree.tree_flatten_with_path(_pytree.tree_unflatten(list(range(count)), spec))
    names = []
    for path, _place in paths:
        parts = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
        name = re.sub(r"[^\w.]", "_", ".".join(parts))
        names.append(f"output_{name}" if name[:1].isdigit() else name or "output")
    return names
