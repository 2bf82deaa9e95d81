"""An answer of a model on this machine or on a device: as lines, as JSON, and drawn on its picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from edgebundle.answer import Answer, Timing
from edgebundle.output import Output

if TYPE_CHECKING:
    from agent.runtime.postprocess import Value
    from builder.bundles.package import Package
    from builder.running.local_run import RunResult

NOTHING_FOUND: Final = "nothing was found"  # by a detector: no score is over its threshold
_MOST_VALUES: Final = 8  # of an output, on its line


@dataclass(frozen=True, slots=True)
class Computed(Answer):
    """An answer that this machine, or a board, has computed.

    `result`: the run that it is of. Without a postprocess the answer's tensors are the model's outputs.
    """

    result: RunResult = field(kw_only=True, repr=False)

    @classmethod
    def of(cls, package: Package, result: RunResult) -> Computed:
        """Return the answer of a run."""
        manifest, values = package.manifest, result.answers
        if values is None:
            names = [spec.name for spec in manifest.outputs]
            is_whole = len(names) == len(result.outputs)
            values = dict(zip(names if is_whole else result.outputs, result.outputs.values(), strict=True))
        outputs = tuple(output_of(name, value) for name, value in values.items())
        return cls("", manifest.name, manifest.version, outputs, Timing(0.0), result=result)


def output_of(name: str, value: Value) -> Output:
    """Return a tensor of an answer: an array, or texts."""
    from agent.bundle.tensor_spec import datatype_of

    if isinstance(value, tuple):
        return Output(name, "BYTES", (len(value),), tuple(bytes(v).decode("utf-8", "replace") for v in value))
    return Output(name, datatype_of(str(value.dtype)), value.shape, value.tobytes())


def lines_of(answer: Answer, most: int | None = None, before: Sequence[Stretch] = ()) -> list[str]:
    """Return an answer as lines: the score, label and box of each object, classes, a text, or tensors.

    `most`: how many classes or objects are shown; None for all.
    `before`: what was heard in the parts of a recording before this one.
    """
    names = set(answer)
    if {"segments", "seconds"} <= names:
        found = stretches(answer)
        return [*map(str, found), _heard(answer, [*before, *found])]
    if isinstance(answer, Computed) and answer.result.nearest is not None:
        return [str(answer.result.nearest)]
    if {"text", "scores"} <= names:
        rows = zip(answer.output("scores").flat(), answer.output("text").flat(), strict=False)
        return [f"{score:8.4f}  {text}" for score, text in rows] or [NOTHING_FOUND]
    if {"class_map", "shares", "classes"} <= names:
        shares = zip(answer.output("shares").flat(), kinds_of(answer), strict=False)
        return [f"{100 * share:7.2f}%  {name}" for share, name in shares] or [NOTHING_FOUND]
    if lists := answer.lists("classes"):
        boxes = answer.boxes_of(lists[0])[:most]
        kinds = kinds_of(answer)[:most]
        points = _points(answer, lists[0]) or [""] * len(boxes)
        width = max(map(len, kinds), default=0)
        return [
            f"{box.score:8.4f}  {kind:{width}}  [{box.x0:.0f}, {box.y0:.0f}, {box.x1:.0f}, {box.y1:.0f}]"
            + shown
            for box, kind, shown in zip(boxes, kinds, points, strict=False)
        ] or [NOTHING_FOUND]
    if answer.labels:
        scores = (label.score for label in answer.labels[:most])
        return [f"{score:8.4f}  {kind}" for score, kind in zip(scores, kinds_of(answer), strict=False)]
    return [_tensor(output) for output in answer.outputs]


def _points(answer: Answer, prefix: str) -> list[str]:
    """Return the key points of each object as text; none if the answer has no key points."""
    name = f"{prefix}keypoints"
    if name not in set(answer) or len(answer.output(name).shape) != 3:
        return []
    (_, count, size), values = answer.output(name).shape, answer.output(name).flat()
    points = [f"({values[at]:.0f}, {values[at + 1]:.0f})" for at in range(0, len(values), size)]
    return ["  " + " ".join(points[at : at + count]) for at in range(0, len(points), count)]


def _tensor(output: Output) -> str:
    values = output.first(_MOST_VALUES + 1)
    shown = [str(value) if output.datatype == "BYTES" else f"{value:.6g}" for value in values[:_MOST_VALUES]]
    shown += ["..."] if len(values) > _MOST_VALUES else []
    return f"{output.name}  {output.datatype} [{','.join(map(str, output.shape))}]  {', '.join(shown)}"


def kinds_of(answer: Answer) -> list[str]:
    """Return the label of each object, or of each class, best first; `class 3` without labels."""
    lists = answer.lists("classes") or answer.lists("indices")
    prefix = lists[0] if lists else ""
    names = set(answer)
    if f"{prefix}labels" in names:
        return list(map(str, answer.output(f"{prefix}labels").flat()))
    ids = next((each for each in (f"{prefix}classes", f"{prefix}indices") if each in names), None)
    is_list = lists or {"segments", "class_map"} & names
    return [f"class {int(index)}" for index in answer.output(ids).flat()] if ids and is_list else []


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of time in a recording.

    `start_s`, `end_s`: when it begins and ends, from the beginning of the recording.
    `label`: what is heard in it.
    `score`: the model's score, or None if it has none.
    """

    start_s: float
    end_s: float
    label: str
    score: float | None = None

    def __str__(self) -> str:
        score = "" if self.score is None else f"{self.score:.4f}  "
        return f"{clock(self.start_s)} to {clock(self.end_s)}  {score}{self.label}"


