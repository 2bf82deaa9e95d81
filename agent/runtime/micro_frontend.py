"""The features of TensorFlow Lite Micro's audio frontend: mel bands without noise and with an even loudness.

Promises the numbers of the frontend, which computes with whole numbers: wake words are trained on them, and
a difference of one step in a quiet band is a large one after its logarithm. A frame depends on all frames
before it, by the estimate of the noise, which the caller keeps.

Source: tensorflow/lite/experimental/microfrontend/lib (window, filterbank, noise_reduction,
pcan_gain_control, log_scale), and kiss_fft's 16-bit transform, which it calls.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from agent.bundle.audio import Audio, Features
from agent.runtime.storage import Array

_HALF: Final = np.float32(0.5)
_WINDOW_BITS: Final = 12
_BAND_BITS: Final = 12
_SAMPLE_MAX: Final = 32767
_FRACTION_BITS: Final = 15
# Noise: how fast its estimate follows in even and odd bands, and the least that is left of a band.
_NOISE_BITS: Final = 14
_SMOOTHING_BITS: Final = 10
_EVEN, _ODD, _LEAST = (int(np.float32(part) * (1 << _NOISE_BITS)) for part in (0.025, 0.06, 0.05))
# Gain: (noise + 80)^-0.95, in 21 bits.
_STRENGTH: Final = np.float32(0.95)
_OFFSET: Final = np.float32(80)
_GAIN_BITS: Final = 21
_MOST_GAIN: Final = 32767
_SNR_BITS: Final = 12
_OUTPUT_BITS: Final = 6
_NOISE_ESTIMATE_BITS: Final = 32
# Logarithm: 128 segments, 16 bits behind the point; ln(2) in these; the result has 6 bits.
_LOG_SEGMENTS_BITS: Final = 7
_LOG_BITS: Final = 16
_LN_2: Final = 45426
_SCALE_SHIFT: Final = 6
_LARGEST: Final = (1 << 16) - 1
# What models are trained on: the 16-bit number times this.
_REAL: Final = 0.0390625


class MicroFrontend:
    """One model's declared features, whose `log` is `micro`, set up once."""

    def __init__(self, audio: Audio) -> None:
        assert audio.features is not None
        self._declared = declared = audio.features
        self._starts = np.arange(audio.frames) * declared.step
        self._kept_frames = min(audio.hop // declared.step, audio.frames)
        phases = np.float32(2 * np.pi / declared.frame) * (
            np.arange(declared.frame, dtype=np.float32) + _HALF
        )
        # float32, as one coefficient depends on it; rounded from float64, as NumPy's own differ by processor.
        window = _HALF - _HALF * np.cos(phases.astype(np.float64)).astype(np.float32)
        self._window = np.floor(window * np.float32(1 << _WINDOW_BITS) + _HALF).astype(np.int64)
        self._weights, self._unweights = band_weights(declared, audio.rate)
        self._correction = declared.fft.bit_length() - 1 - _BAND_BITS // 2
        self._gains = _gain_table(_SMOOTHING_BITS - self._correction)
        self._logs = _log_table()
        self._smoothing: Array = np.where(np.arange(declared.bands) % 2 == 0, _EVEN, _ODD).astype(np.int64)
        half = declared.fft // 2
        self._twiddles = _twiddles(-2 * np.pi * np.arange(half) / half)
        self._real_twiddles = _twiddles(-np.pi * ((np.arange(half // 2) + 1) / half + 0.5))

    def begin(self) -> Array:
        """Return the noise before the first frame: int64, shape (bands,)."""
        return np.zeros(self._declared.bands, np.int64)

    def __call__(self, samples: Array, noise: Array) -> tuple[Array, Array]:
        """Compute the features of a window: float from -1 to 1, shape (window,).

        Return them, float64 of shape (frames, bands), or transposed as declared, and the estimate of the
        noise before the first frame of the next window; `noise` is that before the first frame of this one.
        """
        declared = self._declared
        whole = np.clip(np.rint(samples.astype(np.float64) * 32768), -32768, 32767).astype(np.int64)
        frames = np.lib.stride_tricks.sliding_window_view(whole, declared.frame)[self._starts]
        windowed = (frames * self._window) >> _WINDOW_BITS
        # Each frame is moved up as far as 16 bits allow, and its result down again.
        loudest = np.minimum(np.abs(windowed).max(axis=1), _SAMPLE_MAX)
        shifts = 15 - _bit_length(loudest)
        padded = np.zeros((len(frames), declared.fft), np.int64)
        padded[:, : declared.frame] = windowed << shifts[:, None]
        real, imaginary = self._transform(padded)
        energy = real * real + imaginary * imaginary
        sums = energy @ self._weights
        sums[:, 1:] += (energy @ self._unweights)[:, :-1]
        signals = _square_root(sums[:, 1:]) >> shifts[:, None]
        rows, after = [], noise
        for index, signal in enumerate(signals):
            noise, row = self._without_noise(noise, signal)
            rows.append(row)
            if index + 1 == self._kept_frames:
                after = noise
        values = self._logarithm(np.array(rows)) * _REAL
        values = (values - declared.mean) / declared.std
        return (values if declared.order == "frames_first" else values.T), after

    def _without_noise(self, noise: Array, signal: Array) -> tuple[Array, Array]:
        """Return the new estimate of the noise, and a frame without it and with an even loudness."""
        scaled = (signal << _SMOOTHING_BITS) & 0xFFFFFFFF
        noise = (scaled * self._smoothing + noise * ((1 << _NOISE_BITS) - self._smoothing)) >> _NOISE_BITS
        left = (scaled - np.minimum(noise, scaled)) >> _SMOOTHING_BITS
        signal = np.maximum(left, (signal * _LEAST) >> _NOISE_BITS)
        ratio: Array = (signal * self._gain(noise)) >> (_GAIN_BITS - self._correction - _SNR_BITS)
        low = (ratio * ratio) >> (2 + 2 * _SNR_BITS - _OUTPUT_BITS)
        high = (ratio >> (_SNR_BITS - _OUTPUT_BITS)) - (1 << _OUTPUT_BITS)
        return noise, np.where(ratio < 2 << _SNR_BITS, low, high)

    def _gain(self, noise: Array) -> Array:
        """Interpolate the gain between powers of two."""
        interval = _bit_length(noise)
        moved = np.where(
            interval < 11, noise << np.maximum(11 - interval, 0), noise >> np.maximum(interval - 11, 0)
        )
        fraction = moved & 0x3FF
        first, slope, bend = self._gains[interval].T
        value = (((bend * fraction) >> 5) + (slope << 5)) * fraction
        return np.asarray(((value + (1 << 14)) >> 15) + first)

    def _logarithm(self, signal: Array) -> Array:
        """Return the natural logarithm in steps of 1 / 64, and 0 for what is below 2."""
        value = np.maximum(
            signal << self._correction if self._correction > 0 else signal >> -self._correction, 1
        )
        integer = _bit_length(value) - 1
        rest = value - (1 << integer)
        fraction = np.where(
            integer < _LOG_BITS,
            rest << np.maximum(_LOG_BITS - integer, 0),
            rest >> np.maximum(integer - _LOG_BITS, 0),
        )
        segment = fraction >> (_LOG_BITS - _LOG_SEGMENTS_BITS)
        low, high = self._logs[segment], self._logs[segment + 1]
        place = fraction - (segment << (_LOG_BITS - _LOG_SEGMENTS_BITS))
        binary = (integer << _LOG_BITS) + fraction + low + (((high - low) * place) >> _LOG_BITS)
        half = 1 << (_LOG_BITS - 1)
        natural = (_LN_2 * binary + half) >> _LOG_BITS
        result = ((natural << _SCALE_SHIFT) + half) >> _LOG_BITS
        return np.minimum(np.where(value > 1, result, 0), _LARGEST)

    def _transform(self, frames: Array) -> tuple[Array, Array]:
        """Return the spectrum of real frames [n, fft]: two arrays of [n, fft // 2 + 1]."""
        half = frames.shape[1] // 2
        a, b = self._complex(frames[:, 0::2], frames[:, 1::2], 1)
        real, imaginary = (np.zeros((len(frames), half + 1), np.int64) for _ in range(2))
        first = _divided(a[:, 0], 2), _divided(b[:, 0], 2)
        real[:, 0], real[:, half] = first[0] + first[1], first[0] - first[1]
        low = np.arange(1, half // 2 + 1)
        ar, ai = _divided(a[:, low], 2), _divided(b[:, low], 2)
        br, bi = _divided(a[:, half - low], 2), _divided(-b[:, half - low], 2)
        sr, si, dr, di = ar + br, ai + bi, ar - br, ai - bi
        tr, ti = _product(dr, di, *self._real_twiddles)
        real[:, low], imaginary[:, low] = (sr + tr) >> 1, (si + ti) >> 1
        real[:, half - low], imaginary[:, half - low] = (sr - tr) >> 1, (ti - si) >> 1
        return real, imaginary

    def _complex(self, a: Array, b: Array, stride: int) -> tuple[Array, Array]:
        """Return the transform of a + i b along the last axis, divided by its length."""
        length = a.shape[-1]
        if length == 1:
            return a, b
        factor = 4 if length % 4 == 0 else 2
        parts = [self._complex(a[:, i::factor], b[:, i::factor], stride * factor) for i in range(factor)]
        parts = [(_divided(r, factor), _divided(i, factor)) for r, i in parts]
        places = np.arange(length // factor) * stride
        turned = [parts[0]]
        for number, (r, i) in enumerate(parts[1:], 1):
            turned.append(_product(r, i, *(table[number * places] for table in self._twiddles)))
        if factor == 2:
            (r0, i0), (r1, i1) = turned
            return _joined(r0 + r1, r0 - r1), _joined(i0 + i1, i0 - i1)
        (r0, i0), (r1, i1), (r2, i2), (r3, i3) = turned
        er, ei, fr, fi = r0 + r2, i0 + i2, r0 - r2, i0 - i2
        sr, si, dr, di = r1 + r3, i1 + i3, r1 - r3, i1 - i3
        return (
            _joined(er + sr, fr + di, er - sr, fr - di),
            _joined(ei + si, fi - dr, ei - si, fi + dr),
        )


def band_weights(declared: Features, rate: int) -> tuple[Array, Array]:
    """Return the weights with which a bin rises to a band, and falls from the one before.

    They are int64 [fft // 2 + 1, bands + 1]; band i is the rise of i + 1 and the fall of i.
    """
    bins = declared.fft // 2 + 1
    spacing = np.float32(0.5 * rate / (bins - 1))
    low, high = (_to_mel(np.float32(hertz)) for hertz in (declared.low_hz, declared.high_hz))
    step = np.float32(high - low) / np.float32(declared.bands + 1)
    centres = (low + step * np.arange(1, declared.bands + 2, dtype=np.float32)).astype(np.float32)
    rising, falling = (np.zeros((bins, declared.bands + 1), np.int64) for _ in range(2))
    # Without the bin of 0 Hz.
    index = int(1.5 + np.float32(declared.low_hz) / spacing)
    for band, centre in enumerate(centres):
        before = low if band == 0 else centres[band - 1]
        while index < bins and (mel := _to_mel(np.float32(index) * spacing)) <= centre:
            weight = (centre - mel) / (centre - before)
            whole = np.float32(1 << _BAND_BITS)
            rising[index, band] = int(np.floor(weight * whole + _HALF))
            falling[index, band] = int(np.floor((np.float32(1) - weight) * whole + _HALF))
            index += 1
    return rising, falling


def _to_mel(hertz: np.float32) -> np.float32:
    return np.float32(np.float32(1127) * np.log1p(hertz / np.float32(700)))


def _gain_table(input_bits: int) -> Array:
    """Return value, slope and bend of the gain where the noise has 0 to 32 bits: int64 [33, 3]."""

    def gain(noise: int) -> int:
        real = np.float32(noise) / np.float32(1 << input_bits)
        found = np.float32(1 << _GAIN_BITS) * np.float32(np.float64(real + _OFFSET) ** -np.float64(_STRENGTH))
        return _MOST_GAIN if found > _MOST_GAIN else int(found + _HALF)

    rows = [(gain(0), 0, 0), (gain(1), 0, 0)]
    for bits in range(2, _NOISE_ESTIMATE_BITS + 1):
        begin = 1 << (bits - 1)
        end = 2 * begin - (bits == _NOISE_ESTIMATE_BITS)
        first, middle, last = (gain(noise) for noise in (begin, begin + begin // 2, end))
        slope = 4 * (middle - first) - (last - first)
        rows.append((first, slope, last - first - slope))
    return np.array(rows, np.int64)


def _log_table() -> Array:
    """Return log2(1 + i / 128) - i / 128 in 16 bits: int64 [130], where the last one is never used."""
    places = np.arange((1 << _LOG_SEGMENTS_BITS) + 1) / (1 << _LOG_SEGMENTS_BITS)
    table = np.rint((np.log2(1 + places) - places) * (1 << _LOG_BITS)).astype(np.int64)
    return np.append(table, 0)


def _twiddles(phases: Array) -> tuple[Array, Array]:
    real, imaginary = (
        np.floor(0.5 + _SAMPLE_MAX * wave(phases)).astype(np.int64) for wave in (np.cos, np.sin)
    )
    return real, imaginary


def _joined(*parts: Array) -> Array:
    """Join parts of a spectrum; very loud ones overflow their 16 bits."""
    return np.concatenate(parts, -1).astype(np.int16).astype(np.int64)


def _rounded(value: Array) -> Array:
    return (value + (1 << (_FRACTION_BITS - 1))) >> _FRACTION_BITS


def _divided(value: Array, count: int) -> Array:
    return _rounded(value * (_SAMPLE_MAX // count))


def _product(ar: Array, ai: Array, br: Array, bi: Array) -> tuple[Array, Array]:
    return _rounded(ar * br - ai * bi), _rounded(ar * bi + ai * br)


def _bit_length(values: Array) -> Array:
    """Return how many bits whole numbers below 2^53 have; 0 has none."""
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)


def _square_root(values: Array) -> Array:
    """Return the square roots of whole numbers below 2^62, rounded."""
    root = np.sqrt(values.astype(np.float64)).astype(np.int64)
    root -= root * root > values
    root += (root + 1) * (root + 1) <= values
    return np.asarray(root + ((values - root * root > root) & (root != 0xFFFF)))
