"""Presets for models that take sound: how a recording becomes the input, and what else follows from the name.

Promises a declaration that fits the model's tensors: the device's own `Listener` is built for it when the
bundle is described. A preset also knows the shapes and values that its authors' exports leave open, which
outputs are states, and the postprocess that belongs to it. Sources: snakers4/silero-vad (utils_vad.py),
mlcommons/tiny (keyword_spotting/get_dataset.py), openai/whisper (audio.py), the frontend's settings and the
mean of scores in ESPHome's micro_wake_word, and the defaults of librosa and torchaudio.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from types import MappingProxyType
from typing import Any, Final

from agent.bundle import canonical_json
from agent.bundle.audio import Audio, Features
from agent.bundle.tensor_spec import TensorSpec
from agent.errors import EdgeError
from builder.compiling.declaration_file import read_toml
from builder.errors import ModelError

_FIELDS: Final = "docs/audio.md lists the fields and what they take"
_KIND: Final = "audio"


@dataclass(frozen=True, slots=True)
class AudioPreset:
    """What a name stands for.

    `audio`: fields of `Audio`; `window` may be missing and is then the number of the input's values.
    `features`: fields of `Features`, or empty.
    `input_shapes`, `input_values`: what the model's file leaves open, by input.
    `states`: as `builder.compiling.states` takes them.
    `postprocess`: what is declared without a `--postprocess`.
    `labels`: names of the classes for a model that has as many, if the user gives none.
    """

    audio: Mapping[str, Any]
    features: Mapping[str, Any] = field(default_factory=dict)
    input_shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    input_values: Mapping[str, float] = field(default_factory=dict)
    states: tuple[str, ...] = ()
    postprocess: str | None = None
    labels: tuple[str, ...] = ()


# 30 ms every 20 ms; tf.signal.stft, linear_to_mel_weight_matrix and mfccs_from_log_mel_spectrograms.
_TENSORFLOW: Final = {
    "frame": 480, "step": 320, "fft": 512, "bands": 40, "low_hz": 20.0, "high_hz": 4000.0,
    "spectrum": "magnitude", "edges": "mel", "log": "natural", "offset": 1e-6, "dct": "tensorflow",
}  # fmt: skip
_PRESETS: Final[Mapping[str, AudioPreset]] = MappingProxyType(
    {
        "samples": AudioPreset({"rate": 16000}),
        "silero": AudioPreset(
            {"rate": 16000, "window": 576, "hop": 512, "lead": 64},
            input_shapes={"input": (1, 576), "state": (2, 1, 128)},
            input_values={"sr": 16000},
            states=("state:stateN",),
            postprocess="speech",
        ),
        "silero-8k": AudioPreset(
            {"rate": 8000, "window": 288, "hop": 256, "lead": 32},
            input_shapes={"input": (1, 288), "state": (2, 1, 128)},
            input_values={"sr": 8000},
            states=("state:stateN",),
            postprocess="speech",
        ),
        "silero-v4": AudioPreset(
            {"rate": 16000, "window": 512, "hop": 512},
            input_shapes={"input": (1, 512), "h": (2, 1, 64), "c": (2, 1, 64)},
            input_values={"sr": 16000},
            states=("h:hn", "c:cn"),
            postprocess="speech",
        ),
        "kws": AudioPreset(
            {"rate": 16000, "window": 16000, "hop": 8000, "peak": "maximum"},
            {**_TENSORFLOW, "coefficients": 10},
            postprocess="keywords,ignore=[10, 11]",
            labels=(
                "down", "go", "left", "no", "off", "on", "right", "stop", "up", "yes", "silence", "unknown",
            ),
        ),
        # 30 ms every 10 ms; the frames of a window begin where those of the window before end.
        "microwakeword": AudioPreset(
            {"rate": 16000},
            {
                "frame": 480, "step": 160, "fft": 512, "bands": 40, "low_hz": 125.0, "high_hz": 7500.0,
                "log": "micro",
            },
            postprocess="keywords,threshold=0.97,average=5",
        ),
        "whisper": AudioPreset(
            {"rate": 16000, "window": 480000, "hop": 480000},
            {
                "frame": 400, "step": 160, "fft": 400, "bands": 80, "low_hz": 0.0, "high_hz": 8000.0,
                "scale": "slaney", "norm": "slaney", "log": "whisper", "offset": 1e-10, "centred": True,
                "order": "bands_first",
            },
        ),
        "librosa": AudioPreset(
            {"rate": 22050},
            {
                "frame": 2048, "step": 512, "fft": 2048, "bands": 128, "low_hz": 0.0, "high_hz": 11025.0,
                "scale": "slaney", "norm": "slaney", "log": "decibel", "offset": 1e-10, "centred": True,
                "order": "bands_first",
            },
        ),
        "torchaudio": AudioPreset(
            {"rate": 16000},
            {
                "frame": 400, "step": 200, "fft": 400, "bands": 128, "low_hz": 0.0, "high_hz": 8000.0,
                "log": "natural", "offset": 1e-6, "centred": True, "order": "bands_first",
            },
        ),
    }
)  # fmt: skip
AUDIO_PRESETS: Final = tuple(_PRESETS)


def is_audio(text: str) -> bool:
    """Return whether a preprocess is for sound: the name of a preset, or a TOML file with `kind = "audio"`.

    Raises
    ------
    ModelError
        If it is the name of a file that cannot be read.
    """
    if text.endswith(".toml"):
        fields = read_toml(text, _FIELDS)
        return fields.get("kind") == _KIND or str(fields.get("preset")) in _PRESETS
    return text.partition(",")[0].strip() in _PRESETS


def preset_of(text: str | None) -> AudioPreset | None:
    """Return the preset that a preprocess for sound begins with, or None if there is none."""
    if text is None or not is_audio(text):
        return None
    if not text.endswith(".toml"):
        return _PRESETS[text.partition(",")[0].strip()]
    fields = read_toml(text, _FIELDS)
    preset = _PRESETS.get(str(fields.get("preset")), AudioPreset({}))
    states = fields.get("states", preset.states)
    if not isinstance(states, list | tuple) or not all(isinstance(state, str) for state in states):
        raise ModelError(
            f"{text}: expected states, a list such as ['h:hn'], got {states!r:.80}",
            hint="write states = ['h:hn', 'c:cn'], each an input and the output that it becomes",
        )
    return replace(preset, states=tuple(states))


def labels_for(preset: AudioPreset, outputs: Sequence[TensorSpec]) -> tuple[str, ...] | None:
    """Return a preset's labels if the model has as many classes, else None."""
    fits = any(len(preset.labels) in spec.shape for spec in outputs)
    return preset.labels if preset.labels and fits else None


