"""The metrics as an optional page for Prometheus.

Promises: the numbers are those that are published over MQTT, read in the event loop; one thread answers one
client at a time, and drops one that has not sent its request and taken its answer within `CLIENT_LIMIT_S`, or
when the page is closed; without `metrics.listen` neither the library nor the thread exists.
The page has no password, so it should listen on 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as LoopTimeoutError
from typing import TYPE_CHECKING, Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from agent.config.settings import ListenAddress
from agent.errors import ConfigError
from agent.service.metrics.metric_table import COUNTER, METRICS
from agent.service.metrics.metrics import Sample

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

    from prometheus_client.metrics_core import Metric

_log = logging.getLogger(__name__)

# For a client's whole request and answer, however little it sends or takes at a time; if the event loop is
# blocked for half of that, the request is answered 503.
CLIENT_LIMIT_S: Final = 5.0
# How long to wait for the thread at the end; it has nothing that must be kept.
_CLOSE_LIMIT_S: Final = 1.0
_POLL_S: Final = 0.1


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        _log.debug("metrics page: " + format, *args)


class _Server(WSGIServer):
    # The client that is being answered.
    client: socket.socket | None = None
    closing = False

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - socketserver's types
        """Answer a client, and cut its connection when its time is over."""
        self.client = request
        timer = threading.Timer(CLIENT_LIMIT_S, _cut, [request])
        timer.daemon = True
        timer.start()
        try:
            if self.closing:
                _cut(request)
            super().finish_request(request, client_address)
        finally:
            timer.cancel()
            self.client = None

    def server_bind(self) -> None:
        # Like the library's method, but without asking DNS for our own name.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        _log.debug("metrics page: %s went away", client_address, exc_info=True)


def _cut(client: socket.socket) -> None:
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


class _Ipv6Server(_Server):
    address_family = socket.AF_INET6


class PrometheusPage:
    """Serves samples to Prometheus; port 0 stands for any free one.

    `samples` is called in the event loop in which this object is made. A missing library, and an address that
    cannot be listened on, raise ConfigError.
    """

    def __init__(self, address: ListenAddress, samples: Callable[[], Sequence[Sample]]) -> None:
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app
        except ImportError as error:
            raise ConfigError(
                "expected the package prometheus-client for metrics.listen, got none",
                hint="pip install 'edgebundle[prometheus]', or leave metrics.listen out",
            ) from error
        self._samples = samples
        self._loop = asyncio.get_running_loop()
        self._read: Sequence[Sample] = ()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._page: Callable[[WSGIEnvironment, StartResponse], Iterable[bytes]] = make_wsgi_app(registry)
        server = _Ipv6Server if ":" in address.host else _Server
        try:
            self._server = make_server(
                address.host, address.port, self._answer, server, handler_class=_Handler
            )
        except OSError as error:
            raise ConfigError(
                f"metrics.listen: cannot listen on {address.host}:{address.port}: {error.strerror or error}",
                hint="choose another port; 127.0.0.1 is reachable only from this device",
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=[_POLL_S], name="prometheus", daemon=True
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._server.server_port)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; the library calls this to write the page."""
        yield from to_metrics(self._read)

    async def close(self) -> None:
        """End the thread, with the connection of a client that is being answered, and stop listening."""
        server = self._server
        server.closing = True  # clients that connect from now on are cut
        if (client := server.client) is not None:
            _cut(client)
        stopping = asyncio.create_task(asyncio.to_thread(server.shutdown))
        await asyncio.wait([stopping], timeout=_CLOSE_LIMIT_S)
        server.server_close()

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one client; called in the page's thread, one client at a time."""
        reading = asyncio.run_coroutine_threadsafe(self._read_samples(), self._loop)
        try:
            self._read = reading.result(CLIENT_LIMIT_S / 2)
        except LoopTimeoutError:
            reading.cancel()
            _log.warning("the event loop gave the metrics page no numbers within %g s", CLIENT_LIMIT_S / 2)
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"the agent is busy\n"]
        return self._page(environ, start_response)

    async def _read_samples(self) -> Sequence[Sample]:
        return self._samples()


def to_metrics(samples: Sequence[Sample]) -> Iterator[Metric]:
    """Group samples by metric, with types and texts from the table."""
    from prometheus_client.metrics_core import Metric

    groups: dict[str, Metric] = {}
    for sample in samples:
        metric = groups.get(sample.metric)
        if metric is None:
            described = METRICS[sample.metric]
            # The library's name of a counter lacks the suffix that its samples have.
            name = sample.metric.removesuffix("_total") if described.kind == COUNTER else sample.metric
            metric = groups[sample.metric] = Metric(name, described.text, described.kind)
        metric.add_sample(sample.name, dict(sample.labels), sample.value)
    yield from groups.values()
