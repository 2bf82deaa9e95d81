"""Rules for every verb: help texts, exit codes, the form of errors, and fast start-up."""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

import builder.cli as cli
from agent.errors import RollbackError
from builder.errors import FAULT, LinkError, ModelError
from tests.cli.terminal import Edgebundle
from tests.patience import PATIENCE_S

EDGEBUNDLE = str(Path(sys.executable).parent / "edgebundle")
Handler = Callable[[argparse.Namespace], int]
Only = Callable[[Handler], None]

# Modules that take too long to import for a help text.
HEAVY = {"tvm", "tvm_ffi", "numpy", "onnx", "onnxruntime", "PIL", "paho", "rich", "xgboost"}


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [EDGEBUNDLE, *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False, **options
    )  # type: ignore[call-overload]


def verbs() -> list[str]:
    """Return all verbs, and the verbs of a verb after its name: `records merge`."""
    found = []
    for verb, parser in choices(cli._parser()).items():
        found += [verb, *(f"{verb} {inner}" for inner in choices(parser))]
    return found


def choices(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(actions[0].choices) if actions else {}


@pytest.fixture
def only_verb(monkeypatch: pytest.MonkeyPatch) -> Only:
    """Replace all verbs by one verb, `do`, with the given handler."""

    def install(handler: Handler) -> None:
        def add_parsers(subparsers: cli.SubParsers) -> None:
            subparsers.add_parser("do").set_defaults(handler=handler)

        monkeypatch.setattr(cli, "_verb_modules", lambda: [types.SimpleNamespace(add_parsers=add_parsers)])

    return install


def raising(error: BaseException) -> Handler:
    def handler(args: argparse.Namespace) -> int:
        raise error

    return handler


def test_missing_verb_is_a_usage_error_of_two_lines() -> None:
    done = run()
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "edgebundle: error: the following arguments are required: VERB\n"
        "edgebundle: hint: see `edgebundle --help`\n"
    )


def test_unknown_verb_lists_the_existing_verbs(edgebundle: Edgebundle) -> None:
    done = edgebundle("compil")
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith("edgebundle: error: ") and "'compil'" in first and "keygen" in first
    assert second == "edgebundle: hint: did you mean compile? Otherwise see `edgebundle --help`"


def test_unknown_flag_points_to_the_verbs_own_help(edgebundle: Edgebundle) -> None:
    done = edgebundle("keygen", "keys", "--colour")
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first == "edgebundle: error: unrecognized arguments: --colour"
    assert second == "edgebundle: hint: see `edgebundle keygen --help`"


def test_abbreviated_flag_is_not_guessed(edgebundle: Edgebundle, tmp_path: Path) -> None:
    assert edgebundle("keygen", str(tmp_path / "keys"), "--js").returncode == 2


def test_version() -> None:
    from agent import __version__

    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"edgebundle {__version__}\n", "")


def test_python_m_builder_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "builder", "--version"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert done.stdout == run("--version").stdout


@pytest.mark.parametrize("verb", verbs())
def test_help_of_each_verb_shows_an_example(edgebundle: Edgebundle, verb: str) -> None:
    done = edgebundle(*verb.split(), "--help")
    assert done.returncode == 0
    assert done.stderr == ""
    assert f"  edgebundle {verb} " in done.stdout.partition("example")[2]


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import contextlib, io, json, sys\n"
        "from builder.cli import main\n"
        "for text in sys.argv[1:]:\n"
        "    with contextlib.redirect_stdout(io.StringIO()):\n"
        "        code = main(text.split())\n"
        "    print(json.dumps([text, code, sorted({name.partition('.')[0] for name in sys.modules})]))\n"
    )
    texts = ["--help", *(f"{verb} --help" for verb in verbs())]
    done = subprocess.run(
        [sys.executable, "-c", script, *texts], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(text, code) for text, code, _ in results] == [(text, 0) for text in texts]
    for text, _, modules in results:
        assert HEAVY.intersection(modules) == set(), text


