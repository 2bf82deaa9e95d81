"""What is asked of a model: an image, tensors, or a document, as it goes over MQTT 5 and over 3.1.1."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.bundle.tensor_spec import TensorSpec
from builder.errors import PackageError

if TYPE_CHECKING:
    import numpy as np

JSON: Final = "application/json"
RAW: Final = "application/octet-stream"
# RFC 2083, 3.1, and ISO 10918-1, B.1.1.3: how a PNG and a JPEG begin.
_MAGIC: Final = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}
# The agent takes packets of 64 MiB; a request that is larger is somebody's mistake.
MAX_REQUEST_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Request:
    """One inference request.

    Attributes
    ----------
    content_type
        What `body` is.
    tensors
        For raw tensors, `name;FP32;1,3,4` each, in the order in which they lie in `body`.
    """

    content_type: str
    body: bytes = field(repr=False)
    tensors: tuple[str, ...] = ()

    @classmethod
    def image(cls, raw: bytes) -> Request:
        """Ask with an image file's bytes.

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
        """Ask with arrays by input name.

        Raises
        ------
        PackageError
            If one has a dtype that no model takes.
        """
        import numpy as np

        specs, parts = [], []
        for name, array in arrays.items():
            try:
                specs.append(TensorSpec.from_dtype(name, array.dtype.name, array.shape))
            except ValueError as error:
                raise PackageError(f"input {name}: {error}") from error
            parts.append(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
        tensors = tuple(f"{spec.name};{spec.datatype};{','.join(map(str, spec.shape))}" for spec in specs)
        return cls(RAW, b"".join(parts), tensors)

    @classmethod
    def from_file(cls, path: Path) -> Request:
        """Ask with what a file holds: a JPEG, a PNG, an `.npz` of inputs, or a `.json` request.

        Raises
        ------
        PackageError
            If it is none of these.
        """
        size = path.stat().st_size
        if size > MAX_REQUEST_BYTES:
            raise PackageError(f"{path} has {size} bytes, a request has at most {MAX_REQUEST_BYTES}")
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
                f"{path}: {error}", hint="--input takes a .jpg, a .png, an .npz of inputs, or a .json request"
            ) from error

    def document(self, inputs: Mapping[str, TensorSpec]) -> dict[str, Any]:
        """Return the request as a document of the Open Inference Protocol, for a broker without properties.

        Parameters
        ----------
        inputs
            What the model takes, to name the input that an image is for.

        Raises
        ------
        PackageError
            If the body is JSON that is no object, or the input that an image is for cannot be told.
        """
        if self.content_type == JSON:
            try:
                document = json.loads(self.body)
            except (ValueError, RecursionError) as error:
                raise PackageError(f"the request is not JSON: {error}") from error
            if not isinstance(document, dict):
                raise PackageError("expected a request that is a JSON object")
            return document
        if self.content_type == RAW:
            return {"inputs": list(self._tensor_documents())}
        if len(inputs) != 1:
            raise PackageError(f"an image is for a model with one input, this one has {len(inputs)}")
        return {
            "inputs": [
                {
                    "name": next(iter(inputs)),
                    "datatype": "BYTES",
                    "shape": [1],
                    "data": [base64.b64encode(self.body).decode()],
                    "parameters": {"content_type": self.content_type},
                }
            ]
        }

    def _tensor_documents(self) -> list[dict[str, Any]]:
        import numpy as np

        documents, offset = [], 0
        for tensor in self.tensors:
            name, datatype, shape = tensor.split(";")
            spec = TensorSpec(name, datatype, tuple(int(dim) for dim in shape.split(",") if dim))
            data = np.frombuffer(self.body, spec.dtype, spec.nbytes // spec.itemsize, offset)
            offset += spec.nbytes
            documents.append(
                {"name": name, "datatype": datatype, "shape": list(spec.shape), "data": data.tolist()}
            )
        return documents
