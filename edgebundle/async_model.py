"""A model on an agent, or on a group of agents, that can be called: for asyncio.

Promises: one call, one answer or one error. A request that was refused because the queue is full (503) is
sent again as a new one until the deadline; everything else that the agent refuses is an error at once.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.wire.answer import OVERLOADED
from agent.wire.request import MAX_TRACE_CHARACTERS
from edgebundle.answer import Answer, read_answer
from edgebundle.asking import Asking, Call, wants_raw
from edgebundle.defaults import DEADLINE_S, IN_FLIGHT
from edgebundle.errors import ClientError, RefusedError, UnknownModelError, UsageError
from edgebundle.request import Request

if TYPE_CHECKING:
    from edgebundle.async_client import AsyncClient
    from edgebundle.model_info import ModelInfo
    from edgebundle.session import AsyncSession
    from edgebundle.target import Target

# The first pause after a 503; it doubles each time. A full queue of a model that takes 100 ms is half empty
# after a few seconds.
_OVERLOAD_PAUSE_S: Final = 0.2
# W3C Trace Context, 3.2: version, trace, parent, flags.
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class AsyncModel(Asking[Coroutine[Any, Any, Answer]]):
    """A model to call; `AsyncClient.model` makes it.

    Parameters
    ----------
    client
        The connection.
    target
        The model that requests are for, and where it is.
    """

    def __init__(self, client: AsyncClient, target: Target) -> None:
        self._client = client
        self._target = target

    @property
    def agent(self) -> str:
        """The name of the agent, or of the group."""
        return self._target.name

    @property
    def name(self) -> str:
        """The model's name."""
        return self._target.model

    async def info(self) -> ModelInfo:
        """Return the model's inputs, outputs and state; of any member, for a group.

        Raises
        ------
        UnknownAgentError, UnknownModelError
            If the broker knows no such agent or model.
        """
        return await self._client.directory.info(self._target)

    async def _ask(self, call: Call) -> Answer:
        is_raw = wants_raw(call.raw)
        request = await self.request(call.data, call.image, call.tensors or {}, call.audio, call.row)
        if is_raw:
            request = replace(request, is_raw=True)
        trace = _trace(call.traceparent, call.tracestate)
        return await self.send(request, call.deadline_s, trace, call.progress)

    async def send(
        self,
        request: Request,
        deadline_s: float = DEADLINE_S,
        trace: tuple[tuple[str, str], ...] = (),
        progress: Callable[[str], None] | None = None,
    ) -> Answer:
        """Send a request that was made before; the errors are those of a call."""
        end_s = time.monotonic() + _seconds(deadline_s)
        pause_s = _OVERLOAD_PAUSE_S
        first_s: float | None = None
        attempts = 0
        while True:
            message, exchange = await self._client.ask(
                self._target, request, end_s=end_s, trace=trace, progress=progress
            )
            first_s = exchange.sent_s if first_s is None else first_s
            attempts += exchange.attempts
            answer = read_answer(
                message,
                agent=self._target.name,
                model=self._target.model,
                total_s=exchange.arrived_s - first_s,
                attempts=attempts,
            )
            if isinstance(answer, Answer):
                return answer
            # The next answer gets as long as the pause, at least: else "no answer" would hide the 503.
            if answer.status != OVERLOADED or time.monotonic() + 2 * pause_s >= end_s:
                raise await self._explained(answer)
            await asyncio.sleep(pause_s)
            pause_s *= 2

    async def item(
        self, item: object, *, deadline_s: float = DEADLINE_S, progress: Callable[[str], None] | None = None
    ) -> Answer:
        """Ask the model about one item of `map`: a path or bytes are a picture."""
        is_picture = isinstance(item, str | Path | bytes | bytearray | memoryview)
        data, image = (None, item) if is_picture else (item, None)
        return await self._ask(Call(data, image, deadline_s=deadline_s, progress=progress))

    def map(
        self,
        items: Iterable[object] | AsyncIterable[object],
        *,
        in_flight: int = IN_FLIGHT,
        deadline_s: float = DEADLINE_S,
        progress: Callable[[str], None] | None = None,
    ) -> AsyncIterator[Answer]:
        """Ask the model about many items, and yield the answers in the order of the items.

        Parameters
        ----------
        items
            Pictures (paths, bytes) or arrays or mappings of arrays, as a call takes them; a batch is an array
            whose items are asked about one by one. They are taken only as fast as answers arrive.
        in_flight
            How many requests are under way at a time.
        deadline_s, progress
            Of each request.

        Raises
        ------
        UsageError
            If `in_flight` or `deadline_s` cannot be used; raised at once.
        ClientError
            If one has no answer; those under way are cancelled.
        """
        check_many(in_flight, deadline_s)
        return self._map(items, in_flight, deadline_s, progress)

    async def _map(
        self,
        items: Iterable[object] | AsyncIterable[object],
        in_flight: int,
        deadline_s: float,
        progress: Callable[[str], None] | None,
    ) -> AsyncIterator[Answer]:
        running: deque[asyncio.Task[Answer]] = deque()
        try:
            async for item in _iterate(items):
                if len(running) >= in_flight:
                    yield await running[0]
                    running.popleft()
                call = self.item(item, deadline_s=deadline_s, progress=progress)
                running.append(asyncio.ensure_future(call))
            while running:
                yield await running[0]
                running.popleft()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def session(self, name: str | None = None) -> AsyncSession:
        """Return a session: the device keeps the model's state, or what was heard, from call to call.

        Parameters
        ----------
        name
            A name that no other program of this user uses at the same time; None for a random one.
        """
        from edgebundle.session import AsyncSession

        if self._target.is_group:
            raise UsageError(
                f"{self.agent}: expected one agent for a session, got a group, whose members take turns",
                hint="take client.model(AGENT, MODEL) of one agent of the group",
            )
        return AsyncSession(self, name)

    async def request(
        self,
        data: object,
        image: object,
        tensors: Mapping[str, Any],
        audio: object = None,
        row: object = None,
    ) -> Request:
        """Make a request from the arguments of a call."""
        if row is not None:
            if image is not None or audio is not None:
                raise UsageError(
                    "expected a row, a picture or a recording, got several of these",
                    hint="ask once for each of them",
                )
            _only(data, tensors)
            return Request.row(row)
        if audio is not None:
            if image is not None:
                raise UsageError(
                    "expected a picture or a recording, got both", hint="ask once for each of them"
                )
            _only(data, tensors)
            return await self._sound(audio)
        if isinstance(image, Path | str):
            # A file on a slow disk must not hold up other requests.
            _only(data, tensors)
            return await asyncio.to_thread(_picture_file, Path(image))
        if isinstance(image, bytes | bytearray | memoryview):
            _only(data, tensors)
            return Request.image(bytes(image))
        if image is not None and _is_picture(image):
            _only(data, tensors)
            return Request.pixels(image)
        if isinstance(data, Request):
            _only(None, tensors)
            return data
        if image is not None:  # an input of that name
            tensors = {"image": image, **tensors}
        if isinstance(data, Mapping):
            return await self._arrays({**data, **tensors})
        if data is not None:
            _only(None, tensors)
            info = await self._client.directory.info(self._target)
            if len(info.inputs) != 1:
                raise UsageError(
                    f"{self.name}: expected arrays for {len(info.inputs)} inputs, got one array",
                    hint=f"name each: its inputs are {', '.join(map(str, info.inputs))}",
                )
            return _request({info.inputs[0].name: data}, info)
        if tensors:
            return await self._arrays(tensors)
        raise UsageError(
            "expected a picture or tensors, got nothing",
            hint="model(image='cat.jpg'), model(array), model(input_name=array) or model(row={'name': 21.5})",
        )

    async def _sound(self, audio: object) -> Request:
        if isinstance(audio, Path | str):
            return Request.sound(await asyncio.to_thread(Path(audio).read_bytes))
        if isinstance(audio, bytes | bytearray | memoryview):
            return Request.sound(bytes(audio))
        rate = (await self._client.directory.info(self._target)).audio_rate
        if rate is None:
            raise UsageError(
                f"{self.name}: expected tensors or a picture, got samples: it takes no recordings",
                hint="give its inputs by name: model(input_name=array)",
            )
        return Request.samples(audio, rate)

    async def _arrays(self, arrays: Mapping[str, Any]) -> Request:
        """Convert arrays to the datatypes of the inputs, if this user may read what they are."""
        try:
            info = await self._client.directory.info(self._target)
        except UnknownModelError:
            return Request.arrays(arrays)  # the agent decides
        return _request(arrays, info)

    async def _explained(self, error: RefusedError) -> ClientError:
        if not isinstance(error, UnknownModelError):
            return error
        return UnknownModelError(error.message, hint=await self._client.directory.unknown_model(self._target))


