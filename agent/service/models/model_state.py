"""What is retained about a model: OIP's model metadata, and how it is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from agent.bundle.tensor_spec import TensorSpec
from agent.service.models.model import ModelStatus

PLATFORM: Final = "edgebundle_graph"


def document(status: ModelStatus) -> bytes:
    """Write a model's state.

    The keys `name`, `versions`, `platform`, `inputs` and `outputs` are those of the Open Inference Protocol's
    model metadata; `outputs` are the graph's, before a declared postprocess.
    """
    manifest = status.manifest
    return json.dumps(
        {
            "name": status.name,
            "versions": [manifest.version],
            "platform": PLATFORM,
            "inputs": _tensors(manifest.inputs),
            "outputs": _tensors(manifest.outputs),
            "ready": status.ready,
            "state": status.state,
            "message": status.message,
            "version": manifest.version,
            "security_counter": manifest.security_counter,
            "digest": status.digest,
            "key_id": status.key_id,
            "image_input": None if manifest.preprocess is None else manifest.preprocess.input,
            "postprocess": []
            if manifest.postprocess is None
            else [type(step).__name__.lower() for step in manifest.postprocess.steps],
        },
        separators=(",", ":"),
    ).encode()


def _tensors(specs: Sequence[TensorSpec]) -> list[dict[str, object]]:
    return [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]
