"""Content types: a request's payload into the model's inputs, and its results into the answer's payload.

====================================  ==================================================================
`application/json`                  Open Inference Protocol v2; an image as a BYTES tensor in base64
`application/octet-stream`          raw tensors, described by user properties `tensor`
`image/jpeg`, `image/png`         the one input of a model that declares a preprocessing
`application/cbor`                  the JSON's form, tensors as byte strings; where cbor2 is installed
====================================  ==================================================================
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from agent.bundle.manifest import Manifest
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import InputError, MediaTypeError
from agent.runtime.placement import Placement
from agent.runtime.postprocess import Value
from agent.runtime.storage import Array
from agent.worker import oip, oip_json, raw_tensors
from agent.worker.channel import Request

if TYPE_CHECKING:
    from agent.runtime.preprocess import Preprocessor

JSON: Final = "application/json"
RAW: Final = "application/octet-stream"
CBOR: Final = "application/cbor"
IMAGES: Final = ("image/jpeg", "image/png")

Payload = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a request says beside its tensors.

    Attributes
    ----------
    id
        The client's name for it, or None.
    outputs
        Names of the outputs it wants, or None for all.
    placement
        Where its image lies in the input, or None.
    """

    id: str | None
    outputs: tuple[str, ...] | None = None
    placement: Placement | None = None


