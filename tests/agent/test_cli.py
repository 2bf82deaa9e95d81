"""`edge-agent`: wrong usage is one error and a hint that names the word that was meant."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from agent.cli import main, set_up_logging
from agent.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (
            ("chekc",),
            "COMMAND: expected one of run, install, ",
            "did you mean check? Otherwise see `edge-agent",
        ),
        (("xyz",), "COMMAND: expected one of run, install, ", "see `edge-agent --help`"),
        (
            ("check", "--jsno"),
            "unrecognized arguments: --jsno",
            "did you mean --json? Otherwise see `edge-agent check",
        ),
        (("enroll", "--boker=x"), "unrecognized arguments: --boker=x", "did you mean --broker?"),
        (("run", "more"), "unrecognized arguments: more", "see `edge-agent run --help`"),
        (("run", "--brok", "x"), "unrecognized arguments: --brok x", "did you mean --broker?"),
        (("install",), "the following arguments are required: bundle", "see `edge-agent install --help`"),
        (("check", "--config"), "argument --config: expected one argument", "see `edge-agent check --help`"),
        ((), "the following arguments are required: COMMAND", "see `edge-agent --help`"),
    ],
)
def test_wrong_usage(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], error: str, hint: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"edge-agent: error: {error}")
    assert second.startswith(f"edge-agent: hint: {hint}")


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("edge-agent ")
    with pytest.raises(SystemExit) as caught:
        main(["run", "--help"])
    assert caught.value.code == 0
    assert "--state-dir" in capsys.readouterr().out


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    """The logger whose handlers `set_up_logging` replaces."""
    logger = logging.getLogger()
    handlers, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.mark.parametrize("environment", [{}, {"JOURNAL_STREAM": "8:1"}])
def test_a_text_of_others_begins_no_line_of_the_log(
    root_logger: logging.Logger, capsys: pytest.CaptureFixture[str], environment: dict[str, str]
) -> None:
    set_up_logging("info", environment)
    root_logger.info("refused: %s", "a\nb\x1b[2J\r<0>2026-01-01 forged\x85\u2028c")
    try:
        raise ValueError("x\n2026-01-01 ERROR agent: forged")  # noqa: TRY301
    except ValueError:
        root_logger.exception("failed")
    level = "<6>" if environment else ""
    first, second, *traceback = capsys.readouterr().err.split("\n")[:-1]
    assert first.endswith("root: refused: a b?[2J <0>2026-01-01 forged  c")
    assert first.startswith(level)
    assert second.endswith("root: failed")
    indent = "<3>  " if environment else "  "
    assert traceback[-1] == f"{indent}2026-01-01 ERROR agent: forged"
    assert all(line.startswith(indent) for line in traceback)


def test_a_name_with_a_line_break_is_one_line_of_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ConfigError("cannot read a\nedge-agent: hint: forged", hint="one\ntwo")

    monkeypatch.setattr("agent.cli._version", fail)
    assert main(["version"]) == 78
    assert capsys.readouterr().err.splitlines() == [
        "edge-agent: error: cannot read a edge-agent: hint: forged",
        "edge-agent: hint: one two",
    ]
