"""The normalised ONNX model as a Relax module, by TVM's own front end."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Final

import onnx
from onnx import helper
from tvm import relax
from tvm.ir import IRModule
from tvm.relax.frontend.onnx import from_onnx, onnx_frontend

from agent.bundle.tensor_spec import TensorSpec
from builder.errors import FrontEndError, ModelError
from builder.importer.relax_cleanup import clean_up
from builder.importer.silence import FOREIGN_FAILURES, first_line, quiet_native

# The front end makes tuples of these, or crashes; a graph executor has tensors alone.
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
    """A static Relax module and what its inputs and outputs are called.

    Attributes
    ----------
    mod
        Holds `main`, whose parameters are the inputs in the order of `inputs`; weights are constants.
    inputs, outputs
        In the order of the parameters, and of the returned tuple (a single output is returned bare).
    """

    mod: IRModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def supported_operators() -> frozenset[str]:
    """Operators of ONNX's own domain that TVM's front end has a converter for."""
    # The list has no public name; nothing else says what the front end knows.
    return frozenset(onnx_frontend._get_convert_map()) - _NOT_TENSORS


def convert(model: onnx.ModelProto) -> IRModule:
    """Run the front end, silently.

    Raises
    ------
    FrontEndError
        If it refused.
    """
    with quiet_native():
        try:
            return clean_up(from_onnx(model, keep_params_in_input=False))
        except FOREIGN_FAILURES as error:
            reason = first_line(error)
        # What is left half built complains when it is destroyed, which must be now: its frames hang on the
        # error.
        gc.collect()
    raise FrontEndError(reason)


def to_relax(model: onnx.ModelProto) -> RelaxModel:
    """Convert a normalised model.

    Raises
    ------
    FrontEndError
        If the front end refused the model, or made shapes that are not static.
    ModelError
        If an input's or output's name or datatype cannot be served.
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
    """The front end's types must be ONNX's: a difference means a wrong converter."""
    if len(specs) != len(types):
        raise FrontEndError(f"{len(types)} {kind}s came out of {len(specs)}")
    for spec, found in zip(specs, types, strict=True):
        dims = getattr(getattr(found, "shape", None), "values", None)
        shape = None if dims is None else tuple(getattr(dim, "value", None) for dim in dims)
        dtype = str(getattr(getattr(found, "dtype", None), "dtype", ""))
        if shape != spec.shape or dtype != spec.dtype:
            came = "of unknown shape" if shape is None or None in shape else f"{list(shape)} {dtype}"
            raise FrontEndError(
                f"{kind} '{spec.name}' should be {list(spec.shape)} {spec.dtype}, became {came}"
            )