def with_file(call: Call) -> Call:
    """Return a call with the contents of its file, if it names one: for a thread that may wait."""
    if isinstance(call.audio, Path | str) and call.image is None and call.row is None:
        return replace(call, audio=Path(call.audio).read_bytes())
    if isinstance(call.image, Path | str) and call.audio is None and call.row is None:
        _only(call.data, call.tensors or {})
        return replace(call, data=_picture_file(Path(call.image)), image=None)
    return call


def _picture_file(path: Path) -> Request:
    request = Request.from_file(path)
    if request.tensors or not request.content_type.startswith("image/"):
        raise UsageError(f"{path}: expected a JPEG or PNG image", hint="give arrays without image=")
    return request


def _only(data: object, tensors: Mapping[str, Any]) -> None:
    if data is not None or tensors:
        raise UsageError(
            "expected one picture, one array, or arrays by name, got several of these",
            hint="several inputs: model(first=array, second=array) or model({'first': array, ...})",
        )


def _is_picture(value: object) -> bool:
    """Return whether a value is a picture of Pillow or an array of pixels."""
    if hasattr(value, "convert"):
        return True
    shape: tuple[int, ...] = getattr(value, "shape", ())
    return str(getattr(value, "dtype", "")) == "uint8" and (
        len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4))
    )


