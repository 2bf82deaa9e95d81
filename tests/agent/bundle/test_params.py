from __future__ import annotations

import io
import mmap
import struct
from pathlib import Path

import numpy as np
import pytest

from agent.bundle.params import dump_params, index_params, write_params
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import EndlessDataError, FormatError

SPECS = [
    TensorSpec("p0", "FP32", (2, 3)),
    TensorSpec("p1", "INT8", (5,)),
    TensorSpec("scalar", "INT64", ()),
    TensorSpec("empty", "FP16", (0, 7)),
    TensorSpec("flag", "BOOL", (2,)),
]


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        spec.name: np.asarray(rng.integers(0, 2, spec.shape)).astype(spec.dtype).reshape(spec.shape)
        for spec in SPECS
    }


def file_of(values: dict[str, np.ndarray]) -> bytes:
    return dump_params([(spec, values[spec.name].data) for spec in SPECS])


def test_index_finds_what_was_written() -> None:
    values = arrays()
    raw = file_of(values)
    entries = index_params(raw)
    assert [entry.spec for entry in entries] == SPECS
    for entry in entries:
        data = np.frombuffer(raw[entry.offset : entry.offset + entry.nbytes], entry.spec.dtype)
        np.testing.assert_array_equal(data.reshape(entry.spec.shape), values[entry.spec.name])


def test_index_reads_an_mmap_without_copying_it(tmp_path: Path) -> None:
    path = tmp_path / "mod.params"
    path.write_bytes(file_of(arrays()))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert [entry.spec for entry in index_params(mapped)] == SPECS


def test_streaming_writes_the_same_bytes_and_counts_them() -> None:
    values = arrays()
    out = io.BytesIO()
    assert write_params(out, ((spec, values[spec.name].data) for spec in SPECS)) == len(out.getvalue())
    assert out.getvalue() == file_of(values)


def test_file_may_have_no_tensors() -> None:
    assert index_params(dump_params([])) == ()


@pytest.mark.slow
def test_bytes_are_those_of_tvm_and_tvm_reads_ours() -> None:
    import tvm

    values = arrays()
    theirs = bytes(
        tvm.runtime.save_param_dict({name: tvm.runtime.tensor(value) for name, value in values.items()})
    )
    assert file_of(values) == theirs
    loaded = tvm.runtime.load_param_dict(file_of(values))
    assert set(loaded) == set(values)
    for name, value in values.items():
        np.testing.assert_array_equal(loaded[name].numpy(), value)


@pytest.mark.parametrize(
    "data", [bytes(23), bytes(25), np.zeros((4, 3), "float32")[::2], memoryview(bytes(24)).cast("f")[::2]]
)
def test_data_of_another_size_or_with_gaps_is_not_written(data: object) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        dump_params([(SPECS[0], data)])  # type: ignore[list-item]


def test_duplicate_name_is_not_written() -> None:
    with pytest.raises(ValueError, match="same name"):
        dump_params([(SPECS[1], bytes(5)), (SPECS[1], bytes(5))])


def test_every_truncation_is_refused() -> None:
    raw = file_of(arrays())
    for size in range(len(raw)):
        with pytest.raises(FormatError):
            index_params(raw[:size])


def test_data_beyond_the_end_is_reported_with_its_tensor() -> None:
    with pytest.raises(FormatError, match=r"x INT8.* its data reaches beyond the end"):
        index_params(dump_params([(TensorSpec("x", "INT8", (9,)), bytes(9))])[:-1])


def test_trailing_byte_is_refused() -> None:
    with pytest.raises(FormatError, match="expected the end after the last tensor, got 1 bytes"):
        index_params(file_of(arrays()) + b"\0")


# One tensor "x" of two int8: 24 bytes of list head, name at 24, second count at 33, tensor at 41.
ONE = dump_params([(TensorSpec("x", "INT8", (2,)), b"ab")])


@pytest.mark.parametrize(
    ("at", "form", "value", "message"),
    [
        (0, "<Q", 1, "expected to start"),
        (8, "<Q", 1, "expected to start"),
        (24, "<Q", 1 << 60, "a name of"),
        (24, "<Q", 257, "a name of"),
        (24, "<Q", 0, "tensors|name"),
        (32, "<B", 0x3B, "name"),
        (32, "<B", 0xFF, "ascii"),
        (33, "<Q", 2, "tensors"),
        (41, "<Q", 1, "expected tensor 'x'"),
        (49, "<Q", 1, "expected tensor 'x'"),
        (57, "<i", 2, "device"),
        (61, "<i", 1, "device"),
        (65, "<i", -1, "dimensions"),
        (65, "<i", 17, "dimensions"),
        (65, "<i", 1 << 30, "dimensions"),
        (69, "<B", 3, "type code"),
        (70, "<B", 4, "type code"),
        (71, "<H", 4, "lanes"),
        (73, "<q", -1, "dimension"),
        (73, "<q", 3, "header that says"),
        (73, "<q", 1 << 62, "dimension"),
        (81, "<q", 1, "header that says"),
        (81, "<q", -1, "header that says"),
    ],
)
def test_wrong_field_is_refused(at: int, form: str, value: int, message: str) -> None:
    raw = bytearray(ONE)
    struct.pack_into(form, raw, at, value)
    with pytest.raises(FormatError, match=message):
        index_params(bytes(raw))


def test_message_is_one_line_even_if_a_name_is_not() -> None:
    raw = bytearray(ONE.replace(b"x", b"\n", 1))
    raw[57] = 2  # a device that is not the CPU
    with pytest.raises(FormatError, match=r"^'\\n': expected device 1:0"):
        index_params(bytes(raw))


def test_declared_tensors_over_the_limit_are_refused_before_they_are_read() -> None:
    raw = bytearray(ONE)
    struct.pack_into("<Q", raw, 16, 1 << 62)
    with pytest.raises(EndlessDataError):
        index_params(bytes(raw))


def test_duplicate_name_is_refused() -> None:
    two = dump_params([(TensorSpec("x", "INT8", (1,)), b"a"), (TensorSpec("y", "INT8", (1,)), b"b")])
    with pytest.raises(FormatError, match="same name"):
        index_params(two.replace(b"y", b"x", 1))


def test_boolean_of_old_files_is_read() -> None:
    raw = bytearray(dump_params([(TensorSpec("x", "BOOL", (2,)), b"\1\0")]))
    raw[69:71] = bytes([1, 1])
    assert index_params(bytes(raw))[0].spec.datatype == "BOOL"
