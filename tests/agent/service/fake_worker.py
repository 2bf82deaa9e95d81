"""A worker without models: it does what a request's payload says.

`hold:PATH` answers when there is a file of that name, `sleep:S` after S seconds, `hang` never; `crash`
aborts, `garbage` writes bytes that are not a frame, `lie:N` answers with the Nth of `LIES`, `cpus` answers
with the processors it runs on. Anything else comes back as `<version>:<payload>`. A bundle whose version ends
in `-bad` fails its self-test, one that ends in `-dead` dies while loading.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

from agent.worker.channel import Channel
from agent.worker.frames import Answer, Failed, Load, Ready, Request, Share, Stop

# What the agent must not send on: MQTT does not allow it, or a client could not understand it.
LIES = (
    Answer(0, 200, content_type="a\0b"),
    Answer(0, 200, content_type="application/\ud800"),
    Answer(0, 200, content_type="application/octet-stream", tensors=("\ud800;UINT8;2",)),
    Answer(0, 200, content_type="application/octet-stream", tensors=("y;UINT8;3",)),
    Answer(0, 503, "later", "application/json"),
)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    channel = Channel(connection)
    loaded = channel.receive_load()
    assert loaded is not None
    frame, descriptors = loaded
    for descriptor in descriptors:
        os.close(descriptor)
    assert isinstance(frame.header, Load)
    if frame.header.cpus:
        os.sched_setaffinity(0, frame.header.cpus)
    version = json.loads(bytes(frame.payload))["version"]
    if version.endswith("-bad"):
        channel.send(Failed("ERR_SELF_TEST", "sample 0 differs by 0.5"))
        return
    if version.endswith("-dead"):
        os.kill(os.getpid(), signal.SIGKILL)
    channel.send(Ready(0.0, 0.0, 0, 1, 0, False, "no sandbox: a test"))
    while (received := channel.receive()) is not None:
        frame = received
        if isinstance(frame.header, Stop):
            return
        if isinstance(frame.header, Share):
            os.sched_setaffinity(0, frame.header.cpus)
            continue
        assert isinstance(frame.header, Request)
        payload = bytes(frame.payload)
        command, _, argument = payload.decode("latin-1").partition(":")
        if command == "cpus":
            payload = json.dumps(sorted(os.sched_getaffinity(0))).encode()
        elif command == "hold":
            while not Path(argument).exists():
                time.sleep(0.005)
        elif command == "sleep":
            time.sleep(float(argument))
        elif command == "crash":
            os.abort()
        elif command == "hang":
            time.sleep(3600)
        elif command == "garbage":
            connection.sendall(b"not a frame at all, for sure")
        elif command == "lie":
            channel.send(replace(LIES[int(argument)], seq=frame.header.seq), b"{}")
            continue
        if frame.header.client_json:
            body = json.dumps(
                {"id": frame.header.id, "status": 200, "message": "", "version": version}
            ).encode()
            channel.send(Answer(frame.header.seq, 200, content_type="application/json"), body)
        else:
            body = version.encode() + b":" + payload
            answer = Answer(
                frame.header.seq,
                200,
                content_type="application/octet-stream",
                tensors=(f"y;UINT8;{len(body)}",),
            )
            channel.send(answer, body)


main()
