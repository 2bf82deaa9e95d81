"""The current values of the agent's parts, as gauges: (name, labels) -> value.

`metric_table` explains them.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.deploy.outbox import Outbox
from agent.deploy.store.storage import Condition, StorageWatch
from agent.mqtt.connection import Connection
from agent.mqtt.tls import CertificateFiles
from agent.service.metrics.host import process_cpu_s
from agent.service.metrics.metrics import Gauges
from agent.service.models.model import Model
from agent.service.requests.answers import AnswerStore
from agent.wire.reported import ServiceState


def of_answers(answers: AnswerStore) -> Gauges:
    """Return how many answers wait for the broker, and how many were forgotten early."""
    return {
        ("edge_answers_dropped_total", ()): answers.dropped,
        ("edge_outbox_messages", (("kind", "answers"),)): answers.waiting,
    }


def of_outbox(outbox: Outbox) -> Gauges:
    """Return how many reports wait for the broker, and how many were given up."""
    return {
        ("edge_outbox_messages", (("kind", "reports"),)): outbox.waiting,
        ("edge_outbox_dropped_total", ()): outbox.dropped,
    }


def of_storage(watch: StorageWatch) -> Gauges:
    """Return whether the state directory can be written."""
    return {("edge_state_writable", ()): int(watch.condition is Condition.WRITABLE)}


def of_deployment(states: Mapping[str, ServiceState]) -> Gauges:
    """Return a gauge for each model and state: 1 for the state in which the model is, 0 for the others."""
    return {
        ("edge_model_state", (("model", name), ("state", state.value))): int(state is current)
        for name, current in states.items()
        for state in ServiceState
    }


def of_certificates(files: CertificateFiles) -> Gauges:
    """Return when the first certificate in each file expires, in seconds since 1970."""
    return {
        ("edge_certificate_expiry_timestamp_seconds", (("file", name),)): end_s
        for name, end_s in files.expiries().items()
    }


def of_connection(connection: Connection) -> Gauges:
    """Return the state of a connection to the broker."""
    labels = (("connection", connection.name.rpartition("-")[2]),)
    return {
        ("edge_mqtt_connects_total", labels): connection.connects,
        ("edge_mqtt_reconnects_total", labels): max(0, connection.connects - 1),
        ("edge_mqtt_connected", labels): int(connection.connected),
        ("edge_mqtt_unacknowledged", labels): connection.unacknowledged,
        ("edge_mqtt_over_limit_total", labels): connection.over_limit,
        ("edge_mqtt_dropped_total", labels): connection.dropped,
        ("edge_mqtt_protocol_level", labels): connection.version,
        ("edge_mqtt_unsendable_total", labels): connection.unsendable,
    }


def of_model(model: Model) -> Gauges:
    """Return the state of a model and its worker; nothing before its first worker is ready."""
    status = model.status()
    if status is None:
        return {}
    labels = (("model", status.name),)
    gauges: Gauges = {
        ("edge_model_ready", labels): int(status.ready),
        ("edge_model_queue_length", labels): status.queued,
        ("edge_worker_resident_memory_bytes", labels): status.rss_bytes,
        ("edge_worker_restarts_total", labels): status.restarts,
        ("edge_inference_quarantined_total", labels): status.quarantined,
        ("edge_model_sessions", labels): status.sessions,
        ("edge_model_sessions_evicted_total", labels): status.sessions_evicted,
    }
    if model.sandbox is not None:
        gauges["edge_sandbox_complete", labels] = int(model.sandbox.complete)
    cpu_s = None if model.worker_pid is None else process_cpu_s(model.worker_pid)
    if cpu_s is not None:
        gauges["edge_worker_cpu_seconds_total", labels] = cpu_s
    return gauges
