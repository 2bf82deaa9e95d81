"""Arithmetic in float16: from a float model to one whose products are computed so.

The model's file does not change: which nodes stay in float32 is a mark for the compiler. They are those whose
numbers could be too large for float16. The largest number of every tensor is measured on samples, and may be
`HEADROOM` times as large on the device. A product stays in float32 too if a sum of such numbers as were
measured could overflow, whatever their signs. The device limits larger numbers, so that no input makes an
infinity (`builder.kernels.passes.half_limits`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import onnx
import tvm
from numpy.typing import NDArray
from tvm.ir import Call

from builder.calls.spans import bindings_of, names_of
from builder.compiling.block_parity import is_quantised
from builder.errors import ModelError
from builder.importer import ImportedModel
from builder.importer.multiply_adds import multiply_adds_of
from builder.importer.onnx_graph import OnnxGraph
from builder.kernels.passes.half_limits import LARGEST, growth_of_convolution, growth_of_matrix, most_for
from builder.kernels.passes.halves import mark
from builder.kernels.rewriter import constant_of, op_name
from builder.kernels.spaces import half_winograd
from builder.kernels.spaces.geometry import Conv2d
from builder.quantising import table
from builder.quantising.calibration import CalibrationData, Source, samples_for
from builder.quantising.folding import folded
from builder.quantising.session import Session
from builder.target.device_target import DeviceTarget
from builder.target.half_arithmetic import require_half_arithmetic

# How much larger than on the samples a number may become: a brighter picture, a louder recording.
HEADROOM: Final = 8.0
_PRODUCTS: Final = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(frozen=True, slots=True)
class HalvesReport:
    """What is computed in float16.

    `samples`: how many samples the largest numbers were measured on.
    `sampled`: whether these were calibration data, not random numbers.
    `total_macs`, `half_macs`: Multiply-adds of the model, and how many of them are in float16.
    `floats`: the nodes that stay in float32 because of large numbers.
    `faster`: those that multiply in float32 because that is faster: first layers, by Winograd's algorithm.
    """

    model: str
    precision: str
    samples: int
    sampled: bool
    total_macs: int
    half_macs: int
    floats: tuple[str, ...]
    faster: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the table that a person reads, one row each."""
        share = 100 * self.half_macs / max(self.total_macs, 1)
        rows = [("work in float16", f"{share:.1f} % of {self.total_macs / 1e6:,.1f} million multiply-adds")]
        source = "samples" if self.sampled else "random inputs"
        rows.append(
            ("large numbers", f"{table.names(self.floats) or 'none'} (measured on {self.samples} {source})")
        )
        if self.faster:
            rows.append(("first layers", f"{table.names(self.faster)}: faster in float32"))
        return table.lines(rows)


@dataclass(frozen=True, slots=True)
class HalvesModel:
    """A model that is to be computed in float16.

    `model`: the model, marked.
    """

    model: ImportedModel
    report: HalvesReport


def to_halves(
    model: ImportedModel,
    target: DeviceTarget,
    *,
    calibration: Source | None = None,
    preprocess: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> HalvesModel:
    """Decide which products of a model are computed in float16.

    `calibration`, `preprocess`: as in `builder.quantize`: samples on which the largest numbers are measured.
        Without them, random inputs are used.
    Raises `TargetError` if the device does not compute in float16.
    Raises `ModelError` if the model is quantised, or the calibration data cannot be used.
    """
    progress = progress or (lambda _: None)
    require_half_arithmetic(target)
    if is_quantised(model.onnx):
        raise ModelError(
            "--precision fp16: expected a float model, got one that is quantised already",
            hint="compile it as it is: its products of bytes take fewer instructions than those in float16",
        )
    data = samples_for(model, calibration, preprocess)
    progress(f"measuring the largest numbers on {len(data)} samples")
    source = folded(model.onnx)  # batch norms are folded into weights, as the compiler does
    largest = _largest(source, data)
    graph = OnnxGraph(source)
    floats = tuple(node.name for node in source.graph.node if not _fits(node, graph, largest))
    faster = _faster_in_floats(model.mod, target) - set(floats)
    products = [node for node in source.graph.node if multiply_adds_of(node, graph)]
    total = sum(multiply_adds_of(node, graph) for node in products)
    half = sum(
        multiply_adds_of(node, graph)
        for node in products
        if node.name not in faster.union(floats)
        and node.op_type in _PRODUCTS
        and graph.is_constant(node.input[1])
    )
    report = HalvesReport(
        model=model.name,
        precision="fp16",
        samples=len(data),
        sampled=calibration is not None,
        total_macs=total,
        half_macs=half,
        floats=floats,
        faster=tuple(node.name for node in products if node.name in faster),
    )
    return HalvesModel(replace(model, mod=mark(model.mod, floats)), report)


def _faster_in_floats(mod: tvm.IRModule, target: DeviceTarget) -> set[str]:
    """Return the nodes that are computed in float32 because that is faster."""
    found: set[str] = set()
    for binding in bindings_of(mod):
        call = binding.value
        if (
            not isinstance(call, Call)
            or op_name(call) != "relax.nn.conv2d"
            or constant_of(call.args[1]) is None
        ):
            continue
        op = Conv2d.of(call)
        if op is not None and half_winograd.is_faster_in_floats(op, target):
            found.update(names_of(call))
    return found


def _largest(model: onnx.ModelProto, data: CalibrationData) -> dict[str, float]:
    """Return the largest magnitude of each float32 tensor over all samples; infinite if one is not finite."""
    names = [name for node in model.graph.node for name in node.output if name]
    session = Session(model, names)
    largest: dict[str, float] = {}
    for index in range(len(data)):
        sample = data.read(index)
        values = [*sample.items(), *zip(names, session.run(sample), strict=True)]
        for name, value in values:
            if value.dtype == np.float32 and value.size:
                found = float(np.abs(value).max())
                largest[name] = max(largest.get(name, 0.0), found if np.isfinite(found) else np.inf)
    return largest


def _fits(node: onnx.NodeProto, graph: OnnxGraph, largest: dict[str, float]) -> bool:
    """Whether all numbers that a node reads and makes are far enough from float16's largest."""
    for name in (*node.input, *node.output):
        if name in largest and not largest[name] * HEADROOM <= LARGEST:
            return False
    if node.op_type not in _PRODUCTS or node.input[0] not in largest:
        return True
    weight = graph.constant(node.input[1])
    if weight is None or weight.ndim < 2 or not weight.size:
        return True
    return largest[node.input[0]] <= most_for(_growth(node, weight))


def _growth(node: onnx.NodeProto, weight: NDArray[Any]) -> float:
    """Return the largest ratio of a product's sums in float16 to its largest factor."""
    if node.op_type == "Conv":
        strides = next((list(a.ints) for a in node.attribute if a.name == "strides"), [1, 1])
        return growth_of_convolution(weight, strides)
    if node.op_type == "ConvTranspose":
        return growth_of_convolution(weight.swapaxes(0, 1))
    turned = any(a.name == "transB" and a.i for a in node.attribute)
    return growth_of_matrix(weight.swapaxes(-1, -2) if turned else weight)
