"""Acknowledge messages in the order in which they came (MQTT 5.0, 4.6), however they finish.

A core without a connection: an answer that is out early waits here for those before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from agent.mqtt.message import Message, Receipt


class Slot:
    """The place of one message in the order of acknowledgement."""

    __slots__ = ("_order", "done", "receipt")

    def __init__(self, order: AckOrder, receipt: Receipt) -> None:
        self._order = order
        self.receipt = receipt
        self.done = False

    def finish(self) -> None:
        """Say that the message is dealt with; it is acknowledged as soon as all before it are."""
        if not self.done:
            self.done = True
            self._order.release()


class AckOrder:
    """The messages of one connection that are not acknowledged yet.

    Parameters
    ----------
    ack
        Acknowledges one message.
    """

    def __init__(self, ack: Callable[[Receipt], None]) -> None:
        self._ack = ack
        self._slots: deque[Slot] = deque()

    def __len__(self) -> int:
        return len(self._slots)

    def arrived(self, message: Message) -> Slot | None:
        """Give a message its place; None for one that wants no acknowledgement (QoS 0)."""
        receipt = message.receipt
        if receipt is None:
            return None
        if self._slots and self._slots[-1].receipt.epoch != receipt.epoch:
            self.forget()
        # Not the message: many may wait here behind a slow one, and their payloads must not.
        slot = Slot(self, receipt)
        self._slots.append(slot)
        return slot

    def release(self) -> None:
        """Acknowledge what can be."""
        while self._slots and self._slots[0].done:
            self._ack(self._slots.popleft().receipt)

    def forget(self) -> None:
        """Drop everything: the connection is gone, and the broker delivers again what it kept."""
        self._slots.clear()
