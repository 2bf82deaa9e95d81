"""Weights-only quantisation: weights in few bits, arithmetic in float32. No calibration data are needed.

| precision | matrix products, embedding tables | convolutions |
|---|---|---|
| `weights-fp16` | float16 | float16 |
| `weights-int8` | int8, a scale for each output channel, or for each row of a table | the same |
| `weights-int4` | 4 bits, a scale in float16 for each block of 32 | int8 |

The result is ordinary ONNX: Cast or DequantizeLinear of constants. It is exactly what the compiled model
computes, so the compiler compares with it as with any other model. Its distance from the float model is
measured here and reported.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from agent import __version__
from agent.durable import replacing
from builder.errors import ModelError
from builder.importer import ImportedModel, import_onnx, load
from builder.importer.large_models import model_bytes
from builder.importer.onnx_graph import OnnxGraph, attributes, copy_node, remove_dead_nodes
from builder.importer.opset import WITH_BLOCKS, raise_opset
from builder.importer.shapes import infer_shapes
from builder.quantising import table
from builder.quantising.agreement import Agreement, Comparison, class_scores, truths_for
from builder.quantising.block_levels import quantise_blocks
from builder.quantising.calibration import Source, samples_for
from builder.quantising.folding import folded
from builder.quantising.report import kilobytes
from builder.quantising.weight_levels import LARGEST_WEIGHT, best_scales

WeightsPrecision = Literal["weights-fp16", "weights-int8", "weights-int4"]
WEIGHTS_PRECISIONS: Final[tuple[str, ...]] = get_args(WeightsPrecision)
BLOCK: Final = 32
# Smaller constants stay as they are: they save nothing, and a few numbers may matter much.
FEWEST_WEIGHTS: Final = 1024
_LARGEST_HALF: Final = 65504.0

Array = NDArray[Any]
Progress = Callable[[str], None]
# What identifies a weight and the way in which it is quantised -> its codes and their scales.
Levels = dict[tuple[object, ...], tuple[Array, Array]]


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What weights-only quantisation did and cost.

    `float_bytes`, `bytes`: size of the float model, as imported, and of the quantised one.
    `weights`, `quantised`: how many weights the model has, and how many of them were quantised.
    `sampled`: whether the agreement was measured on calibration data, not on random numbers.
    """

    model: str
    precision: str
    float_bytes: int
    bytes: int
    weights: int
    quantised: int
    sampled: bool
    agreement: Agreement

    def document(self) -> dict[str, Any]:
        """Return all fields, for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the table that a person reads, one row each."""
        share = 100 * self.quantised / max(self.weights, 1)
        ratio = self.bytes / max(self.float_bytes, 1)
        rows = [
            ("size", f"{kilobytes(self.bytes)}, float {kilobytes(self.float_bytes)} ({ratio:.2f})"),
            ("weights", f"{share:.1f} % of {self.weights / 1e6:,.1f} million in {self.precision[8:]}"),
        ]
        found = self.agreement
        source = "samples" if self.sampled else "random inputs"
        if found.accuracy is not None:
            rows.append(("accuracy", f"{found.accuracy:.2f} %, float {found.float_accuracy:.2f} %"))
        if found.top1 is not None and self.sampled:
            text = f"{found.top1:.2f} % of {found.samples} samples have float's best class"
            rows.append(("agreement", text))
        if found.sqnr_db is not None:
            rows.append(("noise", f"{found.sqnr_db:.1f} dB signal to noise on {found.samples} {source}"))
        return table.lines(rows)


@dataclass(frozen=True, slots=True)
class WeightsOnlyModel:
    """A model whose weights have few bits.

    Attributes
    ----------
    onnx
        The model, with static shapes.
    name
        The float model's name.
    report
        What quantising did and cost.
    """

    onnx: onnx.ModelProto
    name: str
    report: WeightsReport

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model's file, at once and completely."""
        with replacing(Path(path)) as file:
            file.write(self.onnx.SerializeToString(deterministic=True))

    def imported(self, progress: Progress | None = None) -> ImportedModel:
        """Return the model in the form that `builder.compile` takes, with the float model's name."""
        return replace(import_onnx(self.onnx, progress=progress), name=self.name)