def stretches(answer: Answer) -> list[Stretch]:
    """Return the stretches of time in an answer about a recording."""
    if "segments" not in set(answer):
        return []
    edges, kinds = answer.output("segments").flat(), kinds_of(answer)
    times = list(zip(edges[::2], edges[1::2], strict=True))
    if not kinds:
        return [Stretch(start, end, "speech") for start, end in times]
    rows = zip(times, kinds, answer.output("scores").flat(), strict=True)
    return [Stretch(*edges, kind, score) for edges, kind, score in rows]


def _heard(answer: Answer, found: Sequence[Stretch]) -> str:
    """Return such as `8.15 s heard, 2.67 s of speech` for a recording's stretches and its last answer."""
    heard = f"{answer.output('seconds').flat()[0]:.2f} s heard"
    if kinds_of(answer) or "probabilities" not in set(answer):
        return f"{heard}, {len(found)} word{'' if len(found) == 1 else 's'}"
    return f"{heard}, {sum(each.end_s - each.start_s for each in found):.2f} s of speech"


def clock(seconds: float) -> str:
    """Return a time such as `1:02:03.45`, without hours if there are none."""
    minutes, rest = divmod(round(seconds * 100), 6000)
    hours, minutes = divmod(minutes, 60)
    tail = f"{rest // 100:02}.{rest % 100:02}"
    return f"{hours}:{minutes:02}:{tail}" if hours else f"{minutes}:{tail}"


def document(answer: Answer, asked: Sequence[Answer] = ()) -> dict[str, Any]:
    """Return an answer as JSON, with the latencies of all that were `asked` for with it."""
    made = _computed(answer) if isinstance(answer, Computed) else _received(answer, asked or [answer])
    top = [{"label": each.label, "score": each.score, "index": each.index} for each in answer.labels]
    boxes = [
        {"label": b.label, "score": b.score, "index": b.index, "box": [b.x0, b.y0, b.x1, b.y1]}
        for b in answer.boxes
    ]
    return {"top": top, "boxes": boxes} | made


def _received(answer: Answer, asked: Sequence[Answer]) -> dict[str, Any]:
    timing = answer.timing
    outputs = [
        {"name": each.name, "datatype": each.datatype, "shape": list(each.shape), "data": list(each.flat())}
        for each in answer.outputs
    ]
    return {
        "agent": answer.agent,
        "model": answer.model,
        "version": answer.version,
        "status": 200,
        "message": "",
        "latency_s": round(answer.latency_s, 6),
        "latencies_s": [round(each.latency_s, 6) for each in asked],
        "network_s": timing.network_s if timing.network_s is None else round(timing.network_s, 6),
        "queue_s": timing.queue_s,
        "decode_s": timing.decode_s,
        "compute_s": timing.compute_s,
        "encode_s": timing.encode_s,
        "attempts": answer.attempts,
        "outputs": outputs,
    }


def _computed(answer: Computed) -> dict[str, Any]:
    result = answer.result
    made: dict[str, Any] = {
        "outputs": {
            name: {"shape": list(a.shape), "dtype": str(a.dtype)} for name, a in result.outputs.items()
        }
    }
    if result.answers is not None:
        made["answers"] = {name: value.tolist() for name, value in answer.items()}
    if result.nearest is not None:
        made["nearest"] = asdict(result.nearest)
    if result.times is not None:
        made["times_s"] = {k: getattr(result.times, k) for k in ("mean", "median", "max", "min", "std")}
    return made


def draw_answer(picture: Path, answer: Answer, output: Path) -> None:
    """Draw an answer on its picture and write that."""
    from builder.errors import ModelError
    from builder.running.inputs import Picture, read_inputs

    given = read_inputs(picture, ())
    if not isinstance(given, Picture):
        raise ModelError(
            f"{picture}: expected a picture to draw on",
            hint="give a JPEG or PNG picture with --inputs, or leave out --draw",
        )
    draw_on(given.content, given.content_type, answer, output)


def draw_on(content: bytes, content_type: str, answer: Answer, output: Path) -> None:
    """Draw an answer on a picture and write the result to `output`.

    Raises `ModelError` if the picture cannot be read, the answer cannot be drawn, or the file cannot be
        written.
    """
    from agent.durable import replacing
    from builder.running.drawing import draw, encode

    results = {each.name: each.flat() if each.datatype == "BYTES" else each.values for each in answer.outputs}
    drawn = encode(draw(content, content_type, results), output.suffix)
    with replacing(output) as file:
        file.write(drawn)


def drawn_names(files: list[Path], output: str) -> list[Path]:
    """Return where the picture of each input is drawn: the output itself, or a file in it for each input.

    Raises `ModelError` if there are several inputs and the output is a file, or it is the input itself or no
        picture, or its folder does not exist.
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