def check_many(in_flight: int, deadline_s: float) -> None:
    """Refuse arguments of `map` that cannot be used.

    Raises
    ------
    UsageError
        If one cannot.
    """
    if in_flight < 1:
        raise UsageError(f"in_flight: expected at least 1, got {in_flight}", hint="for example in_flight=2")
    _seconds(deadline_s)


def _seconds(deadline_s: float) -> float:
    if not 0 < deadline_s < float("inf"):
        raise UsageError(
            f"deadline_s: expected a positive number of seconds, got {deadline_s!r:.40}",
            hint="for example deadline_s=10",
        )
    return deadline_s


def _trace(traceparent: str | None, tracestate: str | None) -> tuple[tuple[str, str], ...]:
    if traceparent is not None and not _TRACEPARENT.fullmatch(traceparent):
        raise UsageError(
            f"traceparent: expected 00-<32 hex digits>-<16 hex digits>-01, got {traceparent!r:.80}",
            hint="give the header of W3C Trace Context as it came, or leave it out",
        )
    longest = MAX_TRACE_CHARACTERS // 2
    if tracestate is not None and not (len(tracestate) <= longest and tracestate.isprintable()):
        raise UsageError(
            f"tracestate: expected at most {longest} printable characters",
            hint="give the header of W3C Trace Context as it came, or leave it out",
        )
    given = (("traceparent", traceparent), ("tracestate", tracestate))
    return tuple((name, value) for name, value in given if value is not None)


async def _iterate(items: Iterable[object] | AsyncIterable[object]) -> AsyncIterator[object]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


def _request(arrays: Mapping[str, Any], info: ModelInfo) -> Request:
    quantised = [each.name for each in info.quantisation.inputs]
    return Request.arrays(arrays, info.inputs, info.smallest_inputs, quantised)
