"""Write small `.tflite` files: tensors, operators and options, with the schema's own functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import flatbuffers
import numpy as np
import tflite
from numpy.typing import NDArray

TYPES: Final = {
    "float32": tflite.TensorType.FLOAT32,
    "float16": tflite.TensorType.FLOAT16,
    "float64": tflite.TensorType.FLOAT64,
    "int4": tflite.TensorType.INT4,
    "int8": tflite.TensorType.INT8,
    "int16": tflite.TensorType.INT16,
    "int32": tflite.TensorType.INT32,
    "int64": tflite.TensorType.INT64,
    "uint8": tflite.TensorType.UINT8,
    "uint16": tflite.TensorType.UINT16,
    "uint32": tflite.TensorType.UINT32,
    "bool": tflite.TensorType.BOOL,
    "string": tflite.TensorType.STRING,
    "complex64": tflite.TensorType.COMPLEX64,
    "resource": tflite.TensorType.RESOURCE,
}
# The interpreter has these only from a later version on.
VERSIONS: Final = {"BROADCAST_TO": 2}


@dataclass
class Sparse:
    """How a constant is stored: each level is an extent, or segments and indices."""

    order: Sequence[int]
    block_map: Sequence[int]
    levels: Sequence[int | tuple[Sequence[int], Sequence[int]]]
    width: str = "Int32Vector"


@dataclass
class FileTensor:
    """A tensor to write; `data` makes it constant, `scales` quantise it.

    `block`: so many numbers share a scale, in place of `scales`: those are in tensor 0.
    """

    shape: Sequence[int] = ()
    dtype: str = "float32"
    data: NDArray[Any] | bytes | None = None
    scales: Sequence[float] = ()
    zeros: Sequence[int] = ()
    axis: int = 0
    name: str = ""
    variable: bool = False
    signature: Sequence[int] = ()
    sparsity: Sparse | None = None
    block: int = 0


@dataclass
class FileOperator:
    """An operator to write; `options` are the schema's fields by name."""

    code: str
    inputs: Sequence[int]
    outputs: Sequence[int]
    options: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    intermediates: Sequence[int] = ()
    custom: bytes = b""


@dataclass
class FileSubgraph:
    """A subgraph to write."""

    tensors: list[FileTensor] = field(default_factory=list)
    operators: list[FileOperator] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def tensor(self, *arguments: Any, **fields: Any) -> int:
        self.tensors.append(FileTensor(*arguments, **fields))
        return len(self.tensors) - 1

    def constant(self, values: Any, dtype: str | None = None, **fields: Any) -> int:
        array = np.asarray(values, dtype)
        if array.dtype == np.int64 and dtype is None:
            array = array.astype(np.int32)
        return self.tensor(array.shape, str(array.dtype), array, **fields)

    def op(
        self, code: str, inputs: Sequence[int], outputs: Sequence[int], options: str = "", **fields: Any
    ) -> None:
        between, custom = fields.pop("intermediates", ()), fields.pop("custom", b"")
        self.operators.append(FileOperator(code, inputs, outputs, options, fields, between, custom))


def write(
    *subgraphs: FileSubgraph, metadata: Mapping[str, bytes] | None = None, deprecated: bool = True
) -> bytes:
    """Write a file; an operator code that the schema does not know is a custom operator.

    Without `deprecated`, codes are only in the newer field, as ai-edge-quantizer writes those that it adds.
    """
    b = flatbuffers.Builder(1024)
    buffers: list[bytes] = [b""]
    codes: list[str] = []
    graphs = [_subgraph(b, graph, buffers, codes) for graph in subgraphs]
    pieces = []
    for name, content in (metadata or {}).items():
        buffers.append(content)
        text = b.CreateString(name)
        tflite.MetadataStart(b)
        tflite.MetadataAddName(b, text)
        tflite.MetadataAddBuffer(b, len(buffers) - 1)
        pieces.append(tflite.MetadataEnd(b))
    code_tables = []
    for code in codes:
        number = getattr(tflite.BuiltinOperator, code, None)
        custom = b.CreateString(code) if number is None else None
        number = tflite.BuiltinOperator.CUSTOM if number is None else number
        tflite.OperatorCodeStart(b)
        if deprecated:
            tflite.OperatorCodeAddDeprecatedBuiltinCode(b, min(number, 127))
        tflite.OperatorCodeAddBuiltinCode(b, number)
        tflite.OperatorCodeAddVersion(b, VERSIONS.get(code, 1))
        if custom is not None:
            tflite.OperatorCodeAddCustomCode(b, custom)
        code_tables.append(tflite.OperatorCodeEnd(b))
    buffer_tables = []
    for content in buffers:
        data = _bytes(b, content) if content else None
        tflite.BufferStart(b)
        if data is not None:
            tflite.BufferAddData(b, data)
        buffer_tables.append(tflite.BufferEnd(b))
    vectors = [_tables(b, tables) for tables in (code_tables, graphs, buffer_tables, pieces)]
    tflite.ModelStart(b)
    tflite.ModelAddVersion(b, 3)
    tflite.ModelAddOperatorCodes(b, vectors[0])
    tflite.ModelAddSubgraphs(b, vectors[1])
    tflite.ModelAddBuffers(b, vectors[2])
    if pieces:
        tflite.ModelAddMetadata(b, vectors[3])
    b.Finish(tflite.ModelEnd(b), b"TFL3")
    return bytes(b.Output())


