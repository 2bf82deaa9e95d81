from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import ChannelError
from agent.worker.channel import Channel, Decoder, send_load
from agent.worker.frames import (
    MAX_HEADER_BYTES,
    Answer,
    Failed,
    Frame,
    Header,
    Load,
    Ready,
    Request,
    Stop,
    decode_header,
    encode,
)

texts = st.text(max_size=40)
integers = st.integers(-(2**62), 2**62)
floats = st.floats(allow_nan=False, allow_infinity=False)
headers: st.SearchStrategy[Header] = st.one_of(
    st.builds(Load, files=st.lists(texts, max_size=5).map(tuple), threads=integers, cpus=st.just((0, 1))),
    st.builds(
        Request,
        seq=integers,
        content_type=texts,
        tensors=st.lists(texts, max_size=3).map(tuple),
        accept=st.none() | texts,
        id=st.none() | texts,
        received_s=floats,
        deadline_s=st.none() | floats,
        client_json=st.booleans(),
    ),
    st.just(Stop()),
    st.builds(Ready, floats, floats, integers, integers, integers, st.booleans(), texts),
    st.builds(Failed, texts, texts, st.none() | texts),
    st.builds(Answer, seq=integers, status=integers, message=texts, tensors=st.just(("y;FP32;1",))),
)
frames = st.lists(st.tuples(headers, st.binary(max_size=200_000)), max_size=5)


def stream(sent: list[tuple[Header, bytes]]) -> bytes:
    return b"".join(b"".join(encode(header, payload)) for header, payload in sent)


def plain(received: list[Frame]) -> list[tuple[Header, bytes]]:
    return [(frame.header, bytes(frame.payload)) for frame in received]


@given(sent=frames, cuts=st.lists(st.integers(0, 1_000_000), max_size=20))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(
    sent: list[tuple[Header, bytes]], cuts: list[int]
) -> None:
    data = stream(sent)
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    decoder = Decoder()
    received = [frame for a, b in pairwise(edges) for frame in decoder.feed(data[a:b])]
    assert plain(received) == sent
    assert decoder.idle


@pytest.mark.slow
@given(sent=frames, sizes=st.lists(st.integers(1, 100_000), min_size=1, max_size=10))
def test_a_buffered_protocol_gets_the_same_frames(sent: list[tuple[Header, bytes]], sizes: list[int]) -> None:
    rest, decoder, received, turn = stream(sent), Decoder(), [], 0
    while rest:
        place = decoder.get_buffer(-1)
        assert len(place) > 0
        count = min(len(place), len(rest), sizes[turn % len(sizes)])
        place[:count] = rest[:count]
        received += decoder.buffer_updated(count)
        rest, turn = rest[count:], turn + 1
    assert plain(received) == sent


@given(data=st.binary(max_size=400))
def test_arbitrary_bytes_are_frames_or_an_error(data: bytes) -> None:
    decoder = Decoder()
    try:
        decoder.feed(data)
    except ChannelError:
        return
    # Less than a prefix is not judged yet.
    assert len(data) < 16 or data[:4] == b"EBC1"


@given(sent=st.tuples(headers, st.binary(max_size=50)), at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_an_error_or_another_frame_and_never_a_crash(
    sent: tuple[Header, bytes], at: int, bit: int
) -> None:
    data = bytearray(stream([sent]))
    data[at % len(data)] ^= 1 << bit
    with contextlib.suppress(ChannelError):
        Decoder(max_payload_bytes=1 << 20).feed(bytes(data))


def _header(content: Any) -> bytes:
    return json.dumps(content).encode()


GOOD = {"kind": "failed", "code": "E", "message": "m", "hint": None}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff",
        b"[]",
        b"[" * 10_000,
        b'{"kind":"failed","code":"E","message":"m","hint":NaN}',
        _header({"kind": "fork"}),
        _header({"kind": ["failed"]}),
        _header({key: value for key, value in GOOD.items() if key != "hint"}),
        _header(GOOD | {"more": 1}),
        _header(GOOD | {"code": 1}),
        _header(GOOD | {"hint": 1}),
        _header({"kind": "answer"} | {"seq": True, "status": 200}),
        _header({"kind": "load", "files": "mod.so"}),
    ],
)
def test_a_header_that_is_not_exactly_its_kind_is_refused(raw: bytes) -> None:
    assert isinstance(decode_header(_header(GOOD)), Failed)
    with pytest.raises(ChannelError):
        decode_header(raw)


