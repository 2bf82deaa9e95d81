"""A verb's flags are the fields of a dataclass: what the command line gives arrives typed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from builder.cli import Parser
from builder.cli.flags import argument, flag, flat, part, takes


@dataclass(frozen=True, slots=True)
class Board:
    rpc_key: str | None = flag(metavar="KEY")
    threads: int = flag("-t", type=int, default=2, group="speed\nhow fast it is")


@dataclass(frozen=True, slots=True)
class Verb:
    file: str = argument(metavar="FILE")
    board: Board = part(Board, "board")
    states: list[str] | None = flag("--state", action="append")
    quiet: bool = flag("-q", action="store_true")


def parsed(*arguments: str) -> Verb:
    parser, taken = Parser(prog="verb"), list[Verb]()

    def handle(flags: Verb) -> int:
        taken.append(flags)
        return 0

    takes(parser, Verb, handle)
    args = parser.parse_args(arguments)
    assert args.handler(args) == 0
    return taken[0]


def test_flags_arrive_as_a_value() -> None:
    assert parsed("a") == Verb("a", Board(None, 2), None, quiet=False)
    given = parsed("a", "-t", "4", "--rpc-key", "pi", "--state", "h:hn", "--state", "c:cn", "-q")
    assert given == Verb("a", Board("pi", 4), ["h:hn", "c:cn"], quiet=True)
    values = {"file": "a", "rpc_key": "pi", "threads": 4, "states": ["h:hn", "c:cn"], "quiet": True}
    assert flat(given) == values


def test_a_part_has_its_group_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    shown = capsys.readouterr().out
    assert shown.index("board:\n  --rpc-key KEY") < shown.index("speed:\n  how fast it is\n")
    assert "  -q, --quiet" in shown.partition("board:")[0]
