"""From a recording to answers: windows of samples into the model, its outputs over time into results.

Promises the same results however a recording is cut into parts: what is between two parts is in `Hearing`,
which is not changed, so that a part that fails can be sent again. Memory depends on the window and on the
answer, not on the recording. Leaves running the model to the caller, and reading files to `wav`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from agent.bundle.audio import Audio, Keywords, Speech
from agent.bundle.manifest import Manifest
from agent.bundle.processing import Softmax
from agent.errors import ExecutionError, FormatError, InputError
from agent.runtime.features import FeatureExtractor
from agent.runtime.micro_frontend import MicroFrontend
from agent.runtime.postprocess import Value, class_count, softmax
from agent.runtime.quantisation import to_input, to_real
from agent.runtime.segments import Segment, SpeechFinder, WordFinder
from agent.runtime.storage import Array
from agent.runtime.wav import Recording

Finder = SpeechFinder | WordFinder
# Values of an output over all windows of one request, in bytes: the answer is copied once or twice.
MAX_OUTPUT_BYTES: Final = 32 << 20


@dataclass(frozen=True, slots=True)
class Hearing:
    """What is between two parts of a recording.

    `pending` are the samples that the next window begins with (float32, shape (n,)), `finders` what is going
    on for each step that finds something, and `noise` what the frontend knows about the noise, or an empty
    array.
    """

    pending: Array = field(repr=False)
    windows: int
    samples: int
    finders: tuple[Finder, ...]
    noise: Array = field(repr=False)


class Listener:
    """One model's declared audio and postprocess, set up once.

    `labels` are names of the classes in UTF-8, or empty. Raises FormatError if the declaration does not give
    the input's shape, a step does not fit its output, or there are fewer labels than classes.
    """

    def __init__(self, manifest: Manifest, labels: Sequence[bytes] = ()) -> None:
        if manifest.audio is None:
            raise FormatError("expected a declaration of audio, got none")
        self.audio: Audio = manifest.audio
        self._spec = next(spec for spec in manifest.inputs if spec.name == manifest.audio.input)
        self._quantised = manifest.quantised_inputs.get(manifest.audio.input)
        declared = manifest.audio.features
        self._micro = (
            MicroFrontend(manifest.audio) if declared is not None and declared.log == "micro" else None
        )
        self._extract = None if declared is None or self._micro else FeatureExtractor(manifest.audio)
        self._labels = tuple(labels)
        steps = () if manifest.postprocess is None else manifest.postprocess.steps
        self._softmax = [step for step in steps if isinstance(step, Softmax)]
        self._steps = [step for step in steps if isinstance(step, Speech | Keywords)]
        outputs = {spec.name: spec for spec in manifest.outputs}
        for step in self._steps:
            count = class_count(step, outputs)
            if labels and len(labels) < count:
                raise FormatError(
                    f"labels.txt: expected a line for each of {count} classes, got {len(labels)}"
                )
        self._consumed = {step.output for step in self._steps}
        self._real = manifest.real_outputs
        self._prefixes = ["" if len(self._steps) == 1 else f"{step.output}_" for step in self._steps]
        size = self._spec.nbytes // self._spec.itemsize
        wanted = manifest.audio.window
        if declared is not None:
            wanted = manifest.audio.frames * (declared.coefficients or declared.bands)
        if size != wanted:
            raise FormatError(f"audio: expected an input of {wanted} values for a window, got {self._spec}")

    def begin(self) -> Hearing:
        """Return what there is before the first sample."""
        rate = self.audio.rate
        finders = (
            SpeechFinder(step, rate) if isinstance(step, Speech) else WordFinder(step) for step in self._steps
        )
        noise = np.zeros(0, np.int64) if self._micro is None else self._micro.begin()
        return Hearing(np.zeros(self.audio.lead, np.float32), 0, 0, tuple(finders), noise)

    def check(self, recording: Recording) -> None:
        """Check that a recording has the declared rate; another raises InputError."""
        rate = self.audio.rate
        if recording.rate != rate:
            raise InputError(
                f"expected a recording of {rate} samples a second, got {recording.rate}",
                hint=f"convert it: ffmpeg -i in.wav -ar {rate} -ac 1 out.wav, or arecord -r {rate}",
            )

    def prepare(self, window: Array, noise: Array) -> tuple[Array, Array]:
        """Return the model's input for a window: its shape and dtype; and the noise for the next window."""
        audio = self.audio
        values = window.astype(np.float64) if audio.features is not None else window
        if audio.peak != "none":
            peak = values.max() if audio.peak == "maximum" else np.abs(values).max()
            if peak > 0:
                values = values / peak
        if audio.scale != 1.0:
            values = values * audio.scale
        if self._extract is not None:
            values = self._extract(values)
        elif self._micro is not None:
            values, noise = self._micro(values, noise)
        return to_input(values, self._spec.dtype, self._quantised).reshape(self._spec.shape), noise

    def listen(
        self,
        hearing: Hearing,
        recording: Recording | None,
        run: Callable[[Array], Mapping[str, Array]],
        *,
        end: bool,
    ) -> tuple[Hearing, dict[str, Value]]:
        """Take the next part of a recording, or none, and return what there is behind it, and the results.

        `run` runs the model on its input, and returns its outputs by name, which the next run may overwrite.
        If the recording has its `end` here, its rest is filled with zeros to a window.

        For speech, the results are `segments` (float64, shape (m, 2), seconds from the beginning), those that
        ended in this part, `speaking` (bool, shape (1,)), whether one goes on, and `probabilities` (float32,
        shape (n,), one for each window). For keywords they are `segments`, `labels`, `classes` (int64) and
        `scores` (float32). Other outputs, of all n windows, have the shape (n, ...). `seconds` (float64,
        shape (1,)) is where the part ended.

        Raises InputError if the rate is another, a sample is not finite, or there are no samples at all, and
        ExecutionError if scores are NaN, or the outputs are too large for an answer.
        """
        track = _Track(self, hearing)
        if recording is not None:
            self.check(recording)
            for block in recording.blocks():
                track.add(block, run)
        if end:
            if not track.samples:
                raise InputError("expected samples, got a recording without any")
            track.fill(run)
        return track.result(end=end)

    def scores(self, outputs: Mapping[str, Array]) -> dict[str, Array]:
        """Make quantised outputs real, and apply the steps that change an output."""
        values = dict(outputs)
        for name, quantised in self._real.items():
            values[name] = to_real(values[name], quantised)
        for step in self._softmax:
            values[step.output] = softmax(values[step.output], step.axis)
        return values

    @property
    def steps(self) -> list[Speech | Keywords]:
        """The steps that find something over time."""
        return self._steps

    def results(
        self,
        found: Sequence[Sequence[Segment]],
        finders: Sequence[Finder],
        outputs: Mapping[str, Array],
    ) -> dict[str, Value]:
        """Return what was found, and the outputs of all windows (shape (n, ...)), by name."""
        results: dict[str, Value] = {}
        for step, prefix, segments, finder in zip(self._steps, self._prefixes, found, finders, strict=True):
            edges = [(segment.start, segment.end) for segment in segments]
            results[f"{prefix}segments"] = np.array(edges, np.float64).reshape(-1, 2) / self.audio.rate
            if isinstance(finder, SpeechFinder):
                results[f"{prefix}speaking"] = np.array([finder.start is not None])
                values = outputs.get(step.output)
                scores = () if values is None else values.reshape(len(values), -1)[:, 0]
                results[f"{prefix}probabilities"] = np.array(scores, np.float32)
                continue
            if self._labels:
                results[f"{prefix}labels"] = tuple(self._labels[segment.label] for segment in segments)
            results[f"{prefix}classes"] = np.array([segment.label for segment in segments], np.int64)
            results[f"{prefix}scores"] = np.array([segment.score for segment in segments], np.float32)
        return results | {name: values for name, values in outputs.items() if name not in self._consumed}


