"""`edge-agent`: wrong usage is one error and a hint that names the word that was meant."""

from __future__ import annotations

import pytest

from agent.cli import main


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
