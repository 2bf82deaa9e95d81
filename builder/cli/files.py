"""`run` and `infer` with several pictures or recordings: an answer for each, its accuracy, and a summary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agent.terminal import redraw, say, say_json
from builder.cli import EXIT_INPUT
from builder.cli.answers import Computed, document, draw_answer, drawn_names, kinds_of, lines_of
from builder.cli.tally import Tally
from builder.errors import ModelError

if TYPE_CHECKING:
    from builder.running.accuracy import Truth
    from edgebundle.answer import Answer


@dataclass(frozen=True, slots=True)
class File:
    """One of the files.

    `truth`: its class, if a table says it.
    `drawn`: where its answer is drawn, or None.
    """

    path: Path
    truth: Truth | None
    drawn: Path | None


class Files:
    """The files that a model is asked about, and what becomes of the answers.

    `names`: files, folders and patterns; none for those of `accuracy`.
    `accuracy`: a table of files and labels, or annotations of COCO (`.json`); or None.
    `labels`: the model's labels, if they are known.
    `draw`: a file or a folder for drawn answers, or None.
    `most`: how many classes or objects of an answer are printed; None for all.
    Raises `ModelError` if an argument cannot be used.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        accuracy: str | None,
        labels: Sequence[str] | None,
        draw: str | None,
        as_json: bool,
        most: int | None = None,
    ) -> None:
        from builder.running.accuracy import Accuracy, read_truths, truths_of
        from builder.running.detection_accuracy import DetectionAccuracy
        from builder.running.input_files import input_files

        truths: Sequence[Truth | None] = ()
        self._classes: Accuracy | None = None
        self._objects: DetectionAccuracy | None = None
        paths = input_files(names) if names else []
        if accuracy is not None and accuracy.endswith(".json"):
            self._objects = DetectionAccuracy(accuracy)
            paths = [path for path in paths or self._objects.files if self._objects.has(path)]
            if not paths:
                raise ModelError(
                    f"--accuracy: {accuracy} does not have the pictures of {', '.join(names)}",
                    hint="give pictures that the annotations name, or leave out --inputs to take all of them",
                )
        elif accuracy is not None:
            self._classes = Accuracy()
            rows = read_truths(accuracy, labels)
            truths = found = truths_of(
                paths or {truth.file.resolve(): truth.file for truth in rows}.values(), rows, accuracy
            )
            paths = [truth.file for truth in found]
        drawn = drawn_names(paths, draw) if draw else [None] * len(paths)
        self._files = list(map(File, paths, truths or [None] * len(paths), drawn))
        self._as_json = as_json
        self._most = most
        self._tally = Tally("input")
        self._documents: list[dict[str, object]] = []

    def __iter__(self) -> Iterator[File]:
        for number, file in enumerate(self._files, 1):
            redraw(f"{number} of {len(self._files)}: {file.path.name[:60]}")
            yield file

    def add(self, file: File, answer: Answer) -> None:
        """Take the answer about a file.

        Raises `ModelError` if it cannot be drawn or compared.
        """
        if file.drawn is not None:
            draw_answer(file.path, answer, file.drawn)
        if self._objects is not None:
            if not answer.lists("classes"):
                raise ModelError(
                    "--accuracy: expected a bundle that answers with boxes for annotations in JSON, "
                    "got another one",
                    hint="a classifier takes a CSV table of files and labels; "
                    "for boxes see docs/your-detector.md",
                )
            self._objects.add(file.path, answer.boxes)
        if self._classes is not None and file.truth is not None:
            self._classes.count(*_is_right(answer, file.truth))
        kinds = kinds_of(answer)
        self._tally.add(kinds if answer.lists("classes") else kinds[:1])
        if self._as_json:
            self._documents.append({"file": str(file.path), **document(answer)})
        elif self._objects is None and self._classes is None:
            redraw()
            say(f"{file.path}:", *lines_of(answer, self._most))

    def refuse(self, file: File, error: Exception) -> None:
        """Take the error of a file."""
        self._tally.refuse(str(file.path), error)

    def finish(self) -> int:
        """Print the summary, and return the exit code."""
        summary, failed = self._tally.end(), self._tally.failed
        accuracy = self._classes or self._objects
        if self._as_json:
            counts = {} if accuracy is None else {"accuracy": accuracy.document()}
            say_json({"results": self._documents, "failed": failed} | counts, indent=2)
        else:
            say(summary)
            if accuracy is not None:
                say(accuracy)
        return EXIT_INPUT if failed else 0


def _is_right(answer: Answer, truth: Truth) -> tuple[bool, bool, int]:
    """Return whether the right class is the best one, or among the five best, and how many there are.

    A device answers only with the classes that it lists; a run has the scores of all.
    """
    from builder.running.accuracy import TOP, is_right

    if isinstance(answer, Computed):
        return is_right(answer.result.get_output("output_0"), truth)
    if not answer.lists("indices"):
        raise ModelError(
            f"{answer.model}: expected an answer with classes, got none",
            hint="declare them: edgebundle repack BUNDLE --postprocess softmax,top5",
        )
    right = [truth.label in (each.label, str(each.index)) for each in answer.labels[:TOP]]
    return any(right[:1]), any(right), len(right)
