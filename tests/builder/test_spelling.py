from __future__ import annotations

from builder.spelling import closest, did_you_mean


def test_the_closest_word_is_found_whatever_its_case() -> None:
    assert closest("complie", ["compile", "profile"]) == "compile"
    assert closest("RPI6", ["rpi5", "host"]) == "rpi5"
    assert closest("xyzzy", ["compile", "profile"]) is None
    assert closest("", []) is None
    assert closest("compile" * 100_000, ["compile"]) is None


def test_a_hint_keeps_the_other_way_out() -> None:
    assert did_you_mean("rpi6", ["rpi5"], otherwise="use rpi5") == "did you mean rpi5? Otherwise use rpi5"
    assert did_you_mean("zzz", ["rpi5"], otherwise="use rpi5") == "use rpi5"
