"""Convert the normalised ONNX model to a Relax module with TVM's own front end."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import onnx
from onnx import helper
from tvm import relax
from tvm.ir import IRModule
from tvm.relax.frontend.onnx import from_onnx, onnx_frontend

from agent.bundle.tensor_spec import TensorSpec
from builder.calls.recurrent import GATES
from builder.calls.spans import TracingBuilder, carry, span_of
from builder.errors import FrontEndError, ModelError
from builder.importer import converters, integer_products, recurrent_call
from builder.importer.classic.kept import PLACEHOLDER, is_kept, kept_converter, with_placeholders
from builder.importer.converters import Converter
from builder.importer.relax_cleanup import clean_up
from builder.importer.silence import FOREIGN_FAILURES, first_line, quiet_native

# Errors of Python that the front end does not mean for users, and names inside TVM, which tell them nothing.
_MISHAPS: Final = (ArithmeticError, AttributeError, LookupError, NameError, TypeError)
_INTERNAL: Final = re.compile(
    r"<class|\b(tvm|relax|tirx?|topi|ffi|te)\.\w|Check failed|\b\w*[a-z](Expr|Type|Imm|Var|Node)\b"
)
_OF_TEXTS: Final = "it reads or makes texts, which a device does not have: export what is beside it"
_UNEXPLAINED: Final = "TVM's front end does not take it with these inputs and attributes"
# The front end turns these into tuples or crashes; a graph executor has only tensors.
_NOT_TENSORS: Final = frozenset(
    {
        "Optional",
        "OptionalGetElement",
        "OptionalHasElement",
        "ConcatFromSequence",
        "SequenceAt",
        "SequenceConstruct",
        "SequenceEmpty",
        "SequenceErase",
        "SequenceInsert",
        "SequenceLength",
        "SplitToSequence",
    }
)


@dataclass(frozen=True, slots=True)
class RelaxModel:
    """A static Relax module with the specs of its inputs and outputs.

    `mod`: holds `main`, whose parameters are the inputs in the order of `inputs`; weights are constants.
    `inputs`: in the order of the parameters.
    `outputs`: in the order of the returned tuple; a single output is returned without a tuple.
    """

    mod: IRModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def supported_operators() -> frozenset[str]:
    """Operators of ONNX's own domain that TVM's front end has a converter for."""
    # TVM has no public name for this list.
    own = {*GATES, "BitCast", "ConvInteger"}
    return (frozenset(onnx_frontend._get_convert_map()) | own) - _NOT_TENSORS


class _TracingImporter(onnx_frontend.ONNXGraphImporter):  # type: ignore[misc]  # TVM has no types
    """TVM's front end, which marks what it makes of each node."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as in the base class
        super().__init__(*args, **kwargs)
        self.bb = TracingBuilder()

    def _convert_operator(self, op_name: str, inputs: Any, attrs: Any, opset: int) -> relax.Expr:  # noqa: ANN401
        self.bb.current = span_of([attrs["tvm_custom"]["name"]])
        return super()._convert_operator(op_name, inputs, attrs, opset)


@contextmanager
def _own_front_end(nodes: Sequence[onnx.NodeProto]) -> Iterator[None]:
    """Let TVM's front end convert some operators of `nodes` in our way, and mark what it makes of each."""
    importer, converters_of_tvm = onnx_frontend.ONNXGraphImporter, onnx_frontend._get_convert_map

    def with_ours() -> dict[str, Any]:
        return {
            **converters_of_tvm(),
            **{kind: recurrent_call.converter(kind) for kind in GATES},
            "BitCast": Converter(converters.bit_cast),
            "Cast": Converter(converters.cast, onnx_frontend.Cast),
            "ConvInteger": Converter(integer_products.convolution),
            "DequantizeLinear": Converter(converters.dequantise_blocks, onnx_frontend.DequantizeLinear),
            "MatMulInteger": Converter(integer_products.matmul, onnx_frontend.MatMulInteger),
            "Pad": converters.Padding(),
            PLACEHOLDER: kept_converter(nodes),
        }

    onnx_frontend.ONNXGraphImporter, onnx_frontend._get_convert_map = _TracingImporter, with_ours
    try:
        yield
    finally:
        onnx_frontend.ONNXGraphImporter, onnx_frontend._get_convert_map = importer, converters_of_tvm


