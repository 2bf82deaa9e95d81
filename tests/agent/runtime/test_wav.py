"""Recordings: each form of samples, and files that lie."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import InputError
from agent.runtime.wav import read_recording

WAVES = np.sin(np.arange(5000) / 7)[:, None] * [0.5, 0.25]


def riff(*chunks: tuple[bytes, bytes], length: int | None = None) -> bytes:
    body = b"".join(
        name + struct.pack("<I", len(data) if length is None or name != b"data" else length) + data
        for name, data in chunks
    )
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


def form(code: int, channels: int, rate: int, bits: int, align: int | None = None) -> bytes:
    align = channels * bits // 8 if align is None else align
    return struct.pack("<HHIIHH", code, channels, rate, rate * align % 2**32, align, bits)


def encoded(code: int, bits: int) -> bytes:
    if code == 3:
        return WAVES.astype("<f4" if bits == 32 else "<f8").tobytes()
    if bits == 8:
        return np.rint(WAVES * 127 + 128).astype(np.uint8).tobytes()
    whole = np.rint(WAVES * (2 ** (bits - 1) - 1)).astype("<i4")
    return np.ascontiguousarray(whole.view(np.uint8).reshape(-1, 4)[:, : bits // 8]).tobytes()


def samples(raw: bytes, media_type: str = "audio/wav", parameters: str = "") -> np.ndarray:
    return np.concatenate(list(read_recording(raw, media_type, parameters).blocks()))


@pytest.mark.parametrize(("code", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)])
@pytest.mark.parametrize("extensible", [False, True])
def test_each_form_of_samples_becomes_the_mean_of_its_channels(
    code: int, bits: int, extensible: bool
) -> None:
    head = form(code, 2, 8000, bits)
    if extensible:
        head = form(0xFFFE, 2, 8000, bits) + struct.pack("<HHI", 22, bits, 3) + struct.pack("<H14x", code)
    # An odd chunk is followed by a byte that does not count.
    raw = riff((b"LIST", b"abc\0")[:2], (b"fmt ", head), (b"data", encoded(code, bits)))
    recording = read_recording(raw, "audio/wav")
    assert (recording.rate, recording.channels, recording.frames) == (8000, 2, 5000)
    # One step of the samples, and half of it for the scale of 2^(n-1) instead of one less.
    np.testing.assert_allclose(samples(raw), WAVES.mean(axis=1), atol=2.0 ** -(min(bits, 24) - 2))


def test_l16_is_big_endian_and_its_rate_is_required() -> None:
    raw = np.array([1, -2, 300], ">i2").tobytes()
    expected = np.array([1, -2, 300]) / 32768
    np.testing.assert_array_equal(samples(raw, "audio/l16", "rate=16000"), expected.astype(np.float32))
    assert read_recording(raw * 2, "audio/l16", " rate=8000 ; channels=2").frames == 3
    for parameters in ("", "channels=1", "rate=", "rate=x", "rate=16000;codec=1", "rate=99999999"):
        with pytest.raises(InputError):
            read_recording(raw, "audio/l16", parameters)


@pytest.mark.parametrize("length", [0, 0x7FFFFFFF, 0xFFFFFFFF, 40_000_000])
def test_a_length_that_a_recorder_did_not_know_means_to_the_end(length: int) -> None:
    data = encoded(1, 16)
    raw = riff((b"fmt ", form(1, 2, 8000, 16)), (b"data", data), length=length)
    assert read_recording(raw, "audio/wav").frames == 5000


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "expected a WAV file"),
        (b"OggS" + bytes(40), "expected a WAV file"),
        (riff((b"data", bytes(4))), "expected a chunk 'fmt '"),
        (riff((b"fmt ", form(1, 1, 8000, 16))), "expected a chunk 'data'"),
        (riff((b"fmt ", bytes(8)), (b"data", b"")), "expected a format of at least 16"),
        (riff((b"fmt ", form(85, 1, 8000, 16)), (b"data", bytes(4))), "got format 85"),
        (riff((b"fmt ", form(1, 1, 8000, 12)), (b"data", bytes(4))), "12 bits"),
        (riff((b"fmt ", form(1, 1, 0, 16)), (b"data", bytes(4))), "expected a rate"),
        (riff((b"fmt ", form(1, 1, 2**32 - 1, 16)), (b"data", bytes(4))), "expected a rate"),
        (riff((b"fmt ", form(1, 0, 8000, 16)), (b"data", bytes(4))), "expected 1 to 32 channels"),
        (riff((b"fmt ", form(1, 65535, 8000, 16, 65534)), (b"data", bytes(4))), "65535 channels"),
        (riff((b"fmt ", form(1, 33, 8000, 16)), (b"data", bytes(4))), "got 33"),
        (riff((b"fmt ", form(1, 2, 8000, 16, 2)), (b"data", bytes(4))), "expected 4 bytes"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(raw: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        read_recording(raw, "audio/wav")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_samples_that_are_not_finite_are_refused(value: float) -> None:
    raw = riff((b"fmt ", form(3, 1, 8000, 64)), (b"data", np.array([0, value], "<f8").tobytes()))
    with pytest.raises(InputError, match="finite"):
        samples(raw)


@given(st.data())
def test_damaged_files_are_read_or_refused(data: st.DataObject) -> None:
    raw = bytearray(riff((b"fmt ", form(1, 1, 8000, 16)), (b"data", bytes(20))))
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        recording = read_recording(cut, "audio/wav")
        assert sum(block.size for block in recording.blocks()) == recording.frames <= 20
    except InputError:
        pass
