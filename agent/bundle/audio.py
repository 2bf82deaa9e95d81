"""How sound becomes a model's input, and how outputs over time become speech or keywords, as declared.

Promises values within range. Leaves the work to `agent.runtime.audio` and `agent.runtime.segments`. Leaves
names such as `silero` to the builder: the manifest holds the values that they stand for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Final

from agent.bundle.canonical_json import LATER
from agent.bundle.values import one_of, within

# Telephones have 8000 samples a second, studios 192000.
MIN_RATE: Final = 1_000
MAX_RATE: Final = 384_000
# A minute at 44.1 kHz; speech models take at most 30 s at 16 kHz. This bounds a session's memory.
MAX_WINDOW: Final = 1 << 22
MAX_FRAME: Final = 1 << 15
MAX_BANDS: Final = 1024
# Spectrum of a window, all its frames together, and the matrix of mel bands: both are in memory, in float64.
# Whisper's spectrum has 1.2 million elements, its matrix 16,000.
MAX_SPECTRUM: Final = 1 << 24
MAX_MATRIX: Final = 1 << 22
# Two seconds of scores every 10 ms; ESPHome averages 5 to 10.
MAX_AVERAGE: Final = 200
# An hour, in ms.
MAX_MS: Final = 3_600_000

SPECTRA: Final = ("magnitude", "power")
SCALES: Final = ("htk", "slaney")
NORMS: Final = ("none", "slaney")
LOGS: Final = ("none", "natural", "log10", "decibel", "whisper", "micro")
PEAKS: Final = ("none", "maximum", "absolute")
ORDERS: Final = ("frames_first", "bands_first")
DCTS: Final = ("ortho", "tensorflow")


@dataclass(frozen=True, slots=True)
class Features:
    """From a window of samples to log-mel bands or MFCCs, one row for each frame.

    A frame is multiplied by a periodic Hann window and padded with zeros to `fft` samples.

    Attributes
    ----------
    frame, step
        Samples of a frame, and from one frame to the next.
    fft
        Samples of the Fourier transform, a multiple of 2 and at least `frame`.
    bands
        Number of mel bands.
    low_hz, high_hz
        Edges of the lowest and the highest band.
    spectrum
        `magnitude` or `power`.
    scale
        Mel scale: `htk` (2595 log10(1 + f / 700), also TensorFlow's) or `slaney` (librosa's default).
    norm
        `slaney` divides each band by its width in Hz; `none` leaves its peak at 1.
    edges
        `hertz`: a band is a triangle over frequencies, as in librosa and torchaudio; `mel`: over mels,
        without the bin of 0 Hz, as in TensorFlow.
    log
        `none`; `natural` or `log10`, of the value plus `offset`; `decibel`, 10 log10 of at least `offset`;
        `whisper`, log10 of at least `offset`, not less than the largest minus 8, then (x + 4) / 4;
        `micro`, all of TensorFlow Lite Micro's frontend with its own window, bands, noise reduction and gain
        control in whole numbers: `spectrum`, `scale`, `norm`, `edges`, `offset` and `dct` do not count.
    offset
        What keeps the logarithm finite.
    coefficients
        Number of MFCCs (DCT-II of the bands), or 0 for the bands themselves.
    dct
        `ortho`, or `tensorflow`, which scales the first coefficient like the others.
    centred
        Whether frame i is centred at sample i * step, with the signal mirrored at its ends (librosa,
        torchaudio, Whisper), instead of beginning there (TensorFlow).
    order
        `frames_first` or `bands_first`: how a row lies in the model's input.
    mean, std
        Each value becomes `(value - mean) / std`. For an integer input, rounded.

    Raises
    ------
    ValueError
        If a value is out of its range.
    """

    frame: int
    step: int
    fft: int
    bands: int
    low_hz: float
    high_hz: float
    spectrum: str = "power"
    scale: str = "htk"
    norm: str = "none"
    edges: str = "hertz"
    log: str = "natural"
    offset: float = 1e-6
    coefficients: int = 0
    dct: str = "ortho"
    centred: bool = False
    order: str = "frames_first"
    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        within("frame", self.frame, 1, MAX_FRAME)
        within("step", self.step, 1, MAX_FRAME)
        within("fft", self.fft, max(2, self.frame), MAX_FRAME)
        if self.fft % 2:
            raise ValueError(f"fft: expected an even number, got {self.fft}")
        within("bands", self.bands, 1, MAX_BANDS)
        within("coefficients", self.coefficients, 0, self.bands)
        one_of("spectrum", self.spectrum, SPECTRA)
        one_of("scale", self.scale, SCALES)
        one_of("norm", self.norm, NORMS)
        one_of("edges", self.edges, ("hertz", "mel"))
        one_of("log", self.log, LOGS)
        one_of("dct", self.dct, DCTS)
        one_of("order", self.order, ORDERS)
        numbers = (self.low_hz, self.high_hz, self.offset, self.mean, self.std)
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError(f"features: expected finite numbers, got {numbers}")
        if not 0 <= self.low_hz < self.high_hz:
            raise ValueError(f"low_hz, high_hz: expected 0 <= low < high, got {self.low_hz}, {self.high_hz}")
        if self.offset <= 0 and self.log != "none":
            raise ValueError(f"offset: expected a positive number, got {self.offset}")
        if self.log == "micro" and (self.coefficients or self.centred or self.fft & (self.fft - 1)):
            raise ValueError(
                f"log micro: expected an fft that is a power of 2, and no coefficients and no centred, "
                f"got {self.fft}, {self.coefficients} and {self.centred}"
            )
        if self.std == 0:
            raise ValueError("std: expected a number other than 0, got 0")


@dataclass(frozen=True, slots=True)
class Audio:
    """From a recording to the model's input, window after window.

    Several channels are averaged. The recording's rate must be the declared one.

    Attributes
    ----------
    input
        Name of the input that takes a window.
    rate
        Samples a second.
    window
        Samples of a window.
    hop
        Samples from one window to the next; the first `window - hop` samples are also in the window before.
    lead
        Zeros before the recording's first sample, so that the first window has fewer new samples.
    scale
        Factor for samples, which are -1 to 1.
    peak
        What samples of a window are divided by: `none`, its `maximum` or its largest `absolute` value.
    features
        What is computed of a window, or None if the model takes samples.

    Raises
    ------
    ValueError
        If a value is out of its range.
    """

    input: str
    rate: int
    window: int
    hop: int
    lead: int = 0
    scale: float = 1.0
    peak: str = "none"
    features: Features | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        within("rate", self.rate, MIN_RATE, MAX_RATE)
        within("window", self.window, 1, MAX_WINDOW)
        within("hop", self.hop, 1, self.window)
        within("lead", self.lead, 0, self.window - self.hop)
        one_of("peak", self.peak, PEAKS)
        if not math.isfinite(self.scale) or self.scale == 0:
            raise ValueError(f"scale: expected a finite number other than 0, got {self.scale}")
        if self.features is not None:
            if self.features.frame > self.window:
                raise ValueError(
                    f"frame: expected at most {self.window} samples, a window, got {self.features.frame}"
                )
            within("elements of a window's spectrum", self.frames * self.features.fft, 0, MAX_SPECTRUM)
            within("elements of the mel bands", self.features.bands * self.features.fft, 0, MAX_MATRIX)
            if self.features.log == "micro" and self.hop % self.features.step:
                raise ValueError(f"hop: expected a multiple of step, {self.features.step}, got {self.hop}")
            if self.features.high_hz > self.rate / 2:
                raise ValueError(
                    f"high_hz: expected at most half the rate, {self.rate / 2:g}, got {self.features.high_hz}"
                )

    @property
    def frames(self) -> int:
        """How many frames a window's features have; 0 without features."""
        if self.features is None:
            return 0
        if self.features.centred:
            frames = 1 + self.window // self.features.step
            # Whisper leaves the last frame out.
            return frames - 1 if self.features.log == "whisper" else frames
        return 1 + (self.window - self.features.frame) // self.features.step


