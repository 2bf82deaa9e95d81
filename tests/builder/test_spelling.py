from __future__ import annotations

from pathlib import Path

from builder.spelling import READABLE, closest, did_you_mean, similar_file


def test_the_closest_word_is_found_whatever_its_case() -> None:
    assert closest("complie", ["compile", "profile"]) == "compile"
    assert closest("RPI6", ["rpi5", "host"]) == "rpi5"
    assert closest("xyzzy", ["compile", "profile"]) is None
    assert closest("", []) is None
    assert closest("compile" * 100_000, ["compile"]) is None


def test_a_hint_keeps_the_other_way_out() -> None:
    assert did_you_mean("rpi6", ["rpi5"], otherwise="use rpi5") == "did you mean rpi5? Otherwise use rpi5"
    assert did_you_mean("zzz", ["rpi5"], otherwise="use rpi5") == "use rpi5"


def test_a_file_that_does_not_exist_has_a_similar_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "signing.pub").touch()
    assert similar_file(tmp_path / "signing.pup") == f"did you mean {tmp_path / 'signing.pub'}?"
    assert similar_file(tmp_path / "signing.pub", otherwise="x") == "x"
    assert similar_file(tmp_path / "photo.jpg") == READABLE
    assert similar_file(tmp_path / "absent" / "signing.pub", otherwise="x") == "x"
    for name in ("a" * 5000, "a\0b"):
        assert similar_file(tmp_path / name, otherwise="x") == "x"
