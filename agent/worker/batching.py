"""Requests that wait are computed together, for models whose manifest declares a batch.

The rule for latency: `delay_s` after a request has arrived, it is computed as soon as the model is free, with
those that are there by then; with a delay of 0, it never waits for others. So a delay costs an idle model up
to that time, and a busy one nothing. Requests keep their order, which is that of the agent's fair queue.

Promises an answer for each request. A request that cannot be decoded, whose deadline has passed, or whose
sizes differ from its neighbours', is answered by itself and does not change the others. If the kernels fail
for several requests, each is computed again by itself; so does the agent if they end the process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np

from agent.bundle.manifest import Manifest
from agent.runtime.bucketed_module import BucketedModule
from agent.runtime.storage import Array
from agent.worker.channel import Channel
from agent.worker.codec import Decoded, Payload
from agent.worker.frames import Answer, Frame, Load, Request
from agent.worker.model import Model

# Of payloads that wait for their batch, and of inputs that wait until all are decoded.
MAX_HELD_BYTES: Final = 64 << 20


@dataclass(slots=True)
class _Item:
    """A decoded request: its inputs, its part of the batch, and its sizes in the other dimensions."""

    frame: Frame
    request: Request
    decoded: Decoded
    media_type: str
    times: list[float]
    inputs: dict[str, Array]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """What its inputs take."""
        return sum(array.nbytes for array in self.inputs.values())


class Batching:
    """Answers the requests of one model, whose manifest declares a batch, together.

    A request waits for others until `delay_s` after its arrival.
    """

    def __init__(
        self,
        model: Model,
        module: BucketedModule,
        manifest: Manifest,
        delay_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        buckets = module.buckets
        self._model = model
        self._module = module
        self._delay_s = delay_s
        self._clock = clock
        self._axis = [dimension.name for dimension in buckets.dimensions].index(buckets.batch or "")
        self.limit = buckets.dimensions[self._axis].high
        self._names = [spec.name for spec in manifest.inputs]

    def gather(self, channel: Channel, first: Frame) -> list[Frame]:
        """Return `first` and the requests behind it: those that are there, or come within the delay.

        Any other frame ends the batch and is received next.
        """
        frames = [first]
        assert isinstance(first.header, Request)
        end_s = (first.header.received_s or self._clock()) + self._delay_s
        held = len(first.payload)
        while len(frames) < self.limit and held <= MAX_HELD_BYTES and not _is_by_itself(frames[-1]):
            if not channel.has_frame(max(0.0, end_s - self._clock())):
                break
            frame = channel.receive()
            if frame is None:
                break
            if not isinstance(frame.header, Request) or _is_by_itself(frame):
                channel.put_back(frame)
                break
            frames.append(frame)
            held += len(frame.payload)
        return frames

    def answers(self, frames: Sequence[Frame]) -> Iterator[tuple[Answer, Payload]]:
        """Answer requests, in their order.

        An answer's payload may be the model's own memory, which the next one overwrites: send it first.
        """
        if len(frames) == 1:
            yield self._by_itself(frames[0])
            return
        rest = list(frames)
        while rest:
            decoded: list[_Item | tuple[Answer, Payload]] = []
            held = largest = 0
            while rest and held + largest <= MAX_HELD_BYTES:
                item = self._decode(rest.pop(0))
                decoded.append(item)
                nbytes = item.nbytes if isinstance(item, _Item) else 0
                held, largest = held + nbytes, max(largest, nbytes)
            yield from self._grouped(decoded)

    def _grouped(self, decoded: Sequence[_Item | tuple[Answer, Payload]]) -> Iterator[tuple[Answer, Payload]]:
        for others, group in groupby(decoded, key=self._others):
            if others is None:
                yield from (item for item in group if not isinstance(item, _Item))
                continue
            items = [item for item in group if isinstance(item, _Item)]
            while items:
                part = self._first_part(items)
                items = items[len(part) :]
                yield from self._together(part) if len(part) > 1 else [self._by_itself(part[0].frame)]

    def _by_itself(self, frame: Frame) -> tuple[Answer, Payload]:
        assert isinstance(frame.header, Request)
        return self._model.answer(frame.header, memoryview(frame.payload), self._clock)

    def _decode(self, frame: Frame) -> _Item | tuple[Answer, Payload]:
        """Decode a request, or return its refusal."""
        request = frame.header
        assert isinstance(request, Request)
        times = [self._clock()]
        try:
            media_type, decoded = self._model.decode(request, memoryview(frame.payload), times[0])
            inputs = {name: self._module.input_view(name).copy() for name in self._names}
        except Exception as error:  # noqa: BLE001 - as in `Model.answer`: one request must not end the worker
            return self._model.failed(request, error, times, self._clock)
        times.append(self._clock())
        return _Item(frame, request, decoded, media_type, times, inputs, self._module.sizes)

    def _others(self, item: _Item | tuple[Answer, Payload]) -> tuple[int, ...] | None:
        """Return the sizes that requests of one batch have in common; None for a refusal."""
        if not isinstance(item, _Item):
            return None
        return (*item.sizes[: self._axis], *item.sizes[self._axis + 1 :])

    def _first_part(self, items: Sequence[_Item]) -> list[_Item]:
        """Return as many of the first items as the largest bucket and the memory hold; at least one."""
        size = nbytes = 0
        part: list[_Item] = []
        for item in items:
            size += item.sizes[self._axis]
            nbytes += item.nbytes
            if part and (size > self.limit or nbytes > MAX_HELD_BYTES):
                break
            part.append(item)
        return part

    def _together(self, items: Sequence[_Item]) -> Iterator[tuple[Answer, Payload]]:
        sizes = list(items[0].sizes)
        sizes[self._axis] = sum(item.sizes[self._axis] for item in items)
        try:
            self._module.use(tuple(sizes))
            for name in self._names:
                np.concatenate([item.inputs[name] for item in items], out=self._module.input_view(name))
            begun_s = self._clock()
            self._module.run()
            ended_s = self._clock()
            outputs = self._module.outputs()
        except Exception:  # noqa: BLE001 - whose fault it is shows when each is computed by itself
            yield from (self._by_itself(item.frame) for item in items)
            return
        start = 0
        for item in items:
            rows = slice(start, start + item.sizes[self._axis])
            start = rows.stop
            # What the others took to be decoded counts as waiting.
            times = [begun_s - (item.times[1] - item.times[0]), begun_s, ended_s]
            values = {name: output[rows] for name, output in outputs.items()}
            try:
                yield self._model.encode(
                    item.request, item.decoded, item.media_type, values, times, self._clock
                )
            except Exception as error:  # noqa: BLE001 - as in `Model.answer`: one request must not end the worker
                yield self._model.failed(item.request, error, times, self._clock)


def batching_of(model: Model, manifest: Manifest, load: Load) -> Batching | None:
    """Return how a worker answers requests together; None if it does not, or the model declares no batch."""
    module = model.module
    if not load.batch or not isinstance(module, BucketedModule) or module.buckets.batch is None:
        return None
    return Batching(model, module, manifest, load.batch_delay_s)


def _is_by_itself(frame: Frame) -> bool:
    return isinstance(frame.header, Request) and frame.header.by_itself
