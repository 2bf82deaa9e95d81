"""How a tensor's name, datatype and shape are written: in a user property, and in JSON.

Leaves to others: the numbers, which the worker and the builder read and write with numpy.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agent.bundle.tensor_spec import TensorSpec
from agent.errors import FormatError
from agent.wire import document

_PROPERTY: Final = re.compile(
    r"([^;]{1,256});([A-Z0-9]{1,8});(|(?:0|[1-9][0-9]{0,9})(?:,(?:0|[1-9][0-9]{0,9})){0,15})"
)


# Answers of a model describe the same tensors each time. A description that is accepted is short.
_REMEMBERED_TENSORS: Final = 256


def format_tensor(name: str, datatype: str, shape: Sequence[int]) -> str:
    """Return the value of a user property `tensor`, such as `image;FP32;1,3,224,224`."""
    return f"{name};{datatype};{','.join(map(str, shape))}"


@functools.lru_cache(maxsize=_REMEMBERED_TENSORS)
def parse_tensor(text: str) -> TensorSpec:
    """Read the value of a user property `tensor`.

    Raises
    ------
    ValueError
        If it is not one.
    """
    match = _PROPERTY.fullmatch(text)
    if match is None:
        raise ValueError(f"expected a tensor described as name;FP32;1,3,4, got {text!r:.80}")
    shape = tuple(map(int, match[3].split(","))) if match[3] else ()
    try:
        return TensorSpec(match[1], match[2], shape)
    except ValueError as error:
        raise ValueError(f"tensor {text!r:.80}: {error}") from error


@dataclass(frozen=True, slots=True)
class JsonTensor:
    """One tensor of the Open Inference Protocol's JSON.

    Attributes
    ----------
    spec
        Name, datatype and shape.
    data
        Its values, flat or nested; strings for BYTES.
    content_type
        The media type of an image in a BYTES input, or None.
    """

    spec: TensorSpec
    data: Sequence[object]
    content_type: str | None = None

    def to_document(self) -> dict[str, object]:
        """Return the tensor as a JSON object."""
        tensor: dict[str, object] = {**spec_document(self.spec), "data": self.data}
        if self.content_type is not None:
            tensor["parameters"] = {"content_type": self.content_type}
        return tensor

    @classmethod
    def from_document(cls, value: object) -> JsonTensor:
        """Read a tensor from a JSON object.

        Raises
        ------
        FormatError
            If it is not one.
        """
        tensor = document.members(value)
        data = tensor.get("data")
        if not isinstance(data, list):
            raise FormatError(f"expected a tensor with data, an array, got {document.shown(data)}")
        parameters = document.members(tensor.get("parameters"))
        return cls(parse_spec(value), data, document.optional_text(parameters.get("content_type")))


def spec_document(spec: TensorSpec, smallest: Sequence[int] | None = None) -> dict[str, object]:
    """Return name, datatype and shape as a JSON object.

    `smallest` is the smallest shape of a tensor whose shape changes; `spec` has the largest. A dimension that
    changes is -1 in `shape`, as in the Open Inference Protocol, and `shape_min` and `shape_max` have its
    bounds.
    """
    described: dict[str, object] = {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
    if smallest is None or tuple(smallest) == spec.shape:
        return described
    shape = [high if low == high else -1 for low, high in zip(smallest, spec.shape, strict=True)]
    return described | {"shape": shape, "shape_min": list(smallest), "shape_max": list(spec.shape)}


def parse_spec(value: object) -> TensorSpec:
    """Read name, datatype and largest shape from a JSON object; what is no tensor's raises FormatError."""
    tensor = document.members(value)
    shape = tensor.get("shape_max", tensor.get("shape"))
    if not isinstance(shape, list):
        raise FormatError(f"expected a tensor with a shape, an array, got {document.shown(shape)}")
    try:
        return TensorSpec(
            document.text(tensor.get("name")), document.text(tensor.get("datatype")), tuple(shape)
        )
    except ValueError as error:
        raise FormatError(str(error)) from error


def smallest_shape(value: object, spec: TensorSpec) -> tuple[int, ...]:
    """Read the smallest shape of a tensor from its JSON object; that of `spec` if it is fixed or invalid."""
    smallest = document.members(value).get("shape_min")
    if not isinstance(smallest, list) or len(smallest) != len(spec.shape):
        return spec.shape
    fits = all(type(low) is int and 0 <= low <= high for low, high in zip(smallest, spec.shape, strict=True))
    return tuple(smallest) if fits else spec.shape
