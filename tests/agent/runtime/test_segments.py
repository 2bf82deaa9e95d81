"""Speech and words from one result a window: as Silero's own rule, however the results arrive."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agent.bundle.audio import Keywords, Speech
from agent.runtime.segments import Segment, SpeechFinder, WordFinder

WINDOW = 512
RATE = 16000


def reference(probabilities: Sequence[float], length: int, declared: Speech) -> list[tuple[int, int]]:
    """Silero's `get_speech_timestamps` in its default form, with a list of all speech at the end."""
    least = RATE * declared.min_speech_ms / 1000
    quiet_for = RATE * declared.min_silence_ms / 1000
    pad = int(RATE * declared.pad_ms / 1000)
    found: list[dict[str, int]] = []
    current: dict[str, int] = {}
    end = 0
    triggered = False
    for i, probability in enumerate(probabilities):
        if probability >= declared.threshold and end:
            end = 0
        if probability >= declared.threshold and not triggered:
            triggered = True
            current["start"] = WINDOW * i
            continue
        if probability < max(declared.threshold - declared.hysteresis, 0.01) and triggered:
            if not end:
                end = WINDOW * i
            if WINDOW * i - end < quiet_for:
                continue
            current["end"] = end
            if current["end"] - current["start"] > least:
                found.append(current)
            current, end, triggered = {}, 0, False
    if current and length - current["start"] > least:
        current["end"] = length
        found.append(current)
    for i, speech in enumerate(found):
        if i == 0:
            speech["start"] = max(0, speech["start"] - pad)
        if i == len(found) - 1:
            speech["end"] = min(length, speech["end"] + pad)
            continue
        silence = found[i + 1]["start"] - speech["end"]
        gap = silence // 2 if silence < 2 * pad else pad
        speech["end"] = min(length, speech["end"] + gap)
        found[i + 1]["start"] = max(0, found[i + 1]["start"] - gap)
    return [(speech["start"], speech["end"]) for speech in found]


@st.composite
def talks(draw: st.DrawFn) -> tuple[list[float], int, Speech]:
    level = st.sampled_from([0.0, 0.2, 0.34, 0.36, 0.49, 0.5, 0.8, 1.0])
    runs = draw(st.lists(st.tuples(level, st.integers(1, 12)), min_size=1, max_size=20))
    probabilities = [value for value, count in runs for _ in range(count)]
    length = WINDOW * len(probabilities) - draw(st.integers(0, WINDOW - 1))
    declared = Speech(
        "p", min_speech_ms=draw(st.sampled_from([0, 90, 250])), min_silence_ms=draw(st.integers(60, 200))
    )
    return probabilities, length, declared


@given(talks())
def test_speech_is_where_the_models_authors_find_it(talk: tuple[list[float], int, Speech]) -> None:
    probabilities, length, declared = talk
    finder, found = SpeechFinder(declared, RATE), []
    for i, probability in enumerate(probabilities):
        finder, segment = finder.push(WINDOW * i, probability)
        found.append(segment)
    found.append(finder.finish(length))
    assert [(each.start, each.end) for each in found if each] == reference(probabilities, length, declared)


def test_windows_with_the_same_word_are_one() -> None:
    declared = Keywords("scores", threshold=0.6, ignore=(2,))
    heard = [(0, 0.9), (0, 0.7), (1, 0.65), (1, 0.5), (2, 0.99), (1, 0.8), (0, 0.61)]
    finder, found = WordFinder(declared), []
    for i, (label, score) in enumerate(heard):
        finder, segment = finder.push(100 * i, 100 * i + 200, label, score)
        found.append(segment)
    found.append(finder.finish(750))
    assert [each for each in found if each] == [
        Segment(0, 300, 0, 0.9),
        Segment(200, 400, 1, 0.65),
        Segment(500, 700, 1, 0.8),
        Segment(600, 750, 0, 0.61),
    ]


def test_a_score_is_the_mean_of_the_last_windows() -> None:
    finder, means = WordFinder(Keywords("scores", average=3)), []
    for score in (0.9, 0.6, 0.6, 0.0):
        finder, mean = finder.mean(np.array([score, 1 - score]))
        means.append(round(float(mean[0]), 6))
    assert means == [0.3, 0.5, 0.7, 0.4]
