"""Arithmetic in bfloat16: which products of a model are computed so.

A bfloat16 has the range of a float32, so nothing is measured: no number becomes too large. The model's file
does not change; a mark tells the compiler to round the operands of products
(`builder.kernels.passes.bfloats`).
"""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, replace
from typing import Any

import onnx

from builder.compiling.block_parity import is_quantised
from builder.errors import ModelError
from builder.importer import ImportedModel
from builder.importer.multiply_adds import multiply_adds_of
from builder.importer.onnx_graph import OnnxGraph, attributes
from builder.kernels.passes.bfloats import mark
from builder.kernels.spaces.bfloat_matmul import pays, rows_that_pay
from builder.quantising import table
from builder.target.device_target import DeviceTarget
from builder.target.half_arithmetic import computes_halves, require_bfloat_arithmetic


class Reason(enum.StrEnum):
    """Why layers stay in float32."""

    OPERATOR = "only matrix products are computed in bfloat16"
    FORM = "not rows times a constant matrix"
    SLOWER = "bfloat16 would be slower"


@dataclass(frozen=True, slots=True)
class FloatLayers:
    """Layers that stay in float32.

    Attributes
    ----------
    operator
        Of the model's nodes.
    reason
        Why they stay.
    nodes
        How many there are.
    macs
        Their multiply-adds.
    """

    operator: str
    reason: Reason
    nodes: int
    macs: int


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
        What stays in float32, that with the most multiply-adds first.
    warnings
        What the user should know; one line each.
    """

    model: str
    precision: str
    total_macs: int
    bfloat_macs: int
    floats: tuple[FloatLayers, ...]
    warnings: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the table that a person reads, one row each."""
        rows = [
            (
                "work in bfloat16",
                f"{self._share(self.bfloat_macs)} of {self.total_macs / 1e6:,.1f} million multiply-adds",
            ),
            *(
                ("in float32", f"{each.nodes} {each.operator} ({self._share(each.macs)}): {each.reason}")
                for each in self.floats
            ),
        ]
        return table.lines(rows, width=18) + [f"  note: {text}" for text in self.warnings]

    def _share(self, macs: int) -> str:
        return f"{100 * macs / max(self.total_macs, 1):.1f} %"


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
    bfloat, floats = 0, dict[tuple[str, Reason], list[int]]()
    for node in model.onnx.graph.node:
        macs = multiply_adds_of(node, graph)
        reason = reason_against(node, graph, target)
        if reason is None:
            bfloat += macs
        elif macs:
            floats.setdefault((node.op_type, reason), []).append(macs)
    if not bfloat:
        raise ModelError(
            f"--precision bf16: expected matrix products with constant weights (MatMul, Gemm)"
            f"{rows_that_pay(target)}, got none",
            hint=f"only these are faster in bfloat16 on {target.cpu}; {_instead(target)}",
        )
    layers = [FloatLayers(*key, len(each), sum(each)) for key, each in floats.items()]
    layers.sort(key=lambda each: (-each.macs, each.operator))
    total = bfloat + sum(each.macs for each in layers)
    warnings = (
        (f"less than half of the work is in bfloat16, which gains little; {_instead(target)}",)
        if 2 * bfloat < total
        else ()
    )
    report = BfloatsReport(model.name, "bf16", total, bfloat, tuple(layers), warnings)
    return BfloatsModel(replace(model, mod=mark(model.mod)), report)


def _instead(target: DeviceTarget) -> str:
    """Return what to use for a model that bfloat16 does not make faster, as an instruction."""
    others = ["int8, whose convolutions run on tiles too"] if target.dot.tiles else []
    if computes_halves(target):
        others.append("fp16, for convolutions and products of any size")
    if not others:
        return "compile the model in float32, or with --precision int8"
    return f"use --precision {', or '.join(others)}"


def reason_against(node: onnx.NodeProto, graph: OnnxGraph, target: DeviceTarget) -> Reason | None:
    """Return why a node stays in float32; None if it is a product whose operands are rounded."""
    if node.op_type not in ("Gemm", "MatMul") or node.domain:
        return Reason.OPERATOR
    left, right = (graph.shape_of(name) or () for name in node.input[:2])
    if len(left) < 2 or len(right) != 2 or not graph.is_constant(node.input[1]):
        return Reason.FORM
    rows = left[1:] if attributes(node).get("transA", 0) else left[:-1]
    return None if pays(rows, target) else Reason.SLOWER
