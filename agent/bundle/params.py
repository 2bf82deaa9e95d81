"""mod.params: tensors by name, in TVM's classic parameter format, byte for byte.

Promises the bytes of `tvm.runtime.save_param_dict` for the same tensors in the same order, and an index that
stays within the bounds of any input. Leaves alignment to the loader: the format has no padding, so tensors
must be copied before a kernel reads them.

The format (little endian; dmlc's serialisation of TVM's `NDArray` list)::

    u64 list magic, u64 0, u64 n, n x (u64 length, name), u64 n, n x tensor
    tensor: u64 magic, u64 0, i32 device type 1, i32 device 0, i32 dimensions,
            u8 type code, u8 bits, u16 lanes, i64 shape[dimensions], i64 bytes, data
"""

from __future__ import annotations

import io
import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from agent.bundle.tensor_spec import MAX_DIMENSIONS, MAX_NAME_CHARS, TensorSpec
from agent.errors import EndlessDataError, FormatError

if TYPE_CHECKING:
    from typing import Protocol

    from _typeshed import ReadableBuffer

    class _Writer(Protocol):
        def write(self, data: ReadableBuffer, /) -> object: ...


_LIST_MAGIC: Final = 0xF7E58D4F05049CB7
_TENSOR_MAGIC: Final = 0xDD5E40F096B4A13F
_CPU: Final = 1
# The largest exports have a few thousand weights; each takes a few hundred bytes in the index.
MAX_PARAMS: Final = 65536

_U64: Final = struct.Struct("<Q")
_LIST_HEAD: Final = struct.Struct("<QQQ")
_TENSOR_HEAD: Final = struct.Struct("<QQiiiBBH")
_I64: Final = struct.Struct("<q")

# DLPack's DLDataTypeCode and bits, for one lane.
_CODES: Final = MappingProxyType(
    {
        "BOOL": (6, 8),
        "UINT8": (1, 8),
        "UINT16": (1, 16),
        "UINT32": (1, 32),
        "UINT64": (1, 64),
        "INT8": (0, 8),
        "INT16": (0, 16),
        "INT32": (0, 32),
        "INT64": (0, 64),
        "FP16": (2, 16),
        "FP32": (2, 32),
        "FP64": (2, 64),
    }
)
# Before DLPack 0.8 a boolean was an unsigned integer of one bit; old files still say so.
_DATATYPES: Final = MappingProxyType({code: datatype for datatype, code in _CODES.items()} | {(1, 1): "BOOL"})


@dataclass(frozen=True, slots=True)
class ParamEntry:
    """One tensor of a parameter file: its data is `nbytes` bytes at `offset`, which may be unaligned."""

    spec: TensorSpec
    offset: int
    nbytes: int


def dump_params(params: Iterable[tuple[TensorSpec, ReadableBuffer]]) -> bytes:
    """Return the parameter file of these tensors, in this order.

    Parameters
    ----------
    params
        Specs, each with its data: C-contiguous, little endian, of exactly `spec.nbytes` bytes.

    Raises
    ------
    ValueError
        If a name is listed twice or a tensor cannot be written, as in `write_params`.
    """
    out = io.BytesIO()
    write_params(out, params)
    return out.getvalue()


def write_params(file: _Writer, params: Iterable[tuple[TensorSpec, ReadableBuffer]]) -> int:
    """Write a parameter file without holding it in memory; return the number of bytes.

    More than 65536 tensors, a duplicate name, data that is not contiguous or does not have its spec's size,
    and a spec without a fixed size (`BYTES`) raise ValueError.
    """
    entries = list(params)
    if len(entries) > MAX_PARAMS:
        raise ValueError(f"expected at most {MAX_PARAMS} parameters, got {len(entries)}")
    names = [spec.name.encode("ascii") for spec, _ in entries]
    if len(set(names)) != len(names):
        raise ValueError("two parameters have the same name")
    head = [
        _LIST_HEAD.pack(_LIST_MAGIC, 0, len(names)),
        *(_U64.pack(len(n)) + n for n in names),
        _U64.pack(len(names)),
    ]
    written = 0
    for piece in head:
        written += len(piece)
        file.write(piece)
    for spec, buffer in entries:
        data = memoryview(buffer)
        if spec.datatype == "BYTES" or data.nbytes != spec.nbytes or not data.c_contiguous:
            raise ValueError(f"{spec}: expected {spec.nbytes} contiguous bytes, got {data.nbytes}")
        raw = _tensor_head(spec)
        file.write(raw)
        if data.nbytes:
            file.write(data.cast("B"))
        written += len(raw) + data.nbytes
    return written


