"""A request that was accepted and is not answered yet: it waits in a queue or in a worker.

Promises: no I/O and no copy of the payload; a request is answered or refused exactly once.
Leaves to others: the form of messages (`agent.wire`), deadlines (`model`), and what an answer leads to
(`inference`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from agent.errors import RequestError
from agent.mqtt.message import Message
from agent.service.requests.acknowledgement import Slot
from agent.service.requests.answers import ReplyTo, RequestKey
from agent.service.requests.quarantine import Content
from agent.wire.answer_head import AnswerHead
from agent.wire.request import InferMessage
from agent.wire.topics import ANONYMOUS
from agent.worker.frames import Answer, Request

# One day: no answer is kept for longer.
MAX_DEADLINE_S: Final = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The deadline of a request that names none, and how long any may wait and be computed."""

    default_s: float
    longest_s: float


@dataclass(frozen=True, slots=True)
class Ends:
    """Called once for each request: with answer, payload and the version of the model, or with an error."""

    answered: Callable[[Pending, Answer, bytes, str], None]
    refused: Callable[[Pending, RequestError], None]


class Pending:
    """One accepted request to a model.

    `key` is equal for repeated deliveries of one request; None if nothing tells two requests apart. `frame`
    is for the worker and lacks the payload, which is dropped as soon as the request is finished; `nbytes`
    stays. `ends` are called when it is answered or refused.

    `client` is the user in the request's topic, or `topics.ANONYMOUS`. `slots` are the deliveries that wait
    for an acknowledgement. `deadline` is the timer while it waits or is computed. `suspect` is its content,
    if a worker died while it computed an equal one. `error` is why it must be refused at once: a property is
    over a limit.
    """

    __slots__ = (
        "_ends",
        "_payload_digest",
        "client",
        "deadline",
        "error",
        "finished",
        "frame",
        "key",
        "model",
        "nbytes",
        "payload",
        "reply",
        "slots",
        "suspect",
    )

    def __init__(
        self,
        model: str,
        reply: ReplyTo,
        key: RequestKey | None,
        frame: Request,
        payload: bytes,
        ends: Ends,
        *,
        payload_digest: bytes | None = None,
    ) -> None:
        self.model = model
        self.reply = reply
        self.key = key
        self.frame = frame
        self.payload = payload
        self.nbytes = len(payload)
        self._payload_digest = payload_digest
        self.client = frame.client
        self.slots: list[Slot] = []
        self.deadline: asyncio.TimerHandle | None = None
        self.finished = False
        self.suspect: Content | None = None
        self.error: RequestError | None = None
        self._ends = ends

    @classmethod
    def read(
        cls,
        message: Message,
        model: str,
        user: str | None,
        ends: Ends,
        *,
        seq: int,
        now_s: float,
        deadlines: Deadlines,
        payload_digest: bytes | None = None,
    ) -> Pending:
        """Read a request from a message that arrived on an `infer` topic.

        `model` and `user` are from the topic. No other request of this process has the same `seq`.
        The answer is kept until the request's own deadline. One that names no reply topic for an answer, or
        whose user has a name that no user can have, raises UnanswerableError.
        """
        request = InferMessage.from_message(message, user)
        limit_s = deadlines.default_s if request.deadline_s is None else request.deadline_s
        until_s = now_s + min(limit_s, MAX_DEADLINE_S)
        # A request that is refused for its properties is not remembered: they may be too long to be stored.
        correlation = None if request.refusal is not None else request.correlation
        key = None
        if correlation is not None:
            payload_digest = payload_digest or hashlib.sha256(message.payload).digest()
            key = RequestKey.of(message.topic, request.reply_to, correlation, payload_digest)
        pending = cls(
            model,
            ReplyTo(request.reply_to, request.correlation, message.qos, until_s, request.trace),
            key,
            Request(
                seq=seq,
                content_type=request.content_type,
                tensors=request.tensors,
                accept=request.accept,
                id=request.id,
                received_s=now_s,
                deadline_s=now_s + min(limit_s, deadlines.longest_s),
                client_json=request.has_envelope,
                client=user or ANONYMOUS,
                session=None if request.session is None else request.session.name,
                step=None if request.session is None else request.session.step,
                session_end=request.session is not None and request.session.end,
            ),
            message.payload,
            ends,
            payload_digest=payload_digest,
        )
        pending.error = request.refusal
        return pending

    @property
    def expires_s(self) -> float:
        """When it is given up (`time.monotonic`): at its deadline, or earlier."""
        deadline_s = self.frame.deadline_s
        return self.reply.deadline_s if deadline_s is None else deadline_s

    @property
    def head(self) -> AnswerHead:
        """The head of a refusal's JSON."""
        return AnswerHead(self.model, id=self.frame.id, has_envelope=self.frame.client_json)

    def content(self) -> Content:
        """Return what the model gets from it, as digests."""
        if not self._payload_digest:
            self._payload_digest = hashlib.sha256(self.payload).digest()
        return Content.of(self.frame, self.nbytes, self._payload_digest)

    def answer(self, answer: Answer, payload: bytes, version: str) -> None:
        """Report a worker's answer; a late one is dropped, since the 408 has already been sent."""
        if self._finish():
            self._ends.answered(self, answer, payload, version)

    def refuse(self, error: RequestError) -> None:
        """Report why there will be no answer."""
        if self._finish():
            self._ends.refused(self, error)

    def expire(self, error: RequestError) -> None:
        """Refuse a request whose deadline passed while a worker computes it; `content` stays known."""
        self.content()
        self.refuse(error)

    def _finish(self) -> bool:
        if self.finished:
            return False
        self.finished = True
        if self.deadline is not None:
            self.deadline.cancel()
        # The timer and this object refer to each other: without that cycle both are freed now, and the
        # payload with them, instead of at the next garbage collection.
        self.deadline = None
        self.payload = b""
        return True
