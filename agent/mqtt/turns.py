"""How one connection shares the event loop: turns of reading, back-pressure, and what a flood may cost.

Promises: no peer has the event loop to itself. A turn reads `PACKETS_IN_A_TURN` packets or for `TURN_S`, has
what they led to written, and lets everything else go on. A broker that does not read what we answer is not
read either (`PAUSE_BYTES`). If more arrives than can be read, messages at QoS 0 may be dropped before they
are decoded.

No I/O happens here: the socket reads, and paho decodes what it read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from agent.mqtt.paho_client import PahoClient
from agent.mqtt.transport import BrokerSocket

# What one connection may do before the event loop goes on. For a burst of honest requests that costs a few
# more system calls.
PACKETS_IN_A_TURN: Final = 64
TURN_S: Final = 0.005
# Above the first, the socket is not read until no more than the second waits to be written.
PAUSE_BYTES: Final = 1 << 20
RESUME_BYTES: Final = 512 << 10
# Turns that were used up and follow each other within `_TOGETHER_S` belong to one flood. A burst of honest
# requests is over before messages are dropped.
SHED_AFTER_S: Final = 0.1
_TOGETHER_S: Final = 0.25


class Turns:
    """Reads the packets of one connection, a turn at a time.

    `is_over` returns whether the broker has sent more than it may, which ends a turn. `ended` is called after
    each turn that left the connection up, with whether the turn was used up. `shed` is called with the topic
    of a message at QoS 0 while more arrives than can be read, and for how many seconds that has been so; it
    returns whether to drop the message, which `dropped` counts. `running` says whether a turn is being taken
    now.
    """

    def __init__(
        self,
        client: PahoClient,
        *,
        is_over: Callable[[], bool],
        ended: Callable[[bool], None],
        shed: Callable[[str, float], bool],
    ) -> None:
        self.running = False
        self.dropped = 0
        self._client = client
        self._is_over = is_over
        self._ended = ended
        self._shed = shed
        self._socket: BrokerSocket | None = None
        self._next: asyncio.Handle | None = None
        # Since when turns were used up, and when the last one was.
        self._flooded_since_s = self._flooded_s = -_TOGETHER_S
        self._flooded_for_s = 0.0
        # What was decided about topics in this turn.
        self._decided: dict[bytes, bool] = {}

    def begin(self, sock: BrokerSocket) -> None:
        """Read a socket from now on."""
        self._socket = sock
        sock.watch(self._readable)

    def end(self) -> None:
        """Read nothing more."""
        self._socket = None
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def match_writing(self) -> None:
        """Read no more than the broker reads of what that leads to; call this when that has changed."""
        client, sock = self._client, self._socket
        if sock is None:
            return
        if client.reading:
            if client.unsent_bytes > PAUSE_BYTES:
                client.reading = False
                sock.unwatch()
        elif client.unsent_bytes <= RESUME_BYTES:
            client.reading = True
            sock.watch(self._readable)
            if self._next is None:  # what was read ahead
                self._next = asyncio.get_running_loop().call_soon(self._take)

    def _readable(self) -> None:
        if self._next is None:
            self._take()

    def _take(self) -> None:
        self._next = None
        sock = self._socket
        if sock is None or not self._client.reading:
            return
        sock.wake()
        began_s = time.monotonic()
        is_flood = began_s - self._flooded_s < _TOGETHER_S
        self._flooded_for_s = began_s - self._flooded_since_s if is_flood else 0.0
        self._decided.clear()
        self.running = True
        try:
            is_used_up = self._read(sock, began_s)
        finally:
            self.running = False
        if self._socket is not sock:
            return
        if is_used_up and not self._is_over():
            if not self._flooded_for_s:
                self._flooded_since_s = began_s
            self._flooded_s = time.monotonic()
            self._next = asyncio.get_running_loop().call_soon(self._take)
        self._ended(is_used_up)

    def _read(self, sock: BrokerSocket, began_s: float) -> bool:
        """Read until the turn is used up, or there is nothing left to read; return whether it was used up."""
        for _ in range(PACKETS_IN_A_TURN):
            if self._flooded_for_s >= SHED_AFTER_S:
                self.dropped += sock.skip(self._is_shed)
            self._client.loop_read()
            # The kernel does not report bytes that are already in the buffers of the socket and of TLS.
            if self._socket is not sock or not sock.pending():
                return False
            if time.monotonic() - began_s > TURN_S or self._is_over():
                break
        return True

    def _is_shed(self, name: bytes) -> bool:
        is_shed = self._decided.get(name)
        if is_shed is None:
            topic = name.decode("utf-8", "replace")
            is_shed = self._decided[name] = self._shed(topic, self._flooded_for_s)
        return is_shed
