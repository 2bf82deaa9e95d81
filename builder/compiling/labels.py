"""Labels: the names of a model's classes, from a file or a known list.

Promises exactly one label for each class that the postprocess can name, and refuses labels without a use, or
if the number of the first class is not known.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

from agent.bundle.archive import MAX_MEMBER_BYTES
from agent.bundle.audio import Keywords
from agent.bundle.detection import Objects
from agent.bundle.processing import ClassMap, Ctc, Detect, Pose, Postprocess, Step, TopK, outputs_of
from agent.bundle.tensor_spec import TensorSpec
from agent.runtime.postprocess import class_count
from builder.errors import ModelError
from builder.spelling import did_you_mean, similar_file

MAX_LABELS_BYTES: Final = MAX_MEMBER_BYTES["labels.txt"]
Labels: TypeAlias = str | os.PathLike[str] | Sequence[str]
BACKGROUND: Final = "background"
# Steps whose answers have labels.
NAMED: Final = frozenset(step.kind for step in (TopK, Detect, Objects, Pose, ClassMap, Ctc, Keywords))
COCO: Final = "coco"
_LABELS_HINT: Final = f"give a file with one label per line, or {COCO}"
# Labels, and the number of the class that the first one names.
_NUMBERED: Final = re.compile(r"(.+),\s*first\s*=(.*)", re.DOTALL)
# The 80 classes of COCO's detection task, in the order of its annotations (cocodataset.org).
COCO_LABELS: Final = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat",
    "traffic light", "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse",
    "sheep", "cow", "elephant", "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie",
    "suitcase", "frisbee", "skis", "snowboard", "sports ball", "kite", "baseball bat", "baseball glove",
    "skateboard", "surfboard", "tennis racket", "bottle", "wine glass", "cup", "fork", "knife", "spoon",
    "bowl", "banana", "apple", "sandwich", "orange", "broccoli", "carrot", "hot dog", "pizza", "donut",
    "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet", "tv", "laptop", "mouse",
    "remote", "keyboard", "cell phone", "microwave", "oven", "toaster", "sink", "refrigerator", "book",
    "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)  # fmt: skip
# COCO's numbers from 1 to 90 that no class has (cocodataset.org).
_UNUSED: Final = frozenset({12, 26, 29, 30, 45, 66, 68, 69, 71, 83})
_NUMBERS: Final = 90
# What label files call the line of a class that detectors have beside the others, and do not answer.
_PLACEHOLDERS: Final = frozenset({"???", "unlabeled", "n/a", BACKGROUND, "__background__"})
_LINE: Final = re.compile(r"\r\n|\r|\n")  # and not what Unicode calls one: dictionaries of texts have those
# A line with the number of its class: `0: person`, `0,person`, `0  person`.
_WITH_NUMBER: Final = re.compile(r"(\d{1,5})(\s*[:,;]\s*|\s+)(\S.*)")
_MOST_NUMBERS: Final = 1 << 16  # the most classes of a class map
_UTF_16: Final = (b"\xff\xfe", b"\xfe\xff")  # as Windows marks it


def read_labels(source: Labels) -> list[str]:
    """Read labels: `coco`, a UTF-8 file with one label per line, or the labels themselves.

    Behind a file or `coco`, `,first=1` says that its first label is that of class 1: one for class 0 is put
    before it, and COCO's are put at their own numbers. Lines that begin with numbers say it themselves.

    Raises `ModelError` if the file cannot be read, is not UTF-8 text, or is empty.
    """
    if not isinstance(source, str | os.PathLike):
        return [" ".join(label.split()) or " " for label in source]
    return _read(source)[1]


def _read(source: str | os.PathLike[str]) -> tuple[str, list[str], bool]:
    """Return a source without `,first=`, its labels from class 0 on, and whether it says their numbers."""
    what, first = _first_number(source)
    own = None
    if what == COCO:
        lines = list(COCO_LABELS) if first != 1 else _at_numbers(COCO_LABELS)
    else:
        lines, own = _without_numbers(_read_lines(Path(what)))
    if (own if first is None else first) == 1:
        lines = [BACKGROUND, *lines]
    return what, lines, (first, own) != (None, None) or lines[0].casefold() in _PLACEHOLDERS


def _first_number(source: str | os.PathLike[str]) -> tuple[str, int | None]:
    """Return labels without `,first=`, and the number that it says, or None."""
    match = _NUMBERED.fullmatch(text := str(source))
    if match is None:
        return text, None
    if match[2].strip() not in ("0", "1"):
        raise ModelError(
            f"--labels: expected first=0 or first=1, got first={match[2]:.20}",
            hint="first is the number of the class that the first label names",
        )
    return match[1], int(match[2])


def _read_lines(path: Path) -> list[str]:
    try:
        if path.stat().st_size > MAX_LABELS_BYTES:
            raise ModelError(
                f"{path}: expected at most {MAX_LABELS_BYTES} bytes, got {path.stat().st_size}",
                hint=_LABELS_HINT,
            )
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ModelError(
            f"{path}: cannot be read ({error.strerror})",
            hint=similar_file(path, otherwise=did_you_mean(str(path), [COCO], otherwise=_LABELS_HINT)),
        ) from error
    except UnicodeDecodeError as error:
        raise ModelError(
            f"{path}: expected UTF-8 text, one label per line ({error.reason} at byte {error.start})",
            hint=f"write it as UTF-8: iconv -f {'utf-16' if content[:2] in _UTF_16 else 'latin1'} -t utf-8 "
            f"{path}",
        ) from error
    if other := _other_format(text):
        raise ModelError(
            f"{path}: expected one label per line, got {other}",
            hint="write only the names into a file, one a line, in the order of the classes",
        )
    # A line with only a space is a space, which texts are read with.
    lines = [line.strip() or line[:1] for line in _LINE.split(text)]
    while lines and not lines[-1].strip() and lines[-1] != " ":
        lines.pop()
    if not any(line.strip() for line in lines):
        raise ModelError(f"{path}: expected one label per line, got an empty file", hint=_LABELS_HINT)
    return lines


def _other_format(text: str) -> str:
    """Return what a file is that has other lines than labels, or nothing."""
    if re.match(r"\s*item\s*\{", text):
        return "a label map of TensorFlow"
    try:
        found = json.loads(text) if text.lstrip()[:1] in ("[", "{") else []
    except (ValueError, RecursionError):
        return ""
    return "JSON" if found and all(isinstance(each, str) for each in found) else ""


def _without_numbers(lines: list[str]) -> tuple[list[str], int | None]:
    """Return labels without the numbers that each line begins with, and the first number; None without.

    Numbers that no line has get a space. Names that only their numbers tell apart, such as `1 euro` and
    `2 euro`, keep them.
    """
    found = [_WITH_NUMBER.fullmatch(line) for line in lines if line]
    names = {int(match[1]): match[3] for match in found if match is not None}
    numbers = sorted(names)
    is_name = numbers[:1] == [1] and any(match[2] == " " for match in found if match is not None)
    if len(names) < len(found) or 2 * len(set(names.values())) <= len(found) or is_name:
        return lines, None
    if numbers[0] > 1 or numbers[-1] >= _MOST_NUMBERS:
        return lines, None
    return [names.get(number, " ") for number in range(numbers[0], numbers[-1] + 1)], numbers[0]


def read_named_labels(
    source: Labels | None,
    outputs: Sequence[TensorSpec],
    declared: Postprocess | None,
    counts: Mapping[str, int] | None = None,
) -> bytes | None:
    """Read labels and check that the postprocess uses each of them.

    `source`: `coco`, a file with one label per line, the labels themselves, or None for no labels.
    `declared`: the postprocess, or None. If its first class is the background, the file may leave that one
        out.
    `counts`: outputs that are numbers of classes -> how many classes there are, where the model's file says
        so.
    Result: the labels, each followed by a line feed.
    Raises `ModelError` if the labels cannot be read, are not as many as the classes, or nothing uses them; or
        if there are none, and the postprocess makes texts of them; or if neither the labels nor the model's
        file say which class number the first label has. Labels that are given themselves begin at 0.
    """
    if source is None:
        check_labels([], outputs, declared, "labels", counts)
        return None
    if isinstance(source, str | os.PathLike):
        what, lines, are_numbered = _read(source)
        if not are_numbered:
            _check_numbers(what, lines, declared, counts or {})
    else:
        what, lines = "labels", read_labels(source)
    lines = check_labels(lines, outputs, declared, what, counts)
    return ("\n".join(lines) + "\n").encode()


def label_lines(
    source: Labels | None,
    own: Sequence[str],
    outputs: Sequence[TensorSpec],
    declared: Postprocess | None,
    counts: Mapping[str, int] | None = None,
) -> bytes | None:
    """Return the labels of a bundle: those that the user gives, or the model's own.

    `source`, `outputs`, `declared`, `counts`: as in `read_named_labels`.
    `own`: the class names in the model's file. They are kept for a postprocess to come, but left out if there
        is one that has no use for them.
    """
    if source is None and own and declared is None:
        return "".join(f"{label}\n" for label in own).encode()
    if source is None and own:
        with suppress(ModelError):
            return read_named_labels(own, outputs, declared, counts)
    return read_named_labels(source, outputs, declared, counts)


def check_labels(
    lines: Sequence[str],
    outputs: Sequence[TensorSpec],
    declared: Postprocess | None,
    what: str,
    counts: Mapping[str, int] | None = None,
) -> list[str]:
    """Return the labels of a postprocess, one for each class.

    One for the background is added if it was left out, and left out if the model does not answer it. COCO's
    80 names are put at their 90 numbers if the model has those.

    `what`: where the labels are from, for messages.
    Raises `ModelError` if they are not as many as the classes, or nothing uses them.
    """
    found = list(lines)
    specs = {spec.name: spec for spec in outputs}
    named = [step for step in (declared.steps if declared else ()) if step.kind in NAMED]
    if not named and found:
        got = "none" if declared is None else "one without classes"
        raise ModelError(
            f"{what}: expected a postprocess that names classes, got {got}",
            hint="add --postprocess, such as softmax,top5 or the preset of your detector",
        )
    for step in named:
        count = class_count(step, specs) or _counted(step, counts or {})
        is_text = isinstance(step, Ctc)
        if found == list(COCO_LABELS) and count in (_NUMBERS, _NUMBERS + 1):
            found = [*[BACKGROUND] * (count - _NUMBERS), *_at_numbers(found)]
        if len(found) == count + 1 and not is_text and found[0].casefold() in _PLACEHOLDERS:
            del found[0]
        if len(found) == count - 1 and _first_is_background(step):
            found.insert(0, BACKGROUND)
        if is_text and len(found) == count - 2:
            found.append(" ")  # which PaddleOCR adds to its file of characters, even if that has one
        allowed = (count - 1, count) if is_text else (count,)
        if count and len(found) not in allowed and (found or is_text):
            expected = f"{' or '.join(map(str, allowed))} label{'' if allowed == (1,) else 's'}"
            raise ModelError(
                f"{what}: expected {expected} for {_classes_of(step)}, got {len(found)}",
                hint="add --labels FILE, one character per line"
                if is_text
                else f"give a file with {expected}, or leave out --labels for the classes' numbers",
            )
    return found


def _check_numbers(
    what: str, lines: Sequence[str], declared: Postprocess | None, counts: Mapping[str, int]
) -> None:
    """Check that the first class's number is known; in rows of a box, a score and a class it is 0."""
    for step in declared.steps if declared is not None else ():
        if not isinstance(step, Objects) or not step.class_ids or _counted(step, counts):
            continue
        name = step.class_ids[0].output
        if name not in {part.output for part in step.boxes}:
            own = f" and COCO's own numbers up to {_NUMBERS}" if what == COCO else ""
            raise ModelError(
                f"{what}: expected to know which number of {name} the class {lines[0]!r:.40} has, got a "
                "model whose file does not say it",
                hint=f"write --labels {what},first=0 (RT-DETR, D-FINE), or --labels {what},first=1 "
                f"(torchvision and TensorFlow: 0 is the background{own})",
            )


def _classes_of(step: Step) -> str:
    """Return the name of the output from which the number of classes is known."""
    if isinstance(step, Objects):
        return (step.class_ids or step.scores or step.boxes)[0].output
    return outputs_of(step)[-1]


def _counted(step: Step, counts: Mapping[str, int]) -> int:
    """Return how many classes a model's file gives to an output of class numbers, 0 if it does not say."""
    parts = step.class_ids if isinstance(step, Objects) else ()
    return counts.get(parts[0].output, 0) if parts else 0


def _at_numbers(names: Sequence[str]) -> list[str]:
    """Return COCO's names at their numbers, from 1 to 90; the others have a space."""
    rest = iter(names)
    return [" " if number in _UNUSED else next(rest) for number in range(1, _NUMBERS + 1)]


def _first_is_background(step: Step) -> bool:
    if isinstance(step, Detect):
        return step.background
    if isinstance(step, ClassMap):
        return step.threshold is not None
    return isinstance(step, Objects) and step.background == "first"
