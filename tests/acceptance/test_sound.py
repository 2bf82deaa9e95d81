"""Silero VAD and MLPerf Tiny's keyword spotting, from file to times, against their authors' wrappers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest

from agent.bundle.audio import Speech
from builder.bundles.package import Package
from builder.cli import main
from builder.running.local_run import run
from tests.agent.runtime.test_features import tensorflow_mfccs
from tests.agent.runtime.test_segments import reference
from tests.streaming_models import wav

pytestmark = pytest.mark.slow
RATE = 16000


def speech_like(seconds: float, seed: int = 0) -> np.ndarray:
    """Syllables: a buzz of 120 Hz through three formants that move, loud and soft four times a second."""
    rng = np.random.default_rng(seed)
    t = np.arange(round(seconds * RATE)) / RATE
    buzz = np.sin(2 * np.pi * np.cumsum(120 + 15 * np.sin(2 * np.pi * 3 * t)) / RATE)
    buzz = np.sign(buzz) * np.abs(buzz) ** 0.2
    voice = np.zeros_like(t)
    for low, move in ((500, 250), (1500, 500), (2500, 200)):
        centre = low + move * np.sin(2 * np.pi * 2 * t + rng.random() * 6)
        voice += buzz * np.cos(2 * np.pi * np.cumsum(centre) / RATE)
    envelope = np.clip(np.sin(2 * np.pi * 4 * t), 0, 1) * (np.sin(2 * np.pi * 0.4 * t) > 0)
    samples = 0.2 * voice * envelope + rng.normal(size=t.size) * 0.002
    return samples.astype(np.float32)


def test_silero_hears_what_its_authors_wrapper_hears(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, bundle = models / "silero_vad_16k_op15.onnx", tmp_path / "vad.bundle"
    assert main(["compile", str(model), "--preprocess", "silero", "-o", str(bundle), "-q"]) == 0
    samples = speech_like(6.3)
    (tmp_path / "speech.wav").write_bytes(wav(samples, RATE))
    # OnnxWrapper of silero_vad/utils_vad.py: each 512 samples after the last 64 of those before.
    session = ort.InferenceSession(str(model))
    state, context, expected = np.zeros((2, 1, 128), np.float32), np.zeros(64, np.float32), []
    for start in range(0, samples.size, 512):
        chunk = samples[start : start + 512]
        x = np.concatenate((context, np.pad(chunk, (0, 512 - chunk.size))))[None]
        probability, state = session.run(None, {"input": x, "state": state, "sr": np.array(RATE)})
        context = x[0, -64:]
        expected.append(float(probability.reshape(-1)[0]))
    answers = run(bundle, tmp_path / "speech.wav").answers
    assert answers is not None
    np.testing.assert_allclose(np.asarray(answers["probabilities"]), expected, atol=1e-4)
    found = reference(expected, samples.size, Speech("output"))
    np.testing.assert_allclose(np.asarray(answers["segments"]), np.array(found).reshape(-1, 2) / RATE)
    capsys.readouterr()
    assert main(["run", str(bundle), "--inputs", str(tmp_path / "speech.wav")]) == 0
    assert "6.30 s heard" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_keyword_spotting_gets_tensorflows_features(models: Path, tmp_path: Path, kind: str) -> None:
    litert = pytest.importorskip("ai_edge_litert.interpreter")
    model, bundle = models / "tiny" / f"kws_{kind}.tflite", tmp_path / "kws.bundle"
    declared = ["--preprocess", "kws", "--postprocess", "keywords,threshold=0.0"]
    assert main(["compile", str(model), *declared, "-o", str(bundle), "-q"]) == 0
    samples = speech_like(1.0, seed=4)
    (tmp_path / "word.wav").write_bytes(wav(samples, RATE))
    interpreter = litert.Interpreter(str(model))
    interpreter.allocate_tensors()
    (taken,), (given,) = interpreter.get_input_details(), interpreter.get_output_details()
    features = tensorflow_mfccs(samples.astype(np.float64) / samples.max()).reshape(taken["shape"])
    if kind == "int8":
        scale, zero = taken["quantization"]
        features = np.clip(np.rint(features / scale + zero), -128, 127)
    interpreter.set_tensor(taken["index"], features.astype(taken["dtype"]))
    interpreter.invoke()
    scores = interpreter.get_tensor(given["index"]).reshape(-1).astype(np.float64)
    if kind == "int8":
        scores = (scores - given["quantization"][1]) * given["quantization"][0]
    answers = run(bundle, tmp_path / "word.wav").answers
    assert answers is not None
    labels = Package.load(bundle).members["labels.txt"].split()
    assert answers["labels"] == (labels[int(scores.argmax())],)
    np.testing.assert_allclose(
        np.asarray(answers["scores"]), scores.max(), atol=1e-3 if kind == "float32" else 0.01
    )
