"""Whatever the process of a framework does, the answer is a reply or one line."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from builder.errors import ModelError, UnsupportedOperatorError
from builder.importer.frameworks import process as process_module
from builder.importer.frameworks.process import FrameworkProcess
from tests import damaged_archives
from tests.builder.importer.frameworks.stand_in import VECTORS, stand_in

PROGRAM = Path(__file__)  # not run by a stand-in


def asked(tmp_path: Path, **behaviour: str) -> Exception:
    """Return the error of a request to a stand-in that misbehaves."""
    python = stand_in(tmp_path, VECTORS / "recurrent", **behaviour)
    timeout_s = 3 if "sleep" in behaviour.get("before", "") else 60
    with (
        FrameworkProcess(python, PROGRAM, "PyTorch", "m.pt2", timeout_s=timeout_s) as process,
        pytest.raises(ModelError) as caught,
    ):
        process.ask("convert")
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_reply(tmp_path: Path) -> None:
    with FrameworkProcess(stand_in(tmp_path, VECTORS / "recurrent"), PROGRAM, "PyTorch", "m") as process:
        assert process.ask("convert")["inputs"] == ["ids", "mask"]
        assert set(process.arrays("examples.npz")) == {"ids", "mask"}
        assert process.arrays("absent.npz") == {}
        folder = process.folder
    assert not folder.exists()


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ({"before": "os.kill(os.getpid(), 9)"}, r"m\.pt2: it crashed \(signal 9\)"),
        ({"before": "sys.exit('no room')"}, "it ended: no room"),
        ({"before": "sys.exit(3)"}, "it ended: status 3"),
        ({"before": "time.sleep(60)"}, "it took longer than 3 s"),
        ({"after": "print('hello')"}, "it sent an invalid reply"),
        ({"after": "reply = [1]"}, "it sent an invalid reply"),
        ({"after": "reply = 'x' * (2 << 20)"}, "it sent a reply that is too long"),
        ({"after": "reply = {'error': 'a\\x1b[31m\\nb'}"}, r"PyTorch cannot import m\.pt2: a \[31m b"),
    ],
)
def test_misbehaviour_is_one_line(tmp_path: Path, behaviour: dict[str, str], expected: str) -> None:
    error = asked(tmp_path, **behaviour)
    assert len(str(error)) < 600
    with pytest.raises(ModelError, match=expected):
        raise error


def test_unknown_operators_are_listed(tmp_path: Path) -> None:
    obstacles = [{"operator": "aten.i0", "nodes": ["head"], "reason": "no translation"}]
    error = asked(tmp_path, after=f"reply = {{'error': 'e', 'hint': 'h', 'obstacles': {obstacles!r}}}")
    assert isinstance(error, UnsupportedOperatorError)
    assert (error.hint, error.obstacles[0].operator, error.obstacles[0].nodes) == ("h", "aten.i0", ("head",))


def test_a_python_that_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot run"):
        FrameworkProcess(str(tmp_path), PROGRAM, "PyTorch", "m")


@pytest.mark.parametrize("which", damaged_archives.DAMAGED)
def test_arrays_that_cannot_be_read(which: str, tmp_path: Path) -> None:
    with FrameworkProcess(stand_in(tmp_path, VECTORS / "recurrent"), PROGRAM, "PyTorch", "m") as process:
        damaged_archives.write(process.folder, which).rename(process.folder / "outputs.npz")
        with pytest.raises(ModelError, match="it wrote arrays that cannot be read"):
            process.arrays("outputs.npz")


IN_PLACE = {
    "link": "os.symlink({target!r}, {name!r})",
    "pipe": "os.mkfifo({name!r})",
    "folder": "os.mkdir({name!r})",
    "endless": "os.symlink('/dev/zero', {name!r})",
}


@pytest.mark.parametrize("kind", IN_PLACE)
@pytest.mark.parametrize("name", ["model.onnx", "examples.npz"])
def test_what_is_in_the_place_of_a_file_is_not_opened(name: str, kind: str, tmp_path: Path) -> None:
    behaviour = f"os.remove({name!r}); " + IN_PLACE[kind].format(name=name, target=str(tmp_path / "secret"))
    (tmp_path / "secret").write_text("secret")
    with FrameworkProcess(
        stand_in(tmp_path, VECTORS / "recurrent", after=behaviour), PROGRAM, "Keras", "m"
    ) as process:
        process.ask("convert")
        with pytest.raises(ModelError, match=f"it wrote a link, a pipe or a folder in place of {name}"):
            process.take(name)


@pytest.mark.parametrize("kind", IN_PLACE)
def test_inputs_are_written_to_no_other_file(kind: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    behaviour = IN_PLACE[kind].format(name="inputs.npz", target=str(secret))
    with FrameworkProcess(
        stand_in(tmp_path, VECTORS / "recurrent", after=behaviour), PROGRAM, "Keras", "m"
    ) as process:
        process.ask("convert")
        try:
            process.give("inputs.npz", {"x": np.ones(3)})
        except ModelError as error:
            assert "no place for inputs.npz" in str(error)
            assert kind == "folder"
        else:
            assert (process.folder / "inputs.npz").is_file()
            assert not (process.folder / "inputs.npz").is_symlink()
    assert secret.read_text() == "secret"


def test_errors_are_read_from_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    before = (
        f"[os.path.lexists(n) and os.remove(n) or os.symlink({str(tmp_path / 'secret')!r}, n) "
        "for n in ('stderr',)]; sys.exit('why')"
    )
    assert "it ended: why" in str(asked(tmp_path, before=before))


def test_arrays_that_would_fill_the_memory_are_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "MAX_ARRAY_BYTES", 1000)
    with FrameworkProcess(stand_in(tmp_path, VECTORS / "recurrent"), PROGRAM, "Keras", "m") as process:
        process.give("outputs.npz", {"output_0": np.zeros(1000)})
        with pytest.raises(ModelError, match="expected at most 1000 bytes"):
            process.arrays("outputs.npz")


@pytest.mark.parametrize("value", ["5", "None", "[1]", "'ab'", "['\\ud800']"])
def test_a_list_that_is_none_is_an_invalid_reply(value: str, tmp_path: Path) -> None:
    with FrameworkProcess(
        stand_in(tmp_path, VECTORS / "recurrent", after=f"reply = {{'inputs': {value}}}"),
        PROGRAM,
        "Keras",
        "m",
    ) as process:
        reply = process.ask("convert")
        with pytest.raises(ModelError, match="it sent an invalid reply"):
            process.texts(reply, "inputs")


@pytest.mark.parametrize(
    "fills",
    [
        "open('a', 'wb').write(bytes(4 << 20))",
        "sys.stderr.write('x' * (4 << 20)); sys.stderr.flush()",
        "os.makedirs('/'.join('abcdefghijkl')); [open(f'a/{n}', 'w').close() for n in range(99)]",
    ],
)
def test_process_that_fills_the_disk_is_ended(
    fills: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "MAX_FOLDER_BYTES", 2 << 20)
    monkeypatch.setattr(process_module, "MAX_FOLDER_FILES", 100)
    error = asked(tmp_path, before=f"import os; {fills}; time.sleep(60)")
    assert "it filled the disk" in str(error)


def test_process_that_leaves_no_room_on_the_disk_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([1 << 40, 1 << 40])
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=next(free, 1 << 20)))
    assert "it filled the disk" in str(asked(tmp_path, before="time.sleep(60)"))


def test_little_room_that_was_there_before_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 20))
    with FrameworkProcess(stand_in(tmp_path, VECTORS / "recurrent"), PROGRAM, "PyTorch", "m") as process:
        assert process.ask("convert")["inputs"] == ["ids", "mask"]


def test_folders_in_folders_are_removed_however_deep(tmp_path: Path) -> None:
    nest = "import os; [(os.mkdir('a'), os.chdir('a')) for _ in range(3000)]; sys.exit('gone')"
    python = stand_in(tmp_path, VECTORS / "recurrent", before=nest)
    with FrameworkProcess(python, PROGRAM, "PyTorch", "m.pt2") as process, pytest.raises(ModelError):
        process.ask("convert")
    assert not process.folder.parent.exists()
