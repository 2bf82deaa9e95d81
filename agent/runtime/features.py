"""Log-mel bands and MFCCs of a window of samples.

Promises the numbers of the library whose conventions are declared, within rounding: TensorFlow's `tf.signal`
(MLPerf Tiny, micro speech), librosa, torchaudio, or Whisper. Computes in float64, since a window takes far
less time than the model.

The formulas: O'Shaughnessy's mel scale, 2595 log10(1 + f/700) ("htk"); Slaney's, linear below 1000 Hz and
logarithmic above (Auditory Toolbox, 1998); `tf.signal.linear_to_mel_weight_matrix`; `librosa.filters.mel`;
`log_mel_spectrogram` in whisper/audio.py.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from agent.bundle.audio import Audio, Features
from agent.errors import FormatError
from agent.runtime.storage import Array

# Slaney's scale: 200/3 Hz a mel below 1000 Hz, and 27 mels for a factor of 6.4 above.
_LINEAR_HZ: Final = 200.0 / 3
_BREAK_HZ: Final = 1000.0
_LOG_STEP: Final = np.log(6.4) / 27
# How far below the largest value Whisper cuts, in powers of ten.
_WHISPER_RANGE: Final = 8.0


class FeatureExtractor:
    """One model's declared features, set up once; a declaration without features raises FormatError."""

    def __init__(self, audio: Audio) -> None:
        if audio.features is None:
            raise FormatError("audio: expected features, got none")
        self._declared = declared = audio.features
        self._frames = audio.frames
        angles = 2 * np.pi * np.arange(declared.frame) / declared.frame
        self._window = 0.5 - 0.5 * np.cos(angles)
        self._mel = mel_weights(declared, audio.rate)
        self._dct = dct_matrix(declared)
        # Padded on both sides to the transform, as librosa does; TensorFlow pads at the end.
        self._before = (declared.fft - declared.frame) // 2 if declared.centred else 0

    def __call__(self, samples: Array) -> Array:
        """Compute the features of a window: float, shape (window,).

        The result is float64, shape (frames, bands or coefficients), or transposed as declared.
        """
        declared = self._declared
        signal = samples.astype(np.float64)
        if declared.centred:
            half = declared.fft // 2
            # Too short a signal has nothing to mirror.
            padded = np.pad(signal, half, mode="reflect") if signal.size > half else np.pad(signal, half)
            signal = padded[self._before :]
        starts = np.arange(self._frames) * declared.step
        frames = np.lib.stride_tricks.sliding_window_view(signal, declared.frame)[starts] * self._window
        spectrum = np.abs(np.fft.rfft(frames, declared.fft, axis=1))
        if declared.spectrum == "power":
            spectrum = spectrum**2
        values = self._log(spectrum @ self._mel)
        if declared.coefficients:
            values = values @ self._dct
        values = (values - declared.mean) / declared.std
        return values if declared.order == "frames_first" else values.T

    def _log(self, bands: Array) -> Array:
        declared = self._declared
        if declared.log == "natural":
            return np.asarray(np.log(bands + declared.offset))
        if declared.log == "log10":
            return np.asarray(np.log10(bands + declared.offset))
        if declared.log == "decibel":
            return np.asarray(10 * np.log10(np.maximum(bands, declared.offset)))
        if declared.log == "whisper":
            logs = np.log10(np.maximum(bands, declared.offset))
            return np.asarray((np.maximum(logs, logs.max() - _WHISPER_RANGE) + 4) / 4)
        return bands


def mel_weights(declared: Features, rate: int) -> Array:
    """Return the triangular bands: float64, shape (fft // 2 + 1, bands)."""
    hertz = np.arange(declared.fft // 2 + 1) * (rate / declared.fft)
    low, high = (_to_mel(np.array(edge), declared.scale) for edge in (declared.low_hz, declared.high_hz))
    mels = np.linspace(low, high, declared.bands + 2)
    points, places = (mels, _to_mel(hertz, declared.scale))
    if declared.edges == "hertz":
        points, places = _to_hertz(mels, declared.scale), hertz
    left, peak, right = points[:-2], points[1:-1], points[2:]
    rising = (places[:, None] - left) / (peak - left)
    falling = (right - places[:, None]) / (right - peak)
    weights = np.maximum(0.0, np.minimum(rising, falling))
    if declared.edges == "mel":
        weights[0] = 0.0
    if declared.norm == "slaney":
        edges = _to_hertz(mels, declared.scale)
        weights *= 2.0 / (edges[2:] - edges[:-2])
    return np.asarray(weights)


def dct_matrix(declared: Features) -> Array:
    """Return the matrix of a DCT-II: float64, shape (bands, coefficients)."""
    bands, count = declared.bands, declared.coefficients
    angles = np.pi / bands * (np.arange(bands)[:, None] + 0.5) * np.arange(count)
    matrix = np.cos(angles) * np.sqrt(2.0 / bands)
    if declared.dct == "ortho" and count:
        matrix[:, 0] /= np.sqrt(2.0)
    return np.asarray(matrix)


def _to_mel(hertz: Array, scale: str) -> Array:
    if scale == "htk":
        return np.asarray(2595.0 * np.log10(1.0 + hertz / 700.0))
    above = np.log(np.maximum(hertz, _BREAK_HZ) / _BREAK_HZ) / _LOG_STEP
    return np.where(hertz < _BREAK_HZ, hertz / _LINEAR_HZ, _BREAK_HZ / _LINEAR_HZ + above)


def _to_hertz(mels: Array, scale: str) -> Array:
    if scale == "htk":
        return np.asarray(700.0 * (10.0 ** (mels / 2595.0) - 1.0))
    above = _BREAK_HZ * np.exp(_LOG_STEP * (mels - _BREAK_HZ / _LINEAR_HZ))
    return np.where(mels < _BREAK_HZ / _LINEAR_HZ, mels * _LINEAR_HZ, above)