class _Track:
    """One part of a recording on its way through the model."""

    def __init__(self, listener: Listener, hearing: Hearing) -> None:
        self._listener = listener
        self._pending = hearing.pending
        self._windows = hearing.windows
        self._noise = hearing.noise
        self.samples = hearing.samples
        self._finders = list(hearing.finders)
        self._found: list[list[Segment]] = [[] for _ in hearing.finders]
        self._outputs: dict[str, _Windows] = {}
        self._nbytes = 0

    def add(self, block: Array, run: Callable[[Array], Mapping[str, Array]]) -> None:
        """Take samples, and run the model on each window that is complete."""
        audio = self._listener.audio
        self.samples += block.size
        samples = np.concatenate((self._pending, block))
        at = 0
        while samples.size - at >= audio.window:
            self._run(samples[at : at + audio.window], run)
            at += audio.hop
        self._pending = samples[at:].copy()

    def fill(self, run: Callable[[Array], Mapping[str, Array]]) -> None:
        """Run the model on the rest, filled with zeros, if no window had all of it."""
        audio = self._listener.audio
        had = audio.window - audio.hop if self._windows else audio.lead
        if self._pending.size > had:
            window = np.zeros(audio.window, np.float32)
            window[: self._pending.size] = self._pending
            self._run(window, run)
            self._pending = self._pending[:0]

    def result(self, *, end: bool) -> tuple[Hearing, dict[str, Value]]:
        """Return what is behind this part, and what was found in it."""
        if end:
            for index, finder in enumerate(self._finders):
                last = finder.finish(self.samples)
                if last is not None:
                    self._found[index].append(last)
        hearing = Hearing(self._pending, self._windows, self.samples, tuple(self._finders), self._noise)
        seconds = np.array([self.samples / self._listener.audio.rate])
        outputs = {name: windows.array() for name, windows in self._outputs.items()}
        return hearing, self._listener.results(self._found, self._finders, outputs) | {"seconds": seconds}

    def _run(self, window: Array, run: Callable[[Array], Mapping[str, Array]]) -> None:
        listener, audio = self._listener, self._listener.audio
        given, self._noise = listener.prepare(window, self._noise)
        outputs = listener.scores(run(given))
        for name, value in outputs.items():
            self._nbytes += value.nbytes
            if name not in self._outputs:
                self._outputs[name] = _Windows(value)
            self._outputs[name].add(value)
        if self._nbytes > MAX_OUTPUT_BYTES:
            raise ExecutionError(
                f"expected outputs of at most {MAX_OUTPUT_BYTES} bytes for a recording, got more",
                hint="send it in parts, as the steps of a session",
            )
        start = self._windows * audio.hop
        for index, step in enumerate(listener.steps):
            scores = outputs[step.output].reshape(-1)
            if np.isnan(scores).any():
                raise ExecutionError(f"output {step.output!r}: expected scores, got NaN")
            self._finders[index], found = _push(self._finders[index], start, audio.window, scores)
            if found is not None:
                self._found[index].append(found)
        self._windows += 1


class _Windows:
    """An output of all windows in one piece of memory: an array for each takes fifty times a score."""

    def __init__(self, first: Array) -> None:
        self._dtype, self._shape = first.dtype, first.shape
        self._memory, self._count = bytearray(), 0

    def add(self, value: Array) -> None:
        """Add the output of the next window."""
        self._memory += value.tobytes()
        self._count += 1

    def array(self) -> Array:
        """Return it, shape (n, ...)."""
        return np.frombuffer(self._memory, self._dtype).reshape(self._count, *self._shape)


def _push(finder: Finder, start: int, window: int, scores: Array) -> tuple[Finder, Segment | None]:
    if isinstance(finder, SpeechFinder):
        return finder.push(start, float(scores[0]))
    scores = (scores.astype(np.float64) - finder.declared.zero) * finder.declared.scale
    if finder.declared.activation == "softmax":
        scores = softmax(scores, -1)
    finder, scores = finder.mean(scores)
    best = int(np.argmax(scores))
    return finder.push(start, start + window, best, float(scores[best]))