def quantize_weights(
    model: ImportedModel | str | os.PathLike[str],
    precision: WeightsPrecision,
    *,
    calibration: Source | None = None,
    preprocess: str | None = None,
    labels: str | os.PathLike[str] | None = None,
    levels: Levels | None = None,
    progress: Progress | None = None,
) -> WeightsOnlyModel:
    """Quantise the weights of a float model.

    Parameters
    ----------
    model
        The result of `builder.load`, or a path.
    precision
        What the weights become.
    calibration, preprocess, labels
        As in `builder.quantize`; only to measure what it costs. Without them, random inputs are used.
    levels
        What was made of weights before, to which new ones are added; None for nothing.
    progress
        Called with each step as it begins.

    Raises
    ------
    ModelError
        If the model has no weights to quantise, or weights that the precision cannot hold; if the
        calibration data cannot be used.
    """
    progress = progress or (lambda _: None)
    if precision not in WEIGHTS_PRECISIONS:
        raise ModelError(
            f"expected a precision of {', '.join(WEIGHTS_PRECISIONS)}, got {precision!r:.40}",
            hint=f"write precision={WEIGHTS_PRECISIONS[0]!r}",
        )
    if not isinstance(model, ImportedModel):
        progress("importing the model")
        model = load(model, progress=progress)
    progress(f"quantising weights to {precision.removeprefix('weights-')}")
    work = _Weights(folded(model.onnx), precision, {} if levels is None else levels)
    source, quantised = work.source, work.run()
    progress("comparing the quantised model with the float model")
    agreement = _agreement(model, source, quantised, calibration, preprocess, labels, progress)
    report = WeightsReport(
        model.name,
        precision,
        model_bytes(model.onnx),
        model_bytes(quantised),
        work.total,
        work.quantised,
        calibration is not None,
        agreement,
    )
    return WeightsOnlyModel(quantised, model.name, report)


def quantise_like(model: ImportedModel, precision: WeightsPrecision, levels: Levels) -> ImportedModel:
    """Quantise the weights of a model whose agreement was measured at another size.

    Raises `ModelError` if it has no weights to quantise, or weights that the precision cannot hold.
    """
    quantised = _Weights(folded(model.onnx), precision, levels).run()
    return replace(import_onnx(quantised), name=model.name)


def _agreement(
    model: ImportedModel,
    source: onnx.ModelProto,
    quantised: onnx.ModelProto,
    calibration: Source | None,
    preprocess: str | None,
    labels: str | os.PathLike[str] | None,
    progress: Progress,
) -> Agreement:
    data = samples_for(model, calibration, preprocess)
    scores = class_scores(model.outputs)
    truths = truths_for(labels, data, model.outputs, scores)
    return Comparison(source, model.outputs, data, truths, scores, progress).measure(quantised)


