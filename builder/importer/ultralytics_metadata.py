"""What an export of Ultralytics says about itself: the names of its classes, its task, the unit of its boxes.

In ONNX these are the model's metadata. In TensorFlow Lite they are a text in a zip archive behind the model,
which is JSON or, in exports of 2025 and before, a Python dictionary. Promises values within limits, or none:
what a file says about itself never makes it unusable.
"""

from __future__ import annotations

import ast
import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import onnx

_MAX_NAMES: Final = 100_000
_MAX_POINTS: Final = 10_000
_MAX_CHARACTERS: Final = 4 << 20
_MAX_TASK_CHARACTERS: Final = 32
_JSON: Final = "metadata.json"
# A few names and numbers; the archive of TensorFlow Lite's own metadata has files of labels.
_MAX_MEMBERS: Final = 16
_FAILURES: Final = (
    OSError, EOFError, RuntimeError, NotImplementedError, ValueError, SyntaxError, MemoryError,
    RecursionError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Exported:
    """What a file says.

    `labels`: the names of the classes; empty if there are none.
    `task`: `detect`, `segment`, `pose`, `obb`, `classify`, or another word; empty if it is not said.
    `is_final`: whether the model ends in its own choice of objects.
    `points`: key points of an object, and the values of each: 2, or 3 with a confidence; None if not said.
    """

    labels: tuple[str, ...] = ()
    task: str = ""
    is_final: bool = False
    points: tuple[int, int] | None = None


NOTHING_SAID: Final = Exported()


def from_onnx(model: onnx.ModelProto) -> Exported:
    """Return what an ONNX model says."""
    return from_fields({prop.key: prop.value for prop in model.metadata_props})


def from_fields(fields: Mapping[str, object]) -> Exported:
    """Return what a file's fields say.

    `fields`: their values, as the file has them or as text: `names`, `task`, `end2end` and others.
    """
    task = fields.get("task")
    options = _value(fields.get("args"))
    suppressed = options.get("nms") if isinstance(options, dict) else None
    return Exported(
        _labels(_value(fields.get("names"))),
        task[:_MAX_TASK_CHARACTERS] if isinstance(task, str) else "",
        True in (_value(fields.get("end2end")), _value(suppressed)),
        _points(_value(fields.get("kpt_shape"))),
    )


def from_archive(raw: bytes) -> Exported | None:
    """Return what the archive behind a TensorFlow Lite model says; None if Ultralytics did not write it."""
    try:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            members = archive.infolist()[:_MAX_MEMBERS]
            texts = [member for member in members if member.filename == _JSON] or members[:1]
            for member in texts:
                with archive.open(member) as stream:
                    content = stream.read(_MAX_CHARACTERS + 1)
                if len(content) > _MAX_CHARACTERS:
                    return None
                text = content.decode("utf-8")
                fields = json.loads(text) if member.filename == _JSON else _value(text)
                if isinstance(fields, dict) and {"names", "stride"} <= fields.keys():
                    return from_fields(fields)
    except _FAILURES:
        pass
    return None


def _value(value: object) -> object:
    """Return the value of Python that a text is; itself if it is not a text, None if it is another text."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value) if 0 < len(value) <= _MAX_CHARACTERS else None
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _points(shape: object) -> tuple[int, int] | None:
    if not isinstance(shape, list | tuple) or len(shape) != 2:
        return None
    count, values = shape
    is_usable = isinstance(count, int) and 0 < count <= _MAX_POINTS and values in (2, 3)
    return (count, int(values)) if is_usable else None


def _labels(names: object) -> tuple[str, ...]:
    if not isinstance(names, dict) or not 0 < len(names) <= _MAX_NAMES:
        return ()
    found = [names.get(index, names.get(str(index))) for index in range(len(names))]
    words = [" ".join(name.split()) if isinstance(name, str) else "" for name in found]
    return tuple(words) if all(name and name.isprintable() for name in words) else ()