@pytest.mark.parametrize("field", ["seq", "received_s", "deadline_s"])
def test_values_that_are_not_numbers_are_refused(field: str) -> None:
    head, _ = encode(Request(1, received_s=1.0, deadline_s=2.0))
    content = json.loads(head[16:])
    for value in ("NaN", "Infinity", "true", "1e999", "[]", '"1"', "9" * 5000):
        raw = json.dumps(content | {field: "HERE"}).replace('"HERE"', value).encode()
        with pytest.raises(ChannelError):
            decode_header(raw)


def test_lengths_are_refused_before_anything_is_allocated() -> None:
    prefix = struct.Struct("<4sIQ")
    with pytest.raises(ChannelError, match=f"at most {MAX_HEADER_BYTES} bytes"):
        Decoder().feed(prefix.pack(b"EBC1", MAX_HEADER_BYTES + 1, 0))
    with pytest.raises(ChannelError, match="at most 1000 bytes, got 18446744073709551615"):
        Decoder(1000).feed(prefix.pack(b"EBC1", 2, 2**64 - 1))
    with pytest.raises(ChannelError, match="begins with"):
        Decoder().feed(prefix.pack(b"HTTP", 2, 2))


def test_a_header_over_its_limit_is_not_sent() -> None:
    with pytest.raises(ChannelError, match="header"):
        encode(Failed("E", "m" * MAX_HEADER_BYTES))


def test_a_large_payload_is_sent_over_a_socket_that_takes_it_in_pieces() -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    payload = os.urandom(1 << 20)
    with ours, theirs:
        sender = threading.Thread(target=lambda: Channel(ours).send(Request(7), payload))
        sender.start()
        frame = Channel(theirs).receive()
        sender.join()
    assert frame is not None
    assert (frame.header, bytes(frame.payload)) == (Request(7), payload)


def count_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_descriptors_travel_with_the_load_frame() -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    with ours, theirs:
        send_load(ours, Load(("a", "b")), b"manifest", [read, write])
        Channel(ours).send(Stop())
        channel = Channel(theirs)
        received = channel.receive_load()
        assert received is not None
        frame, descriptors = received
        assert (frame.header, bytes(frame.payload)) == (Load(("a", "b")), b"manifest")
        assert channel.receive() == Frame(Stop(), memoryview(b""))
    assert len(descriptors) == 2
    os.write(descriptors[1], b"x")
    assert os.read(read, 1) == b"x"
    assert not os.get_inheritable(descriptors[0])
    for each in (read, write, *descriptors):
        os.close(each)


def test_descriptors_that_do_not_fit_the_frame_are_closed_and_refused() -> None:
    ours, theirs = socket.socketpair()
    read, write = os.pipe()
    with ours, theirs:
        with pytest.raises(ValueError, match="expected 2 descriptors"):
            send_load(ours, Load(("a", "b")), b"", [read])
        head, _ = encode(Load(("a", "b")))
        socket.send_fds(ours, [head], [read])
        before = count_descriptors()
        with pytest.raises(ChannelError, match="expected 2 descriptors, one for each file, got 1"):
            Channel(theirs).receive_load()
        assert count_descriptors() == before
        Channel(ours).send(Stop())
        with pytest.raises(ChannelError, match="expected load as the first frame, got stop"):
            Channel(theirs).receive_load()
    os.close(read)
    os.close(write)


def test_a_stream_may_end_between_frames_and_nowhere_else() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            Channel(ours).send(Stop())
            ours.sendall(encode(Stop())[0][:-1])
        channel = Channel(theirs)
        assert isinstance(channel.receive(), Frame)
        with pytest.raises(ChannelError, match="ended within a frame"):
            channel.receive()


def test_the_protocol_needs_no_numpy() -> None:
    script = "import sys, agent.worker.channel; print(sorted({'numpy', 'tvm_ffi', 'PIL'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_headers_are_values() -> None:
    assert replace(Request(1), seq=2) == Request(2)


def test_payload_is_read_into_its_final_place() -> None:
    decoder = Decoder()
    head, payload = encode(Answer(1, 200), bytes(200_000))
    begun = head + bytes(payload[:100])
    decoder.get_buffer()[: len(begun)] = begun
    assert decoder.buffer_updated(len(begun)) == []
    place = decoder.get_buffer()
    place[:] = bytes(len(place))
    [frame] = decoder.buffer_updated(len(place))
    assert place.obj is frame.payload
    assert len(frame.payload) == 200_000
