"""Names of the MQTT 5 user properties of requests and answers."""

from __future__ import annotations

from typing import Final

# Of an answer: the status as a decimal number, and why it is not 200.
STATUS: Final = "__stat"
STATUS_MESSAGE: Final = "__stMsg"
# Of an answer: the version of the model that computed it.
MODEL_VERSION: Final = "model_version"
# Of an answer: where the device's part of its time went (`server_timing`).
SERVER_TIMING: Final = "server-timing"
# Of a request and an answer: one for each raw tensor, in order, as `name;FP32;1,3,4`.
TENSOR: Final = "tensor"
# Of a request: the content type that the answer should have.
ACCEPT: Final = "accept"
# Of a request: its session, its number in it, and `1` if the session ends with it. The number is also that of
# the answer.
SESSION: Final = "session"
SESSION_STEP: Final = "session_step"
SESSION_END: Final = "session_end"
# W3C Trace Context: MQTT; copied from a request to its answer.
TRACE: Final = ("traceparent", "tracestate")
