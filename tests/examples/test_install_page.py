"""docs/install.md quotes the messages of `edge-agent enroll` as the agent prints them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "install.md").read_text()
SOURCES = ("agent/mqtt/diagnosis.py", "agent/provision/checks/rights.py")


def test_quoted_messages_are_those_of_the_agent() -> None:
    code = "".join((ROOT / source).read_text() for source in SOURCES)
    code = re.sub(r"\{[^{}]*\}", "...", code)  # the fields of f-strings
    table = PAGE.partition("| message | cause |\n|---|---|\n")[2].partition("\n\n")[0]
    messages = [row.split(" | ")[0].removeprefix("| ") for row in table.splitlines()]
    assert len(messages) > 8
    for message in messages:
        for part in re.split(r"\.\.\.|;|,|\d+ s", message):
            words = part.strip().removesuffix("the user name").strip()
            assert words in code, message
