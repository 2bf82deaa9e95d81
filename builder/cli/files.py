"""`run` and `infer` with several pictures or recordings: an answer for each, its accuracy, and a summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.terminal import redraw, say
from builder.cli import EXIT_INPUT
from builder.cli.answers import Summary, draw_answer, drawn_names, found_objects
from builder.cli.failures import Failures
from builder.cli.json_output import print_json
from builder.errors import ModelError

if TYPE_CHECKING:
    from builder.running.accuracy import Truth


@dataclass(frozen=True, slots=True)
class File:
    """One of the files.

    Attributes
    ----------
    path
        The file.
    truth
        Its class, if a table says it.
    drawn
        Where its answer is drawn, or None.
    """

    path: Path
    truth: Truth | None
    drawn: Path | None


class Files:
    """The files that a model is asked about, and what becomes of the answers.

    Parameters
    ----------
    names
        Files, folders and patterns; none for those of `accuracy`.
    accuracy
        A table of files and labels, or annotations of COCO (`.json`); or None.
    labels
        The model's labels, if they are known.
    draw
        A file or a folder for drawn answers, or None.
    as_json
        Whether the answers are printed as JSON.

    Raises
    ------
    ModelError
        If an argument cannot be used.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        accuracy: str | None,
        labels: Sequence[str] | None,
        draw: str | None,
        as_json: bool,
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
        self._summary = Summary()
        self._failures = Failures("inputs")
        self._documents: list[dict[str, object]] = []
        self._began = time.monotonic()

    def __iter__(self) -> Iterator[File]:
        for number, file in enumerate(self._files, 1):
            redraw(f"{number} of {len(self._files)}: {file.path.name[:60]}")
            yield file

    def add(
        self,
        file: File,
        answers: Mapping[str, Any] | None,
        is_right: Callable[[Truth], tuple[bool, bool, int]],
        document: Mapping[str, object],
        lines: Sequence[str],
    ) -> None:
        """Take the answer about a file.

        Parameters
        ----------
        file
            The file.
        answers
            The outputs of the postprocess as a local run has them, or None.
        is_right
            Returns whether the right class is the best one, or among the five best, and how many there are.
        document, lines
            The answer as JSON, and as text.

        Raises
        ------
        ModelError
            If it cannot be drawn or compared.
        """
        if file.drawn is not None:
            draw_answer(file.path, answers, file.drawn)
        if self._objects is not None:
            self._objects.add(file.path, found_objects(answers))
        if self._classes is not None and file.truth is not None:
            self._classes.count(*is_right(file.truth))
        self._summary.add(answers)
        if self._as_json:
            self._documents.append({"file": str(file.path), **document})
        elif self._objects is None and self._classes is None:
            redraw()
            say(f"{file.path}:", *lines)

    def refuse(self, file: File, error: Exception) -> None:
        """Take the error of a file."""
        self._failures.add(str(file.path), error)

    def finish(self) -> int:
        """Print the summary, and return the exit code."""
        redraw()
        self._failures.end()
        accuracy = self._classes or self._objects
        if self._as_json:
            counts = {} if accuracy is None else {"accuracy": accuracy.document()}
            print_json({"results": self._documents, "failed": self._failures.count} | counts)
        else:
            say(self._summary.line(time.monotonic() - self._began, self._failures.count))
            if accuracy is not None:
                say(accuracy)
        return EXIT_INPUT if self._failures.count else 0
