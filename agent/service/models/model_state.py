"""A model's state document, from its status."""

from __future__ import annotations

from agent.service.models.model import ModelStatus
from agent.wire.model_state import ModelState


def state_document(status: ModelStatus) -> ModelState:
    """Return what is retained about a model."""
    manifest = status.manifest
    steps = () if manifest.postprocess is None else manifest.postprocess.steps
    return ModelState(
        name=status.name,
        version=manifest.version,
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        ready=status.ready,
        state=status.state,
        message=status.message,
        security_counter=manifest.security_counter,
        digest=status.digest,
        key_id=status.key_id,
        image_input=None if manifest.preprocess is None else manifest.preprocess.input,
        postprocess=tuple(type(step).__name__.lower() for step in steps),
    )