class Codec:
    """One model's way between payloads and tensors.

    Parameters
    ----------
    manifest
        The model's.
    preprocessor
        Its preprocessing, or None if it takes no images.
    target
        Returns an input's memory by its name.
    cbor
        As `import_cbor` returned it.
    """

    def __init__(
        self,
        manifest: Manifest,
        preprocessor: Preprocessor | None,
        target: Callable[[str], Array],
        cbor: ModuleType | None,
    ) -> None:
        self._manifest = manifest
        self._inputs: dict[str, TensorSpec] = {spec.name: spec for spec in manifest.inputs}
        self._preprocessor = preprocessor
        self._target = target
        self._cbor = cbor

    def answer_type(self, request: Request) -> str:
        """Return the content type of a request's answer.

        Raises
        ------
        MediaTypeError
            If it wishes for one that is not served.
        """
        if request.client_json:
            return JSON
        wanted = _media_type(request.accept or "")
        if wanted in {"", "*/*"}:
            own = _media_type(request.content_type)
            wanted = own if own in {RAW, CBOR} else JSON
        if wanted not in {JSON, RAW, CBOR} or (wanted == CBOR and self._cbor is None):
            raise MediaTypeError(f"an answer is {', '.join(self._served(JSON, RAW))}, not {wanted!r:.80}")
        return wanted

    def decode(self, request: Request, payload: memoryview) -> Decoded:
        """Write a request's tensors into the model's inputs.

        Raises
        ------
        MediaTypeError
            If its content type is not served.
        InputError
            If its payload is not what the model takes.
        """
        media_type = _media_type(request.content_type) or JSON
        if media_type == JSON:
            return self._decode_document(oip_json.parse(payload), request.id)
        if media_type == RAW:
            raw_tensors.fill_inputs(payload, request.tensors, self._inputs, self._target)
            return Decoded(request.id)
        if media_type in IMAGES:
            return Decoded(request.id, placement=self._decode_image(payload, media_type))
        if media_type == CBOR and self._cbor is not None:
            return self._decode_document(self._parse_cbor(payload), request.id)
        raise MediaTypeError(
            f"a request is {', '.join(self._served(JSON, RAW, *IMAGES))}, not {media_type!r:.80}"
        )

    def encode(
        self, request: Request, decoded: Decoded, media_type: str, values: Mapping[str, Value]
    ) -> tuple[tuple[str, ...], Payload]:
        """Return an answer's user properties `tensor` and its payload.

        Parameters
        ----------
        media_type
            As `answer_type` returned it.
        values
            Results by name; BYTES as a tuple. The payload may be a result's own memory.

        Raises
        ------
        InputError
            If the request wants an output that is not there.
        ExecutionError
            If a result cannot be told in this content type.
        """
        if decoded.outputs is not None:
            unknown = [name for name in decoded.outputs if name not in values]
            if unknown:
                raise InputError(
                    f"expected outputs among {', '.join(map(repr, values))}, came {unknown[0]!r:.80}"
                )
            values = {name: values[name] for name in decoded.outputs}
        if media_type == RAW:
            return raw_tensors.format_answer(values)
        head: dict[str, Any] = {
            "model_name": self._manifest.name,
            "model_version": self._manifest.version,
        }
        if decoded.id is not None:
            head["id"] = decoded.id
        if request.client_json:
            head |= {"status": 200, "message": ""}
        if media_type == CBOR:
            assert self._cbor is not None
            outputs = [_cbor_tensor(name, value) for name, value in values.items()]
            body: bytes = self._cbor.dumps(head | {"outputs": outputs})
            return (), body
        return (), oip_json.format_answer(head, values)

    def _decode_document(self, document: object, given_id: str | None) -> Decoded:
        request = oip.parse_request(document)
        oip.check_names([tensor.name for tensor in request.inputs], self._inputs)
        placement = None
        for tensor in request.inputs:
            if tensor.datatype == "BYTES":
                placement = self._decode_image_tensor(tensor)
            else:
                oip.fill(self._target(tensor.name), self._inputs[tensor.name], tensor)
        return Decoded(request.id if request.id is not None else given_id, request.outputs, placement)

    def _decode_image_tensor(self, tensor: oip.RequestTensor) -> Placement:
        if self._preprocessor is None or tensor.name != self._preprocessor.input:
            raise InputError(f"expected {self._inputs[tensor.name]}, came BYTES: this input takes no image")
        if tensor.shape != (1,):
            raise InputError(f"an image is BYTES of shape [1], not {list(tensor.shape)!r:.80}")
        media_type = _media_type(tensor.content_type or "")
        if media_type not in IMAGES:
            raise InputError(
                f"parameters of input {tensor.name!r} have a content_type, {' or '.join(IMAGES)}, "
                f"not {tensor.content_type!r:.80}"
            )
        data = oip_json.image_bytes(tensor.data)
        return self._preprocessor(self._preprocessor.decode(data, media_type), self._target(tensor.name))

    def _decode_image(self, payload: memoryview, media_type: str) -> Placement:
        if self._preprocessor is None:
            raise MediaTypeError(f"model {self._manifest.name} takes no images, and {media_type} came")
        if len(self._inputs) != 1:
            raise InputError(f"expected the inputs {', '.join(map(repr, self._inputs))}, came one image")
        image = self._preprocessor.decode(payload, media_type)
        return self._preprocessor(image, self._target(self._preprocessor.input))

    def _parse_cbor(self, payload: memoryview) -> object:
        assert self._cbor is not None
        if payload.nbytes > oip_json.MAX_JSON_BYTES:
            raise InputError(
                f"a CBOR request has at most {oip_json.MAX_JSON_BYTES} bytes, not {payload.nbytes}"
            )
        try:
            document: object = self._cbor.loads(bytes(payload))
        except (self._cbor.CBORDecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise InputError(f"the payload is not CBOR: {' '.join(str(error).split()):.120}") from error
        return document

    def _served(self, *media_types: str) -> tuple[str, ...]:
        return media_types if self._cbor is None else (*media_types, CBOR)


def encode_error(request: Request, media_type: str, status: int, message: str) -> tuple[str, bytes]:
    """Return content type and payload of an answer that failed.

    Only JSON says it in its payload, as the Open Inference Protocol does; for others the user properties do.
    """
    if media_type != JSON:
        return "", b""
    document: dict[str, Any] = {"error": message}
    if request.id is not None:
        document["id"] = request.id
    if request.client_json:
        document |= {"status": status, "message": message}
    return JSON, json.dumps(document, separators=(",", ":")).encode()


def _media_type(text: str) -> str:
    # RFC 9110, 8.3.1: parameters follow a semicolon, names are case-insensitive.
    return text.partition(";")[0].strip().lower()


def import_cbor() -> ModuleType | None:
    """Import cbor2 where it is installed, before the sandbox closes the files.

    Optional: it earns its megabyte only where clients speak it.
    """
    try:
        return importlib.import_module("cbor2")
    except ImportError:
        return None


def _cbor_tensor(name: str, value: Value) -> dict[str, Any]:
    datatype, shape = oip.datatype_of(value)
    data = list(value) if isinstance(value, tuple) else value.tobytes()
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": data}
