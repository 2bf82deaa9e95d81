"""Arithmetic in bfloat16: which products of a model are computed so.

A bfloat16 has the range of a float32, so nothing is measured: no number becomes too large. The model's file
does not change; a mark tells the compiler to round the operands of products
(`builder.kernels.passes.bfloats`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import onnx

from builder.compiling.block_parity import is_quantised
from builder.errors import ModelError
from builder.importer import ImportedModel
from builder.importer.multiply_adds import multiply_adds_of
from builder.importer.onnx_graph import OnnxGraph
from builder.kernels.passes.bfloats import mark
from builder.kernels.spaces.bfloat_matmul import FEW_ROWS, pays
from builder.target.device_target import DeviceTarget
from builder.target.half_arithmetic import require_bfloat_arithmetic


@dataclass(frozen=True, slots=True)
class BfloatsReport:
    """What is computed in bfloat16.

    Attributes
    ----------
    model
        The model's name.
    precision
        `bf16`.
    total_macs, bfloat_macs
        Multiply-adds of the model, and how many of them are in bfloat16.
    floats
        Operator -> how many of its nodes multiply in float32.
    """

    model: str
    precision: str
    total_macs: int
    bfloat_macs: int
    floats: Mapping[str, int]

    def document(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the table that a person reads, one row each."""
        share = 100 * self.bfloat_macs / max(self.total_macs, 1)
        kept = ", ".join(f"{count} {name}" for name, count in self.floats.items()) or "none"
        rows = [
            ("work in bfloat16", f"{share:.1f} % of {self.total_macs / 1e6:,.1f} million multiply-adds"),
            ("in float32", kept),
        ]
        return [f"  {name:<18}{text}" for name, text in rows]


@dataclass(frozen=True, slots=True)
class BfloatsModel:
    """A model that is to be computed in bfloat16.

    Attributes
    ----------
    model
        The model, marked.
    report
        What is computed in bfloat16.
    """

    model: ImportedModel
    report: BfloatsReport


def to_bfloats(model: ImportedModel, target: DeviceTarget) -> BfloatsModel:
    """Mark a model whose products are to be computed in bfloat16.

    Parameters
    ----------
    model
        The result of `builder.load`.
    target
        The device.

    Raises
    ------
    TargetError
        If the device does not multiply bfloat16.
    ModelError
        If the model is quantised, or no product of it would be faster in bfloat16.
    """
    require_bfloat_arithmetic(target)
    if is_quantised(model.onnx):
        raise ModelError(
            "--precision bf16: expected a float model, got one that is quantised already",
            hint="compile it as it is: its products of bytes are faster than those of bfloat16",
        )
    graph = OnnxGraph(model.onnx)
    work = [(node, count) for node in model.onnx.graph.node if (count := multiply_adds_of(node, graph))]
    bfloat = sum(count for node, count in work if is_rounded(node, graph, target))
    if not bfloat:
        few = "" if target.core.bfloats > 1 else f" of at most {FEW_ROWS} rows"
        raise ModelError(
            f"--precision bf16: expected matrix products with constant weights (MatMul, Gemm){few}, got none",
            hint=f"only these are faster in bfloat16 on {target.cpu}; compile the model in float32 or int8",
        )
    floats = Counter(node.op_type for node, _ in work if not is_rounded(node, graph, target))
    report = BfloatsReport(model.name, "bf16", sum(c for _, c in work), bfloat, dict(floats.most_common()))
    return BfloatsModel(replace(model, mod=mark(model.mod)), report)


def is_rounded(node: onnx.NodeProto, graph: OnnxGraph, target: DeviceTarget) -> bool:
    """Whether a node is a product of rows with a constant matrix, whose operands are rounded."""
    if node.op_type not in ("Gemm", "MatMul") or node.domain:
        return False
    left, right = (graph.shape_of(name) or () for name in node.input[:2])
    if len(left) < 2 or len(right) != 2 or not graph.is_constant(node.input[1]):
        return False
    rows = left[1:] if any(each.name == "transA" and each.i for each in node.attribute) else left[:-1]
    return pays(rows, target)
