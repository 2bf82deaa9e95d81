"""What a model answered: status, tensors by name, and the best labels where there are any."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from agent.bundle.tensor_spec import TensorSpec
from agent.mqtt.message import Message
from builder.errors import FleetError
from builder.fleet.request import RAW

if TYPE_CHECKING:
    import numpy as np

OK: Final = 200
OVERLOADED: Final = 503
_STATUS, _MESSAGE, _TENSOR = "__stat", "__stMsg", "tensor"


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of an answer: numbers as an array, BYTES as an array of texts."""

    name: str
    datatype: str
    values: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Prediction:
    """One row of a top-k list."""

    label: str
    score: float
    index: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, read.

    Attributes
    ----------
    status, message
        200 and nothing, or one of 400, 404, 408, 415, 500, 503 and why.
    version
        Of the model that answered.
    """

    status: int
    message: str
    version: str = ""
    outputs: tuple[Output, ...] = field(default=(), repr=False)

    def top(self) -> tuple[Prediction, ...]:
        """Return the answer's top-k list, best first; empty if it has none."""
        found = {output.name: output.values for output in self.outputs}
        scores, indices = found.get("scores"), found.get("indices")
        if scores is None or indices is None:
            return ()
        labels = found.get("labels")
        names = [str(index) for index in indices] if labels is None else [str(label) for label in labels]
        return tuple(
            Prediction(label, float(score), int(index))
            for label, score, index in zip(names, scores, indices, strict=False)
        )


def read_answer(message: Message) -> Answer:
    """Read an answer, from MQTT 5's properties or from the JSON itself.

    Raises
    ------
    FleetError
        If it is no answer of an agent.
    """
    properties = message.properties
    status, text = properties.first(_STATUS), properties.first(_MESSAGE) or ""
    try:
        if properties.content_type == RAW:
            outputs = tuple(_raw_outputs(properties.all(_TENSOR), message.payload))
            version = properties.first("model_version") or ""
            return Answer(int(status or "0"), text, version, outputs)
        document = json.loads(message.payload or b"{}")  # a refusal may be its properties alone
        return Answer(
            status=int(status or document.get("status") or 0),
            message=text or str(document.get("message") or document.get("error") or ""),
            version=str(document.get("model_version") or ""),
            outputs=tuple(_json_outputs(document.get("outputs") or ())),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise FleetError(f"the agent's answer cannot be read: {error}") from error


def _json_outputs(documents: Iterable[dict[str, Any]]) -> Iterable[Output]:
    import numpy as np

    for document in documents:
        spec = TensorSpec(document["name"], document["datatype"], tuple(document["shape"]))
        dtype = object if spec.datatype == "BYTES" else spec.dtype
        values = np.array(document["data"], dtype=dtype).reshape(spec.shape)
        yield Output(spec.name, spec.datatype, values)


def _raw_outputs(tensors: Iterable[str], payload: bytes) -> Iterable[Output]:
    import numpy as np

    offset = 0
    for tensor in tensors:
        name, datatype, shape = tensor.split(";")
        spec = TensorSpec(name, datatype, tuple(int(dim) for dim in shape.split(",") if dim))
        if datatype == "BYTES":
            texts = []
            for _ in range(spec.shape[0] if spec.shape else 1):
                (length,) = struct.unpack_from("<I", payload, offset)
                offset += 4 + length
                texts.append(payload[offset - length : offset].decode("utf-8", "replace"))
            yield Output(name, datatype, np.array(texts, dtype=object))
        else:
            values = np.frombuffer(payload, spec.dtype, spec.nbytes // spec.itemsize, offset)
            offset += spec.nbytes
            yield Output(name, datatype, values.reshape(spec.shape))
