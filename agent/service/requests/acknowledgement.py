"""Acknowledges messages in the order in which they arrived (MQTT 5.0, 4.6), in whatever order they finish.

No I/O: the acknowledgement of a message that finishes early waits here for those before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from agent.mqtt.message import Message, Receipt


class Slot:
    """One message's place in the order of acknowledgement."""

    __slots__ = ("_order", "done", "receipt")

    def __init__(self, order: AckOrder, receipt: Receipt) -> None:
        self._order = order
        self.receipt = receipt
        self.done = False

    def finish(self) -> None:
        """Mark the message as finished; it is acknowledged as soon as all messages before it are."""
        if not self.done:
            self.done = True
            self._order.release()


class AckOrder:
    """The messages of one connection that are not acknowledged yet; `ack` acknowledges one of them."""

    def __init__(self, ack: Callable[[Receipt], None]) -> None:
        self._ack = ack
        self._slots: deque[Slot] = deque()

    def __len__(self) -> int:
        return len(self._slots)

    def arrived(self, message: Message) -> Slot | None:
        """Return a message's place at the end; None if it needs no acknowledgement (QoS 0)."""
        receipt = message.receipt
        if receipt is None:
            return None
        if self._slots and self._slots[-1].receipt.epoch != receipt.epoch:
            self.forget()
        # Keep the receipt, not the message: many may wait behind a slow one, and payloads must be freed.
        slot = Slot(self, receipt)
        self._slots.append(slot)
        return slot

    def release(self) -> None:
        """Acknowledge the messages at the head that are finished."""
        while self._slots and self._slots[0].done:
            self._ack(self._slots.popleft().receipt)

    def forget(self) -> None:
        """Drop all messages: the connection is gone, and the broker will deliver them again."""
        self._slots.clear()
