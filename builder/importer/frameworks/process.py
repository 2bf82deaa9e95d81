"""A framework in a process of its own, which exports a model and computes outputs.

Promises an answer or one `ModelError`, whatever the framework does (prints, crashes, hangs, fills memory or
the disk).
Requests and replies are JSON, one a line; models and arrays are files in a folder that both know, which is
removed at the end. What the process leaves there may be a link or a pipe: a file is moved out of its reach
before it is opened, and moved in once it is written. The process has no GPU and may not unpickle objects. It
is confined (`confinement.py`): it reads its installation, writes the folder, and has no network, no home, and
of the environment only what an installation needs. Where the kernel cannot do that, only a model that the
user trusts is opened. What it has started ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from numpy.typing import NDArray

from agent.array_file import damage, read_arrays, reason_of, write_arrays
from builder.errors import ModelError, Obstacle, UnsupportedOperatorError
from builder.importer.frameworks import confinement
from builder.importer.frameworks.confinement import UNCONFINED
from builder.importer.frameworks.interpreter import places_of

_WITHOUT: Final = "export it to ONNX in your own Python, and compile that file"

# A large model is exported in one or two minutes; one that takes longer does not end.
TIMEOUT_S: Final = 600.0
# A reply lists names; a thousand operators with their nodes take less.
MAX_REPLY_BYTES: Final = 1 << 20
# Unpacked: inputs or outputs of one run, and what a recurrent model gives after several steps.
MAX_ARRAY_BYTES: Final = 1 << 31
# What it may leave in its folder: copies of a model and of its conversions, and the files of a cache.
MAX_FOLDER_BYTES: Final = 16 << 30
MAX_FOLDER_FILES: Final = 100_000
# What it must leave on the disk, also where its folder does not show what it takes (a file without a name).
MIN_FREE_BYTES: Final = 256 << 20
_LOOK_S: Final = 0.5
_LONGEST: Final = 300  # of a message from the process
_MOST_OBSTACLES: Final = 100
_TAIL_BYTES: Final = 4096
# Runs a file without its folder in the path of modules, where `keras.py` would hide Keras.
_START: Final = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; import runpy; "
    "runpy.run_path(sys.argv[1], run_name='__main__')"
)
_ENVIRONMENT: Final[Mapping[str, str]] = {
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",  # torch.load takes tensors only
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0",
    "CUDA_VISIBLE_DEVICES": "",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "PYTHONUNBUFFERED": "1",
}
# What an installation may need, if the model is not trusted: other variables may be secrets.
_NEEDED: Final = frozenset(
    {"PATH", "LANG", "LANGUAGE", "TZ", "USER", "LOGNAME", "VIRTUAL_ENV", "CONDA_PREFIX"}
)
_NEEDED_BEGINNINGS: Final = (
    "PYTHON", "LD_", "LC_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TF_", "KERAS_", "TORCH",
    "PYTORCH_", "ONNX", "XLA_", "JAX_",
)  # fmt: skip


class FrameworkProcess:
    """A process that answers requests about one model; a context manager.

    `framework`: the framework's name, for messages.
    `trusted`: whether the user trusts the model: then the framework is not confined.
    `folder`: where files are exchanged.
    """

    def __init__(
        self,
        python: str,
        program: Path,
        framework: str,
        model: str,
        *,
        trusted: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._framework, self._model, self._timeout_s = framework, model, timeout_s
        places = () if trusted else (*places_of(python), program.resolve().parent)
        if len(places) == 1:
            raise ModelError(f"cannot run {python}", hint="name its program: --python VENV/bin/python")
        self._files = tempfile.TemporaryDirectory(prefix="edgebundle-", ignore_cleanup_errors=True)
        self.folder = Path(self._files.name, "exchange")
        self.folder.mkdir()
        self._errors = Path(self._files.name, "stderr").open("w+b")  # noqa: SIM115 - closed by `close`
        command = [str(Path(shutil.which(python) or python).absolute()), "-c", _START, str(program.resolve())]
        environment = {**os.environ, **_ENVIRONMENT}
        if not trusted:
            command = [*_confined(places, self.folder), *command]
            environment = {**_needed(os.environ), **_ENVIRONMENT, **_own_places(self.folder)}
        self._free_bytes = shutil.disk_usage(self.folder).free
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own program, by the user's Python
                command,
                cwd=self.folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            self._errors.close()
            self._files.cleanup()
            raise ModelError(
                f"cannot run {python}: {error.strerror or error}",
                hint="give the path of a Python that has the framework: --python venv/bin/python",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process and what it has started, and remove its files."""
        if self._process.returncode is None:
            self._end_group()
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            self._files.cleanup()
        except RecursionError:  # it has left folders in folders, a thousand deep
            subprocess.run(["rm", "-rf", "--", self._files.name], check=True)  # noqa: S603, S607 - our own folder

    def ask(self, command: str, **arguments: object) -> dict[str, Any]:
        """Send one request and return its reply.

        Raises `UnsupportedOperatorError` if the framework's exporter lacks operators.
        Raises `ModelError` if the framework refuses, crashes or takes too long.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: the missing reply says so
            self._process.stdin.write(json.dumps({"command": command, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        line = self._read_line()
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._failure("sent an invalid reply") from error
        if not isinstance(reply, dict):
            raise self._failure("sent an invalid reply")
        if "error" in reply:
            raise self._refusal(reply)
        return reply

    def texts(self, reply: Mapping[str, Any], key: str) -> tuple[str, ...]:
        """Return a list of texts in a reply; empty if there is none."""
        found = reply.get(key, [])
        if not isinstance(found, list) or not all(isinstance(each, str) and _is_text(each) for each in found):
            raise self._failure("sent an invalid reply")
        return tuple(found)

    def arrays(self, name: str) -> dict[str, NDArray[Any]]:
        """Read a file of arrays that the process has written; empty if it has written none."""
        path = self.take(name)
        if path is None:
            return {}
        try:
            with zipfile.ZipFile(path) as archive:
                size = sum(member.file_size for member in archive.infolist())
            if size > MAX_ARRAY_BYTES:
                raise ValueError(f"expected at most {MAX_ARRAY_BYTES} bytes, got {size}")
            return read_arrays(path)
        except damage() as error:
            raise self._failure(f"wrote arrays that cannot be read ({reason_of(error)})") from error

    def take(self, name: str) -> Path | None:
        """Move a file out of the reach of the process; None if it has written none.

        Raises `ModelError` if it is no regular file.
        """
        path = Path(self._files.name, name)
        try:
            (self.folder / name).replace(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._failure(f"wrote a file that cannot be read ({error.strerror})") from error
        if not stat.S_ISREG(path.lstat().st_mode):
            raise self._failure(f"wrote a link, a pipe or a folder in place of {name}")
        return path

    def give(self, name: str, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write a file of arrays, in the place of whatever the process has there."""
        path = Path(self._files.name, name)
        write_arrays(path, arrays)
        try:
            path.replace(self.folder / name)
        except OSError as error:
            raise self._failure(f"has no place for {name} ({error.strerror})") from error

    def _end_group(self) -> None:
        with contextlib.suppress(OSError):  # nothing of it is left
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        end_s = time.monotonic() + self._timeout_s
        line = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                self._check_disk()
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    raise self._failure(f"took longer than {self._timeout_s:g} s")
                if not selector.select(min(left_s, _LOOK_S)):
                    continue
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                line += piece
                if len(line) > MAX_REPLY_BYTES:
                    raise self._failure("sent a reply that is too long")
                if not piece:
                    raise self._ended()
        return line

    def _check_disk(self) -> None:
        """End the process if it fills the disk; its files are removed with everything else."""
        left = shutil.disk_usage(self.folder).free
        if min(left, MIN_FREE_BYTES) < min(self._free_bytes, MIN_FREE_BYTES) or _is_too_much(
            self._files.name
        ):
            self._end_group()
            raise self._failure("filled the disk")

    def _ended(self) -> ModelError:
        """Return an error that says how the process has ended."""
        try:
            status = self._process.wait(5)
        except subprocess.TimeoutExpired:
            return self._failure("closed its output")
        self._end_group()
        if status < 0:
            return self._failure(f"crashed (signal {-status})")
        stream = self._errors
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = stream.read(_TAIL_BYTES).decode(errors="replace").strip().splitlines()
        last = _one_line(lines[-1]) if lines else f"status {status}"
        if status == UNCONFINED:
            return ModelError(
                f"{self._framework} cannot be confined on this machine ({last}), and {self._model} may hold "
                "code that it runs",
                hint="use Linux 5.13 or newer with Landlock, or add --trust-model for a model that you trust",
            )
        return self._failure(f"ended: {last}")

    def _failure(self, what: str) -> ModelError:
        return ModelError(
            f"{self._framework} cannot import {self._model}: it {what}", hint=_trust(what) or _WITHOUT
        )

    def _refusal(self, reply: dict[str, Any]) -> ModelError:
        message = f"{self._framework} cannot import {self._model}: {_one_line(reply['error'])}"
        hint = _one_line(reply.get("hint") or "") or _trust(message) or _WITHOUT
        listed = reply.get("obstacles")
        obstacles = []
        for entry in (listed if isinstance(listed, list) else [])[:_MOST_OBSTACLES]:
            if isinstance(entry, dict) and isinstance(entry.get("nodes"), list):
                nodes = tuple(_one_line(name) for name in entry["nodes"][:_MOST_OBSTACLES])
                obstacles.append(
                    Obstacle(_one_line(entry.get("operator")), nodes, _one_line(entry.get("reason")))
                )
        if obstacles:
            return UnsupportedOperatorError(message, hint=hint, obstacles=obstacles)
        return ModelError(message, hint=hint)


