"""What is taken from metrics: of this version, of others, and of strangers."""

from __future__ import annotations

import math

from agent.service.metrics.metrics import Metrics, to_document
from agent.worker.frames import Answer
from dashboard.sample import Sample, read_sample
from dashboard.series import LENGTH, Series


def test_histogram_of_a_real_agent() -> None:
    metrics = Metrics()
    for total_s in (0.002, 0.002, 0.3, 100.0):
        metrics.durations("digits", Answer(seq=1, status=200, compute_us=1), total_s)
        metrics.request("digits", 200)
    metrics.request("digits", 503)
    model = read_sample(to_document(metrics.samples({}))).models["digits"]
    assert {bound: count for bound, count in model.buckets if count} == {0.0025: 2, 0.5: 1, math.inf: 1}
    assert dict(model.statuses) == {"200": 4, "503": 1}
    assert [quantile for quantile, _ in model.quantiles] == [0.5, 0.9, 0.99]
    assert model.throughput == 4.0


def test_device() -> None:
    sample = read_sample(
        {
            'edge_temperature_celsius{zone="cpu"}': 61.5,
            'edge_temperature_celsius{zone="gpu"}': 70,
            'edge_throttled{cause="under_voltage"}': 1,
            'edge_throttled{cause="throttled"}': 0,
            'edge_throttled_since_boot{cause="throttled"}': 1,
            "edge_agent_uptime_seconds": 5,
        }
    )
    assert (sample.temperature_c, sample.throttled, sample.throttled_before) == (
        70,
        ("under_voltage",),
        ("throttled",),
    )
    assert sample.uptime_s == 5


def test_absurd_numbers_and_strange_names_are_left_out() -> None:
    values = {
        'edge_temperature_celsius{zone="a"}': math.nan,
        'edge_temperature_celsius{zone="b"}': 1e300,
        "edge_load1": math.inf,
        'edge_inference_throughput{model="m"': 1.0,
        'edge_inference_duration_seconds_bucket{model="m",le="x"}': 1.0,
        'edge_inference_duration_seconds_bucket{model="m",le="nan"}': 1.0,
        'edge_inference_latency_seconds{model="m",quantile="inf"}': 1.0,
        "edge_of_tomorrow": 1.0,
        "other": 1.0,
    }
    sample = read_sample(values)
    assert sample.models["m"].buckets == ()
    # JSON has no infinity: it would keep every page that shows this agent from its next message.
    assert sample.models["m"].quantiles == ()
    assert sample == Sample(models=sample.models)
    many = {f'edge_inference_throughput{{model="m{i}"}}': 1.0 for i in range(1000)}
    assert len(read_sample(many).models) == 64


def test_counts_that_fall_are_no_negative_bars() -> None:
    key = 'edge_inference_duration_seconds_bucket{{model="m",le="{}"}}'
    model = read_sample({key.format("0.1"): 5, key.format("0.2"): 3, key.format("+Inf"): 6}).models["m"]
    assert [count for _, count in model.buckets] == [5, 0, 1]


def test_series_keeps_the_latest_points() -> None:
    series, sample = Series(), read_sample({'edge_inference_throughput{model="m"}': 2.0}).models["m"]
    for time_s in range(LENGTH + 5):
        series.add(time_s, sample)
    points = list(series.points())
    assert len(points) == LENGTH
    assert points[0] == [5.0, 2.0, None, None]
    assert points[-1] == [LENGTH + 4.0, 2.0, None, None]
    assert [points[i + 1][0] - points[i][0] for i in range(LENGTH - 1)] == [1.0] * (LENGTH - 1)  # type: ignore[operator]
