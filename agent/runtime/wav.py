"""Reads recordings: WAV files, and raw 16-bit PCM as RFC 2586 describes it.

Promises that no number in a file is used before it was checked against the file's bytes, and that a recording
is decoded in blocks of bounded memory. Takes PCM of 8, 16, 24 and 32 bits and floats of 32 and 64 bits, with
up to `MAX_CHANNELS` channels, which are averaged. A length of 0, or one that exceeds the file (recorders
write these to pipes), means up to the end. Leaves compressed formats and other rates to the sender.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from agent.errors import InputError
from agent.runtime.storage import Array

# Microphone arrays have up to 16.
MAX_CHANNELS: Final = 32
_BLOCK_FRAMES: Final = 1 << 15
_CHUNK: Final = struct.Struct("<4sI")
# WAVEFORMATEX of the Multimedia Programming Interface, without cbSize.
_FORMAT: Final = struct.Struct("<HHIIHH")
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
# Chunks before the samples; files of editors have some ten.
_MAX_CHUNKS: Final = 256
_L16: Final = re.compile(r"\s*(rate|channels)\s*=\s*(\d{1,7})\s*", re.ASCII)

# (format, bits) -> how numpy reads a sample, what 0 is, and what it is divided by.
_KINDS: Final = {
    (_PCM, 8): ("u1", 128.0, 128.0),
    (_PCM, 16): ("<i2", 0.0, 32768.0),
    (_PCM, 24): ("", 0.0, 8388608.0),
    (_PCM, 32): ("<i4", 0.0, 2147483648.0),
    (_FLOAT, 32): ("<f4", 0.0, 1.0),
    (_FLOAT, 64): ("<f8", 0.0, 1.0),
}


@dataclass(frozen=True, slots=True)
class Recording:
    """Samples that are not decoded yet.

    Attributes
    ----------
    rate
        Samples a second.
    channels, bits
        Of the file.
    frames
        How many samples each channel has.
    """

    rate: int
    channels: int
    bits: int
    frames: int
    _data: memoryview = field(repr=False)
    _kind: tuple[str, float, float] = field(repr=False)

    def blocks(self) -> Iterator[Array]:
        """Yield the samples, float32 from -1 to 1, shape (n,), the mean of the channels.

        Raises
        ------
        InputError
            If a sample is NaN or infinite.
        """
        width = self.channels * self.bits // 8
        for start in range(0, self.frames, _BLOCK_FRAMES):
            count = min(_BLOCK_FRAMES, self.frames - start)
            samples = self._decode(self._data[start * width : (start + count) * width])
            mono = samples.reshape(count, self.channels).mean(axis=1, dtype=np.float64)
            with np.errstate(over="ignore"):
                block = ((mono - self._kind[1]) / self._kind[2]).astype(np.float32)
            if not np.isfinite(block).all():
                raise InputError("expected finite samples, got NaN or infinity")
            yield block

    def _decode(self, data: memoryview) -> Array:
        dtype = self._kind[0]
        if dtype:
            return np.frombuffer(data, dtype)
        # Three bytes are the upper ones of four; the sum is divided by 2^8, which keeps the sign.
        whole = np.zeros((len(data) // 3, 4), np.uint8)
        whole[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
        return whole.view("<i4")[:, 0] >> 8


def read_recording(data: bytes | memoryview, media_type: str, parameters: str = "") -> Recording:
    """Read a recording's form, without its samples.

    Parameters
    ----------
    data
        The file, untrusted.
    media_type
        `audio/wav` or `audio/l16`.
    parameters
        What follows the media type: `rate=16000; channels=1` of `audio/l16`.

    Raises
    ------
    InputError
        If it is not such a recording.
    """
    view = memoryview(data).cast("B")
    return _read_l16(view, parameters) if media_type == "audio/l16" else _read_wav(view)


def _read_l16(view: memoryview, parameters: str) -> Recording:
    # RFC 2586: big-endian, the rate is required.
    found = {"channels": 1}
    for parameter in filter(str.strip, parameters.split(";")):
        match = _L16.fullmatch(parameter)
        if match is None:
            raise InputError(f"expected audio/L16;rate=16000, got the parameter {parameter[:40]!a}")
        found[match[1]] = int(match[2])
    if "rate" not in found:
        raise InputError("expected audio/L16;rate=16000, got no rate")
    return _recording(view, found["rate"], found["channels"], 16, (">i2", 0.0, 32768.0))


def _read_wav(view: memoryview) -> Recording:
    if len(view) < 12 or bytes(view[:4]) not in (b"RIFF", b"RF64") or bytes(view[8:12]) != b"WAVE":
        raise InputError("expected a WAV file, which begins with RIFF and WAVE, got something else")
    at, form = 12, None
    for _ in range(_MAX_CHUNKS):
        if at + _CHUNK.size > len(view):
            break
        name, size = _CHUNK.unpack_from(view, at)
        at += _CHUNK.size
        if name == b"data":
            if form is None:
                raise InputError("WAV: expected a chunk 'fmt ' before the samples, got none")
            kind, channels, rate, bits = form
            # 0 and 4 GiB are what recorders write before they know the length.
            end = len(view) if size == 0 or at + size > len(view) else at + size
            return _recording(view[at:end], rate, channels, bits, kind)
        if name == b"fmt ":
            form = _format(view[at : at + size])
        at += size + size % 2
    raise InputError("WAV: expected a chunk 'data' with samples, got none")


def _format(chunk: memoryview) -> tuple[tuple[str, float, float], int, int, int]:
    if len(chunk) < _FORMAT.size:
        raise InputError(f"WAV: expected a format of at least {_FORMAT.size} bytes, got {len(chunk)}")
    code, channels, rate, _, align, bits = _FORMAT.unpack_from(chunk)
    if code == _EXTENSIBLE and len(chunk) >= 26:
        # The first two bytes of SubFormat are the code that this format extends.
        (code,) = struct.unpack_from("<H", chunk, 24)
    kind = _KINDS.get((code, bits))
    if kind is None:
        raise InputError(
            f"WAV: expected PCM of 8, 16, 24 or 32 bits, or floats of 32 or 64, got format {code}, "
            f"{bits} bits",
            hint="convert it: ffmpeg -i in.wav -c:a pcm_s16le out.wav",
        )
    if align != channels * bits // 8:
        raise InputError(
            f"WAV: expected {channels * bits // 8} bytes for {channels} channels of {bits} bits, got {align}"
        )
    return kind, channels, rate, bits


def _recording(
    view: memoryview, rate: int, channels: int, bits: int, kind: tuple[str, float, float]
) -> Recording:
    if not 1 <= channels <= MAX_CHANNELS:
        raise InputError(f"expected 1 to {MAX_CHANNELS} channels, got {channels}")
    if not 1 <= rate <= 1_000_000:
        raise InputError(f"expected a rate of 1 to 1000000 samples a second, got {rate}")
    return Recording(rate, channels, bits, len(view) // (channels * bits // 8), view, kind)