def _confined(places: Sequence[Path], folder: Path) -> list[str]:
    """Return the words that start a program which reads some places and writes one folder."""
    given = json.dumps({"read": [str(place) for place in places], "write": str(folder)})
    return [sys.executable, "-I", str(Path(confinement.__file__).resolve()), given]


def _own_places(folder: Path) -> dict[str, str]:
    """Return an environment with home and temporary files in a folder; Keras keeps its backend."""
    home = folder / "home"
    (home / ".keras").mkdir(parents=True)
    with contextlib.suppress(OSError):
        shutil.copyfile(Path.home() / ".keras" / "keras.json", home / ".keras" / "keras.json")
    return {"HOME": str(home), "TMPDIR": str(home), "XDG_CACHE_HOME": str(home), "XDG_CONFIG_HOME": str(home)}


def _needed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an installation may need."""
    return {
        name: value
        for name, value in environment.items()
        if name in _NEEDED or name.startswith(_NEEDED_BEGINNINGS)
    }


def _trust(message: str) -> str | None:
    """Return a hint if a failure looks as if it came of the confinement."""
    if not any(
        text in message for text in ("Permission denied", "PermissionDenied", "Operation not permitted")
    ):
        return None
    return "a model may use no file but its own; add --trust-model if you trust it with all of yours"


def _is_too_much(folder: str) -> bool:
    """Return whether a folder holds more than a process may leave there; links are not followed."""
    folders, files, nbytes = [folder], 0, 0
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                files += 1
                nbytes += entry.stat(follow_symlinks=False).st_blocks * 512
                if files > MAX_FOLDER_FILES or nbytes > MAX_FOLDER_BYTES:
                    return True
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
    return False


def _is_text(value: str) -> bool:
    """Return whether it can be encoded; JSON can spell half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _one_line(text: object) -> str:
    """Return foreign text as one line without control characters."""
    return "".join(c if c.isprintable() else " " for c in str(text)[:_LONGEST]).strip()
