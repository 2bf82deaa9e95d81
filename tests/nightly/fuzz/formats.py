"""The formats that are fuzzed: sound and hostile files of each, how one is changed, and who reads it."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import onnx

from tests.nightly.fuzz import mutations, onnx_models, other_files
from tests.nightly.fuzz.case import Case, one_file

Change = Callable[[Case, random.Random], Case]


@dataclass(frozen=True, slots=True)
class Format:
    """A format.

    Attributes
    ----------
    sound
        Returns files that are accepted, or refused only for want of a framework.
    change
        Changes a sound case.
    hostile
        Each returns files that were hostile from the start; they are the first cases.
    read
        Reads a case in the current folder, and returns the exit code of `edgebundle`.
    """

    sound: Callable[[], Sequence[Case]]
    change: Change
    hostile: Sequence[Callable[[], Case]] = ()
    read: Callable[[Path], int] | None = None


@dataclass(frozen=True, slots=True)
class Corpus:
    """The cases of a format, by number.

    Attributes
    ----------
    name
        The format.
    sound
        Its sound files, made once.
    """

    name: str
    sound: Sequence[Case]

    @classmethod
    def of(cls, name: str) -> Corpus:
        """Make the sound files of a format."""
        return cls(name, FORMATS[name].sound())

    @property
    def first_changed(self) -> int:
        """The number of the first case that is a change of a sound file."""
        return len(FORMATS[self.name].hostile)

    def case(self, seed: int) -> Case:
        """Return a case: the hostile ones first, then changes of sound ones; the same for the same number."""
        found = FORMATS[self.name]
        if seed < len(found.hostile):
            return found.hostile[seed]()
        choice = random.Random(seed)
        return found.change(choice.choice(self.sound), choice)


def check(path: Path) -> int:
    """Run `edgebundle check`."""
    return _edgebundle("check", "--quiet", str(path))


def _edgebundle(*words: str) -> int:
    """Run a verb. The parser of all verbs is made only once: that takes longer than reading most files."""
    from unittest import mock

    from builder import cli

    parser = _parser()
    with mock.patch.object(cli, "_parser", lambda: parser):
        return cli.main(words)


@cache
def _parser() -> Any:
    from builder import cli

    return cli._parser()


def _check_tflite(path: Path) -> int:
    from unittest import mock

    from builder.importer.tflite import comparison

    if not comparison.is_installed():
        return check(path)
    from tests.nightly.fuzz.litert import run_forked

    with mock.patch.object(comparison, "start_interpreter", run_forked):
        return check(path)


def _check_project(path: Path) -> int:
    del path
    return _edgebundle("check", "--quiet", "model.onnx")


def _export_records(path: Path) -> int:
    return _edgebundle("records", "export", str(path))


def _read_labels(path: Path) -> int:
    from builder.compiling.labels import read_labels

    return _explained(lambda: read_labels(path))


def _read_picture(path: Path) -> int:
    import numpy as np

    from agent.bundle.processing import Preprocess
    from agent.bundle.tensor_spec import TensorSpec
    from agent.runtime.preprocess import Preprocessor
    from builder.running.inputs import Picture, read_inputs

    spec = TensorSpec("x", "FP32", (1, 3, 32, 32))
    fields = ("x", "RGB", (32, 32), "stretch", "bilinear", None, 1.0, (0.0,), (1.0,), "NCHW")
    prepare = Preprocessor(Preprocess(*fields), spec)

    def decode() -> None:
        given = read_inputs(path, [spec])
        assert isinstance(given, Picture)
        prepare(prepare.decode(given.content, given.content_type), np.zeros(spec.shape, np.float32))

    return _explained(decode)


def _read_recording(path: Path) -> int:
    from agent.runtime.wav import read_recording
    from builder.running.inputs import Sound, read_inputs

    def decode() -> None:
        given = read_inputs(path, [])
        assert isinstance(given, Sound)
        for _ in read_recording(given.content, "audio/wav").blocks():
            pass

    return _explained(decode)


def _explained(work: Callable[[], object]) -> int:
    """Run a part of `edgebundle run`, and print its errors as the command does."""
    from agent.errors import EdgeError
    from builder.cli import EXIT_INPUT, EXIT_OK
    from builder.errors import BuildError

    try:
        work()
    except (BuildError, EdgeError) as error:
        print(f"edgebundle: error: {error}")
        return EXIT_INPUT
    return EXIT_OK


def _change_onnx(case: Case, choice: random.Random) -> Case:
    kind = choice.random()
    if kind < 0.4:
        return case.with_content(mutations.damaged(case.content, choice))
    model = onnx.ModelProto.FromString(case.content)
    if choice.random() < 0.2:
        model.opset_import[0].version = choice.choice([1, 6, 9, 10, 11, 13, 16, 21, 23, 26, 99])
    if kind < 0.7:
        mutations.message(model, choice)
        return case.with_content(model.SerializeToString())
    if not model.graph.node or not model.graph.initializer:
        return case.with_content(mutations.damaged(case.content, choice))
    return case.with_content(onnx_models.changed_numbers(model, choice))


def _untyped() -> list[Case]:
    return [
        one_file("model.onnx", model.SerializeToString())
        for model in (*onnx_models.operators_behind_nothing(), *onnx_models.sound_models())
    ]


def _change_types(case: Case, choice: random.Random) -> Case:
    return case.with_content(onnx_models.changed_types(onnx.ModelProto.FromString(case.content), choice))


def _change_json(case: Case, choice: random.Random) -> Case:
    if choice.random() < 0.3:
        return case.with_content(mutations.damaged(case.content, choice))
    return case.with_content(mutations.to_json(mutations.document(json.loads(case.content), choice)))


def _change_ubjson(case: Case, choice: random.Random) -> Case:
    from tests.nightly.fuzz.classic_models import from_ubjson, to_ubjson

    if choice.random() < 0.5:
        return case.with_content(mutations.damaged(case.content, choice))
    return case.with_content(to_ubjson(mutations.document(from_ubjson(case.content), choice)))


def _change_bytes(case: Case, choice: random.Random) -> Case:
    return case.with_content(mutations.damaged(case.content, choice))


def _change_lines(case: Case, choice: random.Random) -> Case:
    change = mutations.damaged if choice.random() < 0.3 else mutations.lines
    return case.with_content(change(case.content, choice))


def _change_tflite(case: Case, choice: random.Random) -> Case:
    from tests.nightly.fuzz.tflite_models import changed_graph

    kind = choice.random()
    if kind < 0.4:
        return case.with_content(changed_graph(choice))
    change = mutations.tables if kind < 0.75 else mutations.damaged
    return case.with_content(change(case.content, choice))


def _change_member(raw: bytes, choice: random.Random) -> bytes:
    if raw[:1] in (b"{", b"[") and choice.random() < 0.8:
        with contextlib.suppress(RecursionError, ValueError):  # changed before
            return mutations.to_json(mutations.document(json.loads(raw), choice))
    return mutations.damaged(raw, choice)


def _change_archive(case: Case, choice: random.Random) -> Case:
    if choice.random() < 0.4 or not case.content.startswith(b"PK"):
        return case.with_content(mutations.damaged(case.content, choice))
    return case.with_content(mutations.archive(case.content, choice, _change_member))


def _change_folder(case: Case, choice: random.Random) -> Case:
    """Change one file of a folder: its content, or whether it is there."""
    files = dict(case.files)
    name = choice.choice(list(files))
    if choice.random() < 0.2:
        del files[name]
    elif name.endswith(".json"):
        text = choice.random() < 0.5
        lines = files[name].split(b"\n")
        place = choice.randrange(len(lines))
        if text or not lines[place]:
            files[name] = mutations.lines(files[name], choice)
        else:
            changed = _change_member(lines[place], choice)
            files[name] = b"\n".join([*lines[:place], changed, *lines[place + 1 :]])
    else:
        files[name] = mutations.damaged(files[name], choice)
    return Case(case.main, files or {f"{case.main}/empty": b""})


def _onnx() -> list[Case]:
    return [one_file("model.onnx", model.SerializeToString()) for model in onnx_models.sound_models()]


def _hostile_onnx(make: Callable[[], onnx.ModelProto]) -> Callable[[], Case]:
    return lambda: one_file("model.onnx", make().SerializeToString())


def _classic() -> list[Case]:
    from tests.nightly.fuzz.classic_models import sklearn_models

    return [one_file("model.onnx", raw) for raw in sklearn_models()]


def _xgboost(suffix: str) -> list[Case]:
    from tests.nightly.fuzz.classic_models import xgboost_models

    return [one_file(f"model{suffix}", raw) for raw in xgboost_models(suffix)]


def _legacy() -> list[Case]:
    from tests.nightly.fuzz.classic_models import legacy_xgboost

    return [one_file(f"model{suffix}", legacy_xgboost()) for suffix in (".bin", ".model")]


def _lightgbm() -> list[Case]:
    from tests.nightly.fuzz.classic_models import lightgbm_models

    return [one_file("model.txt", raw) for raw in lightgbm_models()]


def _tflite() -> list[Case]:
    from tests.nightly.fuzz.tflite_models import sound_files

    return [one_file("model.tflite", raw) for raw in sound_files()]


FORMATS: Final[Mapping[str, Format]] = MappingProxyType(
    {
        "onnx": Format(_onnx, _change_onnx, tuple(map(_hostile_onnx, onnx_models.HOSTILE))),
        "types": Format(_untyped, _change_types),
        "classic": Format(_classic, _change_onnx),
        "tflite": Format(_tflite, _change_tflite, read=_check_tflite),
        "xgboost-json": Format(lambda: _xgboost(".json"), _change_json),
        "xgboost-ubj": Format(lambda: _xgboost(".ubj"), _change_ubjson),
        "xgboost-binary": Format(_legacy, _change_bytes),
        "lightgbm": Format(_lightgbm, _change_lines),
        "pt2": Format(other_files.pt2_files, _change_archive, other_files.HOSTILE_PT2),
        "keras": Format(other_files.keras_files, _change_archive, other_files.HOSTILE_KERAS),
        "savedmodel": Format(other_files.saved_models, _change_folder),
        "project": Format(other_files.projects, _change_lines, read=_check_project),
        "records": Format(other_files.records, _change_folder, read=_export_records),
        "labels": Format(other_files.labels, _change_lines, read=_read_labels),
        "pictures": Format(other_files.pictures, _change_bytes, other_files.HOSTILE_PICTURES, _read_picture),
        "recordings": Format(other_files.recordings, _change_bytes, read=_read_recording),
    }
)
