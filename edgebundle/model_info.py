"""What a model's agent says about it, as a client shows it."""

from __future__ import annotations

from dataclasses import dataclass

from agent.bundle.quantisation import NO_QUANTISATION, Quantisation
from agent.bundle.tensor_spec import TensorSpec
from agent.wire.model_state import ModelState, RowColumn


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model on one device.

    Attributes
    ----------
    agent, name, version
        The device's name, the model's, and its version.
    inputs, outputs
        The graph's tensors: name, datatype, shape; the largest shape if it changes. The outputs are those
        before a declared postprocessing.
    smallest_inputs, smallest_outputs
        Their smallest shapes, in the same order; empty if no shape changes.
    image_input
        The input that takes a picture, or None.
    postprocess
        Names of the declared postprocessing steps, in order.
    ready
        Whether it answers requests.
    audio_input, audio_rate
        The input that takes a recording, and its samples a second; None for a model without.
    has_state
        Whether tensors need a session.
    columns
        The columns of a row, in order: name, and datatype (`BYTES` for texts); none if it takes no rows.
    quantisation
        The scales of quantised inputs, which take real numbers too, and of quantised outputs.
    state, message
        `starting`, `ready`, `restarting`, `failed` or `stopped`, and why it is not ready.
    """

    agent: str
    name: str
    version: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    image_input: str | None
    postprocess: tuple[str, ...]
    ready: bool
    state: str
    message: str
    audio_input: str | None = None
    audio_rate: int | None = None
    has_state: bool = False
    smallest_inputs: tuple[tuple[int, ...], ...] = ()
    smallest_outputs: tuple[tuple[int, ...], ...] = ()
    columns: tuple[RowColumn, ...] = ()
    quantisation: Quantisation = NO_QUANTISATION

    @classmethod
    def of(cls, agent: str, state: ModelState) -> ModelInfo:
        """Return what a client shows of a state document."""
        return cls(
            agent=agent,
            name=state.name,
            version=state.version,
            inputs=state.inputs,
            outputs=state.outputs,
            image_input=state.image_input,
            postprocess=state.postprocess,
            ready=state.ready,
            state=state.state,
            message=state.message,
            audio_input=state.audio_input,
            audio_rate=state.audio_rate,
            has_state=state.has_state,
            smallest_inputs=state.smallest_inputs,
            smallest_outputs=state.smallest_outputs,
            columns=state.columns,
            quantisation=state.quantisation,
        )
