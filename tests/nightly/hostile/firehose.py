"""Sends one packet as fast as the broker takes it, in a process of its own that starts soon."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import MutableSequence
from multiprocessing.synchronize import Event
from typing import Final

from tests.nightly.hostile.packets import Packet, length, string

BLOCK_PACKETS: Final = 500


def pour(port: int, packet: Packet, over: Event, sent: MutableSequence[int], at: int) -> None:
    """Send a packet again and again; `sent[at]` counts."""
    block = packet.encode(1) * BLOCK_PACKETS
    body = string(b"MQTT") + b"\x05\x82" + b"\x00\x00" + b"\x00" + string(b"") + string(packet.user.encode())
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"\x10" + length(len(body)) + body)
        sock.recv(1000)
        while not over.is_set():
            sock.sendall(block)
            sent[at] += BLOCK_PACKETS