class _Weights:
    """Replaces the weights of one model.

    `total`, `quantised`: how many float32 weights the model has, and how many were quantised.
    """

    def __init__(self, model: onnx.ModelProto, precision: WeightsPrecision, levels: Levels) -> None:
        self.source = model
        self._precision = precision
        self._levels = levels
        self._model = onnx.ModelProto()
        self._model.CopyFrom(model)
        if precision == "weights-int4":
            self._model = raise_opset(self._model, WITH_BLOCKS)
            if self._model.opset_import[0].version < WITH_BLOCKS:
                raise ModelError(
                    f"expected a model that ONNX can convert to opset {WITH_BLOCKS}, which has weights of "
                    f"4 bits, got opset {self._model.opset_import[0].version}",
                    hint="use weights-int8, or export the model again with a newer opset",
                )
            self._model.ir_version = max(self._model.ir_version, 10)
        self._graph = OnnxGraph(self._model)
        self.total = self.quantised = 0

    def run(self) -> onnx.ModelProto:
        """Return the model with other weights."""
        floats = [t for t in self._model.graph.initializer if t.data_type == TensorProto.FLOAT]
        self.total = sum(int(np.prod(t.dims)) for t in floats)
        known: dict[tuple[str, str], tuple[str, Sequence[onnx.NodeProto]]] = {}

        def replace_node(node: onnx.NodeProto) -> list[onnx.NodeProto] | None:
            place = _place(node)
            if place is None or node.input[place] not in names:
                return None
            weight = self._graph.constant(node.input[place])
            if weight is None or weight.size < FEWEST_WEIGHTS or weight.ndim < 2:
                return None
            if not np.isfinite(weight).all():
                return None
            self._check(node, weight)
            key = (node.input[place], f"{node.op_type} {attributes(node).get('transB', 0)}")
            first = key not in known
            if first:
                turned = node.op_type == "Gemm" and bool(attributes(node).get("transB", 0))
                array = np.ascontiguousarray(weight.T) if turned else weight
                known[key] = self._quantised(node, array)
                self.quantised += weight.size
            name, made = known[key]
            return [*(made if first else ()), *self._reader(node, place, name)]

        names = {t.name for t in floats}
        self._graph.rewrite(replace_node)
        if not self.quantised:
            raise ModelError(
                f"expected float32 weights of matrix products, convolutions or tables with at least "
                f"{FEWEST_WEIGHTS} elements, got none",
                hint="compile the model as it is",
            )
        remove_dead_nodes(self._model.graph)
        infer_shapes(self._model)
        self._model.producer_name, self._model.producer_version = "edgebundle", __version__
        return self._model

    def _check(self, node: onnx.NodeProto, weight: Array) -> None:
        largest = float(np.abs(weight).max())
        if self._precision == "weights-fp16" and largest > _LARGEST_HALF:
            raise ModelError(
                f"{node.name[:80]}: expected weights up to {_LARGEST_HALF:g}, which float16 holds, "
                f"got {largest:g}",
                hint="use weights-int8",
            )

    def _reader(self, node: onnx.NodeProto, place: int, name: str) -> Sequence[onnx.NodeProto]:
        """Return the node with its new weights; a Gemm becomes a product and an addition."""
        copy = copy_node(node)
        copy.input[place] = name
        if node.op_type != "Gemm":
            return [copy]
        bias = node.input[2] if len(node.input) > 2 else ""
        product = self._graph.fresh(f"{node.name}/MatMul") if bias else node.output[0]
        nodes = [helper.make_node("MatMul", [node.input[0], name], [product], name=f"{node.name}/MatMul")]
        if bias:
            nodes.append(helper.make_node("Add", [product, bias], list(node.output), name=f"{node.name}/Add"))
        return nodes

    def _quantised(self, node: onnx.NodeProto, weight: Array) -> tuple[str, Sequence[onnx.NodeProto]]:
        """Return the name of the new weights, and the nodes that make them."""
        output = self._graph.fresh(f"{node.name}/weights")
        if self._precision == "weights-fp16":
            half = self._graph.add_constant(weight.astype(np.float16), f"{node.name}_weight")
            cast = helper.make_node("Cast", [half], [output], name=f"{node.name}/Cast", to=TensorProto.FLOAT)
            return output, [cast]
        # Blocks are along the axis that is summed; of a table, along a row.
        channels = {"Conv": 0, "Gather": 0}.get(node.op_type, 1)
        if self._precision == "weights-int4" and node.op_type != "Conv" and weight.ndim == 2:
            codes, scales = self._once(
                weight, ("blocks", channels), lambda: quantise_blocks(weight, 1 - channels, BLOCK)
            )
            name = self._graph.fresh(f"{node.name}_codes")
            packed = helper.make_tensor(
                name, TensorProto.INT4, codes.shape, _two_in_a_byte(codes).tobytes(), raw=True
            )
            self._graph.set_initializer(packed)
            options = {"axis": 1 - channels, "block_size": BLOCK}
        else:
            codes, scales = self._once(weight, ("rows", channels), lambda: _in_bytes(weight, channels))
            name = self._graph.add_constant(codes, f"{node.name}_codes")
            options = {"axis": channels}
        scale = self._graph.add_constant(scales, f"{node.name}_scales")
        made = helper.make_node(
            "DequantizeLinear", [name, scale], [output], name=f"{node.name}/DequantizeLinear", **options
        )
        return output, [made]

    def _once(
        self, weight: Array, how: tuple[object, ...], make: Callable[[], tuple[Array, Array]]
    ) -> tuple[Array, Array]:
        key = (*how, weight.shape, hashlib.sha256(np.ascontiguousarray(weight).data).digest())
        if key not in self._levels:
            self._levels[key] = make()
        return self._levels[key]


def _in_bytes(weight: Array, channels: int) -> tuple[Array, Array]:
    """Return codes from -127 to 127, and the scale of each channel."""
    scales = best_scales(weight, channels).astype(np.float32)
    shape = [1] * weight.ndim
    shape[channels] = -1
    steps = np.rint(weight / scales.reshape(shape).astype(np.float64))
    return np.clip(steps, -LARGEST_WEIGHT, LARGEST_WEIGHT).astype(np.int8), scales


def _two_in_a_byte(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Return codes of four bits as ONNX stores them: two in a byte, the first in the lower half."""
    flat = codes.reshape(-1).view(np.uint8) & 15
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    return np.asarray(flat[0::2] | flat[1::2] << 4, np.uint8)


def _place(node: onnx.NodeProto) -> int | None:
    """Return the input of a node that is its weights, None if they are not quantised."""
    if node.domain:
        return None
    options = attributes(node)
    match node.op_type:
        case "MatMul" | "Conv":
            return 1
        case "Gemm" if options.get("alpha", 1.0) == options.get("beta", 1.0) == 1.0:
            return None if options.get("transA", 0) else 1
        case "Gather" if options.get("axis", 0) == 0:
            return 0
        case _:
            return None
