"""A model's state document: its metadata and condition, retained at `edge/v1/<device>/models/<model>/state`.

The keys `name`, `versions`, `platform`, `inputs` and `outputs` are those of the Open Inference Protocol's
model metadata; `outputs` are the graph's, before a declared postprocessing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from agent.bundle.quantisation import NO_QUANTISATION, Quantisation, Quantised
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import FormatError
from agent.wire import document
from agent.wire.tensors import parse_spec, smallest_shape, spec_document

PLATFORM: Final = "edgebundle_graph"


class ModelPhase(StrEnum):
    """The state of a model's worker."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class RowColumn:
    """A column of the rows that a model takes.

    Attributes
    ----------
    name
        Its name.
    datatype
        The input's datatype, or `BYTES` for a column of texts.
    """

    name: str
    datatype: str


def _columns(value: object) -> tuple[RowColumn, ...]:
    found = [document.members(item) for item in document.items(value)]
    return tuple(document.read(RowColumn, each) for each in found if isinstance(each.get("name"), str))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelState:
    """One model's state document.

    Attributes
    ----------
    name, version
        The manifest's.
    inputs, outputs
        The graph's tensors, in their largest shapes.
    smallest_inputs, smallest_outputs
        Their smallest shapes, in the same order; empty if no shape changes.
    ready
        Whether it answers requests.
    state
        A member of `ModelPhase`; a later version of the agent may use other texts.
    message
        Why it is not ready, or empty.
    security_counter, digest, key_id
        The manifest's counter, `sha256:<hex>` of the bundle, and the key that signed it.
    image_input
        The input that takes an image, or None.
    postprocess
        Names of the declared postprocessing steps, in order.
    audio_input, audio_rate
        The input that takes a recording, and samples a second; None for a model without.
    has_state
        Whether tensors need a session.
    columns
        The columns of a row, in order; none if the model takes no rows.
    quantisation
        The scales of quantised inputs and outputs.
    next_try_s
        When a failed model is tried again, in seconds since the epoch by the device's clock; None otherwise.
    """

    name: str
    inputs: tuple[TensorSpec, ...] = field(metadata=document.APART)
    outputs: tuple[TensorSpec, ...] = field(metadata=document.APART)
    ready: bool
    state: str
    message: str
    version: str
    security_counter: int | None
    digest: str
    key_id: str
    image_input: str | None
    audio_input: str | None = None
    audio_rate: int | None = None
    has_state: bool = False
    columns: tuple[RowColumn, ...] = field(
        default=(), metadata=document.form(_columns, lambda columns: [*map(document.write, columns)])
    )
    postprocess: tuple[str, ...]
    next_try_s: float | None = field(
        default=None, metadata=document.form(document.parse_time, document.format_time, key="next_try")
    )
    smallest_inputs: tuple[tuple[int, ...], ...] = field(default=(), metadata=document.APART)
    smallest_outputs: tuple[tuple[int, ...], ...] = field(default=(), metadata=document.APART)
    quantisation: Quantisation = field(default=NO_QUANTISATION, metadata=document.APART)

    def to_bytes(self) -> bytes:
        """Write the document."""
        first = {
            "name": self.name,
            "versions": [self.version],
            "platform": PLATFORM,
            "inputs": _documents(self.inputs, self.smallest_inputs, self.quantisation.inputs),
            "outputs": _documents(self.outputs, self.smallest_outputs, self.quantisation.outputs),
        }
        return document.encode(first | document.write(self))

    @classmethod
    def from_bytes(cls, raw: bytes) -> ModelState:
        """Read the document tolerantly: a member or tensor of the wrong form counts as absent.

        Raises
        ------
        EndlessDataError, FormatError
            If it is not a JSON object, or too long.
        """
        fields = document.parse_object(raw, "the model's state document")
        inputs, smallest_inputs = _specs(fields.get("inputs"))
        outputs, smallest_outputs = _specs(fields.get("outputs"))
        versions = document.texts(fields.get("versions"))
        return document.read(
            cls,
            fields,
            version=document.text(fields.get("version")) or next(iter(versions), ""),
            inputs=inputs,
            outputs=outputs,
            smallest_inputs=smallest_inputs,
            smallest_outputs=smallest_outputs,
            quantisation=Quantisation(_quantised(fields.get("inputs")), _quantised(fields.get("outputs"))),
        )


def _documents(
    specs: tuple[TensorSpec, ...], smallest: tuple[tuple[int, ...], ...], quantised: Sequence[Quantised]
) -> list[dict[str, object]]:
    scales = {each.name: {"scale": each.scale, "zero": each.zero} for each in quantised}
    lows = smallest or [spec.shape for spec in specs]
    return [
        spec_document(spec, low) | ({"quantisation": scales[spec.name]} if spec.name in scales else {})
        for spec, low in zip(specs, lows, strict=True)
    ]


def _quantised(value: object) -> tuple[Quantised, ...]:
    """Return the scales of tensors; what is no scale is left out."""
    found = []
    for tensor in map(document.members, document.items(value)):
        fields = document.members(tensor.get("quantisation"))
        scale, zero = document.number(fields.get("scale")), document.integer(fields.get("zero"))
        if scale is not None and zero is not None:
            with contextlib.suppress(ValueError):
                found.append(Quantised(document.text(tensor.get("name")), float(scale), zero))
    return tuple(found)


def _specs(value: object) -> tuple[tuple[TensorSpec, ...], tuple[tuple[int, ...], ...]]:
    """Return tensors and their smallest shapes, none of these if no shape changes."""
    specs, smallest = [], []
    for item in document.items(value):
        with contextlib.suppress(FormatError):
            specs.append(parse_spec(item))
            smallest.append(smallest_shape(item, specs[-1]))
    changes = any(low != spec.shape for low, spec in zip(smallest, specs, strict=True))
    return tuple(specs), tuple(smallest) if changes else ()