def convert(model: onnx.ModelProto) -> IRModule:
    """Run the front end with its output suppressed; calls have spans that name the nodes they come from.

    Raises `FrontEndError` if the front end refused the model.
    """
    with quiet_native(), _own_front_end(list(model.graph.node)):
        try:
            mod = from_onnx(_with_placeholders(model), _empty_inputs(model), keep_params_in_input=False)
            return carry(mod, clean_up(mod))
        except FOREIGN_FAILURES as error:
            reason = first_line(error)
            is_mishap = isinstance(error, _MISHAPS) or not str(error) or _INTERNAL.search(reason)
        # A half-built function complains when it is destroyed. The error's frames keep it alive: collect it
        # now, while output is suppressed.
        gc.collect()
    if "`object`" in reason:  # NumPy's type for texts
        raise FrontEndError(_OF_TEXTS)
    # Only the message says why: "Dynamic pads are not supported", "Slice with dynamic parameters".
    raise FrontEndError(_UNEXPLAINED if is_mishap else reason, depends_on_values="dynamic" in reason.lower())


def _empty_inputs(model: onnx.ModelProto) -> dict[str, list[int]] | None:
    """Shapes of inputs without elements: the front end takes an extent of 0 for an unknown one."""
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in model.graph.input
    }
    return {name: shape for name, shape in shapes.items() if 0 in shape} or None


def _with_placeholders(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model with placeholders for kept nodes; the model itself if it has none."""
    if not any(is_kept(node) for node in model.graph.node):
        return model
    graph = onnx.GraphProto(
        name=model.graph.name or "graph",
        node=with_placeholders(model.graph.node),
        initializer=model.graph.initializer,
        input=model.graph.input,
        output=model.graph.output,
        value_info=model.graph.value_info,
    )
    return onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, graph=graph)


def to_relax(model: onnx.ModelProto) -> RelaxModel:
    """Convert a normalised model.

    Raises `FrontEndError` if the front end refused the model, or produced other shapes or dtypes than ONNX
        infers.
    Raises `ModelError` if an input's or output's name or datatype cannot be served.
    """
    mod = convert(model)
    inputs = tuple(_spec(value) for value in model.graph.input)
    outputs = tuple(_spec(value) for value in model.graph.output)
    main = mod["main"]
    _check("input", inputs, [parameter.ty for parameter in main.params])
    returned = main.ret_ty
    _check("output", outputs, list(returned.fields) if isinstance(returned, relax.TupleType) else [returned])
    return RelaxModel(mod, inputs, outputs)


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    dtype = str(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    shape = tuple(dim.dim_value for dim in tensor.shape.dim)
    try:
        return TensorSpec.from_dtype(value.name, dtype, shape)
    except ValueError as error:
        raise ModelError(
            f"'{value.name}' cannot be served: {error}", hint="rename or convert it in the model"
        ) from error


def _check(kind: str, specs: tuple[TensorSpec, ...], types: list[relax.TensorType]) -> None:
    """Check that the front end's types equal ONNX's: a difference means that a converter is wrong."""
    if len(specs) != len(types):
        raise FrontEndError(f"expected {len(specs)} {kind}s, got {len(types)}")
    for spec, found in zip(specs, types, strict=True):
        dims = getattr(getattr(found, "shape", None), "values", None)
        shape = None if dims is None else tuple(getattr(dim, "value", None) for dim in dims)
        dtype = str(getattr(getattr(found, "dtype", None), "dtype", ""))
        if shape != spec.shape or dtype != spec.dtype:
            got = "an unknown shape" if shape is None or None in shape else f"{list(shape)} {dtype}"
            raise FrontEndError(f"{kind} '{spec.name}': expected {list(spec.shape)} {spec.dtype}, got {got}")
