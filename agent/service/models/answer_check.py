"""Checks a worker's answers as strictly as input from a stranger.

A model's native code runs in the worker, so an answer may say anything. It becomes an MQTT message, whose
strings must be acceptable to brokers: any other string would end the agent's connection.

Promises: a fault is described in one line; an answer without one fits an MQTT message, apart from its size.
Leaves to others: the form of the frame (`agent.worker.frames`), and what follows from a fault (`supervisor`).
"""

from __future__ import annotations

import functools
from typing import Final

from agent.errors import (
    DeadlineError,
    ExecutionError,
    InputError,
    MediaTypeError,
    PayloadError,
    SessionGoneError,
    SessionStepError,
)
from agent.wire.answer_head import MAX_STATUS_MESSAGE_CHARACTERS, OK
from agent.wire.content_types import CBOR, JSON, RAW
from agent.wire.session import MAX_STEP
from agent.wire.tensors import parse_tensor
from agent.worker.frames import Answer

# The refusals that a worker may give; the others are the agent's own.
_REFUSALS: Final = frozenset(
    {
        InputError.status,
        DeadlineError.status,
        SessionStepError.status,
        SessionGoneError.status,
        PayloadError.status,
        MediaTypeError.status,
        ExecutionError.status,
    }
)
_RESULTS: Final = frozenset({JSON, RAW, CBOR})
# Eleven days: far above every deadline, and exact as a float, so that sums of durations stay sensible.
_MAX_DURATION_US: Final = 10**12
# Models answer with the same tensors again and again; an entry takes about 1 KiB, and at most 64 KiB.
_KNOWN_TENSORS: Final = 16


def fault_of(answer: Answer, payload: bytes) -> str | None:
    """Return what is wrong with an answer; None if nothing is."""
    durations = (answer.queue_us, answer.decode_us, answer.compute_us, answer.encode_us)
    if min(durations) < 0 or max(durations) > _MAX_DURATION_US:
        return f"expected durations from 0 to {_MAX_DURATION_US} us, got {durations}"
    counts = (answer.step or 0, answer.sessions, answer.evicted)
    if min(counts) < 0 or max(counts) > MAX_STEP:
        return f"expected counts of sessions from 0 to {MAX_STEP}, got {counts}"
    if answer.content_type == JSON and not payload.isascii():
        return "expected JSON in ASCII, got other bytes"
    if answer.status != OK:
        return _fault_of_refusal(answer, payload)
    if answer.message:
        return f"expected no message with status {OK}, got {answer.message!r:.80}"
    if answer.content_type not in _RESULTS:
        return f"expected a content type among {', '.join(sorted(_RESULTS))}, got {answer.content_type!r:.80}"
    if answer.content_type != RAW:
        return _fault_of_tensors(answer)
    try:
        nbytes = _nbytes(answer.tensors)
    except ValueError as error:
        return str(error)
    if nbytes is not None and nbytes != len(payload):
        return f"expected {nbytes} bytes of raw tensors, got {len(payload)}"
    return None


def _fault_of_refusal(answer: Answer, payload: bytes) -> str | None:
    if answer.status not in _REFUSALS:
        return f"expected a status among {[OK, *sorted(_REFUSALS)]}, got {answer.status}"
    if not 0 < len(answer.message) <= MAX_STATUS_MESSAGE_CHARACTERS:
        return (
            f"expected a message of 1 to {MAX_STATUS_MESSAGE_CHARACTERS} characters, "
            f"got {len(answer.message)}"
        )
    if answer.content_type != JSON:
        return f"expected a refusal in {JSON}, got {answer.content_type!r:.80}"
    if not payload:
        return "expected a refusal with JSON, got an empty payload"
    return _fault_of_tensors(answer)


def _fault_of_tensors(answer: Answer) -> str | None:
    if answer.tensors:
        return f"expected tensors only with {RAW}, got {len(answer.tensors)} with {answer.content_type}"
    return None


@functools.lru_cache(maxsize=_KNOWN_TENSORS)
def _nbytes(tensors: tuple[str, ...]) -> int | None:
    """Return the size of raw tensors; None if one of them is BYTES, whose size is not in its shape."""
    specs = [parse_tensor(tensor) for tensor in tensors]
    return None if any(spec.datatype == "BYTES" for spec in specs) else sum(spec.nbytes for spec in specs)
