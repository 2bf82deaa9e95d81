"""The client without asyncio: threads, futures, closing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from agent.mqtt.message import Message
from edgebundle import BrokerError, Client, ClosedError, ExecutionError, UnknownAgentError, UsageError
from tests.conftest import BrokerProcess
from tests.edgebundle.rig import JPEG, Reply, Responder
from tests.patience import PATIENCE_S, wait_until


def echo(_count: int, message: Message) -> Reply:
    if message.payload == JPEG:
        return None
    if message.properties.content_type == "image/jpeg":
        return 500, {"error": "the model failed"}
    return ("y;FP32;1,1,2,3",), message.payload


@pytest.fixture
def site(mosquitto: BrokerProcess) -> Iterator[BrokerProcess]:
    """A broker with an agent that answers tensors with themselves, a JPEG never, and others with 500."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    responder = Responder(mosquitto, echo)
    asyncio.run_coroutine_threadsafe(responder.__aenter__(), loop).result(PATIENCE_S)
    yield mosquitto
    asyncio.run_coroutine_threadsafe(responder.__aexit__(), loop).result(PATIENCE_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def array(number: float) -> np.ndarray:
    return np.full((1, 1, 2, 3), number, np.float32)


def test_three_lines(site: BrokerProcess) -> None:
    model = Client(site.url).model("kitchen", "digits")
    np.testing.assert_array_equal(model(array(1))["y"], array(1))
    np.testing.assert_array_equal(model(image=array(2))["y"], array(2))  # an input of that name
    assert model.info().inputs[0].shape == (1, 1, 2, 3)
    assert (model.agent, model.name) == ("kitchen", "digits")


def test_threads_share_a_client_and_map_keeps_the_order(site: BrokerProcess) -> None:
    with Client(site.url) as client, ThreadPoolExecutor(8) as pool:
        model = client.model("kitchen", "digits")
        answers = list(pool.map(lambda i: model(array(i)), range(100)))
        assert [answer["y"][0, 0, 0, 0] for answer in answers] == list(range(100))
        mapped = model.map((array(i) for i in range(20)), in_flight=5)
        assert [answer["y"][0, 0, 0, 0] for answer in mapped] == list(range(20))
        assert client.agents() == ("kitchen",)
        for wrong in ({"in_flight": 0}, {"deadline_s": -1.0}):
            with pytest.raises(UsageError, match="expected"):
                model.map([], **wrong)
        with pytest.raises(ExecutionError, match="journalctl"):
            list(model.map([array(1), JPEG + b"1", array(2)]))


def test_future_is_cancelled_and_closing_ends_the_others(site: BrokerProcess) -> None:
    client = Client(site.url)
    model = client.model("kitchen", "digits")
    first, second = model.submit(image=JPEG), model.submit(image=JPEG)
    assert first.cancel()
    client.close()
    with pytest.raises(ClosedError, match="closed while"):
        second.result(PATIENCE_S)
    with pytest.raises(ClosedError, match="the client is closed"):
        model(array(1))
    client.close()
    assert not client._thread.is_alive()


def test_interrupted_call_gives_its_request_up_and_the_client_goes_on(site: BrokerProcess) -> None:
    with Client(site.url) as client:
        model, exchanges = client.model("kitchen", "digits"), client._client._exchanges

        def interrupt() -> None:
            wait_until(lambda: bool(exchanges))
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            model(image=JPEG)
        thread.join()
        wait_until(lambda: not exchanges)
        np.testing.assert_array_equal(model(array(1))["y"], array(1))


def test_call_that_waits_in_another_thread_ends_when_the_client_is_closed(site: BrokerProcess) -> None:
    client = Client(site.url)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.model("kitchen", "digits"), image=JPEG)
        wait_until(lambda: bool(client._client._exchanges))
        client.close()
        with pytest.raises(ClosedError, match="closed while"):
            waiting.result(PATIENCE_S)


def test_file_is_read_by_the_thread_that_asks(site: BrokerProcess, tmp_path: Path) -> None:
    path = tmp_path / "other.jpg"
    path.write_bytes(JPEG + b"1")
    with Client(site.url) as client:
        model, before = client.model("kitchen", "digits"), set(threading.enumerate())
        with pytest.raises(ExecutionError):
            model(image=path)
        assert set(threading.enumerate()) == before
        with pytest.raises(FileNotFoundError):
            model(image=tmp_path / "absent.jpg")
        with pytest.raises(FileNotFoundError):
            model(audio=str(tmp_path / "absent.wav"))
        with pytest.raises(UsageError, match="got several of these"):
            model(array(1), image=path)


def test_forgotten_client_ends_its_thread(site: BrokerProcess) -> None:
    client = Client(site.url)
    thread = client._thread
    del client
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_unreachable_broker_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(BrokerError, match="cannot reach the broker"):
        Client("mqtt://127.0.0.1:1")
    with pytest.raises(UsageError):
        Client("broker")
    assert threading.active_count() == before


def test_callback_that_waits_for_its_own_client_is_refused(mosquitto: BrokerProcess) -> None:
    failures: list[Exception] = []
    with Client(mosquitto.url) as client:

        def on_loop() -> None:
            try:
                client.agents()
            except UsageError as error:
                failures.append(error)

        client._loop.call_soon_threadsafe(on_loop)
        with contextlib.suppress(UnknownAgentError):
            client.model("kitchen", "digits")(image=JPEG, deadline_s=PATIENCE_S)
    assert "another thread" in str(failures[0])


def test_nothing_is_printed_that_a_program_did_not_ask_for(amqtt_broker: BrokerProcess) -> None:
    """Without a configuration, logging would print the warning about MQTT 3.1.1."""
    script = f"from edgebundle import Client\nwith Client({amqtt_broker.url!r}) as client: client.agents()"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_process_that_closes_nothing_ends_at_once(site: BrokerProcess, tmp_path: Path) -> None:
    script = (
        "from edgebundle import Client\n"
        f"model = Client({site.url!r}).model('kitchen', 'digits')\n"
        f"model.submit(image={JPEG!r}, deadline_s={10 * PATIENCE_S})\n"
        "print(model({'image': [[[[0, 0, 0], [0, 0, 0]]]]})['y'].shape)\n"
    )
    # Its open request would take ten times this limit.
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "(1, 1, 2, 3)", "")
