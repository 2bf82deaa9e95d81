"""Every metric of the agent in one table: its kind, its meaning and its labels.

The Prometheus page takes types and help texts from here, and a test compares docs/mqtt.md with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

COUNTER: Final = "counter"
GAUGE: Final = "gauge"
HISTOGRAM: Final = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its type in Prometheus, its meaning in one line, and the names of its labels."""

    kind: str
    text: str
    labels: tuple[str, ...] = ()


_MODEL: Final = ("model",)

METRICS: Final = {
    "edge_inference_requests_total": Metric(
        COUNTER, "Answered requests by model and status.", ("model", "status")
    ),
    "edge_inference_duplicates_total": Metric(COUNTER, "Requests that were delivered before."),
    "edge_inference_unanswerable_total": Metric(
        COUNTER, "Requests without a usable reply topic.", ("reason",)
    ),
    "edge_inference_queue_seconds": Metric(
        HISTOGRAM, "From a request's arrival until its model was free.", _MODEL
    ),
    "edge_inference_decode_seconds": Metric(HISTOGRAM, "Reading and preprocessing a request.", _MODEL),
    "edge_inference_compute_seconds": Metric(HISTOGRAM, "The model's kernels.", _MODEL),
    "edge_inference_encode_seconds": Metric(HISTOGRAM, "Postprocessing and writing an answer.", _MODEL),
    "edge_inference_duration_seconds": Metric(HISTOGRAM, "From a request's arrival to its answer.", _MODEL),
    "edge_inference_latency_seconds": Metric(
        GAUGE, "Quantiles of the last answers' durations.", (*_MODEL, "quantile")
    ),
    "edge_inference_throughput": Metric(GAUGE, "Answers a second, over the last minute.", _MODEL),
    "edge_inference_in_flight": Metric(GAUGE, "Accepted requests whose answer the broker does not have yet."),
    "edge_model_ready": Metric(GAUGE, "Whether a model answers.", _MODEL),
    "edge_model_state": Metric(
        GAUGE, "1 for the state of a model in the reported document, 0 for the others.", (*_MODEL, "state")
    ),
    "edge_model_key_revoked": Metric(
        GAUGE, "Whether the key that signed what a model runs, or should run, was revoked.", _MODEL
    ),
    "edge_model_queue_length": Metric(GAUGE, "Requests that wait for a model or are computed.", _MODEL),
    "edge_model_sessions": Metric(GAUGE, "Sessions of a model's clients.", _MODEL),
    "edge_model_sessions_evicted_total": Metric(
        COUNTER, "Sessions that ended early: too many, unused, or their worker ended.", _MODEL
    ),
    "edge_worker_restarts_total": Metric(COUNTER, "Deaths of a model's worker.", _MODEL),
    "edge_inference_quarantined_total": Metric(
        COUNTER, "Requests answered 500 because equal ones had ended the model's worker.", _MODEL
    ),
    "edge_worker_resident_memory_bytes": Metric(GAUGE, "Resident memory of a model's worker.", _MODEL),
    "edge_sandbox_complete": Metric(GAUGE, "Whether a model's worker has all parts of the sandbox.", _MODEL),
    "edge_worker_cpu_seconds_total": Metric(COUNTER, "CPU time of a model's current worker.", _MODEL),
    "edge_answers_undelivered_total": Metric(COUNTER, "Answers that were given up.", ("reason",)),
    "edge_answers_dropped_total": Metric(COUNTER, "Answers that were forgotten early."),
    "edge_outbox_messages": Metric(
        GAUGE, "Answers and reports of jobs that the broker does not have yet.", ("kind",)
    ),
    "edge_outbox_dropped_total": Metric(COUNTER, "Reports of jobs that were given up."),
    "edge_mqtt_connects_total": Metric(COUNTER, "Connections to the broker.", ("connection",)),
    "edge_mqtt_reconnects_total": Metric(
        COUNTER, "Connections to the broker after the first.", ("connection",)
    ),
    "edge_mqtt_connected": Metric(GAUGE, "Whether a connection is up.", ("connection",)),
    "edge_mqtt_unacknowledged": Metric(
        GAUGE, "Messages that the broker has not acknowledged.", ("connection",)
    ),
    "edge_mqtt_over_limit_total": Metric(
        COUNTER, "Received messages that exceed a limit of the agent.", ("connection",)
    ),
    "edge_mqtt_dropped_total": Metric(
        COUNTER,
        "Requests at QoS 0 that were dropped unread, because more arrived than the agent can read.",
        ("connection",),
    ),
    "edge_control_messages_dropped_total": Metric(
        COUNTER, "Control messages at QoS 0 that were dropped, because too many were being taken."
    ),
    "edge_mqtt_protocol_level": Metric(GAUGE, "5 for MQTT 5, 4 for MQTT 3.1.1.", ("connection",)),
    "edge_mqtt_unsendable_total": Metric(
        COUNTER,
        "Messages that were given up: too large for the broker, or the cause of lost connections.",
        ("connection",),
    ),
    "edge_certificate_expiry_timestamp_seconds": Metric(
        GAUGE, "When the first certificate in a file ends, seconds since the epoch.", ("file",)
    ),
    "edge_agent_uptime_seconds": Metric(GAUGE, "Time since the agent started."),
    "edge_agent_resident_memory_bytes": Metric(GAUGE, "Resident memory of the main process."),
    "edge_agent_cpu_seconds_total": Metric(COUNTER, "CPU time of the main process."),
    "edge_agent_open_descriptors": Metric(GAUGE, "File descriptors of the main process."),
    "edge_faults_total": Metric(COUNTER, "Bugs in the agent that were caught; please report them."),
    "edge_cpu_seconds_total": Metric(COUNTER, "CPU time of the device, all cores together.", ("mode",)),
    "edge_cpu_frequency_hertz": Metric(GAUGE, "Current clock of a core.", ("core",)),
    "edge_memory_available_bytes": Metric(GAUGE, "Memory available to programs."),
    "edge_load1": Metric(GAUGE, "Load average over one minute."),
    "edge_state_writable": Metric(
        GAUGE, "Whether the state directory can be written; without it, models are only served."
    ),
    "edge_keyring_faults": Metric(GAUGE, "Files and lines of the keyring that cannot be used."),
    "edge_state_free_bytes": Metric(GAUGE, "Free space in the file system of the state directory."),
    "edge_state_size_bytes": Metric(GAUGE, "Size of the file system of the state directory."),
    "edge_temperature_celsius": Metric(GAUGE, "Temperature of a thermal zone.", ("zone",)),
    "edge_throttled": Metric(
        GAUGE, "Whether a Raspberry Pi's firmware slows the device down now.", ("cause",)
    ),
    "edge_throttled_since_boot": Metric(GAUGE, "Whether it did so at any time since the boot.", ("cause",)),
    "edge_cooling_state": Metric(GAUGE, "How far a cooling device is on; 0 is off.", ("cooler",)),
}
