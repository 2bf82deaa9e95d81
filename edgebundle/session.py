"""A session with a model: calls that continue the state, or the recording, of the call before.

Promises: the calls of a session are sent one at a time, in their order, and each counts once, however often
it is delivered. If the device no longer has the session, the call says so; nothing begins again by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from agent.wire.content_types import L16, RAW
from agent.wire.session import SessionStep
from edgebundle.asking import wants_raw
from edgebundle.defaults import DEADLINE_S
from edgebundle.errors import ClientError, UsageError
from edgebundle.request import Request

if TYPE_CHECKING:
    from edgebundle.answer import Answer
    from edgebundle.async_model import AsyncModel

# Ending a session on the device makes room for others; if that takes longer, the session ends by itself.
_END_LIMIT_S: Final = 2.0


class AsyncSession:
    """A session; `AsyncModel.session` makes it.

    Parameters
    ----------
    model
        The model.
    name
        The session's name, or None for a random one.

    Raises
    ------
    UsageError
        If the name has other characters or is too long.
    """

    def __init__(self, model: AsyncModel, name: str | None = None) -> None:
        self._model = model
        self._name = secrets.token_hex(8) if name is None else name
        self._step = 0
        self._turn = asyncio.Lock()
        try:
            SessionStep(self._name)
        except ValueError as error:
            raise UsageError(str(error), hint="give a name of letters, digits, - and _, or none") from error

    @property
    def name(self) -> str:
        """The session's name."""
        return self._name

    @property
    def step(self) -> int:
        """The number of the next call, from 0."""
        return self._step

    def reset(self) -> None:
        """Let the next call begin again."""
        self._step = 0

    async def __call__(
        self,
        data: object = None,
        /,
        *,
        image: object = None,
        audio: object = None,
        row: object = None,
        raw: bool = False,
        end: bool = False,
        deadline_s: float = DEADLINE_S,
        progress: Callable[[str], None] | None = None,
        **tensors: Any,  # noqa: ANN401 - whatever numpy takes
    ) -> Answer:
        """Ask the model, as a step of this session.

        Parameters
        ----------
        data, image, audio, row, raw, deadline_s, progress, tensors
            As for `AsyncModel`.
        end
            Whether the session ends with this call. A recording is then heard to its last sample.

        Raises
        ------
        SessionGoneError
            If the device does not have the session any more; `reset` begins again.
        SessionStepError
            If an answer was lost after the device had counted its call.
        ClientError
            If there is no answer for another reason; the same call can then be made again.
        """
        is_raw = wants_raw(raw)
        async with self._turn:
            request = await self._model.request(data, image, tensors, audio, row)
            request = replace(request, is_raw=is_raw)
            return await self._send(request, end=end, deadline_s=deadline_s, progress=progress)

    async def finish(self, *, deadline_s: float = DEADLINE_S) -> Answer:
        """End a recording: hear what is left of it, and return what was found."""
        async with self._turn:
            info = await self._model.info()
            if info.audio_rate is None:
                raise UsageError(
                    f"{self._model.name}: expected a model that takes recordings to finish one",
                    hint="call finish() only for a model that takes audio",
                )
            request = Request(f"{L16};rate={info.audio_rate}", b"")
            return await self._send(request, end=True, deadline_s=deadline_s)

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._step:
            return
        with contextlib.suppress(ClientError):
            async with self._turn:
                await self._send(Request(RAW, b""), end=True, deadline_s=_END_LIMIT_S)

    async def _send(
        self,
        request: Request,
        *,
        end: bool,
        deadline_s: float,
        progress: Callable[[str], None] | None = None,
    ) -> Answer:
        step = SessionStep(self._name, self._step, end)
        answer = await self._model.send(replace(request, session=step), deadline_s, progress=progress)
        self._step = 0 if end else self._step + 1
        return answer
