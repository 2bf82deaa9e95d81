"""Whatever the process of a framework does, the answer is a reply or one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.errors import ModelError, UnsupportedOperatorError
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
