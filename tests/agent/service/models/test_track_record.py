"""The record of a bundle counts what the model did, and not what clients did wrong."""

from __future__ import annotations

from agent.deploy.trial import Score, Trial, fault
from agent.service.models import track_record
from agent.service.models.track_record import TrackRecord
from agent.worker.frames import Answer

OK = Answer(1, 200, compute_us=1000)
FAILED = Answer(1, 500)


def test_answers_and_failures_of_the_model_count_and_faults_of_clients_do_not() -> None:
    record = TrackRecord()
    assert record.score() == Score(0, 0, None)
    for status in (200, 400, 408, 415, 500):
        record.answered(Answer(1, status, compute_us=2000), "a")
    record.failed("a")
    assert record.score() == Score(answers=3, errors=2, p95_s=0.002)


def test_speed_is_the_95th_percentile_of_the_last_answers() -> None:
    record = TrackRecord()
    for _ in range(2000):
        record.answered(Answer(1, 200, compute_us=10**6), "a")
    for number in range(1024):
        record.answered(Answer(1, 200, compute_us=1000 * (number % 100)), "a")
    assert record.score().p95_s == 0.094


def test_client_that_asks_for_slow_formats_does_not_make_a_bundle_slow() -> None:
    before, after = TrackRecord(), TrackRecord()
    for _ in range(200):
        before.answered(OK, "a")
        after.answered(Answer(1, 200, decode_us=10**6, compute_us=1000, encode_us=10**6), "a")
    assert fault(Trial(baseline=before.score()), out_of_service=None, score=after.score()) is None


def test_one_client_cannot_end_a_trial_while_others_are_answered() -> None:
    record = TrackRecord()
    record.answered(OK, "honest")
    for _ in range(1000):
        record.answered(FAILED, "hostile")
        record.failed("hostile")
    assert record.score() == Score(answers=1, errors=0, p95_s=0.001)
    assert fault(Trial(baseline=Score()), out_of_service=None, score=record.score()) is None


def test_version_that_fails_for_all_is_seen_to_fail() -> None:
    single, together = TrackRecord(), TrackRecord()
    for _ in range(20):
        single.answered(FAILED, "a")
        for client in ("a", "b"):
            together.answered(FAILED, client)
    for record in (single, together):
        assert record.score().errors == 20
        assert fault(Trial(baseline=Score()), out_of_service=None, score=record.score()) is not None


def test_names_of_clients_take_bounded_memory() -> None:
    record = TrackRecord()
    for number in range(10 * track_record._MAX_CLIENTS):
        record.answered(OK, str(number))
    assert record.score().answers == 10 * track_record._MAX_CLIENTS
    assert len(record._answers) == track_record._MAX_CLIENTS + 1
