"""Read a `.tflite` file into typed values.

Promises that every number is within its range: a vector is no longer than the file, indices exist, constants
have the bytes that their shape needs, scales are positive. Leaves the meaning of operators to `operators`.

The format is FlatBuffers with the schema of TensorFlow Lite, version 3 (`tensorflow/lite/schema/schema.fbs`).
The library that decodes it checks little: any read of a damaged file may raise, so that this module wraps
those errors once, and counts what it reads, because a small file can refer to the same bytes many times.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import tflite
from flatbuffers.number_types import Int32Flags
from numpy.typing import NDArray

from agent.bundle.tensor_spec import MAX_DIMENSIONS, MAX_TENSOR_BYTES
from builder.errors import ModelError
from builder.importer.onnx_graph import MAX_NODES
from builder.importer.tflite.sparsity import Sparsity
from builder.importer.tflite.tensor import DTYPES, TYPE_NAMES, Quantisation, Tensor

# Larger numbers with scales are biases, whose scales follow from those of data and weights. What files say is
# not always right: the axis of MobileNet's biases is that of its weights.
_LARGEST_QUANTISED: Final = 2
IDENTIFIER: Final = b"TFL3"
SCHEMA_VERSION: Final = 3
# Converted models have one to a few; each `If` and `While` adds two.
MAX_SUBGRAPHS: Final = 1024
# Tensors are at most a few times the operators.
MAX_TENSORS: Final = 4 * MAX_NODES
# The converter joins the names of fused operators, which makes long names; only the beginning is used.
MAX_NAME_BYTES: Final = 200
# A file refers to most of its bytes once. Strings and vtables are shared, which multiplies small numbers.
_READS_OF_THE_FILE: Final = 4
_LEAST_READS: Final = 1 << 20
# What the FlatBuffers library, NumPy and the classes of the schema raise for offsets outside the file.
MALFORMED: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    LookupError,
    TypeError,
    ValueError,
    struct.error,
)
# All sparse weights together, unpacked: they grow from a small file.
MAX_UNPACKED_BYTES: Final = 1 << 28
_CONTROL: Final = re.compile(r"[^ -~]")
_HINT: Final = "download or convert the model again: the file is truncated or damaged"

# Offset in the vtable of an OperatorCode's `builtin_code`.
_BUILTIN_CODE: Final = 10
# The same of a BlockwiseQuantization's `block_size`, and its place among the schemes: the package lacks both.
_BLOCK_SIZE: Final = 8
_BLOCKWISE: Final = 2

OPERATOR_NAMES: Final = MappingProxyType(
    {value: name for name, value in vars(tflite.BuiltinOperator).items() if not name.startswith("_")}
)
_OPTION_CLASSES: Final = MappingProxyType(
    {
        1: {v: k for k, v in vars(tflite.BuiltinOptions).items() if not k.startswith("_")},
        2: {v: k for k, v in vars(tflite.BuiltinOptions2).items() if not k.startswith("_")},
    }
)


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of a subgraph.

    `code`: a `tflite.BuiltinOperator`.
    `name`: its name in the schema; for a custom operator, the name that the file gives it.
    `inputs`, `outputs`, `intermediates`: indices of tensors; -1 in `inputs` is an optional tensor that is
        absent.
    `options`: the options' table, of the class named in `options_name`, or None if the file has none.
    `options_name`: such as `Conv2DOptions`; empty without options.
    `custom`: the options of a custom operator, as it defines them.
    """

    index: int
    code: int
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    intermediates: tuple[int, ...]
    options: Any
    options_name: str
    custom: bytes

    @property
    def is_custom(self) -> bool:
        """Whether it is no operator of the schema."""
        return self.code == int(tflite.BuiltinOperator.CUSTOM)


@dataclass(frozen=True, slots=True)
class Subgraph:
    """A subgraph: tensors, the operators in the order of execution, and its interface."""

    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TfliteModel:
    """A decoded file.

    `subgraphs`: the first is the model; operators of control flow call the others.
    `metadata`: name -> content, as the converter and others attached them.
    """

    subgraphs: tuple[Subgraph, ...]
    metadata: tuple[tuple[str, bytes], ...]


def read(raw: bytes, source: str) -> TfliteModel:
    """Decode a file.

    Parameters
    ----------
    raw
        The file's content.
    source
        The model's name in messages, such as its path.

    Raises
    ------
    ModelError
        If the content is not a TFLite model, or contradicts itself.
    """
    if raw[4:8] != IDENTIFIER:
        got = "an empty file" if not raw else "another format"
        raise ModelError(f"expected a TFLite model, got {got}: {source}", hint=_HINT)
    try:
        return _Reader(raw).model()
    except _DamagedError as error:
        raise ModelError(f"{source}: {error}", hint=_HINT) from error
    except MALFORMED as error:
        raise ModelError(
            f"expected a TFLite model, got a truncated or damaged file: {source}", hint=_HINT
        ) from error


