"""Damaged and hostile files: a few of each format; `python -m tests.nightly.fuzz` has ten thousand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.nightly.fuzz.__main__ import corpus, warm_up
from tests.nightly.fuzz.formats import FORMATS, Corpus, check
from tests.nightly.fuzz.verdict import Judge, Verdict, judge

# Formats whose sound files need no training, and the numbers of hostile files that take seconds.
QUICK = {"onnx": (5, 9, 11), "pt2": (0, 1, 2, 3, 4, 5, 6, 7), "keras": (5,), "savedmodel": (), "project": (),
         "labels": (), "pictures": (0, 2, 3), "recordings": ()}  # fmt: skip


@cache
def made(name: str) -> Corpus:
    cases = Corpus.of(name) if name in QUICK else corpus(name)
    warm_up(cases.sound[0], FORMATS[name].read or check)
    return cases


@pytest.fixture(autouse=True)
def python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python that has every package and answers nothing."""
    monkeypatch.setenv("EDGEBUNDLE_PYTHON", "/bin/true")


def judged(name: str, seeds: Sequence[int]) -> list[Verdict]:
    with Judge(FORMATS[name].read or check) as each:
        return [each.judge(seed, made(name).case(seed)) for seed in seeds]


@pytest.mark.parametrize("name", QUICK)
def test_hostile_files_are_refused_or_accepted(name: str) -> None:
    seeds = [seed for seed in range(made(name).first_changed + 4) if seed not in QUICK[name]]
    verdicts = judged(name, seeds)
    assert not [verdict for verdict in verdicts if verdict.is_fault]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_refused_in_one_line(name: str) -> None:
    first = made(name).first_changed
    verdicts = judged(name, range(first, first + 12))
    assert not [verdict for verdict in verdicts if verdict.is_fault]
    assert "refused" in {verdict.kind for verdict in verdicts}


@pytest.mark.parametrize("name", ["onnx", "pt2", "savedmodel", "project", "pictures"])
def test_a_number_makes_the_same_files_again(name: str) -> None:
    assert made(name).case(1234) == Corpus.of(name).case(1234)
    assert made(name).case(1234) != made(name).case(1236)


@pytest.mark.parametrize("name", ["onnx", "labels", "pictures", "recordings", "project"])
def test_sound_files_are_accepted(name: str) -> None:
    for case in made(name).sound:
        verdict = judge(0, case, FORMATS[name].read or check)
        assert (verdict.kind, Path(case.main).name) == ("accepted", Path(case.main).name), verdict
