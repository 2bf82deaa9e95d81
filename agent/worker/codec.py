"""Content types: decodes a request into the model's inputs, and encodes the results into an answer.

===========================  =======================================================================
`application/json`           Open Inference Protocol v2; an image as a BYTES tensor in base64; or rows, for
                             a model that declares columns
`application/octet-stream`   raw tensors, described by user properties `tensor`
`image/jpeg`, `image/png`    the only input of a model that declares a preprocessing
`audio/wav`, `audio/l16`     a recording, for a model that declares audio
`application/cbor`           the JSON's form with tensors as byte strings, if cbor2 is installed
===========================  =======================================================================
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from agent.bundle.manifest import Manifest
from agent.bundle.state import requested
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import ExecutionError, InputError, MediaTypeError, RequestError
from agent.runtime.placement import Placement
from agent.runtime.postprocess import Value
from agent.runtime.storage import Array
from agent.runtime.wav import Recording, read_recording
from agent.wire.answer_head import AnswerHead
from agent.wire.content_types import (
    CBOR,
    IMAGES,
    JSON,
    RAW,
    RECORDINGS,
    SAME_AS,
    UNPROCESSED,
)
from agent.worker import oip, oip_json, raw_tensors
from agent.worker.channel import MAX_PAYLOAD_BYTES
from agent.worker.frames import Request
from agent.worker.payload_kind import PayloadKind, kind_of

if TYPE_CHECKING:
    from agent.runtime.preprocess import Preprocessor
    from agent.runtime.rows import RowReader

Payload = bytes | memoryview
# JSON without tensors is an envelope, and those are short.
_MAX_EMPTY_BYTES: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class Decoded:
    """What a request says besides its tensors.

    `id` is the requester's name for it, and `outputs` are those to return, or None for all. `placement` is
    where the image lies in the input. The model has not got the `recording` yet. `is_raw` says whether the
    answer has the model's own outputs, without the declared postprocess.
    """

    id: str | None
    outputs: tuple[str, ...] | None = None
    placement: Placement | None = None
    recording: Recording | None = None
    is_raw: bool = False


class Codec:
    """Converts between payloads and one model's tensors.

    `target` returns the memory of an input by its name, and `cbor` is what `import_cbor` returned. `fit` is
    for a model whose shapes change, see `agent.worker.raw_tensors.Fit`. `rows` reads rows of a table; None if
    the model declares no columns.
    """

    def __init__(
        self,
        manifest: Manifest,
        preprocessor: Preprocessor | None,
        target: Callable[[str], Array],
        cbor: ModuleType | None,
        fit: raw_tensors.Fit | None = None,
        rows: RowReader | None = None,
    ) -> None:
        self._rows = rows
        self._manifest = manifest
        self._inputs: dict[str, TensorSpec] = {
            spec.name: spec for spec in requested(manifest.inputs, [s.input for s in manifest.states or ()])
        }
        self._quantised = manifest.quantised_inputs
        self._preprocessor = preprocessor
        self._target = target
        self._cbor = cbor
        self._fit = fit

    def answer_type(self, request: Request) -> str:
        """Return the content type of a request's answer; one that is not supported raises MediaTypeError."""
        if request.client_json:
            return JSON
        wanted = _media_type(request.accept or "")
        if wanted in {"", "*/*"}:
            own = _media_type(request.content_type)
            wanted = own if own in {RAW, CBOR} else JSON
        if wanted not in {JSON, RAW, CBOR} or (wanted == CBOR and self._cbor is None):
            raise MediaTypeError(
                f"expected accept to be one of {', '.join(self._served(JSON, RAW))}, got {wanted!r:.80}"
            )
        return wanted

    def is_empty(self, request: Request, payload: memoryview) -> bool:
        """Return whether a request has no tensors: raw ones without a payload, or JSON with `"inputs": []`.

        A payload that is not JSON raises InputError.
        """
        media_type = _media_type(request.content_type) or JSON
        if media_type == RAW:
            return not payload.nbytes and not request.tensors
        if media_type != JSON or payload.nbytes > _MAX_EMPTY_BYTES:
            return False
        document = oip_json.parse(payload)
        return isinstance(document, dict) and document.get("inputs") == []

    def decode(self, request: Request, payload: memoryview) -> Decoded:
        """Write a request's tensors into the model's inputs.

        A content type that is not supported raises MediaTypeError; a payload that does not fit the model's
        inputs, and a request for raw outputs of a recording, raise InputError.
        """
        is_raw = _is_raw(request.accept or "")
        try:
            decoded = self._decode(request, payload)
        except RequestError as error:
            kind = None if error.hint is not None else _undeclared_kind(request, payload)
            if kind is None:
                raise
            raise type(error)(f"{error}; the payload is {kind.text}", hint=kind.hint) from error
        if not (is_raw or decoded.is_raw):
            return decoded
        if decoded.recording is not None:
            raise InputError(
                f"expected a recording without {UNPROCESSED}, got one with it",
                hint="to get the model's own outputs, send the windows as tensors",
            )
        return replace(decoded, is_raw=True)

    def _decode(self, request: Request, payload: memoryview) -> Decoded:
        media_type = _media_type(request.content_type) or JSON
        if media_type == JSON:
            return self._decode_document(oip_json.parse(payload), request.id)
        if media_type == RAW:
            raw_tensors.fill_inputs(
                payload, request.tensors, self._inputs, self._target, self._fit, self._quantised
            )
            return Decoded(request.id)
        if media_type in IMAGES:
            return Decoded(request.id, placement=self._decode_image(payload, media_type))
        if media_type in RECORDINGS:
            recording = self._recording(payload, request.content_type)
            return Decoded(request.id, recording=recording)
        if media_type == CBOR and self._cbor is not None:
            return self._decode_document(self._parse_cbor(payload), request.id)
        raise MediaTypeError(
            f"expected a request in {', '.join(self._served(JSON, RAW, *IMAGES, *RECORDINGS))}, "
            f"got {media_type!r:.80}"
        )

    def encode(
        self,
        request: Request,
        decoded: Decoded,
        media_type: str,
        values: Mapping[str, Value],
        max_bytes: int = MAX_PAYLOAD_BYTES,
        step: int | None = None,
    ) -> tuple[tuple[str, ...], Payload]:
        """Return the user properties `tensor` of an answer, and its payload.

        The payload may be the memory of a result. `media_type` is what `answer_type` returned. `values` are
        results by name, BYTES as a tuple. `step` is the request's number in its session, which a requester
        without user properties reads in the JSON. Raises InputError if the request asks for an output that
        the model does not have, and ExecutionError if a result cannot be written in this content type, or the
        payload would have more than `max_bytes`.
        """
        if decoded.outputs is not None:
            unknown = [name for name in decoded.outputs if name not in values]
            if unknown:
                raise InputError(
                    f"expected outputs among {', '.join(map(repr, values))}, got {unknown[0]!r:.80}"
                )
            values = {name: values[name] for name in decoded.outputs}
        raw_bytes = sum(map(raw_tensors.size_of, values.values()))
        if raw_bytes > max_bytes:
            # The other content types take more bytes for the same numbers, at least for those of four bytes.
            raise ExecutionError(f"expected an answer of at most {max_bytes} bytes, got {raw_bytes}")
        if media_type == RAW:
            return raw_tensors.format_answer(values)
        manifest = self._manifest
        head = AnswerHead(manifest.name, manifest.version, decoded.id, request.client_json).to_document()
        if step is not None and request.client_json:
            head |= {"session_step": step}
        if media_type == CBOR:
            assert self._cbor is not None
            outputs = [_cbor_tensor(name, value) for name, value in values.items()]
            body: bytes = self._cbor.dumps(head | {"outputs": outputs})
            if len(body) > max_bytes:
                raise ExecutionError(
                    f"expected an answer of at most {max_bytes} bytes, got {len(body)} as CBOR",
                    hint=f"ask for {RAW}",
                )
            return (), body
        return (), oip_json.format_answer(head, values, max_bytes)

    def _decode_document(self, document: object, given_id: str | None) -> Decoded:
        rows = None if self._rows is None else self._rows.rows_of(document)
        if rows is not None:
            decoded = self._decode_rows(rows, given_id)
            # In a document that is a row itself, `parameters` may be a column.
            if isinstance(document, dict) and ("row" in document or "rows" in document):
                return replace(decoded, is_raw=oip.is_raw(document.get("parameters")))
            return decoded
        request = oip.parse_request(document)
        oip.check_names([tensor.name for tensor in request.inputs], self._inputs)
        inputs: Mapping[str, TensorSpec] = self._inputs
        if self._fit is not None:
            inputs = self._fit({t.name: t.shape for t in request.inputs if t.datatype != "BYTES"}, None)
        placement, recording = None, None
        for tensor in request.inputs:
            if tensor.datatype == "BYTES" and self._manifest.audio is not None:
                recording = self._recording(_file_of(tensor), tensor.content_type or "")
            elif tensor.datatype == "BYTES":
                placement = self._decode_image_tensor(tensor)
            else:
                quantised = self._quantised.get(tensor.name)
                oip.fill(self._target(tensor.name), inputs[tensor.name], tensor, quantised)
        return Decoded(
            request.id if request.id is not None else given_id,
            request.outputs,
            placement,
            recording,
            request.is_raw,
        )

    def _decode_rows(self, rows: Sequence[object], given_id: str | None) -> Decoded:
        assert self._rows is not None
        if self._fit is None and len(rows) > 1:
            raise InputError(
                f"expected one row, got {len(rows)}: model {self._manifest.name} takes one at a time",
                hint="send each in a request of its own",
            )
        if self._fit is not None:  # before any value is read: it knows how many rows the model takes
            self._fit(self._rows.shapes(len(rows)), None)
        for name, array in self._rows.arrays(rows).items():
            self._target(name)[...] = array
        return Decoded(given_id)

    def _decode_image_tensor(self, tensor: oip.RequestTensor) -> Placement:
        if self._preprocessor is None or tensor.name != self._preprocessor.input:
            raise InputError(f"expected {self._inputs[tensor.name]}, got BYTES: this input takes no image")
        media_type = _media_type(tensor.content_type or "")
        if media_type not in IMAGES:
            raise InputError(
                f"expected {' or '.join(IMAGES)} as content_type in the parameters of input {tensor.name!r}, "
                f"got {tensor.content_type!r:.80}"
            )
        data = _file_of(tensor)
        return self._preprocessor(self._preprocessor.decode(data, media_type), self._target(tensor.name))

    def _decode_image(self, payload: memoryview, media_type: str) -> Placement:
        if self._preprocessor is None:
            raise self._another_kind(media_type, "images")
        if len(self._inputs) != 1:
            raise InputError(f"expected the inputs {', '.join(map(repr, self._inputs))}, got one image")
        image = self._preprocessor.decode(payload, media_type)
        if self._fit is not None:
            self._fit({}, None)
        return self._preprocessor(image, self._target(self._preprocessor.input))

    def _recording(self, data: bytes | memoryview, content_type: str) -> Recording:
        media_type, _, parameters = content_type.partition(";")
        media_type = _media_type(media_type)
        if self._manifest.audio is None:
            raise self._another_kind(media_type, "recordings")
        if media_type not in RECORDINGS:
            raise InputError(
                f"expected {' or '.join(RECORDINGS)} as content_type in the parameters of input "
                f"{self._manifest.audio.input!r}, got {content_type!r:.80}"
            )
        return read_recording(data, media_type, parameters)

    def _another_kind(self, media_type: str, refused: str) -> MediaTypeError:
        """Return the error for a file of a kind that the model does not take; the hint says what it takes."""
        taken, hint = "tensors", "send tensors: the model declares no preprocessing"
        if self._manifest.audio is not None:
            taken, hint = "a recording", "send a WAV file: this model takes audio"
        elif self._preprocessor is not None:
            taken, hint = "a picture", "send a JPEG or a PNG: the model sees"
        return MediaTypeError(
            f"expected {taken}, got {media_type}: model {self._manifest.name} takes no {refused}", hint=hint
        )

    def _parse_cbor(self, payload: memoryview) -> object:
        assert self._cbor is not None
        if payload.nbytes > oip_json.MAX_JSON_BYTES:
            raise InputError(
                f"expected a CBOR request of at most {oip_json.MAX_JSON_BYTES} bytes, got {payload.nbytes}"
            )
        try:
            document: object = self._cbor.loads(bytes(payload))
        except (self._cbor.CBORDecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise InputError(f"expected CBOR: {' '.join(str(error).split()):.120}") from error
        return document

    def _served(self, *media_types: str) -> tuple[str, ...]:
        return media_types if self._cbor is None else (*media_types, CBOR)


def _media_type(text: str) -> str:
    # RFC 9110, 8.3.1: parameters follow a semicolon, names are case-insensitive.
    media_type = text.partition(";")[0].strip().lower()
    return SAME_AS.get(media_type, media_type)


def _undeclared_kind(request: Request, payload: memoryview) -> PayloadKind | None:
    """Return what the payload is, if that is not what its content type says."""
    kind = kind_of(payload)
    if kind is not None and kind.media_type and kind.media_type == _media_type(request.content_type):
        return None
    return kind


def _is_raw(accept: str) -> bool:
    """Return whether an answer without its postprocess is wanted; unknown parameters are ignored.

    Any postprocess other than `none` raises InputError.
    """
    for parameter in accept.split(";")[1:]:
        name, _, value = (part.strip().lower() for part in parameter.partition("="))
        if name == "postprocess":
            oip.check_postprocess(value)
            return True
    return False


def _file_of(tensor: oip.RequestTensor) -> bytes | memoryview:
    if tensor.shape != (1,):
        raise InputError(f"expected a file as BYTES of shape [1], got shape {list(tensor.shape)!r:.80}")
    return oip_json.image_bytes(tensor.data)


def import_cbor() -> ModuleType | None:
    """Import cbor2 if it is installed; call it before the sandbox is closed.

    Optional, because it costs a megabyte and few clients need it.
    """
    try:
        return importlib.import_module("cbor2")
    except ImportError:
        return None


def _cbor_tensor(name: str, value: Value) -> dict[str, Any]:
    datatype, shape = oip.datatype_of(value)
    data = list(value) if isinstance(value, tuple) else value.tobytes()
    return {"name": name, "datatype": datatype, "shape": list(shape), "data": data}
