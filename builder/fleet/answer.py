"""A model's answer: status, tensors by name, and the best labels if it has them."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from agent.bundle.tensor_spec import TensorSpec
from agent.errors import FormatError
from agent.mqtt.message import Message
from agent.wire import answer as wire
from agent.wire.tensors import JsonTensor
from builder.errors import FleetError

if TYPE_CHECKING:
    import numpy as np

# The length of an element of BYTES, as in the Open Inference Protocol's binary tensor extension.
_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of an answer.

    Attributes
    ----------
    name, datatype
        As the Open Inference Protocol names them.
    values
        An array of the tensor's shape; for BYTES an object array of strings.
    """

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
    """One answer.

    Attributes
    ----------
    status, message
        200 and an empty message, or one of 400, 404, 408, 413, 415, 500, 503 and the reason.
    version
        Of the model that answered.
    outputs
        In the order of the model's outputs.
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
        If it is not an answer of an agent.
    """
    try:
        received = wire.read_answer(message)
        outputs = (
            _json_outputs(received.tensors)
            if received.raw is None
            else _raw_outputs(received.raw_tensors, received.raw)
        )
        return Answer(received.status, received.message, received.model_version, tuple(outputs))
    except (FormatError, ValueError, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise FleetError(f"the agent's answer cannot be read: {error}") from error


def _json_outputs(tensors: Iterable[JsonTensor]) -> Iterable[Output]:
    import numpy as np

    for tensor in tensors:
        spec = tensor.spec
        dtype = object if spec.datatype == "BYTES" else spec.dtype
        yield Output(spec.name, spec.datatype, np.array(tensor.data, dtype=dtype).reshape(spec.shape))


def _raw_outputs(specs: Iterable[TensorSpec], payload: bytes) -> Iterable[Output]:
    import numpy as np

    offset = 0
    for spec in specs:
        if spec.datatype == "BYTES":
            texts = []
            for _ in range(spec.shape[0] if spec.shape else 1):
                (length,) = _LENGTH.unpack_from(payload, offset)
                offset += _LENGTH.size + length
                texts.append(payload[offset - length : offset].decode("utf-8", "replace"))
            yield Output(spec.name, spec.datatype, np.array(texts, dtype=object))
        else:
            values = np.frombuffer(payload, spec.dtype, spec.nbytes // spec.itemsize, offset)
            offset += spec.nbytes
            yield Output(spec.name, spec.datatype, values.reshape(spec.shape))
