"""The client without asyncio: the same calls, from any number of threads.

Promises: one connection for all threads, kept by a thread of its own; Ctrl-C and exceptions in a waiting
thread cancel its request. A client that is not closed is closed with the process.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, Unpack, cast

from edgebundle.asking import Asking, Call
from edgebundle.defaults import DEADLINE_S, IN_FLIGHT
from edgebundle.errors import ClosedError, UsageError

if TYPE_CHECKING:
    from edgebundle.answer import Answer
    from edgebundle.async_client import AsyncClient
    from edgebundle.async_model import AsyncModel
    from edgebundle.broker import Broker, BrokerOptions
    from edgebundle.model_info import ModelInfo
    from edgebundle.session import AsyncSession

_Result = TypeVar("_Result")
# The connection is closed within the time in which a broker that is reachable acknowledges what was sent.
_CLOSE_LIMIT_S: Final = 5.0
# How often a waiting thread looks whether the client's thread still runs.
_LOOK_S: Final = 1.0
_CLOSED: Final = "the client was closed while the request was under way"


class Client:
    """A client of the agents at one broker; it is connected when it is made.

    Parameters
    ----------
    broker, options
        As for `AsyncClient`.
    progress
        As for `AsyncClient`; it is called in the client's own thread.

    Raises
    ------
    UsageError
        If these do not describe a broker.
    BrokerError
        If the broker cannot be reached, or refuses.

    Examples
    --------
    ::

        with Client("mqtts://broker") as client:
            faces = client.model("kitchen", "faces")
            print(faces(image="cat.jpg").boxes)
    """

    def __init__(
        self,
        broker: str | Broker,
        *,
        progress: Callable[[str], None] | None = None,
        **options: Unpack[BrokerOptions],
    ) -> None:
        # Imported at the first use: the protocol takes longer to load than asyncio.
        from edgebundle.async_client import AsyncClient

        self._client = AsyncClient(broker, progress=progress, **options)
        # Windows' default loop cannot watch a socket.
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="edgebundle", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _close, self._client, self._loop, self._thread)
        # A daemon thread does not hold up the end of the process; the connection is closed before it.
        self._end.atexit = False
        atexit.register(self._end)
        try:
            self._wait(self._client.connect())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def model(self, agent: str, model: str) -> Model:
        """Return a model on one agent; see `AsyncClient.model`."""
        return Model(self, self._client.model(agent, model))

    def group_model(self, group: str, model: str) -> Model:
        """Return a model on any agent of a group; see `AsyncClient.group_model`."""
        return Model(self, self._client.group_model(group, model))

    def agents(self) -> tuple[str, ...]:
        """Return the names of the agents that the broker knows; see `AsyncClient.agents`."""
        return self._wait(self._client.agents())

    def close(self) -> None:
        """End the connection; requests that are under way, in any thread, end with `ClosedError`."""
        self._end()
        atexit.unregister(self._end)

    def _start(self, work: Coroutine[Any, Any, _Result]) -> Future[_Result]:
        self._check(work)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        self._check(work)
        return _Waiting(work, self._loop).result(self._thread)

    def _check(self, work: Coroutine[Any, Any, Any]) -> None:
        """Check that work can be given to the client's thread and awaited here."""
        if not self._end.alive:
            work.close()
            raise ClosedError("the client is closed")
        if threading.current_thread() is self._thread:
            work.close()
            raise UsageError(
                "a callback of the client cannot wait for the client",
                hint="use AsyncClient, or another thread",
            )


