"""Requests that are computed together: equal to single answers, in order, and none harms another."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from agent.runtime.bucketed_module import BucketedModule
from agent.worker.batching import MAX_HELD_BYTES, Batching, batching_of
from agent.worker.channel import Channel
from agent.worker.frames import Answer, Frame, Load, Request, Share, encode
from tests.agent.worker.batched_model import JSON, MANIFEST, RAW, model, rows
from tests.fake_module import KERNELS, FakeModule
from tests.patience import PATIENCE_S


def batching(kernels: Any = None, delay_s: float = 0.0) -> Batching:
    made = model(kernels=kernels)
    assert isinstance(made.module, BucketedModule)
    return Batching(made, made.module, MANIFEST, delay_s)


def request(seq: int, n: int, **fields: Any) -> Frame:
    return Frame(
        Request(seq, **{"content_type": RAW, "tensors": (f"x;FP32;{n},3",), **fields}),
        bytearray(rows(n).tobytes()),
    )


def answered(batches: Batching, frames: list[Frame]) -> list[tuple[Answer, bytes]]:
    return [(answer, bytes(payload)) for answer, payload in batches.answers(frames)]


def test_answers_together_are_those_of_each_request_alone() -> None:
    fake = FakeModule()
    together, apart = batching(fake), batching()
    for sizes in ([1] * 6, [2, 1, 3], [3, 3, 3, 1], [6, 1], [1]):
        fake.calls.clear()
        frames = [request(seq, n) for seq, n in enumerate(sizes)]
        found = answered(together, frames)
        wanted = [answered(apart, [frame])[0] for frame in frames]
        assert [a.seq for a, _ in found] == list(range(len(sizes)))
        assert [(a.status, a.tensors, body) for a, body in found] == [
            (a.status, a.tensors, body) for a, body in wanted
        ]
        assert fake.calls["relu"] <= -(-sum(sizes) // 3)


def test_answers_name_the_bucket_that_computed_them() -> None:
    batches = batching()
    [(by_itself, _)] = answered(batches, [request(0, 1)])
    together = [answer.bucket for answer, _ in answered(batches, [request(seq, 1) for seq in range(6)])]
    [(again, _)] = answered(batches, [request(0, 1)])
    assert by_itself.bucket == again.bucket != together[0]
    assert set(together) == {together[0]}


def test_six_requests_are_one_run() -> None:
    fake = FakeModule()
    answered(batching(fake), [request(seq, 1) for seq in range(6)])
    assert fake.calls["relu"] == 1


def test_a_request_that_cannot_be_decoded_is_refused_and_its_neighbours_answered() -> None:
    frames = [
        request(0, 1),
        request(1, 2, tensors=("x;FP32;9,3",)),
        request(2, 2),
        request(3, 1, deadline_s=0.5),
        request(4, 1, content_type="text/plain"),
        Frame(Request(5, content_type=JSON), bytearray(b"{")),
        request(6, 1, accept=JSON),
    ]
    found = answered(batching(), frames)
    assert [a.status for a, _ in found] == [200, 400, 200, 408, 415, 400, 200]
    assert json.loads(found[6][1])["outputs"][0]["shape"] == [1, 3]
    for index in (0, 2):
        n = (1, 0, 2)[index]
        assert found[index][1] == np.maximum(rows(n), 0).tobytes()


def test_a_request_for_which_the_kernels_fail_does_not_take_the_others_with_it() -> None:
    def fussy(x: np.ndarray, out: np.ndarray) -> None:
        if (x == 13).any():
            raise ValueError("13 brings bad luck")
        np.maximum(x, 0, out=out)

    bad = Frame(
        Request(1, content_type=RAW, tensors=("x;FP32;1,3",)), bytearray(np.full(3, 13, "<f4").tobytes())
    )
    found = answered(batching({**KERNELS, "relu": fussy}), [request(0, 1), bad, request(2, 2)])
    assert [a.status for a, _ in found] == [200, 500, 200]
    assert "bad luck" in found[1][0].message
    assert found[2][1] == np.maximum(rows(2), 0).tobytes()


def test_an_unknown_output_is_the_fault_of_one_request() -> None:
    document = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}],
        "outputs": [{"name": "nothing"}],
    }
    odd = Frame(Request(1, content_type=JSON), bytearray(json.dumps(document).encode()))
    assert [a.status for a, _ in answered(batching(), [request(0, 1), odd, request(2, 1)])] == [200, 400, 200]


@contextmanager
def connected() -> Iterator[tuple[socket.socket, Channel]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, Channel(theirs)


def send(connection: socket.socket, *frames: Frame) -> None:
    for frame in frames:
        connection.sendall(b"".join(bytes(part) for part in encode(frame.header, frame.payload)))


def gathered(batches: Batching, channel: Channel) -> list[int]:
    first = channel.receive()
    assert first is not None
    return [f.header.seq for f in batches.gather(channel, first) if isinstance(f.header, Request)]


def test_what_waits_is_gathered_in_order_up_to_the_largest_batch() -> None:
    with connected() as (ours, channel):
        send(ours, *(request(seq, 1) for seq in range(8)))
        assert gathered(batching(), channel) == [0, 1, 2, 3, 4, 5]
        assert gathered(batching(), channel) == [6, 7]


def test_another_frame_ends_a_batch_and_comes_next() -> None:
    with connected() as (ours, channel):
        send(ours, request(0, 1), Frame(Share((), 1)), request(1, 1))
        assert gathered(batching(), channel) == [0]
        frame = channel.receive()
        assert frame is not None
        assert isinstance(frame.header, Share)
        assert gathered(batching(), channel) == [1]


def test_a_request_under_suspicion_is_computed_alone() -> None:
    with connected() as (ours, channel):
        send(ours, request(0, 1), request(1, 1, by_itself=True), request(2, 1, by_itself=True), request(3, 1))
        assert [gathered(batching(), channel) for _ in range(4)] == [[0], [1], [2], [3]]


def test_a_request_waits_for_others_until_the_delay_after_its_arrival() -> None:
    with connected() as (ours, channel):
        send(ours, request(0, 1))
        assert gathered(batching(), channel) == [0]
        begun = time.monotonic()
        send(ours, request(1, 1, received_s=begun))
        assert gathered(batching(delay_s=0.05), channel) == [1]
        assert time.monotonic() - begun >= 0.05
        begun = time.monotonic()
        send(ours, request(2, 1, received_s=begun - 10 * PATIENCE_S))
        assert gathered(batching(delay_s=10 * PATIENCE_S), channel) == [2]
        assert time.monotonic() - begun < PATIENCE_S


def test_only_a_model_that_declares_a_batch_and_an_agent_that_wants_it() -> None:
    made = model()
    assert batching_of(made, MANIFEST, Load((), batch=False)) is None
    assert batching_of(made, MANIFEST, Load((), batch=True, batch_delay_s=0.01)) is not None


def test_inputs_that_are_held_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_HELD_BYTES <= 64 << 20
    monkeypatch.setattr("agent.worker.batching.MAX_HELD_BYTES", 30)
    fake = FakeModule()
    assert [a.status for a, _ in answered(batching(fake), [request(seq, 1) for seq in range(4)])] == [200] * 4
    assert fake.calls["relu"] == 2


def test_payloads_and_decoded_inputs_are_held_no_further_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.worker.batching.MAX_HELD_BYTES", 30)
    with connected() as (ours, channel):
        send(ours, *(request(seq, 1) for seq in range(5)))
        assert gathered(batching(), channel) == [0, 1, 2]
    batches = batching()
    made = batches.answers([request(seq, 1) for seq in range(6)])
    decoded: list[int] = []
    decode = batches._decode

    def counted(frame: Frame) -> Any:
        assert isinstance(frame.header, Request)
        decoded.append(frame.header.seq)
        return decode(frame)

    monkeypatch.setattr(batches, "_decode", counted)
    next(made)
    assert decoded == [0, 1]
    assert [answer.seq for answer, _ in made] == [1, 2, 3, 4, 5]
