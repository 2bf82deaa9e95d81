"""TensorFlow Lite Micro's frontend: the reference's numbers, recorded with pymicro-features 2.0.2."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import pytest

from agent.bundle.audio import Audio, Features
from agent.runtime.micro_frontend import MicroFrontend

RATE = 16000
FEATURES = Features(480, 160, 512, 40, 125.0, 7500.0, log="micro")
# SHA-256 of all 98 frames of a second, as 16-bit numbers.
RECORDED = {
    "noise": "52c87b36bf43ad645d567e75db4013aa3bffc2c71330a84a1c0292de47ee7bfa",
    "faint": "6ef5e1c225319720639d62b1705b4e232ed3340e3366ab45c713f0d6b5a63cb7",
    "steps": "6a50f57009ef8331248ce0286a3de79174ff4ecbfc8fff2644ab8ec778192638",
    "clipped": "9f9b504b8a3784feaf3ad659800824386e67a32fe20fa92102a5bb2b332156ef",
    "one sample": "a14e15ef687d2fb37c36bc4d223e591db5ea1741d969b1619fab03e5bcc521ba",
}
# Frame 40 of `steps`.
FRAME = [
    0, 0, 302, 292, 469, 331, 0, 0, 0, 0, 0, 0, 0, 302, 452, 292, 0, 0, 0, 274,
    452, 302, 0, 0, 449, 311, 353, 0, 450, 302, 0, 311, 450, 0, 448, 287, 450, 297, 447, 297,
]  # fmt: skip


@lru_cache
def sound(name: str) -> np.ndarray:
    """A second of 16-bit samples, the same on every machine."""
    number, noise = 1, np.empty(RATE, np.int64)
    for i in range(RATE):
        number = (1103515245 * number + 12345) % (1 << 31)
        noise[i] = (number >> 16) - 16384
    times = np.arange(RATE)
    return {
        "noise": noise // 4,
        "faint": noise // 4096,
        "steps": np.where(times // 20 % 2 == 0, 20000, -20000) * (times > 4000) + noise // 64,
        "clipped": np.where(noise > 0, 32767, -32768),
        "one sample": np.where(times == 700, 20000, 0),
    }[name].astype(np.int16)


def frames_of(samples: np.ndarray, window: int, hop: int) -> np.ndarray:
    """The frames of all windows without those that a window shares with the one before."""
    frontend = MicroFrontend(Audio("x", RATE, window, hop, features=FEATURES))
    noise, rows = frontend.begin(), []
    for start in range(0, len(samples) - window + 1, hop):
        values, noise = frontend(samples[start : start + window] / 32768, noise)
        rows.append(values[-(hop // 160) :] if start else values)
    return np.rint(np.concatenate(rows) / 0.0390625).astype(np.uint16)


@pytest.mark.parametrize("name", RECORDED)
def test_every_number_is_the_references(name: str) -> None:
    frames = frames_of(sound(name), 480, 160)
    assert frames.shape == (98, 40)
    if name == "steps":
        assert frames[40].tolist() == FRAME
    assert hashlib.sha256(frames.astype("<u2").tobytes()).hexdigest() == RECORDED[name]


@pytest.mark.parametrize(("window", "hop"), [(800, 480), (1280, 480)])
def test_windows_that_share_frames_hear_the_same(window: int, hop: int) -> None:
    samples = sound("steps")[3200:8000]
    frames = frames_of(samples, window, hop)
    assert np.array_equal(frames, frames_of(samples, 480, 160)[: len(frames)])


@pytest.mark.parametrize("fft", [512, 1024, 2048])
def test_a_louder_tone_is_heard_in_its_band(fft: int) -> None:
    """Transforms of other lengths, which have a factor of 2 besides those of 4, or not."""
    features = Features(480, 160, fft, 40, 125.0, 7500.0, log="micro")
    frontend = MicroFrontend(Audio("x", RATE, 480, 160, features=features))
    samples = np.sin(2 * np.pi * 1000 * np.arange(480) / RATE) * 0.5
    values, _ = frontend(samples, frontend.begin())
    mels = np.linspace(1127 * np.log1p(125 / 700), 1127 * np.log1p(7500 / 700), 42)[1:-1]
    assert abs(int(values[0].argmax()) - int(np.abs(mels - 1127 * np.log1p(1000 / 700)).argmin())) <= 1


def test_silence_is_zero() -> None:
    frontend = MicroFrontend(Audio("x", RATE, 800, 480, features=FEATURES))
    values, noise = frontend(np.zeros(800), frontend.begin())
    assert not values.any()
    assert not noise.any()


def test_features_are_transposed_and_scaled_as_declared() -> None:
    plain = MicroFrontend(Audio("x", RATE, 800, 480, features=FEATURES))
    other = Features(480, 160, 512, 40, 125.0, 7500.0, log="micro", order="bands_first", mean=1.0, std=2.0)
    turned = MicroFrontend(Audio("x", RATE, 800, 480, features=other))
    samples = sound("noise")[:800] / 32768
    rows = plain(samples, plain.begin())[0]
    assert np.allclose(turned(samples, turned.begin())[0], (rows.T - 1) / 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"coefficients": 10}, "no coefficients"),
        ({"fft": 480}, "power of 2"),
        ({"centred": True}, "no centred"),
    ],
)
def test_what_the_frontend_does_not_have_is_refused(fields: dict[str, int], message: str) -> None:
    known = {"frame": 480, "step": 160, "fft": 512, "bands": 40, "low_hz": 125.0, "high_hz": 7500.0}
    with pytest.raises(ValueError, match=message):
        Features(**{**known, **fields}, log="micro")  # type: ignore[arg-type]


def test_windows_begin_where_frames_begin() -> None:
    with pytest.raises(ValueError, match="multiple of step, 160, got 400"):
        Audio("x", RATE, 800, 400, features=FEATURES)
