"""The year of `make soak`: how dark times are counted, what the disk forgets, and twenty seconds of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from PIL import Image

from tests.nightly.soak.disk import disk
from tests.nightly.soak.picture import draw_year
from tests.nightly.soak.timeline import MAX_DARK_S, Event, Timeline
from tests.nightly.soak.year import YearResult, run_year


def ticked(timeline: Timeline, from_s: int, to_s: int, *, broker: bool = True) -> None:
    for tenth in range(10 * from_s, 10 * to_s):
        timeline.tick((tenth + 1) / 10, broker=broker)


def test_dark_time_lasts_from_answer_to_answer() -> None:
    timeline = Timeline()
    ticked(timeline, 0, 5)
    timeline.answered(5.0, "steady")
    ticked(timeline, 5, 25)
    timeline.answered(25.0, "fragile")
    assert [round(dark.dark_s) for dark in timeline.darks] == [5, 20]
    assert round(timeline.longest_dark_s) == 20
    ticked(timeline, 25, 95)
    assert round(timeline.longest_dark_s) == 70  # it goes on


def test_absence_of_the_broker_is_not_dark() -> None:
    timeline = Timeline()
    ticked(timeline, 0, 10)
    ticked(timeline, 10, 100, broker=False)
    ticked(timeline, 100, 110)
    timeline.answered(110.0, "steady")
    assert round(timeline.longest_dark_s) == 20
    [(began_s, ended_s)] = timeline.absences
    assert (round(began_s), round(ended_s)) == (10, 100)


def test_dark_time_is_attributed_to_what_happened_when_it_began() -> None:
    timeline = Timeline(events=[Event(3.0, "power cut", 2.0), Event(50.0, "disk full", 5.0)])
    for until_s in (4, 14, 51, 80):
        ticked(timeline, int(timeline.seconds), until_s)
        timeline.answered(float(until_s), "steady")
    assert {kind: round(dark_s) for kind, dark_s in timeline.darkest().items()} == {
        "power cut": 10,
        "disk full": 29,
    }


def test_year_with_a_dark_minute_or_a_model_that_is_gone_is_not_passed() -> None:
    good = YearResult(1, converged_s=3.0)
    assert good.passed
    dark = YearResult(1, converged_s=3.0)
    ticked(dark.timeline, 0, int(MAX_DARK_S) + 1)
    assert not dark.passed
    assert not YearResult(1, converged_s=None, missing=["steady"]).passed


def test_picture_of_a_year_is_drawn(tmp_path: Path) -> None:
    timeline = Timeline(events=[Event(3.0, "power cut", 2.0)])
    ticked(timeline, 0, 20)
    timeline.answered(20.0, "steady")
    draw_year(timeline, tmp_path / "year.png")
    with Image.open(tmp_path / "year.png") as picture:
        assert picture.width == 1000
        assert len(picture.getcolors(1 << 20) or []) > 3
    draw_year(Timeline(), tmp_path / "empty.png")


def test_power_cut_keeps_what_was_synced_and_nothing_else(tmp_path: Path) -> None:
    with disk(tmp_path) as place:
        if place is None:
            pytest.skip("needs root and a loop device")
        with (place.path / "synced").open("wb") as file:
            file.write(b"kept")
            file.flush()
            os.fsync(file.fileno())
        with (place.path / "synced").open("ab") as file:
            file.write(b" and lost")
        (place.path / "not synced").write_bytes(b"lost")
        place.cut_power()
        place.mount()
        assert (place.path / "synced").read_bytes() == b"kept"
        assert not (place.path / "not synced").exists() or (place.path / "not synced").read_bytes() == b""


def test_disk_is_full_and_read_only_when_it_is_told_to(tmp_path: Path) -> None:
    with disk(tmp_path) as place:
        if place is None:
            pytest.skip("needs root and a loop device")
        place.fill()
        with pytest.raises(OSError, match="No space left"):
            (place.path / "more").write_bytes(bytes(1 << 16))
        place.empty()
        (place.path / "more").write_bytes(bytes(1 << 16))
        place.fail()
        with pytest.raises(OSError, match="Read-only"):
            (place.path / "more").write_bytes(b"x")
        place.cut_power()
        place.mount()
        (place.path / "more").write_bytes(b"x")


@pytest.mark.slow
async def test_device_survives_twenty_seconds_of_a_year(tmp_path: Path) -> None:
    kinds = (
        "power cut",
        "disk full at boot",
        "disk read-only at boot",
        "broker forgets all",
        "clock in 1970",
        "good version deployed",
        "version that cannot start",
    )
    result = await run_year(
        0.3, tmp_path / "log", lambda _result: None, number=20_261_122, pace=0.2, only=kinds
    )
    assert result.passed, result.to_json()
    assert {event.kind for event in result.timeline.events} >= {"power cut", "good version deployed"}
    assert result.timeline.answers.keys() == {"steady", "fragile"}
