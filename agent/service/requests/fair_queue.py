"""The requests that wait for one model, with a fair share of the queue and of the worker for each client.

MQTT does not tell a subscriber who published a message. A client's name is therefore the user in the topic of
its request, `.../infer/<user>`, because the broker lets only that user publish there (docs/mosquitto has an
access list). All who ask without a user are one client. Each client has a lane:

- The worker takes one request from each lane in turn, in the order of arrival within a lane. With N clients,
  a request that is the first of its lane waits for at most N - 1 others.
- A client that is set back (`set_back`) has its turn only when no other client waits.
- If the queue is full, the newest request of the longest lane gives way; in bytes, of the heaviest. A client
  that has one request waiting never loses it to a client that has more.

Promises: bounded in requests and bytes; no I/O and no clock. Requests that come back from a worker
(`put_back`) go first and never give way, except for those of clients that are set back.
Leaves to others: deadlines, and answering those that give way (`model`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Final, Generic, Protocol, TypeVar

# More clients than this share one lane, so that a full queue is searched in microseconds.
MAX_LANES: Final = 256
_SHARED: Final = ""


class Waiting(Protocol):
    """What the queue must know about a request."""

    @property
    def client(self) -> str:
        """The client that sent it."""

    @property
    def nbytes(self) -> int:
        """Size of its payload."""


Item = TypeVar("Item", bound=Waiting)


class _Lane(Generic[Item]):
    """The requests of one client."""

    __slots__ = ("items", "nbytes")

    def __init__(self) -> None:
        self.items: deque[Item] = deque()
        self.nbytes = 0


class FairQueue(Generic[Item]):
    """The queue of one model: `count` requests wait, whose payloads have `nbytes` together."""

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._returned: deque[Item] = deque()
        # In the order of their turns.
        self._lanes: OrderedDict[str, _Lane[Item]] = OrderedDict()
        # In the order in which they were set back.
        self._set_back: dict[str, None] = {}
        self.count = 0
        self.nbytes = 0

    @property
    def full(self) -> bool:
        """Whether the next request costs another one its place, or its own."""
        return self.count >= self._max_items or self.nbytes >= self._max_bytes

    def nbytes_of(self, client: str) -> int:
        """Return the bytes of a client that has a lane of its own."""
        lane = self._lanes.get(client)
        return 0 if lane is None else lane.nbytes

    def append(self, item: Item) -> None:
        """Add a request at the end of its lane, regardless of the limits."""
        lane = self._lane(self._lane_of(item))
        lane.items.append(item)
        lane.nbytes += item.nbytes
        self._changed(1, item.nbytes)

    def offer(self, item: Item) -> list[Item]:
        """Add a request, and return those that give way: others, only itself, or none."""
        if self.count < self._max_items and self.nbytes + item.nbytes <= self._max_bytes:
            self.append(item)
            return []
        leaving = self._find_room(item)
        if leaving is None:
            return [item]
        for other in leaving:
            self.remove(other)
        self.append(item)
        return leaving

    def put_back(self, items: Iterable[Item]) -> None:
        """Put requests before all others, in their order; those of clients set back before their own."""
        for item in reversed(list(items)):
            name = self._lane_of(item)
            if name in self._set_back:
                self._lane(name).items.appendleft(item)
                self._lane(name).nbytes += item.nbytes
            else:
                self._returned.appendleft(item)
            self._changed(1, item.nbytes)

    def set_back(self, client: str) -> None:
        """Let a client have its turn only when no other waits, until `restore`."""
        self._set_back.pop(client, None)
        self._set_back[client] = None
        if len(self._set_back) > MAX_LANES:
            del self._set_back[next(iter(self._set_back))]

    def restore(self, client: str) -> None:
        """Give a client its turns again."""
        self._set_back.pop(client, None)

    def pop(self) -> Item:
        """Take out the request whose turn it is, of at least one."""
        if self._returned:
            item = self._returned.popleft()
        elif self._lanes:
            name = self._whose_turn()
            lane = self._lanes[name]
            item = lane.items.popleft()
            lane.nbytes -= item.nbytes
            if lane.items:
                self._lanes.move_to_end(name)
            else:
                del self._lanes[name]
        else:
            raise IndexError("expected a waiting request, got none")
        self._changed(-1, -item.nbytes)
        return item

    def remove(self, item: Item) -> bool:
        """Take out one request; return whether it was here."""
        for name in (item.client, _SHARED):
            lane = self._lanes.get(name)
            if lane is not None and item in lane.items:
                lane.items.remove(item)
                lane.nbytes -= item.nbytes
                if not lane.items:
                    del self._lanes[name]
                break
        else:
            if item not in self._returned:
                return False
            self._returned.remove(item)
        self._changed(-1, -item.nbytes)
        return True

    def clear(self) -> list[Item]:
        """Take out all requests, and return them in the order of their turns."""
        return [self.pop() for _ in range(self.count)]

    def _whose_turn(self) -> str:
        first = next(iter(self._lanes))
        if not self._set_back:
            return first
        return next((name for name in self._lanes if name not in self._set_back), first)

    def _lane(self, name: str) -> _Lane[Item]:
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane()
        return lane

    def _lane_of(self, item: Item) -> str:
        known = item.client in self._lanes or len(self._lanes) < MAX_LANES
        return item.client if known else _SHARED

    def _find_room(self, item: Item) -> list[Item] | None:
        """Return the requests that must give way for this one; None if it must itself."""
        name = self._lane_of(item)
        own = self._lanes.get(name) or _Lane()
        own_items, own_bytes = len(own.items) + 1, own.nbytes + item.nbytes
        # Other lanes as they would be without the requests that give way.
        lanes = {
            other: [len(lane.items), lane.nbytes] for other, lane in self._lanes.items() if other != name
        }
        items, nbytes = self.count + 1, self.nbytes + item.nbytes
        leaving: list[Item] = []
        while items > self._max_items or nbytes > self._max_bytes:
            measure, limit = (0, own_items) if items > self._max_items else (1, own_bytes)
            victim = max(lanes, key=lambda other: lanes[other][measure], default=None)
            if victim is None or lanes[victim][measure] <= limit:
                return None
            count, _ = lanes[victim]
            newest = self._lanes[victim].items[count - 1]
            leaving.append(newest)
            items, nbytes = items - 1, nbytes - newest.nbytes
            lanes[victim] = [count - 1, lanes[victim][1] - newest.nbytes]
        return leaving

    def _changed(self, count: int, nbytes: int) -> None:
        self.count += count
        self.nbytes += nbytes
