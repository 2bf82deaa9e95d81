"""Presets for sound that do not fit: one line for the user, whatever the declaration holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.bundle.audio import Keywords
from agent.bundle.tensor_spec import TensorSpec
from builder.compiling import audio_presets, declarations
from builder.compiling.declared import declare
from builder.compiling.options import Options
from builder.compiling.outline import Outline
from builder.errors import ModelError

SPECTROGRAM = TensorSpec("x", "FP32", (1, 128, 101))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("librosa,bands=0", "at least 1, got 0"),
        ("librosa,bands=-4", "at least 1, got -4"),
        ("librosa,features=3", "expected features as a table, got 3"),
        ("librosa,bands=many", "many"),
        (f"librosa,low_hz={10**400}", "too large"),
        ("samples,step=160", "expected bands"),
        ("samples,bands=128", "expected frame"),
    ],
)
def test_an_option_that_cannot_be_used_is_one_line(text: str, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        audio_presets.audio(text, [SPECTROGRAM])
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("line", ["preset = [1]", "kind = [1]", 'kind = {a = "audio"}', "preset = 3"])
def test_a_file_with_another_type_of_name_is_not_for_sound(tmp_path: Path, line: str) -> None:
    path = tmp_path / "sound.toml"
    path.write_text(line)
    assert not audio_presets.is_audio(str(path))


def test_a_librosa_spectrogram_gets_the_window_of_its_frames() -> None:
    audio = audio_presets.audio("librosa", [SPECTROGRAM])
    assert (audio.window, audio.frames) == (100 * 512, 101)


def test_a_wake_word_hears_each_frame_once() -> None:
    audio = audio_presets.audio("microwakeword", [TensorSpec("x", "INT8", (1, 3, 40))])
    assert (audio.window, audio.hop, audio.frames) == (800, 480, 3)
    slower = audio_presets.audio("microwakeword,step=320", [TensorSpec("x", "INT8", (1, 2, 40))])
    assert (slower.window, slower.hop, slower.frames) == (800, 640, 2)
    with pytest.raises(ModelError, match="multiple of step, 160, got 500"):
        audio_presets.audio("microwakeword,hop=500", [TensorSpec("x", "INT8", (1, 3, 40))])


def test_a_wake_word_has_one_probability() -> None:
    preset = audio_presets.preset_of("microwakeword")
    assert preset is not None
    assert preset.postprocess is not None
    declared = declarations.postprocess(
        preset.postprocess, [TensorSpec("p", "UINT8", (1, 1))], [TensorSpec("x", "INT8", (1, 3, 40))]
    )
    [step] = declared.steps
    assert isinstance(step, Keywords)
    assert (step.output, step.threshold, step.average) == ("p", 0.97, 5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(preprocess="samples", postprocess="softmax,top2"), "for a recording, got top_k"),
        (Options(postprocess="keywords"), "keywords: expected a preprocess for recordings"),
    ],
)
def test_steps_of_recordings_belong_to_recordings(options: Options, message: str) -> None:
    x, y = TensorSpec("x", "FP32", (1, 1600)), TensorSpec("y", "FP32", (1, 4))
    with pytest.raises(ModelError, match=message) as caught:
        declare(Outline((x,), (y,)), options)
    assert "keywords" in caught.value.hint or "microwakeword" in caught.value.hint
    declared = declare(Outline((x,), (y,)), Options(preprocess="samples", postprocess="softmax,keywords"))
    assert declared.audio is not None
