"""The record of a bundle counts what the model did, and not what clients did wrong."""

from __future__ import annotations

from agent.deploy.trial import Tally, Times, Trial, fault
from agent.service.models import track_record
from agent.service.models.track_record import TrackRecord
from agent.worker.frames import NOT_COMPARABLE, Answer

OK = Answer(1, 200, compute_us=1000)
FAILED = Answer(1, 500)
# Of the client "a".
KEY = "40f89e395b66422f"


def tallies(record: TrackRecord) -> list[Tally]:
    return list(record.score().clients.values())


def test_answers_and_failures_of_the_model_count_and_faults_of_clients_do_not() -> None:
    record = TrackRecord()
    assert tallies(record) == []
    for status in (200, 400, 408, 415, 500):
        record.answered(Answer(1, status, compute_us=2000), "a")
    record.failed("a")
    assert tallies(record) == [Tally(3, 2)]
    assert record.score().times == {f"/0/{KEY}": Times(1, 0.002)}


def test_times_are_kept_for_each_bucket_and_number_of_threads() -> None:
    record = TrackRecord()
    for threads, bucket, compute_us in ((1, (8,), 10), (1, (8,), 20), (4, (8,), 30), (1, (8, 512), 40)):
        record.answered(Answer(1, 200, compute_us=compute_us, bucket=bucket), "a", threads)
    record.answered(Answer(1, 200, compute_us=10**9, bucket=NOT_COMPARABLE), "a", 1)
    assert record.score().times == {
        f"8/1/{KEY}": Times(2, 1e-5),
        f"8/4/{KEY}": Times(1, 3e-5),
        f"8x512/1/{KEY}": Times(1, 4e-5),
    }


def test_speed_is_the_95th_percentile_of_the_last_answers() -> None:
    record = TrackRecord()
    for _ in range(2000):
        record.answered(Answer(1, 200, compute_us=10**6), "a")
    for number in range(600):
        record.answered(Answer(1, 200, compute_us=1000 * (number % 100)), "a")
    assert record.score().times[f"/0/{KEY}"] == Times(512, 0.095)


def test_client_that_asks_for_slow_formats_or_sizes_does_not_make_a_bundle_slow() -> None:
    before, after = TrackRecord(), TrackRecord()
    for _ in range(200):
        before.answered(OK, "a")
        after.answered(Answer(1, 200, decode_us=10**6, compute_us=1000, encode_us=10**6), "a")
        for client in "ab":
            after.answered(Answer(1, 200, compute_us=10**6, bucket=(512,)), client)
        after.answered(Answer(1, 200, compute_us=10**6), "a", threads=1)
    assert fault(Trial(baseline=before.score()), out_of_service=None, score=after.score()) is None


def test_heat_at_any_time_of_a_trial_is_remembered() -> None:
    record = TrackRecord()
    assert record.score(("b 1.0.0",), hot=True).others == ("b 1.0.0",)
    assert record.score().hot


def test_names_of_clients_and_kinds_of_requests_take_bounded_memory() -> None:
    record = TrackRecord()
    for number in range(10 * track_record._MAX_CLIENTS):
        record.answered(Answer(1, 200, bucket=(number,) * 100), "a" * 1000 + str(number))
    score = record.score()
    assert score.answers == 10 * track_record._MAX_CLIENTS
    assert len(score.clients) == track_record._MAX_CLIENTS + 1
    assert len(score.times) == track_record._MAX_KINDS
    assert max(map(len, [*score.clients, *score.times])) < 60
    record = TrackRecord()
    for number in range(100):
        record.answered(Answer(1, 200, bucket=(number,)), "a")
    assert len(record.score().times) == track_record._MAX_KINDS_OF_A_CLIENT


def test_client_whose_values_take_long_does_not_make_a_bundle_slow() -> None:
    before, after = TrackRecord(), TrackRecord()
    for _ in range(200):
        for client in ("a", "b"):
            before.answered(OK, client)
        after.answered(OK, "a")
        after.answered(Answer(1, 200, compute_us=10**6), "b")
    assert fault(Trial(baseline=before.score()), out_of_service=None, score=after.score()) is None


def test_the_same_client_has_the_same_key_in_every_process() -> None:
    first, second = TrackRecord(), TrackRecord()
    first.answered(OK, "camera")
    second.answered(OK, "camera")
    assert first.score().clients.keys() == second.score().clients.keys() == {"34d0dd53602671df"}