@dataclass(frozen=True, slots=True)
class Speech:
    """Replace a probability of each window by the times between which somebody speaks.

    The rule is that of Silero VAD's `get_speech_timestamps`: speech begins with a window of at least
    `threshold`, and ends where the probability fell below `threshold - hysteresis` if it does not reach
    `threshold` again within `min_silence_ms`.

    Attributes
    ----------
    output
        Name of the output, of one element.
    threshold
        0 to 1.
    hysteresis
        0 to `threshold`.
    min_speech_ms
        Speech of at most this duration is dropped.
    min_silence_ms
        Silence that is shorter than this does not end speech; at least twice `pad_ms`.
    pad_ms
        Speech is extended by this at both sides.
    """

    kind: ClassVar[str] = "speech"
    output: str
    threshold: float = 0.5
    hysteresis: float = 0.15
    min_speech_ms: int = 250
    min_silence_ms: int = 100
    pad_ms: int = 30

    def __post_init__(self) -> None:
        if not 0 <= self.hysteresis <= self.threshold <= 1:
            raise ValueError(
                f"threshold, hysteresis: expected 0 <= hysteresis <= threshold <= 1, "
                f"got {self.threshold}, {self.hysteresis}"
            )
        for name in ("min_speech_ms", "min_silence_ms", "pad_ms"):
            within(name, getattr(self, name), 0, MAX_MS)
        if self.min_silence_ms < 2 * self.pad_ms:
            raise ValueError(
                f"min_silence_ms: expected at least 2 * pad_ms = {2 * self.pad_ms}, got {self.min_silence_ms}"
            )


@dataclass(frozen=True, slots=True)
class Keywords:
    """Replace the scores of each window by the words that were heard, with their times.

    A word is heard in a window if it has the best score and that is at least `threshold`. Windows with the
    same word that follow each other are one.

    Attributes
    ----------
    output
        Name of the output, whose elements are the classes' scores.
    activation
        What turns the output into scores: `none` or `softmax`.
    threshold
        0 to 1.
    ignore
        Numbers of the classes that are not words, such as silence.
    average
        How many windows a score is the mean of, those before the first counting as 0. None means 1.
    scale, zero
        A score is `(value - zero) * scale`, for a model whose output is quantised.
    """

    kind: ClassVar[str] = "keywords"
    output: str
    activation: str = "none"
    threshold: float = 0.5
    ignore: tuple[int, ...] = ()
    scale: float = 1.0
    zero: float = 0.0
    average: int | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        if self.average is not None:
            within("average", self.average, 1, MAX_AVERAGE)
        if not (math.isfinite(self.scale) and math.isfinite(self.zero) and self.scale > 0):
            raise ValueError(
                f"scale, zero: expected finite numbers, scale above 0, got {self.scale}, {self.zero}"
            )
        one_of("activation", self.activation, ("none", "softmax"))
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold: expected 0 to 1, got {self.threshold}")
        for number in self.ignore:
            within("ignore", number, 0, (1 << 31) - 1)
