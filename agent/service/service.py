"""The agent, wired up: its parts, and the order in which they start and end.

Promises: without a broker, the agent starts, loads its models and keeps trying to connect. It connects before
it loads its models, so a device that takes minutes to load them is visible meanwhile. When it is asked
to stop, it answers the requests that it has accepted, within a time limit, leaves all others with the broker,
and announces that it stops. If one of its tasks fails because of a bug, the agent ends with that error rather
than running half-broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, ParamSpec

import agent
from agent.bundle.machine import Machine
from agent.config.settings import Config
from agent.deploy.circumstances import Circumstances
from agent.deploy.deployment import Deployment
from agent.deploy.fetch.allow_list import HttpsSettings
from agent.deploy.outbox import Outbox
from agent.deploy.store.storage import Condition, StorageWatch
from agent.deploy.store.store import Store
from agent.disk_thread import in_disk_thread, within
from agent.errors import DiskError, EdgeError, StoreError
from agent.mqtt.message import Message
from agent.mqtt.reason_codes import Reason
from agent.mqtt.session import Owner
from agent.mqtt.tls import CertificateFiles
from agent.service import gauges as gauges_of
from agent.service.announcements import Announcements, home_assistant_announcer
from agent.service.client_ids import ClientIds
from agent.service.connections import Connections
from agent.service.control_messages import ControlMessages
from agent.service.inference import Inference, most_held_bytes
from agent.service.metrics import host
from agent.service.metrics.metrics import Metrics, Sample, to_document
from agent.service.models.cores import Cores
from agent.service.models.models import Models
from agent.service.models.worker_process import Spawn
from agent.service.notify import READY, STOPPING, Notifier
from agent.service.presence import Presence, Session
from agent.service.requests.answers import AnswerStore
from agent.service.requests.pending import Deadlines
from agent.service.session_seq import SessionSeq
from agent.service.trusted_keys import TrustedKeys
from agent.wire.metrics import format_metrics
from agent.wire.topics import Metrics as MetricsTopic
from agent.wire.topics import format_topic

if TYPE_CHECKING:
    from agent.service.metrics.prometheus import PrometheusPage

_P = ParamSpec("_P")

_log = logging.getLogger(__name__)

# Often enough: certificates are renewed days before they expire.
_FILES_INTERVAL_S: Final = 30.0
# A disk that does not respond must not hold up presence for longer than this, at each step of the start.
_DISK_LIMIT_S: Final = 10.0
# Rarely, to spare an SD card: if it is not stored, models are loaded in another order, and a version that is
# deployed soon after a power failure is compared with what its predecessor did until an hour before.
_USE_INTERVAL_S: Final = 3600.0
# For the broker to acknowledge the last messages: the state topic's, and the reports of jobs.
_FAREWELL_S: Final = 2.0


class Service:
    """One agent.

    Parameters
    ----------
    config
        Its configuration.
    notifier
        Sends messages to systemd.
    spawn
        Makes worker processes; None for forks of one template.

    Attributes
    ----------
    connections
        The connections to the broker.
    models
        The models that run here.
    """

    def __init__(self, config: Config, notifier: Notifier, *, spawn: Spawn | None = None) -> None:
        self._config = config
        self._notifier = notifier
        self._metrics = Metrics()
        self._trusted_keys = TrustedKeys(config.trust_dir)
        machine = Machine.detect(configured=config.compatible)
        self._session_seq = SessionSeq(config.state_dir)
        self._storage = StorageWatch(config.state_dir, self._on_storage)
        self._store = Store(config.state_dir, on_error=self._storage.suspect, opened=False)
        self._host = host.Host(lambda: self._storage.usage)
        cores = Cores.detect(os.environ, threads=config.worker.threads, apart=config.worker.share_cores)
        self.models = Models(
            config.worker,
            config.queue,
            self._model_changed,
            cores,
            spawn,
            revokes=self._trusted_keys.revokes,
        )
        # Models whose bundles revoked keys have signed.
        self._revoked: set[str] = set()
        try:
            within(_DISK_LIMIT_S, _make_folder, config.state_dir)
            self._responds = True
        except DiskError as error:
            _log.error("%s: %s", config.state_dir, error)
            self._responds = False
        usable = self._responds or config.answers_dir != config.state_dir
        self._answers = AnswerStore(config.answers_dir if usable else None)
        self._inference = Inference(
            config.device,
            self.models,
            self._answers,
            self._metrics,
            Deadlines(config.default_deadline_s, config.max_deadline_s),
            most_held_bytes(machine),
        )
        state_dir = config.state_dir if self._responds else None
        self.connections = Connections(
            config,
            self._inference,
            ClientIds(config.device, state_dir),
            Owner(self._on_control_message, self._on_control_up, self._on_control_down),
        )
        self._control = self.connections.control
        tls = config.broker.tls
        self._certificates = None if tls is None else CertificateFiles(tls)
        # These need the number of this start.
        self._presence: Presence | None = None
        self._control_messages: ControlMessages | None = None
        self._reloading: asyncio.Task[None] | None = None
        self._page: PrometheusPage | None = None
        self._announcements = Announcements(
            host.describe(
                config.device,
                machine,
                sources=("mqtt", *config.sources_https),
                groups=config.groups,
                max_packet_bytes=config.broker.max_packet_bytes,
            ),
            self._store,
            self.models,
            self._host,
            self._control,
            home_assistant_announcer(config.home_assistant, self._control, state_dir),
            config.metrics.interval_s,
        )
        self._outbox = Outbox(self._control, config.state_dir)
        self._deployment = Deployment(
            device=config.device,
            store=self._store,
            circumstances=Circumstances(
                self._trusted_keys.read, machine, config.sources_https, serves_revoked=config.serves_revoked
            ),
            models=self.models,
            control=self._outbox,
            https=HttpsSettings(allow=config.sources_https, ca_file=config.sources_ca),
        )

    @property
    def online(self) -> bool:
        """Whether all connections are up and subscribed, and every control message is acknowledged."""
        return self.connections.online

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set.

        Raises
        ------
        EdgeError
            If the state directory cannot be used.
        """
        config = self._config
        if config.metrics.listen is not None:
            from agent.service.metrics.prometheus import PrometheusPage

            self._page = PrometheusPage(config.metrics.listen, self._read_metrics)
        limit_s = _DISK_LIMIT_S if self._responds else 0.0
        seq, *_ = await asyncio.gather(
            self._session_seq.take(limit_s),
            self._outbox.open(limit_s),
            self._storage.look(limit_s),
            _wait_for_disk(_DISK_LIMIT_S, self._look_at_files),
        )
        if not self._session_seq.stored:
            self._storage.suspect()
        await self._deployment.start()
        try:
            session = Session.start(config.device, seq, agent.__version__)
            self._presence = Presence(
                session, self._control, call_later=asyncio.get_running_loop().call_later
            )
            self._presence.storage = _unless_writable(self._storage.condition)
            self._control_messages = ControlMessages(
                self._control.ack, self._presence, self._deployment, self._metrics
            )
            self.connections.start(self._presence, session.will())
            # Freeze long-lived objects, so that the garbage collector skips them.
            gc.collect()
            gc.freeze()
            self._notifier.notify(READY, f"STATUS=serving as {config.device}")
            _log.info(
                "edge-agent %s serves as %s: broker %s, state in %s",
                agent.__version__,
                config.device,
                config.broker.url,
                config.state_dir,
            )
            await self._serve(stop)
        finally:
            self._notifier.notify(STOPPING)
            if self._page is not None:
                await self._page.close()
            await self._shut_down()
            await self._deployment.close(_FAREWELL_S)
            await self._outbox.close(_FAREWELL_S)
            await _wait_for_disk(_FAREWELL_S, self._answers.close)

    def _on_storage(self, now: Condition) -> None:
        """Say that the state directory can or cannot be written, and use it again when it can."""
        if self._presence is not None:
            self._presence.storage = _unless_writable(now)
            if self._control.connected:
                self._presence.announce()
        self._deployment.disk_changed()
        if now is Condition.WRITABLE:
            self._outbox.use_file()
            self._session_seq.store_later()

    def reload(self) -> None:
        """Connect again with the current certificates and password (SIGHUP).

        If these files cannot be used, the connections stay as they are and the error is logged. The keys of
        trusted signers are read for each deployment anyway.
        """
        self._reloading = asyncio.get_running_loop().create_task(self._reload())

    async def _reload(self) -> None:
        if self._certificates is not None:
            try:
                await in_disk_thread(self._certificates.check)
            except EdgeError as error:
                _log.error("the new certificates are not used: %s; %s", error, error.hint)
                return
        _log.info("connecting again with the current certificates and password")
        self.connections.renew()

    async def _serve(self, stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        stopping = loop.create_task(stop.wait(), name="stop")
        tasks = {
            stopping,
            loop.create_task(self._deployment.run(), name="deployment"),
            loop.create_task(self._publish_metrics(), name="metrics"),
            loop.create_task(self._notifier.pulse(), name="pulse"),
            loop.create_task(self._watch_files(), name="certificates and keys"),
            loop.create_task(self._storage.run(), name="storage"),
            loop.create_task(self._record_use(), name="last use"),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()  # the others end only by an exception, which this raises
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _shut_down(self) -> None:
        limit_s = self._config.shutdown_limit_s
        end_s = time.monotonic() + limit_s
        self._inference.refuse_new()
        used, records = self.models.used(), self._deployment.records()
        self.connections.leave()
        await self.models.close(limit_s)
        await self.connections.close_requests(end_s)
        if self._presence is not None:
            self._presence.stop()
        await self._outbox.stored(_FAREWELL_S)
        await self._control.close(_FAREWELL_S)
        await _wait_for_disk(_FAREWELL_S, self._deployment.record_use, used, records)

    async def _watch_files(self) -> None:
        """Notice damaged keys, and use renewed certificates even without a SIGHUP."""
        while True:
            await asyncio.sleep(_FILES_INTERVAL_S)
            try:
                changed = await in_disk_thread(self._look_at_files)
            except StoreError:  # no thread: the next time, then
                continue
            self._look_at_keys()
            if changed:
                await self._reload()

    def _look_at_files(self) -> bool:
        """Read the keys and the certificates; return whether the certificates have changed. This blocks."""
        self._trusted_keys.check()
        return self._certificates is not None and self._certificates.changed()

    def _look_at_keys(self) -> None:
        """Stop or only report what runs although the key that signed it was revoked, as configured."""
        statuses = [status for model in self.models if (status := model.status()) is not None]
        revoked = {status.name for status in statuses if self.models.revoked(status)}
        for name in sorted(revoked - self._revoked):
            what = "it serves until it is replaced" if self._config.serves_revoked else "it is stopped"
            _log.error("%s: the key that signed its bundle is revoked; %s", name, what)
        self._revoked = revoked
        self._deployment.on_keys_read()

    async def _record_use(self) -> None:
        """Store which models were used last, so that the next start loads these first, and how they did."""
        while True:
            await asyncio.sleep(_USE_INTERVAL_S)
            records = self._deployment.records()
            with contextlib.suppress(StoreError):  # no thread: the next time, then
                await in_disk_thread(self._deployment.record_use, self.models.used(), records)

    async def _publish_metrics(self) -> None:
        topic = format_topic(MetricsTopic(self._config.device))
        while True:
            await self._control.wait_connected()
            self._control.publish(topic, format_metrics(self.samples()), qos=0)
            await asyncio.sleep(self._config.metrics.interval_s)

    def samples(self) -> dict[str, float]:
        """Return the current metrics, by the names that are published."""
        return to_document(self._read_metrics())

    def _read_metrics(self) -> list[Sample]:
        gauges = self._host.gauges()
        gauges["edge_inference_in_flight", ()] = self._inference.in_flight
        gauges.update(gauges_of.of_answers(self._answers))
        gauges.update(gauges_of.of_outbox(self._outbox))
        gauges.update(gauges_of.of_storage(self._storage))
        gauges.update(gauges_of.of_deployment(self._deployment.reported.states()))
        gauges["edge_keyring_faults", ()] = len(self._trusted_keys.faults)
        if self._certificates is not None:
            gauges.update(gauges_of.of_certificates(self._certificates))
        for connection in self.connections:
            gauges.update(gauges_of.of_connection(connection))
        stopped = self._deployment.reported.stopped_by_revocation()
        for name in stopped:
            gauges["edge_model_key_revoked", (("model", name),)] = 1
        for model in self.models:
            gauges.update(gauges_of.of_model(model))
            if (status := model.status()) is not None and model.name not in stopped:
                key_revoked = int(self.models.revoked(status))
                gauges["edge_model_key_revoked", (("model", model.name),)] = key_revoked
        return self._metrics.samples(gauges)

    def _on_control_up(self, _session_present: bool) -> None:
        assert self._presence is not None
        self._presence.announce()
        self._announcements.on_connected()
        for name in self.models.names():
            self._model_changed(name)
        self._deployment.on_connected()
        self._outbox.on_connected()

    def _on_control_down(self, _why: Reason) -> None:
        assert self._control_messages is not None
        self._control_messages.on_down()

    def _on_control_message(self, message: Message) -> None:
        assert self._control_messages is not None
        self._control_messages.take(message)

    def _model_changed(self, name: str) -> None:
        """Tell every part that follows the models."""
        status = self.models.status(name)
        self.connections.model_changed(name, ready=status is not None and status.ready)
        if status is None:
            self._metrics.forget(name)
        if self._announcements.model_changed(name):
            self._deployment.on_model_changed(name)


async def _wait_for_disk(
    limit_s: float, function: Callable[_P, object], *arguments: _P.args, **options: _P.kwargs
) -> None:
    """Call a function in a thread, and go on without it if it fails or does not return within `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            await in_disk_thread(function, *arguments, **options)
    except (TimeoutError, StoreError) as error:
        _log.warning("%s: %s", function.__name__, error or "the disk does not respond")


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(mode=0o750, exist_ok=True)
    except OSError as error:
        _log.error("cannot create %s: %s", path, error.strerror)


def _unless_writable(condition: Condition) -> str:
    return "" if condition is Condition.WRITABLE else condition.value
