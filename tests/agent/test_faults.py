"""Everything around a requester is killed and restarted; `make soak` does this hundreds of times.

Every request must get the right answer, and never two different ones.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from tests.agent.cutting_proxy import CuttingProxy
from tests.agent.faults import (
    CONFIG,
    DEADLINE_S,
    MODEL,
    Load,
    Trial,
    cut_connections,
    kill_agent,
    kill_broker,
    kill_worker,
    restart_broker,
)
from tests.agent.test_agent_process import Device, device, kernels, model_is_ready, signer  # noqa: F401 - fixtures
from tests.conftest import BrokerProcess

pytestmark = pytest.mark.slow

REQUESTS = 600
LIMIT_S = 2.0 * DEADLINE_S


async def suffer(
    device: Device,  # noqa: F811
    kernels: Path,  # noqa: F811
    fault: Callable[[Device], Awaitable[None]],
    times: int,
) -> Load:
    device.start(config=CONFIG)
    device.install(MODEL, kernels)
    await model_is_ready(device.port, MODEL)
    load = Load(device.port, REQUESTS)
    trial = Trial(device, load, fault, times)
    await trial.run(LIMIT_S)
    assert trial.happened == times
    assert load.done == REQUESTS
    assert load.wrong == []
    return load


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "times"),
    [(kill_worker, 6), (kill_agent, 3), (restart_broker, 5), (kill_broker, 5)],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_every_request_gets_one_right_answer(
    device: Device,  # noqa: F811
    kernels: Path,  # noqa: F811
    fault: Callable[[Device], Awaitable[None]],
    times: int,
) -> None:
    load = await suffer(device, kernels, fault, times)
    if fault is kill_worker:
        # The death of a worker costs no other request.
        assert load.statuses[500] <= times
        assert load.statuses[503] == 0
    else:
        assert load.statuses == {200: REQUESTS}


@pytest.mark.slow
async def test_every_request_gets_one_right_answer_from_a_broker_that_forgets(
    forgetful: BrokerProcess,
    kernels: Path,  # noqa: F811
    device: Device,  # noqa: F811
) -> None:
    device.broker, device.port = forgetful, forgetful.port
    load = await suffer(device, kernels, restart_broker, 5)
    assert load.statuses == {200: REQUESTS}


@pytest.mark.slow
async def test_every_request_gets_one_right_answer_over_connections_that_are_cut_in_a_packet(
    device: Device,  # noqa: F811
    kernels: Path,  # noqa: F811
) -> None:
    proxy = CuttingProxy(device.port)
    await proxy.start()
    device.port = proxy.port
    try:
        load = await suffer(device, kernels, cut_connections(proxy), 10)
    finally:
        await proxy.close()
    assert load.statuses == {200: REQUESTS}
    assert proxy.cuts >= 10


@pytest.fixture
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Return a broker without persistence."""
    broker = BrokerProcess("mosquitto", tmp_path_factory.mktemp("forgetful"), persistent=False)
    broker.start()
    yield broker
    broker.stop()
