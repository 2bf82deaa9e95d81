"""Features: the numbers of each library's own formula, written out in the slow way."""

from __future__ import annotations

import math

import numpy as np
import pytest

from agent.bundle.audio import Audio, Features
from agent.runtime.features import FeatureExtractor
from builder.compiling.audio_presets import _PRESETS

RATE = 16000


def mel_htk(hertz: float) -> float:
    return 1127.0 * math.log(1.0 + hertz / 700.0)


def tensorflow_mfccs(samples: np.ndarray) -> np.ndarray:
    """tf.signal.stft, linear_to_mel_weight_matrix and mfccs_from_log_mel_spectrograms, bin by bin."""
    window = [0.5 - 0.5 * math.cos(2 * math.pi * n / 480) for n in range(480)]
    bins = np.arange(257)
    basis = np.exp(-2j * np.pi * np.outer(np.arange(480), bins) / 512)
    edges = np.linspace(mel_htk(20), mel_htk(4000), 42)
    rows = []
    for start in range(0, samples.size - 479, 320):
        spectrum = np.abs((samples[start : start + 480] * window) @ basis)
        bands = []
        for band in range(40):
            total = 0.0
            for k in range(1, 257):
                mel = mel_htk(k * RATE / 512)
                slope = min(
                    (mel - edges[band]) / (edges[band + 1] - edges[band]),
                    (edges[band + 2] - mel) / (edges[band + 2] - edges[band + 1]),
                )
                total += max(0.0, slope) * spectrum[k]
            bands.append(math.log(total + 1e-6))
        rows.append(
            [
                math.sqrt(2 / 40)
                * sum(b * math.cos(math.pi * c * (i + 0.5) / 40) for i, b in enumerate(bands))
                for c in range(10)
            ]
        )
    return np.array(rows)


def signal(count: int) -> np.ndarray:
    t = np.arange(count) / RATE
    noise = np.random.default_rng(3).normal(size=count) * 0.01
    return np.sin(2 * np.pi * 440 * t) * 0.5 + np.sin(2 * np.pi * 3000 * t) * 0.1 + noise


def test_keyword_spotting_has_tensorflows_mfccs() -> None:
    preset = _PRESETS["kws"]
    audio = Audio(
        input="x", **{**preset.audio, "window": 1440, "hop": 1440}, features=Features(**preset.features)
    )
    samples = signal(1440)
    assert audio.frames == 4
    np.testing.assert_allclose(FeatureExtractor(audio)(samples), tensorflow_mfccs(samples), atol=1e-9)


def test_whisper_has_its_log_mel_bands() -> None:
    preset = _PRESETS["whisper"]
    audio = Audio(
        input="x", **{**preset.audio, "window": 1600, "hop": 1600}, features=Features(**preset.features)
    )
    samples = signal(1600)
    padded = np.pad(samples, 200, mode="reflect")
    hann = np.hanning(401)[:-1]
    power = np.array([np.abs(np.fft.rfft(padded[i : i + 400] * hann)) ** 2 for i in range(0, 1600, 160)])
    # librosa.filters.mel(sr=16000, n_fft=400, n_mels=80): Slaney's scale and norm.
    linear, step = 200 / 3, math.log(6.4) / 27
    top = 15 + math.log(8000 / 1000) / step
    mels = np.linspace(0, top, 82)
    hertz = np.where(mels < 15, mels * linear, 1000 * np.exp(step * (mels - 15)))
    weights = np.zeros((80, 201))
    for band in range(80):
        low, peak, high = hertz[band : band + 3]
        for k in range(201):
            f = k * 40.0
            weights[band, k] = max(0.0, min((f - low) / (peak - low), (high - f) / (high - peak)))
        weights[band] *= 2 / (high - low)
    logs = np.log10(np.maximum(weights @ power.T, 1e-10))
    expected = (np.maximum(logs, logs.max() - 8) + 4) / 4
    got = FeatureExtractor(audio)(samples)
    assert got.shape == (80, 10)
    np.testing.assert_allclose(got, expected, atol=1e-9)


@pytest.mark.parametrize("name", ["librosa", "torchaudio"])
def test_silence_and_one_sample_are_finite(name: str) -> None:
    preset = _PRESETS[name]
    audio = Audio(
        input="x", **{**preset.audio, "window": 4096, "hop": 4096}, features=Features(**preset.features)
    )
    extract = FeatureExtractor(audio)
    for samples in (np.zeros(4096), np.eye(1, 4096)[0]):
        values = extract(samples)
        assert values.shape == (128, audio.frames)
        assert np.isfinite(values).all()


def test_orthonormal_dct_keeps_lengths() -> None:
    audio = Audio("x", RATE, 800, 800, features=Features(400, 400, 512, 20, 0.0, 8000.0, coefficients=20))
    plain = Audio("x", RATE, 800, 800, features=Features(400, 400, 512, 20, 0.0, 8000.0))
    samples = signal(800)
    np.testing.assert_allclose(
        np.linalg.norm(FeatureExtractor(audio)(samples), axis=1),
        np.linalg.norm(FeatureExtractor(plain)(samples), axis=1),
    )
