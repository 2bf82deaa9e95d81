"""A model's answer: tensors by name, labels and boxes as objects, and where its time went.

Promises: an answer is checked completely before it is returned, and costs memory only in proportion to its
bytes. Labels and boxes need no numpy; an array is made when it is asked for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from agent.errors import EndlessDataError, FormatError
from agent.mqtt.message import Message
from agent.wire import answer as wire
from agent.wire.answer_head import OK
from agent.wire.properties import TRACE
from agent.wire.server_timing import ServerTiming
from edgebundle.errors import BadAnswerError, RefusedError, refusal
from edgebundle.output import Output, json_output, raw_outputs

if TYPE_CHECKING:
    import numpy as np

_VERSIONS: Final = "use the same version of edgebundle here and of edge-agent there"
_NO_JSON: Final = "ask with MQTT 5, whose answers are not JSON"


@dataclass(frozen=True, slots=True)
class Label:
    """One row of a top-k list.

    Attributes
    ----------
    label
        The class's name; its number if the bundle has no labels.
    score
        The model's score.
    index
        The class's number.
    """

    label: str
    score: float
    index: int


@dataclass(frozen=True, slots=True)
class Box:
    """One detected object.

    Attributes
    ----------
    label
        The class's name; its number if the bundle has no labels.
    score
        The model's score.
    index
        The class's number.
    x0, y0, x1, y1
        Left, top, right and bottom edge in pixels of the picture as it was sent, after its Exif rotation. For
        a request with tensors in the model's own units.
    """

    label: str
    score: float
    index: int
    x0: float
    y0: float
    x1: float
    y1: float

    @property
    def width(self) -> float:
        """From the left to the right edge."""
        return self.x1 - self.x0

    @property
    def height(self) -> float:
        """From the top to the bottom edge."""
        return self.y1 - self.y0

    @property
    def centre(self) -> tuple[float, float]:
        """The middle, x and y."""
        return ((self.x0 + self.x1) / 2, (self.y0 + self.y1) / 2)


@dataclass(frozen=True, slots=True)
class Timing:
    """Where an answer's time went, in seconds.

    Attributes
    ----------
    total_s
        From the first time that the request was sent to the arrival of the answer.
    queue_s, decode_s, compute_s, encode_s
        On the device: waiting for the model, decoding and preprocessing, the graph, postprocessing and
        encoding. None if the agent does not say: older ones, and any with MQTT 3.1.1.
    """

    total_s: float
    queue_s: float | None = None
    decode_s: float | None = None
    compute_s: float | None = None
    encode_s: float | None = None

    @property
    def network_s(self) -> float | None:
        """The rest: broker, network, this client, repetitions. None if the agent's part is unknown."""
        parts = (self.queue_s, self.decode_s, self.compute_s, self.encode_s)
        known = [part for part in parts if part is not None]
        return max(0.0, self.total_s - sum(known)) if len(known) == len(parts) else None

    @property
    def parts_s(self) -> dict[str, float]:
        """What is known of `total_s`: network, queue, decode, compute and encode, in seconds."""
        names = ("network", "queue", "decode", "compute", "encode")
        parts = {name: getattr(self, f"{name}_s") for name in names}
        return {name: part for name, part in parts.items() if part is not None}


