"""The client of edgebundle: ask models on devices over MQTT.

Three lines::

    from edgebundle import Client

    faces = Client("mqtts://broker").model("kitchen", "faces")
    print(faces(image="cat.jpg").boxes)

`AsyncClient` is the same for asyncio. docs/clients.md shows both, and docs/mqtt.md is the protocol below.

Promises: a request is sent until there is one answer, or an error that says why there is none. Importing this
package loads neither arrays nor MQTT: each name is imported at its first use, numpy when an array is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from edgebundle.answer import Answer, Box, Label, Timing
    from edgebundle.async_client import AsyncClient
    from edgebundle.async_model import AsyncModel
    from edgebundle.broker import Broker
    from edgebundle.client import Client, Model
    from edgebundle.errors import (
        BadAnswerError,
        BrokerError,
        ClientError,
        ClosedError,
        DeadlineError,
        ExecutionError,
        InputError,
        MediaTypeError,
        NoAnswerError,
        OverloadedError,
        PayloadError,
        RefusedError,
        UnknownAgentError,
        UnknownModelError,
        UsageError,
    )
    from edgebundle.model_info import ModelInfo
    from edgebundle.output import Output
    from edgebundle.request import Request

_MODULE_OF: Final = {
    "Answer": "edgebundle.answer",
    "AsyncClient": "edgebundle.async_client",
    "AsyncModel": "edgebundle.async_model",
    "BadAnswerError": "edgebundle.errors",
    "Box": "edgebundle.answer",
    "Broker": "edgebundle.broker",
    "BrokerError": "edgebundle.errors",
    "Client": "edgebundle.client",
    "ClientError": "edgebundle.errors",
    "ClosedError": "edgebundle.errors",
    "DeadlineError": "edgebundle.errors",
    "ExecutionError": "edgebundle.errors",
    "InputError": "edgebundle.errors",
    "Label": "edgebundle.answer",
    "MediaTypeError": "edgebundle.errors",
    "Model": "edgebundle.client",
    "ModelInfo": "edgebundle.model_info",
    "NoAnswerError": "edgebundle.errors",
    "Output": "edgebundle.output",
    "OverloadedError": "edgebundle.errors",
    "PayloadError": "edgebundle.errors",
    "RefusedError": "edgebundle.errors",
    "Request": "edgebundle.request",
    "Timing": "edgebundle.answer",
    "UnknownAgentError": "edgebundle.errors",
    "UnknownModelError": "edgebundle.errors",
    "UsageError": "edgebundle.errors",
}

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncModel",
    "BadAnswerError",
    "Box",
    "Broker",
    "BrokerError",
    "Client",
    "ClientError",
    "ClosedError",
    "DeadlineError",
    "ExecutionError",
    "InputError",
    "Label",
    "MediaTypeError",
    "Model",
    "ModelInfo",
    "NoAnswerError",
    "Output",
    "OverloadedError",
    "PayloadError",
    "RefusedError",
    "Request",
    "Timing",
    "UnknownAgentError",
    "UnknownModelError",
    "UsageError",
]


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