def _bytes(b: Any, content: bytes) -> int:
    """A vector of bytes at a multiple of 16, which the interpreter's kernels need."""
    b.StartVector(1, len(content), 16)
    b.head -= len(content)
    b.Bytes[b.head : b.head + len(content)] = content
    return int(b.EndVector())


def _tables(b: Any, offsets: Sequence[int]) -> int:
    b.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        b.PrependUOffsetTRelative(offset)
    return int(b.EndVector())


def _vector(b: Any, values: Sequence[Any], dtype: str) -> int:
    return int(b.CreateNumpyVector(np.asarray(values, dtype)))


def _subgraph(b: Any, graph: FileSubgraph, buffers: list[bytes], codes: list[str]) -> int:
    tensors = [_tensor(b, tensor, index, buffers) for index, tensor in enumerate(graph.tensors)]
    operators = []
    for operator in graph.operators:
        if operator.code not in codes:
            codes.append(operator.code)
        operators.append(_operator(b, operator, codes.index(operator.code)))
    parts = _tables(b, tensors), _tables(b, operators)
    ends = _vector(b, graph.inputs, "int32"), _vector(b, graph.outputs, "int32")
    name = b.CreateString("main")
    tflite.SubGraphStart(b)
    tflite.SubGraphAddName(b, name)
    tflite.SubGraphAddTensors(b, parts[0])
    tflite.SubGraphAddOperators(b, parts[1])
    tflite.SubGraphAddInputs(b, ends[0])
    tflite.SubGraphAddOutputs(b, ends[1])
    return int(tflite.SubGraphEnd(b))


def _tensor(b: Any, tensor: FileTensor, index: int, buffers: list[bytes]) -> int:
    buffer = 0
    if tensor.data is not None:
        content = (
            tensor.data if isinstance(tensor.data, bytes) else np.ascontiguousarray(tensor.data).tobytes()
        )
        buffers.append(content)
        buffer = len(buffers) - 1
    name = b.CreateString(tensor.name or f"t{index}")
    shape = _vector(b, tensor.shape, "int32")
    signature = _vector(b, tensor.signature, "int32") if tensor.signature else None
    quantisation = None
    if tensor.scales:
        zeros = _vector(b, tensor.zeros or [0] * len(tensor.scales), "int64")
        scales = _vector(b, tensor.scales, "float32")
        tflite.QuantizationParametersStart(b)
        tflite.QuantizationParametersAddScale(b, scales)
        tflite.QuantizationParametersAddZeroPoint(b, zeros)
        tflite.QuantizationParametersAddQuantizedDimension(b, tensor.axis)
        quantisation = tflite.QuantizationParametersEnd(b)
    if tensor.block:
        quantisation = _blocks(b, tensor.block)
    sparsity = None if tensor.sparsity is None else _sparsity(b, tensor.sparsity)
    tflite.TensorStart(b)
    tflite.TensorAddShape(b, shape)
    tflite.TensorAddType(b, TYPES[tensor.dtype])
    tflite.TensorAddBuffer(b, buffer)
    tflite.TensorAddName(b, name)
    if quantisation is not None:
        tflite.TensorAddQuantization(b, quantisation)
    if sparsity is not None:
        tflite.TensorAddSparsity(b, sparsity)
    if tensor.variable:
        tflite.TensorAddIsVariable(b, True)
    if signature is not None:
        tflite.TensorAddShapeSignature(b, signature)
    return int(tflite.TensorEnd(b))


