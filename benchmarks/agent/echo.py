"""A bare paho responder, `python -m benchmarks.agent.echo PORT`: the least that an answer over MQTT can cost.

It prints `ready`. Then it publishes each message's payload to its Response Topic, with its Correlation Data,
on the thread that received it. It sets TCP_NODELAY and, after each receive, TCP_QUICKACK, as the agent does:
without them each round trip takes 44 ms at QoS 1, and the comparison would flatter us.
"""

from __future__ import annotations

import socket
import sys
from typing import Any, Final

from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

TOPIC: Final = "bench/echo"


class _Client(paho.Client):
    def _sock_recv(self, bufsize: int) -> bytes:
        data = super()._sock_recv(bufsize)
        assert isinstance(self._sock, socket.socket)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return data


def _answer(client: paho.Client, _data: object, message: paho.MQTTMessage) -> None:
    asked: Any = message.properties  # paho sets its attributes when it reads a packet
    properties: Any = Properties(PacketTypes.PUBLISH)
    properties.CorrelationData = asked.CorrelationData
    client.publish(asked.ResponseTopic, message.payload, message.qos, properties=properties)


def _subscribe(client: paho.Client, *_: object) -> None:
    client.subscribe(TOPIC, 1)


def _say_ready(*_: object) -> None:
    print("ready", flush=True)


def main() -> None:
    """Connect to the broker and answer until killed."""
    client = _Client(CallbackAPIVersion.VERSION2, client_id="echo", protocol=MQTTProtocolVersion.MQTTv5)
    client.on_message = _answer
    client.on_connect = _subscribe
    client.on_subscribe = _say_ready
    client.connect("127.0.0.1", int(sys.argv[1]))
    sock = client.socket()
    assert isinstance(sock, socket.socket)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.loop_forever()


if __name__ == "__main__":
    main()
