"""Show answers of `run` and `infer`: tables, JSON, drawn pictures, and the summary of many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from builder.running.detection_accuracy import Detection
    from builder.running.local_run import RunResult
    from edgebundle.answer import Answer

NOTHING_FOUND: Final = "nothing was found"  # by a detector: no score is over its threshold
_MOST_NAMED: Final = 8  # kinds of objects in the summary


def table(answers: Mapping[str, Any]) -> list[str]:
    """Return an answer as lines: score, label and box of each object, classes, or a text."""
    from builder.running.drawing import strings

    labels = strings(answers["labels"]) if "labels" in answers else None
    if "segments" in answers:
        return _segments(answers, labels)
    if "text" in answers:
        return [
            f"{float(score):8.4f}  {text}"
            for score, text in zip(answers["scores"], strings(answers["text"]), strict=True)
        ]
    if "class_map" in answers:
        names = labels or [f"class {index}" for index in answers["classes"]]
        return [
            f"{100 * float(share):7.2f}%  {name}"
            for share, name in zip(answers["shares"], names, strict=True)
        ]
    scores = answers.get("scores", ())
    if "boxes" in answers and not len(scores):
        return [NOTHING_FOUND]
    indices = answers.get("classes", answers.get("indices"))
    names = labels or ([] if indices is None else [f"class {int(index)}" for index in indices])
    width = max(map(len, names), default=0)
    lines = []
    for i, score in enumerate(scores if len(names) == len(scores) else ()):
        line = f"{float(score):8.4f}  {names[i]:{width}}"
        if "boxes" in answers:
            line += "  [" + ", ".join(f"{float(v):.0f}" for v in answers["boxes"][i]) + "]"
        if "keypoints" in answers:
            line += "  " + " ".join(
                f"({float(p[0]):.0f}, {float(p[1]):.0f})" for p in answers["keypoints"][i]
            )
        lines.append(line.rstrip())
    return lines


def _segments(answers: Mapping[str, Any], labels: list[str] | None) -> list[str]:
    """Return a line for each stretch of time: `0:01.25 to 0:03.10  speech`."""
    names = labels or [f"class {int(index)}" for index in answers.get("classes", ())]
    lines = []
    for i, (start, end) in enumerate(answers["segments"]):
        line = f"{clock(float(start))} to {clock(float(end))}"
        lines.append(f"{line}  {float(answers['scores'][i]):.4f}  {names[i]}" if names else f"{line}  speech")
    heard = f"{float(answers['seconds'][0]):.2f} s heard"
    if names or "probabilities" not in answers:
        count = len(lines)
        return [*lines, f"{heard}, {count} word{'' if count == 1 else 's'}"]
    spoken = sum(float(end - start) for start, end in answers["segments"])
    return [*lines, f"{heard}, {spoken:.2f} s of speech"]


def clock(seconds: float) -> str:
    """Return a time such as `1:02:03.45`, without hours if there are none."""
    minutes, rest = divmod(round(seconds * 100), 6000)
    hours, minutes = divmod(minutes, 60)
    tail = f"{rest // 100:02}.{rest % 100:02}"
    return f"{hours}:{minutes:02}:{tail}" if hours else f"{minutes}:{tail}"


def found_objects(answers: Mapping[str, Any] | None) -> list[Detection]:
    """Return the objects of a detector's answer.

    Raises
    ------
    ModelError
        If the answer is not a detector's.
    """
    from builder.errors import ModelError
    from builder.running.detection_accuracy import Detection
    from builder.running.drawing import strings

    if answers is None or not {"boxes", "scores", "classes"} <= set(answers):
        raise ModelError(
            "--accuracy: expected a bundle that answers with boxes for annotations in JSON, got another one",
            hint="a classifier takes a CSV table of files and labels; for boxes see docs/your-detector.md",
        )
    indices = [int(index) for index in answers["classes"]]
    labels = strings(answers["labels"]) if "labels" in answers else [str(index) for index in indices]
    boxes = [(float(x0), float(y0), float(x1), float(y1)) for x0, y0, x1, y1 in answers["boxes"]]
    return [
        Detection(label, index, float(score), box)
        for label, index, score, box in zip(labels, indices, answers["scores"], boxes, strict=True)
    ]


def document(result: RunResult) -> dict[str, object]:
    """Return a result as JSON."""
    made: dict[str, object] = {
        "outputs": {
            name: {"shape": list(a.shape), "dtype": str(a.dtype)} for name, a in result.outputs.items()
        }
    }
    if result.answers is not None:
        made["answers"] = {
            name: [bytes(v).decode() for v in value] if isinstance(value, tuple) else value.tolist()
            for name, value in result.answers.items()
        }
    if result.nearest is not None:
        made["nearest"] = asdict(result.nearest)
    if result.times is not None:
        made["times_s"] = {k: getattr(result.times, k) for k in ("mean", "median", "max", "min", "std")}
    return made


def draw_answer(picture: Path, answers: Mapping[str, Any] | None, output: Path) -> None:
    """Draw an answer on its picture and write that.

    Raises
    ------
    ModelError
        If there is no picture or no answer, or the file cannot be written.
    """
    from builder.errors import ModelError
    from builder.running.inputs import Picture, read_inputs

    given = read_inputs(picture, ())
    if not isinstance(given, Picture):
        raise ModelError(
            f"{picture}: expected a picture to draw on",
            hint="give a JPEG or PNG picture with --inputs, or leave out --draw",
        )
    if answers is None:
        raise ModelError(
            "expected an answer to draw, but the model declares no postprocess",
            hint="add one: edgebundle repack BUNDLE --postprocess PRESET",
        )
    draw_on(given.content, given.content_type, answers, output)


def draw_on(content: bytes, content_type: str, answers: Mapping[str, Any], output: Path) -> None:
    """Draw an answer on a picture and write the result to `output`.

    Raises
    ------
    ModelError
        If the picture cannot be read, the answer cannot be drawn, or the file cannot be written.
    """
    from agent.durable import replacing
    from builder.running.drawing import draw, encode

    drawn = encode(draw(content, content_type, answers), output.suffix)
    with replacing(output) as file:
        file.write(drawn)


def results_of(answer: Answer) -> dict[str, Any]:
    """Return a device's answer as a local run has it: arrays by name, and texts as strings."""
    return {each.name: each.flat() if each.datatype == "BYTES" else each.values for each in answer.outputs}