def _blocks(b: Any, size: int) -> int:
    """The table BlockwiseQuantization, which the package lacks: `scales`, `zero_points`, `block_size`."""
    b.StartObject(3)
    b.PrependInt32Slot(2, size, 0)
    details = b.EndObject()
    tflite.QuantizationParametersStart(b)
    tflite.QuantizationParametersAddDetailsType(b, 2)
    tflite.QuantizationParametersAddDetails(b, details)
    return int(tflite.QuantizationParametersEnd(b))


def _sparsity(b: Any, sparse: Sparse) -> int:
    dtype = {"Int32Vector": "int32", "Uint16Vector": "uint16", "Uint8Vector": "uint8"}[sparse.width]
    kind = getattr(tflite.SparseIndexVector, sparse.width)

    def numbers(values: Sequence[int]) -> int:
        found = _vector(b, values, dtype)
        getattr(tflite, f"{sparse.width}Start")(b)
        getattr(tflite, f"{sparse.width}AddValues")(b, found)
        return int(getattr(tflite, f"{sparse.width}End")(b))

    levels = []
    for level in sparse.levels:
        ends = None if isinstance(level, int) else [numbers(values) for values in level]
        tflite.DimensionMetadataStart(b)
        if ends is None:
            tflite.DimensionMetadataAddDenseSize(b, level)
        else:
            tflite.DimensionMetadataAddFormat(b, tflite.DimensionType.SPARSE_CSR)
            tflite.DimensionMetadataAddArraySegmentsType(b, kind)
            tflite.DimensionMetadataAddArraySegments(b, ends[0])
            tflite.DimensionMetadataAddArrayIndicesType(b, kind)
            tflite.DimensionMetadataAddArrayIndices(b, ends[1])
        levels.append(tflite.DimensionMetadataEnd(b))
    order, block_map = _vector(b, sparse.order, "int32"), _vector(b, sparse.block_map, "int32")
    tables = _tables(b, levels)
    tflite.SparsityParametersStart(b)
    tflite.SparsityParametersAddTraversalOrder(b, order)
    tflite.SparsityParametersAddBlockMap(b, block_map)
    tflite.SparsityParametersAddDimMetadata(b, tables)
    return int(tflite.SparsityParametersEnd(b))


def _operator(b: Any, operator: FileOperator, code: int) -> int:
    options = None
    if operator.options:
        values = {
            key: _field_vector(b, operator.options, key, value)
            if isinstance(value, list | np.ndarray)
            else (b.CreateString(value) if isinstance(value, str) else value)
            for key, value in operator.fields.items()
        }
        getattr(tflite, f"{operator.options}Start")(b)
        for key, value in values.items():
            getattr(tflite, f"{operator.options}Add{key}")(b, value)
        options = getattr(tflite, f"{operator.options}End")(b)
    inputs, outputs = _vector(b, operator.inputs, "int32"), _vector(b, operator.outputs, "int32")
    between = _vector(b, operator.intermediates, "int32") if operator.intermediates else None
    custom = b.CreateByteVector(operator.custom) if operator.custom else None
    tflite.OperatorStart(b)
    tflite.OperatorAddOpcodeIndex(b, code)
    tflite.OperatorAddInputs(b, inputs)
    tflite.OperatorAddOutputs(b, outputs)
    if custom is not None:
        tflite.OperatorAddCustomOptions(b, custom)
    if between is not None:
        tflite.OperatorAddIntermediates(b, between)
    if options is not None:
        if hasattr(tflite.BuiltinOptions, operator.options):
            tflite.OperatorAddBuiltinOptionsType(b, getattr(tflite.BuiltinOptions, operator.options))
            tflite.OperatorAddBuiltinOptions(b, options)
        else:
            tflite.OperatorAddBuiltinOptions2Type(b, getattr(tflite.BuiltinOptions2, operator.options))
            tflite.OperatorAddBuiltinOptions2(b, options)
    return int(tflite.OperatorEnd(b))


def _field_vector(b: Any, options: str, key: str, values: Any) -> int:
    if (options, key) == ("BucketizeOptions", "Boundaries"):
        return _vector(b, values, "float32")
    return _vector(b, values, "int64" if options.startswith("Stablehlo") else "int32")