class _DamagedError(Exception):
    """A fault of the file with a description for the user."""


class _Reader:
    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._left = max(_READS_OF_THE_FILE * len(raw), _LEAST_READS)
        self._unpacked = 0
        self._model = tflite.Model.GetRootAs(raw, 0)

    def model(self) -> TfliteModel:
        if self._model.Version() != SCHEMA_VERSION:
            raise _DamagedError(
                f"expected version {SCHEMA_VERSION} of the schema, got {self._model.Version()}"
            )
        codes = [
            self._code(self._model.OperatorCodes(i))
            for i in range(self._count(self._model.OperatorCodesLength(), "operator codes", MAX_NODES))
        ]
        subgraphs = self._count(self._model.SubgraphsLength(), "subgraphs", MAX_SUBGRAPHS)
        if not subgraphs:
            raise _DamagedError("expected at least one subgraph, got none")
        read = tuple(self._subgraph(self._model.Subgraphs(i), codes) for i in range(subgraphs))
        total = sum(len(graph.operators) for graph in read)
        if total > MAX_NODES:
            raise _DamagedError(f"expected a graph of at most {MAX_NODES} operators, got {total}")
        return TfliteModel(read, tuple(self._metadata()))

    def _count(self, length: int, what: str, limit: int) -> int:
        """Check the length of a vector of tables, each of which has an offset of 4 bytes."""
        if length > limit:
            raise _DamagedError(f"expected at most {limit} {what}, got {length}")
        self._take(4 * length)
        return length

    def _take(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise _DamagedError("expected each part of the file to be used once, got overlapping parts")

    def _text(self, table: Any, slot: int) -> str:  # noqa: ANN401 - the schema's classes have no types
        """A string, printable, of at most `MAX_NAME_BYTES`."""
        offset = table._tab.Offset(slot)
        if not offset:
            return ""
        length = table._tab.VectorLen(offset)
        start = table._tab.Vector(offset)
        if start + length > len(self._raw):
            raise _DamagedError("expected text inside the file, got an offset outside")
        self._take(min(length, MAX_NAME_BYTES))
        text = self._raw[start : start + min(length, MAX_NAME_BYTES)].decode("utf-8", errors="replace")
        return _CONTROL.sub("_", text)

    def _numbers(self, length: int, get: Callable[[], Any]) -> NDArray[Any]:
        """A vector of numbers, without a copy; numpy checks that it is inside the file."""
        if not length:
            return np.zeros(0, np.int64)
        self._take(length)
        return np.asarray(get())

    def _indices(self, length: int, get: Callable[[], Any], limit: int, *, optional: bool) -> tuple[int, ...]:
        found = self._numbers(length, get)
        least = -1 if optional else 0
        if found.size and not (least <= int(found.min()) and int(found.max()) < limit):
            raise _DamagedError(f"expected tensors {least} to {limit - 1}, got {int(found.max())}")
        return tuple(int(index) for index in found)

    def _code(self, table: Any) -> tuple[int, str]:  # noqa: ANN401
        # Files from before the schema had 127 operators use only the first field; both are the same, the
        # first is a placeholder, or it is left out (schema.fbs, OperatorCode). The package's `BuiltinCode`
        # takes what is left out for 0, which is ADD.
        place = table._tab.Offset(_BUILTIN_CODE)
        newer = int(table._tab.Get(Int32Flags, place + table._tab.Pos)) if place else 0
        code = max(int(table.DeprecatedBuiltinCode()), newer)
        if code == tflite.BuiltinOperator.CUSTOM:
            return code, self._text(table, 6) or "unnamed"
        return code, OPERATOR_NAMES.get(code, f"operator code {code}")

    def _subgraph(self, table: Any, codes: list[tuple[int, str]]) -> Subgraph:  # noqa: ANN401
        count = self._count(table.TensorsLength(), "tensors", MAX_TENSORS)
        tensors = tuple(self._tensor(table.Tensors(i), i) for i in range(count))
        inputs = self._indices(table.InputsLength(), table.InputsAsNumpy, count, optional=False)
        outputs = self._indices(table.OutputsLength(), table.OutputsAsNumpy, count, optional=False)
        if len(set(inputs)) != len(inputs):
            raise _DamagedError("expected every input once, got one twice")
        operators = tuple(
            self._operator(table.Operators(i), i, codes, count)
            for i in range(self._count(table.OperatorsLength(), "operators", MAX_NODES))
        )
        made = set(inputs)
        for operator in operators:
            for index in operator.outputs:
                if index in made:
                    raise _DamagedError(
                        f"expected every tensor to be made once, got '{tensors[index].name}' made twice"
                    )
                made.add(index)
        return Subgraph(tensors, operators, inputs, outputs)

    def _operator(
        self,
        table: Any,  # noqa: ANN401
        index: int,
        codes: list[tuple[int, str]],
        tensors: int,
    ) -> Operator:
        number = table.OpcodeIndex()
        if number >= len(codes):
            raise _DamagedError(f"operator {index}: expected one of {len(codes)} codes, got {number}")
        code, name = codes[number]
        inputs = self._indices(table.InputsLength(), table.InputsAsNumpy, tensors, optional=True)
        outputs = self._indices(table.OutputsLength(), table.OutputsAsNumpy, tensors, optional=False)
        between = self._indices(
            table.IntermediatesLength(), table.IntermediatesAsNumpy, tensors, optional=True
        )
        options, options_name = self._options(table)
        custom = b""
        if code == tflite.BuiltinOperator.CUSTOM:
            custom = self._numbers(table.CustomOptionsLength(), table.CustomOptionsAsNumpy).tobytes()
        return Operator(index, code, name, inputs, outputs, between, options, options_name, custom)

    def _options(self, table: Any) -> tuple[Any, str]:  # noqa: ANN401
        for names, kind, value in (
            (_OPTION_CLASSES[1], table.BuiltinOptionsType(), table.BuiltinOptions()),
            (_OPTION_CLASSES[2], table.BuiltinOptions2Type(), table.BuiltinOptions2()),
        ):
            name = names.get(kind, "")
            if kind and value is not None and hasattr(tflite, name):
                options = getattr(tflite, name)()
                options.Init(value.Bytes, value.Pos)
                return options, name
        return None, ""

    def _tensor(self, table: Any, index: int) -> Tensor:  # noqa: ANN401
        name = self._text(table, 10) or f"tensor_{index}"
        shape = self._shape(self._numbers(table.ShapeLength(), table.ShapeAsNumpy), name)
        signature = self._numbers(table.ShapeSignatureLength(), table.ShapeSignatureAsNumpy)
        kind = int(table.Type())
        obstacle = None
        if kind not in DTYPES:
            obstacle = f"its datatype is {TYPE_NAMES.get(kind, kind)}"
        elif (scheme := table.Quantization()) is not None and scheme.DetailsType():
            obstacle = _scheme(scheme)
        data = None if obstacle else self._data(table.Buffer(), kind, shape, name, table.Sparsity())
        quantisation = None if obstacle else self._quantisation(table.Quantization(), shape, kind, name)
        return Tensor(
            index,
            name,
            kind,
            shape,
            data,
            quantisation,
            obstacle,
            tuple(np.flatnonzero(signature < 0).tolist()) if table.HasRank() or shape else None,
        )

    def _shape(self, dims: NDArray[Any], name: str) -> tuple[int, ...]:
        if dims.size > MAX_DIMENSIONS:
            raise _DamagedError(
                f"tensor '{name}': expected at most {MAX_DIMENSIONS} dimensions, got {dims.size}"
            )
        shape = tuple(int(dim) for dim in dims)
        # Old converters wrote -1 for an unknown batch.
        shape = tuple(1 if dim == -1 else dim for dim in shape)
        if any(dim < 0 for dim in shape) or math.prod(shape) * 8 > MAX_TENSOR_BYTES:
            raise _DamagedError(f"tensor '{name}': expected a shape of at most 4 GiB, got {list(shape)}")
        return shape

    def _data(
        self,
        buffer: int,
        kind: int,
        shape: tuple[int, ...],
        name: str,
        sparsity: Any,  # noqa: ANN401
    ) -> NDArray[Any] | None:
        if not buffer:
            return None  # the schema's sentinel: buffer 0 is always empty
        if buffer >= self._model.BuffersLength():
            raise _DamagedError(f"tensor '{name}': expected one of the file's buffers, got {buffer}")
        table = self._model.Buffers(buffer)
        if table.Offset() > 1:  # large files have their data behind the FlatBuffer
            start, length = int(table.Offset()), int(table.Size())
            if start + length > len(self._raw):
                raise _DamagedError(f"tensor '{name}': expected its data inside the file")
            content = np.frombuffer(self._raw, np.uint8, length, start)
        elif table.DataLength():
            content = np.asarray(table.DataAsNumpy())
        else:
            return np.zeros(shape, DTYPES[kind]) if 0 in shape else None
        self._take(content.size)
        count = math.prod(shape)
        if sparsity is not None:
            values = content.view(DTYPES[kind])
            self._unpacked += count * values.dtype.itemsize
            if self._unpacked > MAX_UNPACKED_BYTES:
                raise _DamagedError(
                    f"expected at most {MAX_UNPACKED_BYTES} bytes of sparse weights, got more"
                )
            return Sparsity.read(sparsity, len(shape)).unpack(values, shape)
        if kind == tflite.TensorType.INT4:
            return np.asarray(_unpack(content, count, name).reshape(shape))
        wanted = count * np.dtype(DTYPES[kind]).itemsize
        if content.size != wanted:
            raise _DamagedError(
                f"tensor '{name}' of shape {list(shape)}: expected {wanted} bytes, got {content.size}"
            )
        # Values other than 0 and 1 would make a boolean that is neither.
        if kind == tflite.TensorType.BOOL:
            return np.asarray(content != 0).reshape(shape)
        numbers: NDArray[Any] = content.view(DTYPES[kind]).reshape(shape)
        return numbers

    def _quantisation(self, table: Any, shape: tuple[int, ...], kind: int, name: str) -> Quantisation | None:  # noqa: ANN401
        if table is None or not table.ScaleLength():
            return None
        scales = self._numbers(table.ScaleLength(), table.ScaleAsNumpy).astype(np.float32)
        zeros = self._numbers(table.ZeroPointLength(), table.ZeroPointAsNumpy).astype(np.int64)
        axis = int(table.QuantizedDimension())
        if not zeros.size:
            zeros = np.zeros(scales.size, np.int64)
        elif zeros.size == 1:
            zeros = np.repeat(zeros, scales.size)
        if np.dtype(DTYPES[kind]).itemsize > _LARGEST_QUANTISED:
            return None
        if scales.size > 1 and not (0 <= axis < len(shape) and shape[axis] == scales.size):
            raise _DamagedError(
                f"tensor '{name}' of shape {list(shape)}: expected a scale for each slice of an axis, "
                f"got {scales.size} for axis {axis}"
            )
        if zeros.size != scales.size:
            raise _DamagedError(f"tensor '{name}': expected {scales.size} zero points, got {zeros.size}")
        dtype = np.dtype(DTYPES[kind])
        if dtype.kind not in "iu":
            return None  # converters leave the range that they saw on float tensors
        # A zero scale belongs to a tensor that is always zero, or to one that is not quantised after all.
        if not (np.isfinite(scales).all() and (scales > 0).all()):
            if not (scales != 0).any():
                return None
            wrong = scales[~(np.isfinite(scales) & (scales > 0))][0]
            raise _DamagedError(f"tensor '{name}': expected positive scales, got {float(wrong):g}")
        limits = np.iinfo(dtype)
        if int(zeros.min()) < limits.min or int(zeros.max()) > limits.max:
            raise _DamagedError(
                f"tensor '{name}': expected zero points of {dtype}, "
                f"got {int(zeros.min())} to {int(zeros.max())}"
            )
        return Quantisation(scales, zeros, axis if scales.size > 1 else 0)

    def _metadata(self) -> list[tuple[str, bytes]]:
        found = []
        for i in range(self._count(self._model.MetadataLength(), "pieces of metadata", MAX_SUBGRAPHS)):
            table = self._model.Metadata(i)
            if table.Buffer() >= self._model.BuffersLength():
                raise _DamagedError("expected metadata in one of the file's buffers, got none")
            buffer = self._model.Buffers(table.Buffer())
            if buffer.DataLength():
                content = np.asarray(buffer.DataAsNumpy())
                self._take(content.size)
                found.append((self._text(table, 4), content.tobytes()))
        return found


def _scheme(table: Any) -> str:  # noqa: ANN401
    """Say how a tensor is quantised whose scales are neither per tensor nor per axis."""
    if table.DetailsType() != _BLOCKWISE:
        return "it is quantised by a custom scheme"
    details = table.Details()
    place = details.Offset(_BLOCK_SIZE)
    size = int(details.Get(Int32Flags, place + details.Pos)) if place else 0
    return f"it has a scale for each block of {size} numbers"


def _unpack(content: NDArray[np.uint8], count: int, name: str) -> NDArray[np.int8]:
    """Unpack 4-bit numbers: two a byte, the lower half first."""
    if content.size != (count + 1) // 2:
        raise _DamagedError(f"tensor '{name}': expected {(count + 1) // 2} bytes, got {content.size}")
    both = np.stack([content & 15, content >> 4], axis=-1).reshape(-1)[:count].astype(np.int8)
    return np.where(both > 7, both - 16, both).astype(np.int8)
