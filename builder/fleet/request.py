"""An inference request: an image, tensors or JSON, as a payload for MQTT 5 and as JSON for MQTT 3.1.1."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.bundle.tensor_spec import TensorSpec
from agent.wire import document
from agent.wire.content_types import JPEG, JSON, PNG, RAW
from agent.wire.tensors import JsonTensor, format_tensor, parse_tensor
from builder.errors import PackageError

if TYPE_CHECKING:
    import numpy as np

# How a PNG and a JPEG begin: RFC 2083, 3.1, and ISO 10918-1, B.1.1.3.
_MAGIC: Final = {b"\x89PNG\r\n\x1a\n": PNG, b"\xff\xd8\xff": JPEG}
# By default an agent accepts packets of 64 MiB; a larger request is a mistake.
MAX_REQUEST_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Request:
    """One inference request.

    Attributes
    ----------
    content_type
        The media type of `body`.
    body
        The payload.
    tensors
        For raw tensors, one `name;FP32;1,3,4` each, in the order in which they lie in `body`.
    """

    content_type: str
    body: bytes = field(repr=False)
    tensors: tuple[str, ...] = ()

    @classmethod
    def image(cls, raw: bytes) -> Request:
        """Make a request from an image file's bytes.

        Raises
        ------
        PackageError
            If they are neither a JPEG nor a PNG.
        """
        for magic, content_type in _MAGIC.items():
            if raw.startswith(magic):
                return cls(content_type, raw)
        raise PackageError("expected a JPEG or PNG image, got something else")

    @classmethod
    def arrays(cls, arrays: Mapping[str, np.ndarray[Any, Any]]) -> Request:
        """Make a request from arrays by input name.

        Raises
        ------
        PackageError
            If an array has a dtype that no model takes.
        """
        import numpy as np

        tensors, parts = [], []
        for name, array in arrays.items():
            try:
                spec = TensorSpec.from_dtype(name, array.dtype.name, array.shape)
            except ValueError as error:
                raise PackageError(f"input {name}: {error}") from error
            tensors.append(format_tensor(spec.name, spec.datatype, spec.shape))
            parts.append(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
        return cls(RAW, b"".join(parts), tuple(tensors))

    @classmethod
    def from_file(cls, path: Path) -> Request:
        """Make a request from a file: a JPEG, a PNG, an `.npz` of inputs, or a `.json` request.

        Raises
        ------
        PackageError
            If it is none of these.
        """
        size = path.stat().st_size
        if size > MAX_REQUEST_BYTES:
            raise PackageError(f"{path}: expected at most {MAX_REQUEST_BYTES} bytes, got {size}")
        if path.suffix == ".npz":
            import numpy as np

            try:
                with np.load(path, allow_pickle=False) as arrays:
                    return cls.arrays({name: arrays[name] for name in arrays.files})
            except (ValueError, OSError, EOFError) as error:
                raise PackageError(f"{path} cannot be read as .npz: {error}") from error
        raw = path.read_bytes()
        if path.suffix == ".json":
            return cls(JSON, raw)
        try:
            return cls.image(raw)
        except PackageError as error:
            raise PackageError(
                f"{path}: {error}",
                hint="use a .jpg, a .png, an .npz of inputs or a .json request",
            ) from error

    def to_json(self, inputs: Sequence[TensorSpec]) -> bytes:
        """Return the request as JSON of the Open Inference Protocol, for a broker without MQTT 5.

        Parameters
        ----------
        inputs
            The model's inputs; an image is for the only one.

        Raises
        ------
        PackageError
            If an image is for a model with several inputs, or a tensor holds NaN or infinity.
        """
        if self.content_type == JSON:
            return self.body
        tensors = self._raw_tensors() if self.content_type == RAW else self._image_tensor(inputs)
        try:
            return document.encode({"inputs": [tensor.to_document() for tensor in tensors]})
        except ValueError as error:
            raise PackageError(
                "expected finite numbers, got NaN or infinity, which JSON cannot represent",
                hint="use a broker with MQTT 5",
            ) from error

    def _image_tensor(self, inputs: Sequence[TensorSpec]) -> Iterator[JsonTensor]:
        if len(inputs) != 1:
            raise PackageError(f"expected a model with one input for an image, got {len(inputs)} inputs")
        spec = TensorSpec(inputs[0].name, "BYTES", (1,))
        yield JsonTensor(spec, [base64.b64encode(self.body).decode()], self.content_type)

    def _raw_tensors(self) -> Iterator[JsonTensor]:
        import numpy as np

        offset = 0
        for tensor in self.tensors:
            spec = parse_tensor(tensor)
            data = np.frombuffer(self.body, spec.dtype, spec.nbytes // spec.itemsize, offset)
            offset += spec.nbytes
            yield JsonTensor(spec, data.tolist())
