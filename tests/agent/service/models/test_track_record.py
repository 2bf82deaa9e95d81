"""The record of a bundle counts what the model did, and not what clients did wrong."""

from __future__ import annotations

from agent.deploy.trial import Score
from agent.service.models.track_record import TrackRecord
from agent.worker.frames import Answer


def test_answers_and_failures_of_the_model_count_and_faults_of_clients_do_not() -> None:
    record = TrackRecord()
    assert record.score() == Score(0, 0, None)
    for status in (200, 400, 408, 415, 500):
        record.answered(Answer(1, status, decode_us=1000, compute_us=2000, encode_us=3000))
    record.failed()
    assert record.score() == Score(answers=3, errors=2, p95_s=0.006)


def test_speed_is_the_95th_percentile_of_the_last_answers() -> None:
    record = TrackRecord()
    for _ in range(2000):
        record.answered(Answer(1, 200, compute_us=10**6))
    for number in range(1024):
        record.answered(Answer(1, 200, compute_us=1000 * (number % 100)))
    assert record.score().p95_s == 0.094
