"""What a model's agent says about it, as a client shows it."""

from __future__ import annotations

from dataclasses import dataclass

from agent.bundle.tensor_spec import TensorSpec
from agent.wire.model_state import ModelState


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
    smallest_inputs: tuple[tuple[int, ...], ...] = ()
    smallest_outputs: tuple[tuple[int, ...], ...] = ()

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
            smallest_inputs=state.smallest_inputs,
            smallest_outputs=state.smallest_outputs,
        )
