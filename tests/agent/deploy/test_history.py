"""Old jobs go only to a broker that has forgotten them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from agent.deploy.history import PATIENCE_S, History
from agent.deploy.jobs import Job, Journal, Request
from agent.wire import topics
from agent.wire.job import Status
from agent.wire.reported import Origin
from tests.agent.deploy.rig import DEVICE, FakeControl
from tests.virtual_time import in_virtual_time

JOBS = [
    Job(
        Request(
            job=f"job-{number}",
            model="digits",
            digest=f"sha256:{number:064x}",
            size=1,
            version="1",
            sources=(),
            origin=Origin.DESIRED,
        ),
        Status.SUCCEEDED,
        time_s=float(number),
    )
    for number in range(64)
]
NEWEST = topics.Job(DEVICE, "job-63")
DOCUMENT = JOBS[-1].state().to_bytes()


def history(control: FakeControl, folder: Path, jobs: Sequence[Job] = JOBS) -> History:
    journal = Journal(folder / "jobs.json")
    for job in jobs:
        journal.put(job)
    return History(DEVICE, control, journal)


@in_virtual_time
async def test_broker_that_has_the_newest_job_gets_none_again(tmp_path: Path) -> None:
    control = FakeControl()
    published = history(control, tmp_path)
    published.on_connected()
    assert control.filters == {topics.format_topic(NEWEST)}
    published.on_retained(NEWEST, DOCUMENT)
    await asyncio.sleep(2 * PATIENCE_S)
    assert not control.log
    assert not control.filters


@in_virtual_time
async def test_broker_that_forgot_gets_every_job_again(tmp_path: Path) -> None:
    control = FakeControl()
    published = history(control, tmp_path)
    published.on_connected()
    await asyncio.sleep(2 * PATIENCE_S)
    assert len(control.retained) == len(JOBS)
    assert not control.filters


@in_virtual_time
async def test_broker_with_an_older_state_gets_every_job_again(tmp_path: Path) -> None:
    control = FakeControl()
    published = history(control, tmp_path)
    published.on_connected()
    published.on_retained(NEWEST, replace(JOBS[-1], status=Status.IN_PROGRESS).state().to_bytes())
    published.on_retained(topics.Job(DEVICE, "job-3"), DOCUMENT)
    await asyncio.sleep(2 * PATIENCE_S)
    assert len(control.retained) == len(JOBS)


@in_virtual_time
async def test_job_that_changed_last_is_the_one_that_is_asked_for(tmp_path: Path) -> None:
    control = FakeControl()
    published = history(control, tmp_path)
    published.publish(JOBS[5])
    published.on_connected()
    assert control.filters == {topics.format_topic(topics.Job(DEVICE, "job-5"))}


@in_virtual_time
async def test_after_a_restart_the_job_that_changed_last_is_asked_for_whatever_the_clock_says(
    tmp_path: Path,
) -> None:
    path = tmp_path / "jobs.json"
    before = Journal(path)
    for job in JOBS:
        before.put(job)
    before.put(replace(JOBS[5], time_s=-1.0))  # the clock went back
    before._file.save([asdict(job) for job in before])
    journal = Journal(path)
    journal.load()
    control = FakeControl()
    History(DEVICE, control, journal).on_connected()
    assert control.filters == {topics.format_topic(topics.Job(DEVICE, "job-5"))}


def test_a_job_that_changed_before_the_file_was_read_is_the_last(tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    Journal(path)._file.save([asdict(job) for job in JOBS])
    journal = Journal(path)
    journal.put(JOBS[2])
    journal.load()
    assert list(journal) == [job for job in JOBS if job != JOBS[2]] + [JOBS[2]]


@in_virtual_time
async def test_each_connect_asks_anew_and_waits_once(tmp_path: Path) -> None:
    control = FakeControl()
    published = history(control, tmp_path)
    for _ in range(3):
        published.on_connected()
        await asyncio.sleep(PATIENCE_S / 2)
    await asyncio.sleep(2 * PATIENCE_S)
    assert len(control.log) == len(JOBS)
    published.on_connected()
    published.close()
    await asyncio.sleep(2 * PATIENCE_S)
    assert len(control.log) == len(JOBS)


@in_virtual_time
async def test_agent_without_jobs_asks_for_nothing(tmp_path: Path) -> None:
    control = FakeControl()
    history(control, tmp_path, ()).on_connected()
    assert not control.filters
