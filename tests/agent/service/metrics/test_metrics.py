"""Samples have Prometheus' names, and requesters cannot multiply them."""

from __future__ import annotations

from agent.service.metrics.metrics import BUCKETS_S, Histogram, Metrics, Throughput, to_document
from agent.worker.frames import Answer


def test_counter_is_written_with_its_labels() -> None:
    metrics = Metrics()
    metrics.request("digits", 200)
    metrics.request("digits", 200)
    metrics.request("digits", 503)
    samples = to_document(metrics.samples({}))
    assert samples['edge_inference_requests_total{model="digits",status="200"}'] == 2
    assert samples['edge_inference_requests_total{model="digits",status="503"}'] == 1


def test_label_values_are_escaped() -> None:
    metrics = Metrics()
    metrics.count("edge_x_total", reason='a"b\\c\nd')
    assert 'edge_x_total{reason="a\\"b\\\\c\\nd"}' in to_document(metrics.samples({}))


def test_histogram_is_cumulative_and_its_bounds_are_inclusive() -> None:
    histogram = Histogram()
    for value in (0.0, BUCKETS_S[0], BUCKETS_S[0] * 1.01, 1000.0):
        histogram.observe(value)
    out = to_document(histogram.samples("h", ()))
    assert out['h_bucket{le="0.0005"}'] == 2
    assert out['h_bucket{le="0.001"}'] == 3
    assert out['h_bucket{le="30"}'] == 3
    assert out['h_bucket{le="+Inf"}'] == out["h_count"] == 4


def test_durations_come_as_histograms_and_quantiles() -> None:
    metrics = Metrics()
    answer = Answer(1, 200, queue_us=1000, decode_us=2000, compute_us=30_000, encode_us=4000)
    for number in range(100):
        metrics.durations("m", answer, number / 1000)
    samples = to_document(metrics.samples({}))
    assert samples['edge_inference_compute_seconds_sum{model="m"}'] == 3.0
    assert samples['edge_inference_queue_seconds_bucket{model="m",le="0.001"}'] == 100
    assert samples['edge_inference_latency_seconds{model="m",quantile="0.5"}'] == 0.05
    assert samples['edge_inference_latency_seconds{model="m",quantile="0.99"}'] == 0.099
    metrics.forget("m")
    assert not any("seconds" in name for name in to_document(metrics.samples({})))


def test_throughput_is_of_the_last_minute() -> None:
    now_s = [1000.0]
    throughput = Throughput(lambda: now_s[0])
    for _ in range(30):
        throughput.count()
    assert throughput.per_second() == 30  # a second is the least that it is measured over
    now_s[0] += 30
    for _ in range(60):
        throughput.count()
    assert throughput.per_second() == 3
    now_s[0] += 45  # the first thirty are forgotten
    assert throughput.per_second() == 1
    now_s[0] += 1e6
    assert throughput.per_second() == 0
