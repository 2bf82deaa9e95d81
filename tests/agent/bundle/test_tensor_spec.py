from __future__ import annotations

import pytest

from agent.bundle.tensor_spec import TensorSpec, datatype_of


def test_every_datatype_goes_to_its_dtype_and_back() -> None:
    pairs = {
        "BOOL": ("bool", 1),
        "UINT8": ("uint8", 1),
        "INT64": ("int64", 8),
        "FP16": ("float16", 2),
        "FP32": ("float32", 4),
    }
    for datatype, (dtype, size) in pairs.items():
        spec = TensorSpec.from_dtype("x", dtype, (2, 3))
        assert (spec.datatype, spec.dtype, spec.nbytes, datatype_of(dtype)) == (
            datatype,
            dtype,
            6 * size,
            datatype,
        )


def test_scalar_has_the_bytes_of_one_element() -> None:
    assert TensorSpec("x", "FP64", ()).nbytes == 8


def test_bytes_have_no_dtype() -> None:
    with pytest.raises(ValueError, match="BYTES"):
        _ = TensorSpec("x", "BYTES", (1,)).dtype


@pytest.mark.parametrize(
    ("name", "datatype", "shape"),
    [
        ("", "FP32", (1,)),
        ("a;b", "FP32", (1,)),
        ("a\nb", "FP32", (1,)),
        ("é", "FP32", (1,)),
        ("x" * 257, "FP32", (1,)),
        ("x", "float32", (1,)),
        ("x", "FP8", (1,)),
        ("x", "FP32", (-1,)),
        ("x", "FP32", (True,)),
        ("x", "FP32", (1.0,)),
        ("x", "FP32", [1]),
        ("x", "FP32", (1,) * 17),
        ("x", "FP32", (1 << 40,)),
        ("x", "FP32", (1 << 16, 1 << 16)),
    ],
)
def test_name_datatype_or_shape_out_of_bounds_is_refused(
    name: str, datatype: str, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="expected "):
        TensorSpec(name, datatype, shape)
