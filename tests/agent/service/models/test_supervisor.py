"""One worker is started, watched, restarted and given up, in virtual time and without processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.bundle.buckets import Buckets, Dimension, InputAxis, OutputAxis
from agent.bundle.manifest import Resources
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import DeadlineError, ExecutionError, IncompatibleError, SelfTestError
from agent.service.models.life_cycle import State
from agent.service.models.supervisor import START_LIMIT_S
from agent.worker.frames import Answer, Failed, Frame, Header, Share
from tests.agent.service.models.conftest import READY, Requests, Supervised, Workers
from tests.virtual_time import START_S, in_virtual_time, settle

MakeSupervised = Callable[..., Supervised]


@in_virtual_time
async def test_worker_is_ready_after_its_samples(supervised: MakeSupervised, workers: Workers) -> None:
    made = supervised()
    await made.supervisor.start()
    assert made.states == ["READY"]
    assert made.supervisor.pid == 1
    assert made.supervisor.has_room
    assert await made.supervisor.stop(1.0) == []
    assert made.states == ["READY", "STOPPING", "STOPPED"]
    assert made.supervisor.pid is None


@in_virtual_time
async def test_address_space_is_what_the_manifest_declares_for_all_processors(
    supervised: MakeSupervised, workers: Workers
) -> None:
    async def limit(resources: Resources, **limits: int) -> int:
        await supervised(resources=resources, **limits).supervisor.start()
        assert workers.latest.load is not None
        return workers.latest.load.memory_bytes

    threads = os.cpu_count() or 1
    base = await limit(Resources(0, 0, 0), memory_bytes=1 << 20)
    assert base > (1 << 20) + threads * (8 << 20)
    assert await limit(Resources(10, 1000, 0), memory_bytes=1 << 20) == base + 1010
    assert await limit(Resources(10, 1000, 7), memory_bytes=1 << 20) == base + 1010 + (threads - 1) * 7
    # An early bundle does not say what its weights become.
    assert await limit(Resources(10, 1000), memory_bytes=1 << 20) == base + 5010
    assert await limit(Resources(10, 1000, 7), memory_bytes=0) == 0


@in_virtual_time
async def test_worker_that_is_never_ready_is_given_up(supervised: MakeSupervised, workers: Workers) -> None:
    workers.silent = True
    made = supervised()
    with pytest.raises(SelfTestError, match="not ready within 120 s"):
        await made.supervisor.start()
    assert asyncio.get_running_loop().time() == pytest.approx(START_S + START_LIMIT_S)
    assert made.states == ["STOPPED"]
    assert made.supervisor.pid is None


@in_virtual_time
async def test_worker_that_cannot_be_started_or_loaded_says_why(
    supervised: MakeSupervised, workers: Workers
) -> None:
    workers.broken = True
    with pytest.raises(SelfTestError, match="out of processes"):
        await supervised().supervisor.start()
    workers.broken, workers.silent = False, True
    starting = asyncio.ensure_future(supervised().supervisor.start())
    await settle()
    workers.latest.on_frame(Frame(Failed("ERR_INCOMPATIBLE", "needs AVX-512")))
    with pytest.raises(IncompatibleError, match="needs AVX-512"):
        await starting
    starting = asyncio.ensure_future(supervised().supervisor.start())
    await settle()
    workers.latest.die()
    with pytest.raises(SelfTestError, match="killed by SIGSEGV before it was ready"):
        await starting


@in_virtual_time
async def test_death_costs_no_request(
    supervised: MakeSupervised, workers: Workers, requests: Requests
) -> None:
    made = supervised()
    await made.supervisor.start()
    for _ in range(2):
        made.supervisor.send(requests.new())
    assert not made.supervisor.has_room
    workers.latest.die()
    assert requests.ended == {}
    assert [pending.frame.seq for pending in made.supervisor.take_back()] == [1, 2]
    assert made.states == ["READY", "RESTARTING"]
    await asyncio.sleep(0.1)
    assert made.states == ["READY", "RESTARTING", "READY"]
    assert made.supervisor.crashes == 1
    await made.supervisor.stop(0)


@in_virtual_time
async def test_request_that_computes_too_long_is_answered_408_at_the_limit(
    supervised: MakeSupervised, workers: Workers, requests: Requests
) -> None:
    made = supervised(compute_limit_s=30.0)
    await made.supervisor.start()
    for _ in range(2):
        made.supervisor.send(requests.new())
    await asyncio.sleep(20)
    workers.latest.answer()  # the second one begins now
    await asyncio.sleep(29)
    assert requests.ended == {1: b"x"}
    await asyncio.sleep(1.01)
    assert isinstance(requests.ended[2], DeadlineError)
    assert made.supervisor.crashes == 1
    await made.supervisor.stop(0)


@in_virtual_time
async def test_request_that_ends_two_workers_is_answered_500(
    supervised: MakeSupervised, workers: Workers, requests: Requests
) -> None:
    made = supervised()
    await made.supervisor.start()
    made.supervisor.send(requests.new())
    workers.latest.die()
    (again,) = made.supervisor.take_back()
    await asyncio.sleep(0.1)
    made.supervisor.send(again)
    workers.latest.die()
    assert isinstance(requests.ended[1], ExecutionError)
    assert str(requests.ended[1]) == "echo: this request crashed the model: its worker killed by SIGSEGV"
    assert made.supervisor.take_back() == []
    await made.supervisor.stop(0)


@in_virtual_time
async def test_suspect_that_is_computed_by_the_next_worker_is_acquitted(
    supervised: MakeSupervised, workers: Workers, requests: Requests
) -> None:
    made = supervised()
    await made.supervisor.start()
    for number in range(5):  # always the same payload
        made.supervisor.send(requests.new())
        workers.latest.die("killed by SIGKILL")
        (again,) = made.supervisor.take_back()
        await asyncio.sleep(2)
        made.supervisor.send(again)
        workers.latest.answer()
        assert requests.ended[number + 1] == b"x"
        assert len(made.supervisor.quarantine) == 0
    await made.supervisor.stop(0)


@in_virtual_time
async def test_requests_that_end_workers_never_take_the_bundle_out_of_service(
    supervised: MakeSupervised, workers: Workers, requests: Requests
) -> None:
    made = supervised(crash_limit=3, crash_window_s=60.0)
    await made.supervisor.start()
    for number in range(50):
        made.supervisor.send(requests.new(b"evil %d" % number))
        workers.latest.die()
        (again,) = made.supervisor.take_back()
        await asyncio.sleep(1.1)  # never slower than this
        made.supervisor.send(again)
        workers.latest.die()
        await asyncio.sleep(1.1)
        assert made.supervisor.state is State.READY
    assert (made.supervisor.deaths.by_requests, made.supervisor.deaths.by_itself) == (100, 0)
    assert all(isinstance(ended, ExecutionError) for ended in requests.ended.values())
    await made.supervisor.stop(0)


@in_virtual_time
async def test_third_death_in_the_window_takes_the_bundle_out_of_service(
    supervised: MakeSupervised, workers: Workers
) -> None:
    made = supervised(crash_limit=3, crash_window_s=60.0)
    await made.supervisor.start()
    for _ in range(3):
        workers.latest.die()
        await asyncio.sleep(3)
    assert made.states[-1] == "FAILED"
    why = "3 workers died within 60 s, the last one killed by SIGSEGV"
    assert made.supervisor.message == why
    assert len(workers.processes) == 3
    await made.supervisor.stop(0)


@in_virtual_time
async def test_bundle_out_of_service_is_tried_again_more_and_more_slowly(
    supervised: MakeSupervised, workers: Workers
) -> None:
    made = supervised(crash_limit=1)
    await made.supervisor.start()
    workers.broken = True
    workers.latest.die()
    failed_s = asyncio.get_running_loop().time()
    await asyncio.sleep(3600)
    assert set(made.states[1:]) == {"FAILED", "RETRYING"}
    times = [process.started_s - failed_s for process in workers.processes[1:]]
    pauses = [later - earlier for earlier, later in itertools.pairwise([0.0, *times])]
    for pause, longest in zip(pauses, [5, 10, 20, 40, 80, 160, 320, 600, 600], strict=False):
        assert 0.8 * longest <= pause <= longest
    workers.broken = False
    await asyncio.sleep(600)
    assert made.supervisor.state is State.READY
    assert made.supervisor.message == ""
    assert made.supervisor.next_try_s is None
    await made.supervisor.stop(0)


@in_virtual_time
async def test_failed_bundle_says_when_it_is_tried_again(
    supervised: MakeSupervised, workers: Workers
) -> None:
    made = supervised(crash_limit=1)
    await made.supervisor.start()
    workers.latest.die()
    assert made.supervisor.next_try_s is not None
    assert 3 <= made.supervisor.next_try_s - time.time() <= 5
    await asyncio.sleep(5)
    assert made.supervisor.state is State.READY
    await made.supervisor.stop(0)


@in_virtual_time
async def test_pauses_grow_if_the_bundle_fails_soon_again_and_are_short_after_a_good_time(
    supervised: MakeSupervised, workers: Workers
) -> None:
    made = supervised(crash_limit=1)
    await made.supervisor.start()

    async def fail() -> float:
        workers.latest.die()
        died_s = asyncio.get_running_loop().time()
        async with asyncio.timeout(1000):
            while made.supervisor.state is not State.READY:
                await asyncio.sleep(0.1)
        return asyncio.get_running_loop().time() - died_s

    assert await fail() <= 5.2
    assert 8 <= await fail() <= 10.2
    assert 16 <= await fail() <= 20.2
    await asyncio.sleep(601)
    assert await fail() <= 5.2
    await made.supervisor.stop(0)


@in_virtual_time
async def test_stop_ends_the_wait_for_the_next_attempt(supervised: MakeSupervised, workers: Workers) -> None:
    made = supervised(crash_limit=1)
    await made.supervisor.start()
    workers.latest.die()
    await made.supervisor.stop(0)
    await asyncio.sleep(3600)
    assert len(workers.processes) == 1
    assert made.states[-1] == "STOPPED"


@in_virtual_time
async def test_deaths_that_are_far_apart_are_tolerated(supervised: MakeSupervised, workers: Workers) -> None:
    made = supervised(crash_limit=3, crash_window_s=60.0)
    await made.supervisor.start()
    for _ in range(20):
        workers.latest.die()
        await asyncio.sleep(31)
    assert made.supervisor.state is State.READY
    assert made.supervisor.crashes == 20
    await made.supervisor.stop(0)


@in_virtual_time
async def test_worker_that_cannot_be_started_again_is_given_up(
    supervised: MakeSupervised, workers: Workers
) -> None:
    made = supervised(crash_limit=4)
    await made.supervisor.start()
    workers.broken = True
    died_s = asyncio.get_running_loop().time()
    workers.latest.die()
    await asyncio.sleep(60)
    assert made.states[:3] == ["READY", "RESTARTING", "FAILED"]
    assert "out of processes" in made.supervisor.message
    waited_s = [process.started_s - died_s for process in workers.processes[1:5]]
    assert waited_s == pytest.approx([0.05, 0.3, 1.3, 2.3])
    await made.supervisor.stop(0)
    assert made.states[-1] == "STOPPED"


@in_virtual_time
async def test_late_end_of_a_process_that_was_given_up_is_not_its_successors(
    supervised: MakeSupervised, workers: Workers, requests: Requests
) -> None:
    made = supervised()
    await made.supervisor.start()
    workers.latest.die()
    workers.silent = True
    await settle()
    await asyncio.sleep(1)
    given_up = workers.latest
    given_up.deaf = True
    given_up.on_frame(Frame(Failed("ERR_SELF_TEST", "sample 0 differs")))
    await asyncio.sleep(1)
    successor = workers.latest
    assert successor is not given_up
    given_up.die("killed by SIGKILL")  # while its successor is loading
    await settle()
    assert workers.latest is successor
    successor.on_frame(Frame(READY))
    await settle()
    given_up.on_frame(Frame(READY))
    assert made.states[-1] == "READY"
    made.supervisor.send(requests.new())
    successor.answer()
    assert requests.ended == {1: b"x"}
    assert made.supervisor.pid == successor.pid


@in_virtual_time
async def test_process_that_says_that_it_failed_and_does_not_end_is_killed(
    supervised: MakeSupervised, workers: Workers
) -> None:
    workers.silent = True
    starting = asyncio.ensure_future(supervised().supervisor.start())
    await settle()
    workers.latest.on_frame(Frame(Failed("ERR_INCOMPATIBLE", "needs AVX-512")))
    with pytest.raises(IncompatibleError):
        await starting
    assert workers.latest.killed


@in_virtual_time
async def test_stop_waits_for_answers_and_returns_the_rest(
    supervised: MakeSupervised, workers: Workers, requests: Requests
) -> None:
    made = supervised()
    await made.supervisor.start()
    for _ in range(2):
        made.supervisor.send(requests.new())
    stopping = asyncio.ensure_future(made.supervisor.stop(10.0))
    await asyncio.sleep(9)
    workers.latest.answer()
    left = await stopping
    assert [pending.frame.seq for pending in left] == [2]
    assert requests.ended == {1: b"x"}
    assert asyncio.get_running_loop().time() == pytest.approx(START_S + 10)


@in_virtual_time
async def test_worker_that_dies_while_it_is_stopped_is_not_restarted(
    supervised: MakeSupervised, workers: Workers, requests: Requests
) -> None:
    made = supervised()
    await made.supervisor.start()
    for _ in range(2):
        made.supervisor.send(requests.new())
    stopping = asyncio.ensure_future(made.supervisor.stop(10.0))
    await settle()
    workers.latest.die()
    assert [pending.frame.seq for pending in await stopping] == [1, 2]
    assert requests.ended == {}
    assert asyncio.get_running_loop().time() == pytest.approx(START_S)
    await asyncio.sleep(60)
    assert len(workers.processes) == 1
    assert made.states == ["READY", "STOPPING", "STOPPED"]


@in_virtual_time
async def test_stop_ends_a_restart(supervised: MakeSupervised, workers: Workers) -> None:
    made = supervised()
    await made.supervisor.start()
    workers.silent = True
    workers.latest.die()
    await asyncio.sleep(1)  # the second process loads
    await made.supervisor.stop(10.0)
    assert made.supervisor.pid is None
    await asyncio.sleep(60)
    assert len(workers.processes) == 2
    assert made.states == ["READY", "RESTARTING", "STOPPED"]


@pytest.mark.parametrize("frame", [Frame(Answer(7, 200)), Frame(Share((), 1)), Frame(Failed("ERR", "late"))])
@in_virtual_time
async def test_worker_that_breaks_the_protocol_is_killed(
    supervised: MakeSupervised, workers: Workers, requests: Requests, frame: Frame
) -> None:
    made = supervised()
    await made.supervisor.start()
    made.supervisor.send(requests.new())
    workers.latest.on_frame(frame)
    await settle()
    assert [pending.frame.seq for pending in made.supervisor.take_back()] == [1]
    assert made.supervisor.crashes == 1
    await made.supervisor.stop(0)


BAD_ANSWERS = (
    Answer(1, 200, content_type="a\0b"),
    Answer(1, 200, content_type="\ud800"),
    Answer(1, 500, "\ud800", "application/json", ("x;UINT8;1",)),
    Answer(1, 999, "why", "application/json"),
    Answer(1, 200, content_type="application/octet-stream", tensors=("y;UINT8;9",)),
)


@pytest.mark.parametrize("answer", BAD_ANSWERS)
@in_virtual_time
async def test_bad_answer_is_the_workers_fault_and_its_request_gets_500(
    supervised: MakeSupervised, workers: Workers, requests: Requests, answer: Answer
) -> None:
    made = supervised(crash_limit=1)
    await made.supervisor.start()
    made.supervisor.send(requests.new(b"bad"))
    made.supervisor.send(requests.new(b"good"))
    workers.latest.on_frame(Frame(answer, b"{}"))
    # Nothing else that it says counts.
    workers.latest.on_frame(Frame(Answer(1, 200, "", "application/json"), b"{}"))
    assert requests.ended == {}
    await settle()
    bad, good = made.supervisor.take_back()
    await asyncio.sleep(1)
    made.supervisor.send(bad)
    made.supervisor.send(good)
    workers.latest.on_frame(Frame(answer, b"{}"))
    await settle()
    error = requests.ended[1]
    assert isinstance(error, ExecutionError)
    assert "its worker sent an invalid answer: expected" in str(error)
    assert made.supervisor.take_back() == [good]
    await asyncio.sleep(1)
    made.supervisor.send(good)
    workers.latest.answer()
    assert requests.ended[2] == b"good"
    await made.supervisor.stop(0)


@in_virtual_time
async def test_what_a_worker_says_about_itself_is_one_bounded_line(
    supervised: MakeSupervised, workers: Workers
) -> None:
    workers.silent = True
    made = supervised()
    starting = asyncio.ensure_future(made.supervisor.start())
    await settle()
    workers.latest.on_frame(Frame(replace(READY, sandbox="\x1b[2J\n" * 9000)))
    await starting
    assert made.supervisor.ready is not None
    assert made.supervisor.ready.sandbox == "?[2J?" * 100
    await made.supervisor.stop(0)
    starting = asyncio.ensure_future(supervised().supervisor.start())
    await settle()
    workers.latest.on_frame(Frame(Failed("ERR_INCOMPATIBLE", "a\nb", "\ud800" * 9000)))
    with pytest.raises(IncompatibleError, match=r"^a\?b$") as caught:
        await starting
    assert caught.value.hint == "?" * 500


frames = st.one_of(
    st.builds(
        Answer,
        seq=st.integers(0, 6),
        status=st.sampled_from([200, 400, 500, 503]) | st.integers(),
        message=st.text(st.characters(codec=None), max_size=5),
        content_type=st.sampled_from(["application/json", "application/octet-stream", ""]),
        tensors=st.lists(st.sampled_from(["y;UINT8;2", "a\0b;UINT8;2"]), max_size=2).map(tuple),
    ),
    st.just(READY),
    st.builds(Failed, st.just("ERR"), st.text(max_size=3)),
    st.just(Share((), 1)),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(said=st.lists(st.one_of(frames, st.none(), st.just("die")), max_size=30))
def test_whatever_a_worker_says_every_request_ends_once(
    supervised: MakeSupervised, workers: Workers, said: list[Header | str | None]
) -> None:
    """None answers as asked. After all of it an honest worker answers what is left."""
    requests = Requests()

    @in_virtual_time
    async def say() -> None:
        made = supervised()
        await made.supervisor.start()
        waiting = [requests.new(b"%d" % number) for number in range(6)]

        async def fill() -> None:
            await settle()
            waiting[:0] = made.supervisor.take_back()
            await asyncio.sleep(2)  # a worker is ready again
            while waiting and made.supervisor.has_room:
                made.supervisor.send(waiting.pop(0))

        for word in said:
            await fill()
            process = workers.latest
            if word == "die":
                process.die()
            elif not isinstance(word, str | None):
                process.on_frame(Frame(word, b"{}"))
            elif process.requests:
                process.answer()
        for _ in range(20):
            await fill()
            while workers.latest.requests:
                workers.latest.answer()
        if made.supervisor.state is State.READY:
            assert set(requests.ended) == set(range(1, 7))
        else:  # it died too often while it had nothing to do
            left = {pending.frame.seq for pending in waiting + made.supervisor.take_back()}
            assert left | set(requests.ended) == set(range(1, 7))
        await made.supervisor.stop(0)

    say()


@in_virtual_time
async def test_share_that_changes_while_a_worker_loads_reaches_it(
    supervised: MakeSupervised, workers: Workers
) -> None:
    made = supervised()
    starting = asyncio.ensure_future(made.supervisor.start())
    await asyncio.sleep(0)
    made.supervisor.share(Share((0,), 1))
    await starting
    assert workers.latest.load is not None
    assert workers.latest.load.cpus == ()
    assert workers.latest.shares == [Share((0,), 1)]
    await made.supervisor.stop(0)


BATCHED: dict[str, Any] = {
    "inputs": (TensorSpec("x", "FP32", (6, 3)),),
    "outputs": (TensorSpec("y", "FP32", (6, 3)),),
    "buckets": Buckets(
        (Dimension("batch", 1, 6, (2, 6)),),
        (InputAxis("x", 0, "batch"),),
        (OutputAxis("y", 0, "batch"),),
        "batch",
    ),
}


@in_virtual_time
async def test_worker_that_computes_requests_together_has_two_batches(
    supervised: MakeSupervised, workers: Workers, requests: Requests
) -> None:
    for batch, sent in ((True, 12), (False, 2)):
        made = supervised(batch=batch, batch_delay_s=0.01, **BATCHED)
        await made.supervisor.start()
        load = workers.latest.load
        assert load is not None
        assert (load.batch, load.batch_delay_s) == (batch, 0.01)
        while made.supervisor.has_room:
            made.supervisor.send(requests.new())
        assert made.supervisor.busy == sent
        await made.supervisor.stop(0)


@in_virtual_time
@pytest.mark.parametrize("hangs", [False, True])
async def test_requests_that_were_computed_together_when_a_worker_died_are_computed_alone(
    supervised: MakeSupervised, workers: Workers, requests: Requests, hangs: bool
) -> None:
    """The second of three is the culprit: the first, which the worker would have answered next, is not."""
    made = supervised(batch=True, compute_limit_s=30.0, **BATCHED)
    await made.supervisor.start()
    for payload in (b"good", b"bad", b"fine"):
        made.supervisor.send(requests.new(payload))
    if hangs:
        await asyncio.sleep(30.01)
    else:
        workers.latest.die()
    left = made.supervisor.take_back()
    assert [pending.frame.seq for pending in left] == [1, 2, 3]
    assert all(pending.frame.by_itself and pending.suspect is None for pending in left)
    assert requests.ended == {}
    await asyncio.sleep(0.2)
    for pending in left:
        made.supervisor.send(pending)
    workers.latest.answer()
    for _ in range(2):  # "bad" by itself, twice
        workers.latest.die()
        left = made.supervisor.take_back()
        await asyncio.sleep(5)
        for pending in left:
            made.supervisor.send(pending)
    assert requests.ended[1] == b"good"
    assert isinstance(requests.ended[2], ExecutionError)
    workers.latest.answer()
    assert requests.ended[3] == b"fine"
    await made.supervisor.stop(0)


@in_virtual_time
async def test_no_request_follows_a_large_one_before_it_is_answered(
    supervised: MakeSupervised, workers: Workers, requests: Requests
) -> None:
    made = supervised()
    await made.supervisor.start()
    made.supervisor.send(requests.new(bytes(4 << 20)))
    rooms = [made.supervisor.has_room]
    workers.latest.answer()
    assert [*rooms, made.supervisor.has_room] == [False, True]
    await made.supervisor.stop(0)