@dataclass(frozen=True, slots=True)
class Answer(Mapping[str, "np.ndarray[Any, Any]"]):
    """One answer: a mapping from the names of its tensors to arrays.

    Attributes
    ----------
    agent, model
        What the request was sent to: the agent or the group, and the model.
    version
        Of the model that answered.
    outputs
        The tensors in the order of the answer.
    timing
        Where the time went.
    attempts
        How often the request was sent.
    trace
        `traceparent` and `tracestate`, as they were sent.
    """

    agent: str
    model: str
    version: str
    outputs: tuple[Output, ...] = field(repr=False)
    timing: Timing
    attempts: int = 1
    trace: tuple[tuple[str, str], ...] = ()

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        return self.output(name).values

    def __iter__(self) -> Iterator[str]:
        return (output.name for output in self.outputs)

    def __len__(self) -> int:
        return len(self.outputs)

    @property
    def latency_s(self) -> float:
        """From the first time that the request was sent to the arrival of the answer."""
        return self.timing.total_s

    def output(self, name: str) -> Output:
        """Return a tensor.

        Raises
        ------
        KeyError
            If the answer does not have one of that name.
        """
        for output in self.outputs:
            if output.name == name:
                return output
        raise KeyError(name)

    @property
    def labels(self) -> tuple[Label, ...]:
        """The first top-k list, best first; empty if the answer has none."""
        lists = self.lists("indices")
        return self.labels_of(lists[0]) if lists else ()

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The first list of detected objects, best first; empty if the answer has none."""
        lists = self.lists("classes")
        return self.boxes_of(lists[0]) if lists else ()

    def lists(self, suffix: str) -> tuple[str, ...]:
        """Return the prefixes of the lists of top-k rows (`indices`) or of detected objects (`classes`).

        A bundle with one list gives an empty prefix. With several, each begins with its output's name. Texts,
        or classes that are not finite, are no list: a model may name its outputs as it likes.
        """
        outputs = {output.name: output for output in self.outputs}
        partner = "boxes" if suffix == "classes" else "scores"
        ends = [name for name in self if name == suffix or name.endswith(f"_{suffix}")]
        prefixes = [name.removesuffix(suffix) for name in ends]
        return tuple(
            each
            for each in prefixes
            if all(
                (found := outputs.get(each + name)) is not None and found.datatype != "BYTES"
                for name in (suffix, "scores", partner)
            )
            and _are_finite(outputs[each + suffix])
        )

    def labels_of(self, prefix: str) -> tuple[Label, ...]:
        """Return the top-k list whose names begin with `prefix`."""
        return tuple(Label(*row) for row in self._rows(prefix, "indices"))

    def boxes_of(self, prefix: str) -> tuple[Box, ...]:
        """Return the list of detected objects whose names begin with `prefix`."""
        edges = iter(map(float, self.output(f"{prefix}boxes").flat()))
        corners = zip(edges, edges, edges, edges, strict=False)
        rows = zip(self._rows(prefix, "classes"), corners, strict=False)
        return tuple(Box(*row, *corner) for row, corner in rows)

    def _rows(self, prefix: str, numbers: str) -> Iterator[tuple[str, float, int]]:
        """Yield the label, score and number of each row; `numbers` names the output that has the last."""
        indices = self.output(f"{prefix}{numbers}").flat()
        scores = self.output(f"{prefix}scores").flat()
        labels = self.output(f"{prefix}labels").flat() if f"{prefix}labels" in set(self) else indices
        for label, score, index in zip(labels, scores, indices, strict=False):
            yield str(label), float(score), int(index)


def _are_finite(output: Output) -> bool:
    return not output.datatype.startswith("FP") or all(map(math.isfinite, output.flat()))


def read_answer(
    message: Message, *, agent: str, model: str, total_s: float, attempts: int
) -> Answer | RefusedError:
    """Read an answer, from MQTT 5's properties or from the JSON itself.

    Parameters
    ----------
    message
        The message.
    agent, model, attempts
        Of the request.
    total_s
        From the first time that the request was sent to the arrival of the answer.

    Returns
    -------
    Answer | RefusedError
        The answer, or the error for an answer with a status that is not 200; it is not raised, because the
        caller may ask again.

    Raises
    ------
    BadAnswerError
        If it is not an answer of an agent.
    """
    try:
        received = wire.read_answer(message)
        if received.status != OK:
            return refusal(received.status, received.message, received.hint)
        outputs = tuple(
            map(json_output, received.tensors)
            if received.raw is None
            else raw_outputs(received.raw_tensors, received.raw)
        )
    except EndlessDataError as error:
        raise BadAnswerError(f"the answer of {agent} is not read: {error}", hint=_NO_JSON) from error
    except (FormatError, ValueError, TypeError, OverflowError, RecursionError, struct.error) as error:
        raise BadAnswerError(
            f"the answer of {agent} cannot be read: {str(error)[:400]}", hint=_VERSIONS
        ) from error
    if message.refusal is not None or len({output.name for output in outputs}) != len(outputs):
        why = message.refusal or "expected tensors with different names, got equal ones"
        raise BadAnswerError(f"the answer of {agent} cannot be read: {why}", hint=_VERSIONS)
    return Answer(
        agent=agent,
        model=model,
        version=received.model_version,
        outputs=outputs,
        timing=_timing(total_s, received.server_timing),
        attempts=attempts,
        trace=tuple(pair for pair in message.properties.user if pair[0] in TRACE),
    )


def _timing(total_s: float, server_timing: str | None) -> Timing:
    spent = ServerTiming.parse(server_timing)
    if spent is None:
        return Timing(total_s)
    parts = (spent.queue_us, spent.decode_us, spent.compute_us, spent.encode_us)
    return Timing(total_s, *(us / 1e6 for us in parts))
