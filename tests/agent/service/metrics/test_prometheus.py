"""The page for Prometheus has the numbers that are published over MQTT, and is optional."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from agent.config.settings import ListenAddress
from agent.errors import ConfigError
from agent.service.metrics import prometheus
from agent.service.metrics.metric_table import METRICS
from agent.service.metrics.prometheus import PrometheusPage
from tests.agent.service.conftest import StartService, keep_active
from tests.bundles import Signer
from tests.conftest import BrokerProcess
from tests.patience import PATIENCE_S, until
from tests.ports import free_port

DASHBOARD = Path(__file__).parents[4] / "docs" / "grafana" / "edge-agent.json"
# Missing on a machine without such sensors, or in an agent without TLS.
OF_SOME_BOARDS = {
    "edge_temperature_celsius",
    "edge_throttled",
    "edge_throttled_since_boot",
    "edge_cooling_state",
    "edge_cpu_frequency_hertz",
    "edge_certificate_expiry_timestamp_seconds",
}
# Missing until it happens for the first time.
OF_ACCIDENTS = {
    "edge_control_messages_dropped_total",
    "edge_faults_total",
    "edge_inference_duplicates_total",
    "edge_inference_unanswerable_total",
    "edge_answers_undelivered_total",
}
EXPECTED = 'edge_inference_requests_total{model="echo",status="200"}'
LOCAL = ListenAddress("127.0.0.1", 0)


def fetch(port: int, accept: str = "text/plain") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return str(response.read().decode())


async def test_page_has_the_numbers_that_are_published(
    mosquitto: BrokerProcess, start_service: StartService, signer: Signer, tmp_path: Path
) -> None:
    port = free_port()
    keep_active(tmp_path / "state-kitchen", signer.packed())
    async with start_service(mosquitto.port, metrics_listen=f"127.0.0.1:{port}") as rig:
        client = await rig.client()
        for _ in range(5):
            await client.ask(b"hello")
        await until(lambda: rig.service.samples()["edge_inference_in_flight"] == 0)
        page = await asyncio.to_thread(fetch, port)
        published = {
            (sample.name, frozenset(sample.labels)): sample.value for sample in rig.service._read_metrics()
        }
        families = {family.name: family for family in text_string_to_metric_families(page)}
        scraped = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families.values()
            for sample in family.samples
        }
        assert scraped.keys() == published.keys()
        five = ("edge_inference_requests_total", frozenset({("model", "echo"), ("status", "200")}))
        assert scraped[five] == rig.service.samples()[EXPECTED] == 5
        same = [key for key in published if key[0].startswith("edge_inference")]
        assert {key: scraped[key] for key in same} == {key: published[key] for key in same}
        assert families["edge_inference_compute_seconds"].type == "histogram"
        assert families["edge_inference_requests"].type == "counter"
        exported = {sample.metric for sample in rig.service._read_metrics()}
        assert exported | OF_SOME_BOARDS | OF_ACCIDENTS == set(METRICS)
        for sample in rig.service._read_metrics():
            labels = {name for name, _ in sample.labels} - {"le"}
            assert labels == set(METRICS[sample.metric].labels), sample
        openmetrics = await asyncio.to_thread(fetch, port, "application/openmetrics-text; version=1.0.0")
        assert {family.name for family in parse_openmetrics(openmetrics)} == families.keys()
        assert_dashboard_names_what_is_there({name for name, _ in scraped})
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", port)) != 0


def assert_dashboard_names_what_is_there(names: set[str]) -> None:
    """Each metric and label of the Grafana dashboard is in a live scrape, or only some boards have it."""
    document = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in document["panels"] for target in panel.get("targets", [])]
    queries += [
        variable["query"]["query"]
        for variable in document["templating"]["list"]
        if variable["type"] == "query"
    ]
    assert len(queries) > 15
    for query in queries:
        found = set(re.findall(r"edge_[a-z0-9_]+", query))
        assert found, query
        assert found <= names | OF_SOME_BOARDS | OF_ACCIDENTS, query
        for name in found:
            of_it = METRICS.get(name) or METRICS[re.sub("_(bucket|sum|count)$", "", name)]
            grouped = re.findall(r"by \(([^)]*)\)", query) + re.findall(r"(\w+)=~?\"", query)
            used = {label.strip() for text in grouped for label in text.split(",")}
            assert used <= {*of_it.labels, "le", "instance", "job"}, query


async def test_blocked_agent_is_reported_as_busy_without_old_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.service.metrics.prometheus.CLIENT_LIMIT_S", 0.2)
    page = PrometheusPage(LOCAL, list)
    status: list[int] = []

    def ask() -> None:
        try:
            fetch(page.port)
            status.append(200)
        except urllib.error.HTTPError as error:
            status.append(error.code)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()  # which blocks the loop
    assert status == [503]
    monkeypatch.setattr("agent.service.metrics.prometheus.CLIENT_LIMIT_S", PATIENCE_S)
    await asyncio.to_thread(ask)
    assert status == [503, 200]
    await page.close()


async def test_silent_client_does_not_hold_up_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.service.metrics.prometheus._Handler.timeout", 2.0)
    page = PrometheusPage(LOCAL, list)
    with socket.create_connection(("127.0.0.1", page.port)):
        assert await asyncio.to_thread(fetch, page.port) == ""
    await page.close()


async def test_port_that_is_taken_is_an_error() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        with pytest.raises(ConfigError, match="cannot listen on 127") as caught:
            PrometheusPage(ListenAddress("127.0.0.1", sock.getsockname()[1]), list)
    assert caught.value.hint is not None


async def test_missing_library_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match="expected the package prometheus-client"):
        PrometheusPage(LOCAL, list)


@pytest.mark.slow
def test_library_is_not_loaded_unless_a_page_is_wanted() -> None:
    script = (
        "import sys, agent.service.service as s; print(*{'prometheus_client', 'wsgiref'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def slow_client(port: int) -> socket.socket:
    """Connect, and send a byte of a request now and then, in a thread."""
    client = socket.create_connection(("127.0.0.1", port))

    def send() -> None:
        with contextlib.suppress(OSError):
            for byte in b"GET /metrics HTTP/1.1\r\nX: " + b"a" * 10_000:
                client.sendall(bytes([byte]))
                time.sleep(0.01)

    threading.Thread(target=send, daemon=True).start()
    return client


async def test_client_that_sends_a_byte_now_and_then_does_not_keep_the_page_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prometheus, "CLIENT_LIMIT_S", 0.2)
    page = PrometheusPage(LOCAL, list)
    with slow_client(page.port):
        await asyncio.to_thread(fetch, page.port)
    await page.close()


async def test_page_closes_soon_although_a_client_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "CLIENT_LIMIT_S", threading.TIMEOUT_MAX)  # only closing ends it
    page = PrometheusPage(LOCAL, list)
    with slow_client(page.port):
        await until(lambda: page._server.client is not None)
        await page.close()
        await until(lambda: not page._thread.is_alive())
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", page.port))
