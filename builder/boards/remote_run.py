"""`run` and `profile` on a board: sends the bundle and its inputs, fetches outputs and times.

The board runs the code of `builder.running.local_run`, with the same checks.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from typing import Any, Final, Unpack

from agent.array_file import damage, read_arrays, reason_of, write_arrays
from agent.runtime.benchmark import BenchmarkResult
from agent.runtime.postprocess import Value
from builder.boards.measuring_process import MeasuringProcess
from builder.boards.rpc_boards import NO_BOARD_S, SESSION_S
from builder.boards.tracker_client import Tracker
from builder.bundles.package import Package
from builder.bundles.profile_report import Report
from builder.errors import BoardError, CandidateError, FleetError, ModelError, PackageError
from builder.running.inputs import Inputs, Picture, Sound, read_inputs
from builder.running.local_run import FillMode, RunResult, TimingOptions, timing_options

OLDER_BOARD: Final = "start `edgebundle rpc-server` of this version on the board"

BOARD_WAIT_S: Final = 60.0  # someone else may be tuning on it
RUN_TIMEOUT_S: Final = 600.0
ATTEMPTS: Final = 3


def run_on_board(
    package: Package | str | os.PathLike[str],
    inputs: Inputs = None,
    *,
    tracker: str | Tracker,
    key: str,
    fill_mode: FillMode = "random",
    benchmark: bool = False,
    threads: int | None = None,
    **timing: Unpack[TimingOptions],
) -> RunResult:
    """Run a compiled model on a board; the other parameters are those of `builder.run`.

    Parameters
    ----------
    tracker, key
        `host:port` of an RPC tracker, and the key that the board is registered under.

    Raises
    ------
    PackageError
        If the bundle cannot be read, or the board cannot run it with these inputs.
    ModelError
        If the file of inputs cannot be read.
    ShapeError
        If the model has no input of an array's name.
    FleetError
        If no board answers.
    """
    options = {
        "fill_mode": fill_mode,
        "benchmark": benchmark,
        "threads": threads,
        **timing_options(**timing),
    }
    package = package if isinstance(package, Package) else Package.load(package)
    files, given = _files(package, inputs)
    request = {
        "bundle": "{path:model.bundle}",
        "inputs": given,
        "outputs": "{path:outputs.npz}",
        "options": options,
    }
    answer, (raw,) = _call("run", request, files, ("outputs.npz",), tracker, key)
    try:
        arrays = read_arrays(io.BytesIO(raw))
    except damage() as error:
        raise PackageError(
            f"the board sent outputs that cannot be read ({reason_of(error)})", hint=OLDER_BOARD
        ) from error
    outputs = {n: value for n, value in arrays.items() if not n.startswith("answer/")}
    found: dict[str, Value] = {}
    for n, value in arrays.items():
        if n.startswith("answer/"):
            found[n.removeprefix("answer/")] = tuple(map(bytes, value)) if value.dtype.kind == "S" else value
    times = answer["times"]
    return RunResult(outputs, found or None, None if times is None else BenchmarkResult(tuple(times)))


def profile_on_board(
    package: Package | str | os.PathLike[str],
    inputs: Inputs = None,
    *,
    tracker: str | Tracker,
    key: str,
    fill_mode: FillMode = "random",
    number: int = 10,
    threads: int | None = None,
) -> Report:
    """Time each kernel of a compiled model on a board; parameters as in `builder.running.local_run.profile`.

    Raises
    ------
    PackageError
        If the bundle was compiled for another machine.
    FleetError
        If no board answers.
    """
    options = {"fill_mode": fill_mode, "number": number, "threads": threads}
    package = package if isinstance(package, Package) else Package.load(package)
    files, given = _files(package, inputs)
    request = {"bundle": "{path:model.bundle}", "inputs": given, "options": options}
    answer, _ = _call("profile", request, files, (), tracker, key)
    try:
        return Report.from_dict(answer)
    except ValueError as error:
        raise FleetError(f"tracker {tracker}: {error}", hint=OLDER_BOARD) from error


def _files(package: Package, inputs: Inputs) -> tuple[list[tuple[str, bytes]], str | None]:
    """Return the files to send, and what stands for the path of the inputs in a request."""
    files = [("model.bundle", package.to_bytes())]
    if inputs is None:
        return files, None
    name, content = _input_file(inputs, package)
    return [*files, (name, content)], f"{{path:{name}}}"


def _call(
    name: str,
    request: Mapping[str, object],
    files: list[tuple[str, bytes]],
    wanted: tuple[str, ...],
    tracker: str | Tracker,
    key: str,
) -> tuple[Any, tuple[bytes, ...]]:
    where = tracker if isinstance(tracker, Tracker) else Tracker.parse(tracker)
    hint = f"on the board: edgebundle rpc-server --tracker {where} --rpc-key {key}"
    if not where.servers(key):
        raise FleetError(f"tracker {where}: no board of key {key!r} is registered", hint=hint)
    process = MeasuringProcess()
    try:
        for attempt in range(ATTEMPTS):
            address = where.request(key, BOARD_WAIT_S, min(NO_BOARD_S, RUN_TIMEOUT_S + SESSION_S))
            if address is None:
                raise FleetError(
                    f"no board of key {key!r} became free within {BOARD_WAIT_S:.0f} s", hint=hint
                )
            try:
                process.open(address, BOARD_WAIT_S)
                answer, fetched = process.call(name, json.dumps(request), files, wanted, RUN_TIMEOUT_S)
                return json.loads(answer), fetched
            except BoardError as error:
                if attempt == ATTEMPTS - 1:
                    raise FleetError(f"board {address.name}: {error}", hint=hint) from error
            except CandidateError as error:
                raise PackageError(f"board {address.name}: {error}", hint=hint) from error
            except ValueError as error:
                raise FleetError(
                    f"board {address.name}: expected JSON, got {str(error)[:80]}", hint=OLDER_BOARD
                ) from error
        raise AssertionError  # the last attempt returned or raised
    finally:
        process.close()
        process.kill()


def _input_file(inputs: Inputs, package: Package) -> tuple[str, bytes]:
    """Return a name for the file of inputs, whose suffix gives its format, and its bytes."""
    given = read_inputs(inputs, package.manifest.inputs)
    if isinstance(given, Sound):
        raise ModelError(
            "expected tensors or a picture on a board, got a recording",
            hint="run it here, without --rpc-tracker",
        )
    if isinstance(given, Picture):
        return f"inputs{given.suffix}", given.content
    buffer = io.BytesIO()
    write_arrays(buffer, given)
    return "inputs.npz", buffer.getvalue()
