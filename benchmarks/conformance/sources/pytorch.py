"""PyTorch's operators as its own tests call them (OpInfo), written as ONNX by both of its exporters.

PyTorch itself computes the outputs.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from benchmarks.conformance.case import Array, Case
from benchmarks.conformance.sources.makers import Maker
from benchmarks.conformance.sources.onnx_nodes import apart as why_apart

# Of an operator's calls, so many are written by the exporter of TorchScript, evenly spread over them.
SAMPLES: Final = 3
_CONSIDERED: Final = 60
_OPSET: Final = 17
_SEED: Final = 0
# The newer exporter takes seconds for each call: it writes only the first.
EXPORTERS: Final = ("script", "dynamo")


def makers() -> Iterator[Maker]:
    """Return the calls of all operators that take or make float32, or else integers."""
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    for exporter in EXPORTERS:
        for info in op_db:
            operator = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
            for index in range(SAMPLES if exporter == "script" else 1):
                name = f"{operator}_{index}_{exporter}"
                yield name, functools.partial(make, name, operator, info, index, exporter)


class Call(torch.nn.Module):
    """A call of an operator, whose tensors are the inputs.

    Parameters
    ----------
    function
        The operator.
    structure
        Its arguments, whose tensors are left out.
    leaves
        The other arguments; None where a tensor is.
    """

    def __init__(self, function: Any, structure: Any, leaves: Sequence[Any]) -> None:  # noqa: ANN401
        super().__init__()
        self._function, self._structure, self._leaves = function, structure, leaves

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call the operator, and return its tensors."""
        given = iter(tensors)
        leaves = [next(given) if leaf is None else leaf[0] for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        results, _ = pytree.tree_flatten(self._function(*args, **kwargs))
        return tuple(result for result in results if isinstance(result, torch.Tensor))


def make(name: str, operator: str, info: Any, index: int, exporter: str, folder: Path) -> Case:  # noqa: ANN401
    """Make a case of one call.

    Raises
    ------
    ValueError
        If the operator has no such call, or nothing of it is a tensor of numbers.
    """
    torch.manual_seed(_SEED)
    dtype = torch.float32 if torch.float32 in info.dtypes else torch.int64
    samples = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=False), _CONSIDERED))
    chosen = {round(place * (len(samples) - 1) / max(1, SAMPLES - 1)) for place in range(SAMPLES)}
    if index >= len(chosen):
        raise ValueError("no such sample")
    sample = samples[sorted(chosen)[index]]
    leaves, structure = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
    tensors = tuple(leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor))
    call = Call(info.op, structure, [None if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves])
    with torch.no_grad():
        outputs = call(*(tensor.clone() for tensor in tensors))
        again = call(*(tensor.clone() for tensor in tensors))
    apart = "" if all(map(_is_same, outputs, again)) else "random numbers"
    path = folder / "model.onnx"
    names = [f"x{place}" for place in range(len(tensors))]
    export(call, tensors, names, path, exporter)
    model = onnx.load(path)
    graph = model.graph
    if len(graph.output) != len(outputs):
        raise ValueError(f"expected {len(outputs)} outputs, got {len(graph.output)}")
    given = dict(zip(names, tensors, strict=True))
    inputs = {value.name: _array(given[value.name]) for value in graph.input}
    apart = why_apart(model) or apart
    return Case("pytorch", name, operator, path, inputs, [_array(value) for value in outputs], apart=apart)


def export(
    call: Call, tensors: tuple[torch.Tensor, ...], names: list[str], path: Path, exporter: str
) -> None:
    """Write a call as ONNX."""
    copies = tuple(tensor.clone() for tensor in tensors)
    if exporter == "script":
        torch.onnx.export(call, copies, str(path), dynamo=False, input_names=names, opset_version=_OPSET)
        return
    options = {"external_data": False, "verbose": False}
    torch.onnx.export(call, copies, str(path), dynamo=True, input_names=names, **options)


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)))


def _array(tensor: torch.Tensor) -> Array:
    return np.array(tensor.detach().resolve_conj().resolve_neg().numpy(), order="C")