def drawn_names(files: list[Path], output: str) -> list[Path]:
    """Return where the picture of each input is drawn: the output itself, or a file in it for each input.

    Raises
    ------
    ModelError
        If there are several inputs and the output is a file, or it is the input itself or no picture, or its
        folder does not exist.
    """
    from builder.errors import ModelError
    from builder.running.drawing import format_of

    path = Path(output)
    is_folder = path.is_dir() or output.endswith("/")
    if len(files) > 1 and not is_folder:
        raise ModelError(
            f"--draw: expected a folder for {len(files)} inputs, got {output}", hint=f"use {output}/"
        )
    if not is_folder:
        if not path.parent.is_dir():
            raise ModelError(
                f"{output}: the folder {path.parent} does not exist", hint=f"make it: mkdir -p {path.parent}"
            )
        if any(path.resolve() == file.resolve() for file in files):
            raise ModelError(
                f"--draw: expected another file than the input, got {output}",
                hint="give --draw another name, or a folder",
            )
        format_of(path.suffix)
        return [path]
    path.mkdir(parents=True, exist_ok=True)
    taken: set[Path] = set()
    names = []
    for file in files:
        name, count = path / file.name, 1
        while name in taken or name.resolve() == file.resolve():
            count += 1
            name = path / f"{file.stem}-{count}{file.suffix}"
        taken.add(name)
        names.append(name)
    return names


class Summary:
    """What many answers have in common."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()
        self._answers = 0

    def add(self, answers: Mapping[str, Any] | None) -> None:
        """Count an answer: its objects, or its best class."""
        from builder.running.drawing import strings

        self._answers += 1
        if answers is None:
            return
        names = strings(answers["labels"]) if "labels" in answers else []
        ids = answers.get("classes", answers.get("indices", ()))
        names = names or [f"class {int(index)}" for index in ids]
        self._seen.update(names if "boxes" in answers else names[:1])

    def line(self, seconds: float, failed: int) -> str:
        """Return such as `24 inputs in 1.3 s, 54.2 ms each; 31 person, 4 bear; 1 could not be read`."""
        each = 1e3 * seconds / max(1, self._answers)
        inputs = "1 input" if self._answers == 1 else f"{self._answers} inputs"
        parts = [f"{inputs} in {seconds:.1f} s, {each:.1f} ms each"]
        most = self._seen.most_common(_MOST_NAMED)
        if most:
            more = f" and {len(self._seen) - len(most)} more" if len(self._seen) > len(most) else ""
            parts.append(", ".join(f"{count} {name}" for name, count in most) + more)
        if failed:
            parts.append(f"{failed} could not be used")
        return "; ".join(parts)