class Model(Asking["Answer"]):
    """A model to call; `Client.model` makes it. A call waits for the answer."""

    def __init__(self, client: Client, model: AsyncModel) -> None:
        self._client = client
        self._model = model

    @property
    def agent(self) -> str:
        """The name of the agent, or of the group."""
        return self._model.agent

    @property
    def name(self) -> str:
        """The model's name."""
        return self._model.name

    def info(self) -> ModelInfo:
        """Return the model's inputs, outputs and state; see `AsyncModel.info`."""
        return self._client._wait(self._model.info())

    def _ask(self, call: Call) -> Answer:
        from edgebundle.async_model import with_file

        # This thread waits anyway, so it reads the file itself instead of handing it to a third thread.
        return self._client._wait(self._model._ask(with_file(call)))

    @property
    def submit(self) -> Asking[Future[Answer]]:
        """Asks the model as a call does, and returns at once: the future has the answer."""
        return _Submitting(self._client, self._model)

    def session(self, name: str | None = None) -> Session:
        """Return a session; see `AsyncModel.session`."""
        return Session(self._client, self._model.session(name))

    def map(
        self,
        items: Iterable[object],
        *,
        in_flight: int = IN_FLIGHT,
        deadline_s: float = DEADLINE_S,
        progress: Callable[[str], None] | None = None,
    ) -> Iterator[Answer]:
        """Ask the model about many items, and yield the answers in their order; see `AsyncModel.map`."""
        from edgebundle.async_model import check_many

        check_many(in_flight, deadline_s)
        return self._map(items, in_flight, deadline_s, progress)

    def _map(
        self,
        items: Iterable[object],
        in_flight: int,
        deadline_s: float,
        progress: Callable[[str], None] | None,
    ) -> Iterator[Answer]:
        running: deque[Future[Answer]] = deque()
        try:
            for item in items:
                if len(running) >= in_flight:
                    yield running[0].result()
                    running.popleft()
                running.append(
                    self._client._start(self._model.item(item, deadline_s=deadline_s, progress=progress))
                )
            while running:
                yield running[0].result()
                running.popleft()
        finally:
            for future in running:
                future.cancel()


class Session:
    """A session without asyncio; `Model.session` makes it. Calls wait for the answer.

    Examples
    --------
    ::

        with client.model("kitchen", "vad").session() as listening:
            for samples in microphone:
                print(listening(audio=samples)["segments"])
    """

    def __init__(self, client: Client, session: AsyncSession) -> None:
        self._client = client
        self._session = session

    @property
    def name(self) -> str:
        """The session's name."""
        return self._session.name

    @property
    def step(self) -> int:
        """The number of the next call, from 0."""
        return self._session.step

    def reset(self) -> None:
        """Let the next call begin again."""
        self._session.reset()

    def __call__(
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
        """Ask the model, as a step of this session; see `AsyncSession.__call__`."""
        call = self._session(
            data,
            image=image,
            audio=audio,
            row=row,
            raw=raw,
            end=end,
            deadline_s=deadline_s,
            progress=progress,
            **tensors,
        )
        return self._client._wait(call)

    def finish(self, *, deadline_s: float = DEADLINE_S) -> Answer:
        """End a recording; see `AsyncSession.finish`."""
        return self._client._wait(self._session.finish(deadline_s=deadline_s))

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client._wait(self._session.__aexit__(kind, error, trace))


class _Submitting(Asking["Future[Answer]"]):
    """Asks without waiting."""

    def __init__(self, client: Client, model: AsyncModel) -> None:
        self._client = client
        self._model = model

    def _ask(self, call: Call) -> Future[Answer]:
        return self._client._start(self._model._ask(call))


class _Waiting(Generic[_Result]):
    """Work on the client's loop, for whose result one thread waits.

    `asyncio.run_coroutine_threadsafe` serves any number of threads and callbacks, with more calls and one
    more turn of the loop.

    Parameters
    ----------
    work
        What to do.
    loop
        The client's loop.
    """

    def __init__(self, work: Coroutine[Any, Any, _Result], loop: asyncio.AbstractEventLoop) -> None:
        self._work = work
        self._loop = loop
        self._ended = threading.Lock()
        self._ended.acquire()
        self._task: asyncio.Task[None] | None = None
        self._error: BaseException | None = None
        self._value: _Result | None = None

    def result(self, thread: threading.Thread) -> _Result:
        """Let the loop's thread do the work, and return its result."""
        try:
            self._loop.call_soon_threadsafe(self._start)
            while not self._ended.acquire(timeout=_LOOK_S):
                if not thread.is_alive():
                    self._error = ClosedError(_CLOSED)
                    break
        except RuntimeError as error:  # closed by another thread a moment ago
            self._work.close()
            raise ClosedError("the client is closed") from error
        except BaseException:  # such as KeyboardInterrupt
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._give_up)
            raise
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # it refers to this frame, and so to the request
        return cast(_Result, self._value)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run())

    def _give_up(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            self._value = await self._work
        except asyncio.CancelledError:
            self._error = ClosedError(_CLOSED)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self._error = error
        finally:
            self._ended.release()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.close()


def _close(client: AsyncClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    closing = asyncio.run_coroutine_threadsafe(client.close(), loop)
    if threading.current_thread() is thread:  # collected as garbage there
        closing.add_done_callback(lambda _closing: loop.stop())
        return
    try:
        closing.result(_CLOSE_LIMIT_S)
    except FutureTimeoutError:
        pass
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_LIMIT_S)