def index_params(raw: ReadableBuffer) -> tuple[ParamEntry, ...]:
    """Find every tensor of a parameter file, without reading its data.

    Parameters
    ----------
    raw
        The file, untrusted: bytes, a memoryview of them, or an mmap.

    Returns
    -------
    tuple of ParamEntry
        In the file's order; names are unique and all data lies within `raw`.

    Raises
    ------
    FormatError
        If it is not such a file, or has bytes that belong to no tensor.
    EndlessDataError
        If it declares more than 65536 tensors.
    """
    if isinstance(raw, mmap.mmap) and not len(raw):
        raise FormatError("mod.params is empty")
    with memoryview(raw) as view:
        try:
            return _index(view)
        except struct.error as error:
            raise FormatError(
                f"mod.params: ends before its last tensor, after {view.nbytes} bytes"
            ) from error
        except ValueError as error:
            raise FormatError(f"mod.params: {error}") from error


def _index(view: memoryview) -> tuple[ParamEntry, ...]:
    magic, reserved, count = _LIST_HEAD.unpack_from(view)
    if magic != _LIST_MAGIC or reserved:
        raise FormatError(
            f"mod.params: expected to start with {_LIST_MAGIC:#018x} and zeros, got {magic:#018x}"
        )
    if count > MAX_PARAMS:
        raise EndlessDataError(f"mod.params: expected at most {MAX_PARAMS} tensors, got {count}")
    at = _LIST_HEAD.size
    names = []
    for _ in range(count):
        (length,) = _U64.unpack_from(view, at)
        at += _U64.size
        if length > MAX_NAME_CHARS or at + length > view.nbytes:
            raise FormatError(
                f"mod.params: expected a name of at most {MAX_NAME_CHARS} bytes at {at}, got {length}"
            )
        names.append(bytes(view[at : at + length]).decode("ascii"))
        at += length
    if len(set(names)) != count:
        raise FormatError("mod.params: two tensors have the same name")
    (again,) = _U64.unpack_from(view, at)
    if again != count:
        raise FormatError(f"mod.params: expected {count} tensors, one for each name, got {again}")
    at += _U64.size
    entries = []
    for name in names:
        entry = _entry(view, at, name)
        entries.append(entry)
        at = entry.offset + entry.nbytes
    if at != view.nbytes:
        raise FormatError(f"mod.params: expected the end after the last tensor, got {view.nbytes - at} bytes")
    return tuple(entries)


def _entry(view: memoryview, at: int, name: str) -> ParamEntry:
    magic, reserved, device, device_id, ndim, code, bits, lanes = _TENSOR_HEAD.unpack_from(view, at)
    if magic != _TENSOR_MAGIC or reserved:
        raise FormatError(f"mod.params: expected tensor {name!r} at {at}, got something else")
    if (device, device_id) != (_CPU, 0):
        raise FormatError(f"{name!r}: expected device 1:0, the CPU, got {device}:{device_id}")
    datatype = _DATATYPES.get((code, bits)) if lanes == 1 else None
    if datatype is None:
        raise FormatError(f"{name!r}: no datatype has type code {code}, {bits} bits and {lanes} lanes")
    if not 0 <= ndim <= MAX_DIMENSIONS:
        raise FormatError(f"{name!r}: expected at most {MAX_DIMENSIONS} dimensions, got {ndim}")
    at += _TENSOR_HEAD.size
    shape = struct.unpack_from(f"<{ndim}q", view, at)
    at += ndim * _I64.size
    (nbytes,) = _I64.unpack_from(view, at)
    at += _I64.size
    spec = TensorSpec(name, datatype, shape)
    if nbytes != math.prod(shape) * spec.itemsize:
        raise FormatError(f"{spec}: expected {spec.nbytes} bytes of data, got a header that says {nbytes}")
    if nbytes > view.nbytes - at:
        raise FormatError(f"{spec}: its data reaches beyond the end of mod.params")
    return ParamEntry(spec, at, nbytes)


def _tensor_head(spec: TensorSpec) -> bytes:
    code, bits = _CODES.get(spec.datatype, (0, 0))
    head = _TENSOR_HEAD.pack(_TENSOR_MAGIC, 0, _CPU, 0, len(spec.shape), code, bits, 1)
    return head + struct.pack(f"<{len(spec.shape)}q", *spec.shape) + _I64.pack(spec.nbytes)