def processor_time(*command: str) -> float:
    """Return the seconds of processor time of a program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, stdout=subprocess.DEVNULL, timeout=PATIENCE_S, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_takes_less_than_four_times_what_its_parser_takes_python() -> None:
    """The least of five runs in turn, so that neither the processor nor other work matters."""
    python = (sys.executable, "-c", "import argparse, dataclasses, json, logging, urllib.parse")
    pairs = [(processor_time(EDGEBUNDLE, "--help"), processor_time(*python)) for _ in range(5)]
    ours, least = map(min, zip(*pairs, strict=True))
    assert ours < 4 * least


def test_input_fault_is_two_lines_and_exit_4(only_verb: Only, capsys: pytest.CaptureFixture[str]) -> None:
    only_verb(raising(ModelError("m.onnx is\nnot a model", hint="give an ONNX file")))
    assert cli.main(["do"]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "edgebundle: error: m.onnx is not a model\nedgebundle: hint: give an ONNX file\n"


def test_error_of_the_agent_has_its_wire_code(only_verb: Only, capsys: pytest.CaptureFixture[str]) -> None:
    only_verb(raising(RollbackError("security counter 1 is older than 2")))
    assert cli.main(["do"]) == 4
    assert capsys.readouterr().err == "edgebundle: error: security counter 1 is older than 2 (ERR_ROLLBACK)\n"


def test_explained_fault_of_edgebundle_is_exit_1(only_verb: Only, capsys: pytest.CaptureFixture[str]) -> None:
    only_verb(raising(LinkError("the linker refused")))
    assert cli.main(["do"]) == 1
    shown = capsys.readouterr().err.splitlines()
    assert shown == ["edgebundle: error: the linker refused", f"edgebundle: hint: {FAULT}"]


def test_unexpected_exception_is_one_line_and_exit_1(
    only_verb: Only, capsys: pytest.CaptureFixture[str]
) -> None:
    only_verb(raising(ZeroDivisionError("division\nby zero")))
    assert cli.main(["do"]) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first == "edgebundle: error: internal error: ZeroDivisionError: division by zero"
    assert second.startswith("edgebundle: hint: ") and "--traceback" in second


@pytest.mark.parametrize("arguments", [["--traceback", "do"], ["do", "--traceback"]], ids=" ".join)
def test_traceback_is_shown_on_request(
    only_verb: Only, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    only_verb(raising(ZeroDivisionError("division by zero")))
    assert cli.main(arguments) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "edgebundle: error: internal error: ZeroDivisionError: division by zero"


def test_full_disk_is_an_input_fault(only_verb: Only, capsys: pytest.CaptureFixture[str]) -> None:
    only_verb(raising(OSError(28, "No space left on device", "out.bundle")))
    assert cli.main(["do"]) == 4
    assert capsys.readouterr().err.splitlines()[0] == "edgebundle: error: No space left on device: out.bundle"


def test_interrupt_prints_nothing() -> None:
    script = (
        "import builder.cli as cli, time, types\n"
        "def wait(args):\n"
        "    print('waiting', flush=True)\n"
        "    time.sleep(60)\n"
        "add = lambda subparsers: subparsers.add_parser('do').set_defaults(handler=wait)\n"
        "cli._verb_modules = lambda: [types.SimpleNamespace(add_parsers=add)]\n"
        "raise SystemExit(cli.main(['do']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, err) == (130, "")


def test_closed_pipe_is_not_an_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [EDGEBUNDLE, "--help"],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    finally:
        os.close(writing)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize("words", [["--broker", "mqtt://b", "agents"], ["--broker=mqtt://b", "agents"]])
def test_a_flag_before_the_verb(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err.splitlines() == [
        "edgebundle: error: expected a verb first, got --broker",
        "edgebundle: hint: flags come after it: edgebundle agents --broker ...",
    ]