def audio(text: str, inputs: Sequence[TensorSpec]) -> Audio:
    """Declare how a recording becomes an input.

    `text`: one of `AUDIO_PRESETS`, with options of `Audio` and `Features` (`kws,hop=4000`) or without; or a
        TOML file with `preset` or `kind = "audio"`, such fields, and `states`.
    `inputs`: the model's inputs without states.
    Raises `ModelError` if a field is unknown or out of range, or does not fit the input.
    """
    preset = preset_of(text)
    assert preset is not None
    given = _options(text)
    known = {each.name for each in dataclass_fields(Audio)} - {"features"}
    of_features = {each.name for each in dataclass_fields(Features)}
    own = given.pop("features", {})
    if not isinstance(own, dict):
        raise ModelError(
            f"preprocess {text[:80]}: expected features as a table, got {own!r:.80}",
            hint="write them below a line [features]",
        )
    features = {**preset.features, **own}
    fields = dict(preset.audio)
    for name, value in given.items():
        if name in known:
            fields[name] = value
        elif name in of_features:
            features[name] = value
        else:
            raise ModelError(
                f"preprocess {text[:80]}: unknown option {name[:80]!r}",
                hint=f"options: {', '.join(sorted(known | of_features))}",
            )
    named = [spec for spec in inputs if spec.name == fields.get("input", spec.name)]
    if len(named) != 1:
        found = ", ".join(map(str, inputs))[:300]
        raise ModelError(
            f"preprocess {text[:80]}: expected one input for a recording, got {found}",
            hint="name one of them in the file: input = 'NAME'",
        )
    fields["input"] = named[0].name
    size = named[0].nbytes // named[0].itemsize
    try:
        if "window" not in fields:
            fields["window"] = _window(size, features)
        fields.setdefault("hop", _hop(fields["window"], features))
        declared = Audio(
            **_floats(Audio, fields), features=Features(**_floats(Features, features)) if features else None
        )
        # TOML's types are not checked before.
        document = canonical_json.parse(canonical_json.encode(canonical_json.to_json(declared)), "preprocess")
        canonical_json.from_json(Audio, document, "preprocess")
    except (ArithmeticError, EdgeError, TypeError, ValueError) as error:
        raise ModelError(f"preprocess {text[:80]}: {error}", hint=_FIELDS) from error
    values = declared.window
    if declared.features is not None:
        values = declared.frames * (declared.features.coefficients or declared.features.bands)
    if values != size:
        raise ModelError(
            f"preprocess {text[:80]}: expected an input of {values} values for a window of "
            f"{declared.window} samples, got {named[0]}",
            hint="change window, frame, step, bands or coefficients, as the model was trained",
        )
    return declared


def _window(size: int, features: Mapping[str, Any]) -> int:
    """Return the window of samples that an input of `size` values is computed of."""
    if not features:
        return size
    if missing := sorted({"bands", "frame", "step"} - features.keys()):
        raise ValueError(f"expected {missing[0]}, got features without it")
    columns = int(features.get("coefficients", 0)) or int(features["bands"])
    if columns < 1:
        raise ValueError(f"expected bands and coefficients of at least 1, got {columns}")
    rows = size // columns
    if features.get("centred"):
        return max(1, (rows - 1) * int(features["step"]))
    return (rows - 1) * int(features["step"]) + int(features["frame"])


def _hop(window: Any, features: Mapping[str, Any]) -> Any:  # noqa: ANN401 - checked with all fields
    """Return the hop without a declared one: a window, or with a frontend that listens on, its frames."""
    if features.get("log") != "micro":
        return window
    return (1 + (window - features["frame"]) // features["step"]) * features["step"]


def _floats(cls: type[Audio] | type[Features], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with whole numbers as floats where the declaration has floats."""
    kinds = {each.name: each.type for each in dataclass_fields(cls)}
    return {
        name: float(value) if kinds.get(name) == "float" and type(value) is int else value
        for name, value in fields.items()
    }


def _options(text: str) -> dict[str, Any]:
    if text.endswith(".toml"):
        return {k: v for k, v in read_toml(text, _FIELDS).items() if k not in ("preset", "kind", "states")}
    found: dict[str, Any] = {}
    for item in text.split(",")[1:]:
        name, is_option, value = item.partition("=")
        if not is_option:
            raise ModelError(
                f"preprocess: expected an option such as hop=4000, got {item[:80]!r}",
                hint="write each option behind a comma as NAME=VALUE",
            )
        try:
            found[name.strip()] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[name.strip()] = value.strip()
    return found
