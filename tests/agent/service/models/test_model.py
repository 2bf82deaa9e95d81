"""One model's queue: its limits, deadlines, swaps and end, in virtual time and without processes."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.config.settings import QueueLimits, WorkerSettings
from agent.deploy.trial import Tally
from agent.errors import DeadlineError, ExecutionError, InputError, OverloadedError, PayloadError
from agent.service.models.model import SET_BACK_S, Model
from agent.service.models.supervisor import Supervisor
from agent.worker.channel import MAX_PAYLOAD_BYTES
from agent.worker.frames import MAX_HEADER_BYTES, Share
from tests.agent.service.models.conftest import Requests, Workers
from tests.bundles import Signer
from tests.virtual_time import START_S, in_virtual_time

MakeModel = Callable[..., Model]


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer(tmp_path / "trust")


async def started(workers: Workers, signer: Signer, limits: QueueLimits | None = None) -> Model:
    model = Model("echo", limits or QueueLimits(), lambda: None, workers)
    assert await replace(model, signer) is None
    return model


async def replace(model: Model, signer: Signer, version: str = "1.0.0") -> Supervisor | None:
    return await model.replace(signer.bundle(version=version), WorkerSettings(), Share((), 1))


@in_virtual_time
async def test_full_queue_refuses_and_takes_again_when_there_is_room(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer, QueueLimits(requests=2))
    for _ in range(4):  # two in the worker, two in the queue
        model.submit(requests.new())
    with pytest.raises(OverloadedError, match="2 requests waiting"):
        model.submit(requests.new())
    status = model.status()
    assert status is not None
    assert status.queued == 4
    workers.latest.answer()
    model.submit(requests.new())
    for _ in range(4):
        workers.latest.answer()
    assert list(requests.ended) == [1, 2, 3, 4, 6]
    await model.stop(0)


@in_virtual_time
async def test_payload_of_a_refused_request_is_freed_at_once(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    """The garbage collector may come much later, and a payload may have 64 MiB."""
    model = await started(workers, signer, QueueLimits(requests=1))
    for _ in range(3):
        model.submit(requests.new())
    payload = bytes(1000)
    gc.disable()
    try:
        references = sys.getrefcount(payload)
        try:
            model.submit(requests.new(payload))
        except OverloadedError:
            requests.ended.clear()
        assert sys.getrefcount(payload) == references
    finally:
        gc.enable()
    await model.stop(0)


@in_virtual_time
async def test_requests_wait_for_the_first_worker_within_the_queue_and_their_deadlines(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = Model("echo", QueueLimits(requests=3), lambda: None, workers)
    for deadline_s in (60.0, 1.0, 60.0):
        model.submit(requests.new(deadline_s=deadline_s))
    with pytest.raises(OverloadedError, match="3 requests waiting"):
        model.submit(requests.new())
    await asyncio.sleep(2)
    assert isinstance(requests.ended.pop(2), DeadlineError)
    await replace(model, signer)
    for _ in range(2):
        workers.latest.answer()
    assert requests.ended == {1: b"x", 3: b"x"}
    await model.stop(0)


@in_virtual_time
async def test_no_request_waits_for_a_worker_that_does_not_come(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = Model("echo", QueueLimits(), lambda: None, workers)
    model.submit(requests.new())
    model.give_up("damaged")
    assert str(requests.ended.pop(1)) == "echo is out of service: damaged"
    with pytest.raises(OverloadedError, match="out of service: damaged"):
        model.submit(requests.new())
    await replace(model, signer)
    model.submit(requests.new())
    workers.latest.answer()
    assert requests.ended == {3: b"x"}
    await model.stop(0)
    with pytest.raises(OverloadedError, match="stopped"):
        model.submit(requests.new())


@in_virtual_time
async def test_payloads_that_wait_are_bounded(workers: Workers, signer: Signer, requests: Requests) -> None:
    model = await started(workers, signer, QueueLimits(payload_bytes=100))
    for size in (1000, 1000, 60, 40):  # the first two do not wait
        model.submit(requests.new(bytes(size)))
    with pytest.raises(OverloadedError):
        model.submit(requests.new(b"x"))
    workers.latest.answer()
    model.submit(requests.new(bytes(60)))
    await model.stop(0)


@in_virtual_time
async def test_client_that_fills_the_queue_makes_room_for_another(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer, QueueLimits(requests=4))
    for _ in range(6):  # two in the worker, four in the queue
        model.submit(requests.new(client="greedy"))
    with pytest.raises(OverloadedError, match="4 requests waiting"):
        model.submit(requests.new(client="greedy"))
    model.submit(requests.new(b"honest", client="honest"))
    assert str(requests.ended[6]) == "echo has 4 requests waiting"
    for _ in range(3):
        workers.latest.answer()
    # Behind what the worker had, the honest client has every second turn.
    assert [payload for _, payload in workers.latest.requests] == [b"honest", b"x"]
    status = model.status()
    assert status is not None
    assert status.queued == 3
    await model.stop(0)


@in_virtual_time
async def test_request_is_given_up_at_the_longest_deadline_of_the_device(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer)
    for _ in range(3):
        model.submit(requests.new(deadline_s=86_400, given_up_s=10))
    await asyncio.sleep(11)
    assert str(requests.ended[3]) == (
        "echo: the deadline of 10 s, the longest on this device, passed while it waited"
    )
    await model.stop(0)


@in_virtual_time
async def test_payload_that_a_worker_would_not_accept_is_refused(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer)
    with pytest.raises(PayloadError, match=f"at most {MAX_PAYLOAD_BYTES} bytes"):
        model.submit(requests.new(bytes(MAX_PAYLOAD_BYTES + 1)))
    assert workers.latest.requests == []
    await model.stop(0)


@in_virtual_time
async def test_request_that_expires_in_the_queue_is_refused_and_not_computed(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer)
    for _ in range(2):
        model.submit(requests.new())
    model.submit(requests.new(b"late", deadline_s=5))
    await asyncio.sleep(4.99)
    assert requests.ended == {}
    await asyncio.sleep(0.02)
    assert str(requests.ended[3]) == "echo: the deadline of 5 s passed while it waited"
    assert isinstance(requests.ended[3], DeadlineError)
    for _ in range(2):
        workers.latest.answer()
    assert workers.latest.requests == []
    assert set(requests.ended) == {1, 2, 3}
    await model.stop(0)


@in_virtual_time
async def test_answer_after_the_deadline_is_dropped(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer)
    model.submit(requests.new(deadline_s=1))
    model.submit(requests.new(b"next"))
    await asyncio.sleep(2)
    assert str(requests.ended[1]) == "echo: the deadline of 1 s passed while it was computed"
    workers.latest.answer()
    workers.latest.answer()
    assert isinstance(requests.ended[1], DeadlineError)
    assert requests.ended[2] == b"next"
    await model.stop(0)


@in_virtual_time
async def test_expired_request_does_not_go_to_the_successor_of_a_dead_worker(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer)
    for deadline_s in (60, 1, 60):
        model.submit(requests.new(deadline_s=deadline_s))
    await asyncio.sleep(2)
    workers.latest.die()
    await asyncio.sleep(1)
    assert [request.seq for request, _ in workers.latest.requests] == [1, 3]
    await model.stop(0)


@in_virtual_time
async def test_request_that_does_not_fit_a_frame_is_refused_and_the_worker_lives(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer)
    for seq in range(1, 10, 3):
        model.submit(requests.new(content_type="x" * MAX_HEADER_BYTES))
        model.submit(requests.new(b"good"))
        model.submit(requests.new(content_type='"' * (MAX_HEADER_BYTES // 2)))
        workers.latest.answer()
        assert isinstance(requests.ended[seq], InputError)
        assert requests.ended[seq + 1] == b"good"
        assert isinstance(requests.ended[seq + 2], InputError)
        await asyncio.sleep(40)  # no limit of any of them ends the worker
    status = model.status()
    assert status is not None
    assert (status.ready, status.restarts, status.queued) == (True, 0, 0)
    await model.stop(0)


async def crash(model: Model, workers: Workers) -> None:
    """Let the worker die of the request that it computes."""
    workers.latest.die()
    await asyncio.sleep(1.1)
    assert model.worker_pid is not None


@in_virtual_time
async def test_quarantined_request_is_refused_and_others_are_computed(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer)
    model.submit(requests.new(b"evil"))
    model.submit(requests.new(b"evil"))
    model.submit(requests.new(b"good"))
    await crash(model, workers)
    assert requests.ended == {}
    await crash(model, workers)  # that was its second worker; the second request is equal to it
    assert [isinstance(requests.ended[seq], ExecutionError) for seq in (1, 2)] == [True, True]
    assert [payload for _, payload in workers.latest.requests] == [b"good"]
    with pytest.raises(ExecutionError, match="echo: this request crashed the model and is not computed"):
        model.submit(requests.new(b"evil"))
    workers.latest.answer()
    model.submit(requests.new(b"also"))
    workers.latest.answer()
    assert (requests.ended[3], requests.ended[5]) == (b"good", b"also")
    status = model.status()
    assert status is not None
    assert (status.ready, status.restarts, status.quarantined) == (True, 2, 2)
    # Each of them counts: a version that crashes on all that a client sends fails for it.
    assert list(model.score((), hot=False).clients.values()) == [Tally(5, 3)]
    await model.stop(0)


@in_virtual_time
async def test_client_whose_request_crashed_the_model_twice_waits_for_all_others(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer)
    model.submit(requests.new(b"evil", client="mallory"))
    await crash(model, workers)
    await crash(model, workers)
    for payload, client in [
        (b"a1", "alice"),
        (b"a2", "alice"),
        (b"evil 2", "mallory"),
        (b"evil 3", "mallory"),
        (b"a3", "alice"),
        (b"b1", "bob"),
        (b"a4", "alice"),
    ]:
        model.submit(requests.new(payload, client=client))
    assert computed(workers, 5) == [b"a1", b"a2", b"a3", b"b1", b"a4"]
    assert [payload for _, payload in workers.latest.requests] == [b"evil 2", b"evil 3"]
    workers.latest.die()
    model.submit(requests.new(b"a5", client="alice"))
    await asyncio.sleep(1.1)
    # Its second try comes when no other request waits.
    assert computed(workers, 1) == [b"a5"]
    assert [payload for _, payload in workers.latest.requests] == [b"evil 2", b"evil 3"]
    await model.stop(0)


@in_virtual_time
async def test_client_whose_request_crashed_the_model_has_its_turns_again_after_a_minute(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer)
    model.submit(requests.new(b"evil", client="mallory"))
    await crash(model, workers)
    await crash(model, workers)
    await asyncio.sleep(SET_BACK_S)
    for payload, client in [(b"a1", "alice"), (b"a2", "alice"), (b"m1", "mallory"), (b"a3", "alice")]:
        model.submit(requests.new(payload, client=client))
    assert computed(workers, 4) == [b"a1", b"a2", b"m1", b"a3"]
    await model.stop(0)


@in_virtual_time
async def test_request_that_a_worker_died_of_comes_after_those_of_others_until_it_is_acquitted(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer)
    model.submit(requests.new(b"bad luck", client="alice"))
    model.submit(requests.new(b"b1", client="bob"))
    model.submit(requests.new(b"a1", client="alice"))
    model.submit(requests.new(b"b2", client="bob"))
    workers.latest.die("killed by SIGKILL")
    await asyncio.sleep(1.1)
    assert computed(workers, 4) == [b"b1", b"b2", b"bad luck", b"a1"]
    for payload, client in [(b"b3", "bob"), (b"b4", "bob"), (b"a2", "alice"), (b"b5", "bob")]:
        model.submit(requests.new(payload, client=client))
    assert computed(workers, 4) == [b"b3", b"b4", b"a2", b"b5"]
    await model.stop(0)


def computed(workers: Workers, count: int) -> list[bytes]:
    """Let the worker answer `count` requests, and return them."""
    payloads = []
    for _ in range(count):
        payloads.append(workers.latest.requests[0][1])
        workers.latest.answer()
    return payloads


@in_virtual_time
async def test_new_version_computes_what_the_old_one_died_of(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer)
    model.submit(requests.new(b"evil"))
    await crash(model, workers)
    await crash(model, workers)
    old = await replace(model, signer)
    assert old is not None
    await model.retire(old, 1.0)
    model.submit(requests.new(b"evil"))
    workers.latest.answer()
    assert requests.ended[2] == b"evil"
    await model.stop(0)


@in_virtual_time
async def test_request_that_hangs_past_its_deadline_is_known_by_its_content(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer)
    for seq in (1, 2):
        model.submit(requests.new(b"hang", deadline_s=1))
        await asyncio.sleep(40)  # the compute limit ends the worker
        assert isinstance(requests.ended[seq], DeadlineError)
    with pytest.raises(ExecutionError, match="crashed the model"):
        model.submit(requests.new(b"hang"))
    model.submit(requests.new(b""))
    workers.latest.answer()
    assert requests.ended[4] == b""
    await model.stop(0)


@in_virtual_time
async def test_payload_of_a_finished_request_is_freed_at_once(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer)
    payload = b"p" * 100_000
    before = sys.getrefcount(payload)
    gc.disable()
    try:
        pending = requests.new(payload)
        model.submit(pending)
        assert sys.getrefcount(payload) > before
        workers.latest.answer()
        requests.ended.clear()
        assert sys.getrefcount(payload) == before
    finally:
        gc.enable()
    await model.stop(0)


@in_virtual_time
async def test_new_version_takes_over_between_two_requests(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer)
    for _ in range(3):
        model.submit(requests.new())
    old = await replace(model, signer, "1.0.0")
    assert old is not None
    first, second = workers.processes
    assert [request.seq for request, _ in second.requests] == [3]
    retiring = asyncio.ensure_future(model.retire(old, 10.0))
    await asyncio.sleep(1)
    first.answer()
    await retiring  # after 10 seconds the second request goes to the successor
    assert asyncio.get_running_loop().time() == pytest.approx(START_S + 10)
    assert {request.seq for request, _ in second.requests} == {2, 3}
    for _ in range(2):
        second.answer()
    assert set(requests.ended) == {1, 2, 3}
    await model.stop(0)


@in_virtual_time
async def test_stop_answers_what_was_accepted_and_refuses_the_rest_at_the_limit(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer)
    for _ in range(4):
        model.submit(requests.new())
    stopping = asyncio.ensure_future(model.stop(10.0))
    await asyncio.sleep(5)
    workers.latest.answer()
    await stopping
    assert asyncio.get_running_loop().time() == pytest.approx(START_S + 10)
    assert requests.ended[1] == b"x"
    assert {str(requests.ended[seq]) for seq in (2, 3, 4)} == {"echo is being stopped"}
    assert model.status() is None
    with pytest.raises(OverloadedError, match="out of service: stopped"):
        model.submit(requests.new())


@in_virtual_time
async def test_stop_ends_as_soon_as_everything_is_answered(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer)
    for _ in range(4):
        model.submit(requests.new())
    stopping = asyncio.ensure_future(model.stop(10.0))
    await asyncio.sleep(1)
    for _ in range(4):
        workers.latest.answer()
    await stopping
    assert asyncio.get_running_loop().time() == pytest.approx(START_S + 1)
    assert list(requests.ended.values()) == [b"x"] * 4


@in_virtual_time
async def test_model_that_failed_refuses_what_waits_and_what_comes(
    workers: Workers, signer: Signer, requests: Requests
) -> None:
    model = await started(workers, signer)
    for _ in range(6):
        model.submit(requests.new())
    workers.broken = True
    workers.latest.die()
    await asyncio.sleep(5)
    assert [type(requests.ended[seq]) for seq in range(1, 7)] == [OverloadedError] * 6
    with pytest.raises(OverloadedError, match="out of service: echo: its worker does not start"):
        model.submit(requests.new())
    await model.stop(0)
