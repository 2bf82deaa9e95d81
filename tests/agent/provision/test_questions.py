"""Questions on a terminal: only for missing values, and asked again after a wrong answer."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from agent.errors import ConfigError
from agent.provision.enrollment import Enrollment
from agent.provision.questions import ask


def answers(*given: str) -> Callable[[str], str]:
    left = iter(given)

    def read(question: str) -> str:
        asked.append(question)
        return next(left)

    asked: list[str] = []
    return read


def test_only_missing_values_are_asked_for() -> None:
    whole = Enrollment(
        device="k", broker="mqtts://b", ca="ca.pem", certificate="c.pem", key="c.key", trust=("s.pub",)
    )
    assert ask(whole, trusts=False, read=answers(), read_secret=answers()) == whole


def test_wrong_answers_are_asked_again_and_empty_ones_mean_the_default() -> None:
    read = answers("a/b", "", "broker.lan", "mqtts://broker.lan", "", "", "me", "", "s.pub")
    found = ask(Enrollment(), trusts=False, read=read, read_secret=answers("hunter2"))
    assert found == Enrollment(
        device=socket.gethostname().partition(".")[0],
        broker="mqtts://broker.lan",
        username="me",
        password="hunter2",
        trust=("s.pub",),
    )
    assert "hunter2" not in repr(found)


def test_questions_end_after_several_wrong_answers() -> None:
    with pytest.raises(ConfigError, match="expected a valid answer"):
        ask(Enrollment(device="k"), trusts=True, read=answers(*["nonsense"] * 9), read_secret=answers())
