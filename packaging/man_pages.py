"""Manual pages from the parsers of `edgebundle` and `edge-agent`: one page a command line, one a verb.

    python packaging/man_pages.py [-o dist/man]        then: man -M dist/man edgebundle

Promises: what `--help` says, and no more: description, arguments, flags in their groups, examples. A page is
man(7), the same bytes for the same parsers and date, and passes `man --warnings` and `mandoc -T lint`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROJECT: Final = Path(__file__).resolve().parent.parent
# Each with its module and the section of the manual.
PROGRAMS: Final = {"edge-agent": ("agent.cli", 8), "edgebundle": ("builder.cli", 1)}
# A line that begins with one of these is a request to roff.
_REQUESTS: Final = (".", "'")


def pages(
    parser: argparse.ArgumentParser, *, section: int, version: str, date: datetime.date
) -> dict[str, str]:
    """Return the pages of a command line by their file names, such as `edgebundle-run.1`.

    Parameters
    ----------
    parser
        The parser of the command line, with its verbs.
    section
        The section of the manual: 1 for commands of users, 8 for those of administrators.
    version, date
        Printed at the bottom of each page.
    """
    found: dict[str, str] = {}
    verbs = dict(_verbs(parser))
    below = f"{parser.prog} {version}"
    for name, verb in verbs.items():
        others = [parser.prog]
        found[f"{_page(verb.prog)}.{section}"] = _write(verb, section, below, date, about=name[1], see=others)
    see = [_page(verb.prog) for verb in verbs.values()]
    about = (parser.description or "").split(".", maxsplit=1)[0]
    found[f"{parser.prog}.{section}"] = _write(
        parser, section, below, date, about=about[:1].lower() + about[1:], see=see
    )
    return found


def _verbs(parser: argparse.ArgumentParser) -> Iterator[tuple[tuple[str, str], argparse.ArgumentParser]]:
    """Yield each verb's name and summary, with its parser; verbs of verbs too."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                verb = action.choices[choice.dest]
                yield (choice.dest, choice.help or ""), verb
                for (name, about), inner in _verbs(verb):
                    yield (f"{choice.dest} {name}", about), inner


def _write(
    parser: argparse.ArgumentParser,
    section: int,
    below: str,
    date: datetime.date,
    *,
    about: str,
    see: list[str],
) -> str:
    name = _page(parser.prog)
    lines = [
        f'.TH {name.upper()} {section} {date.isoformat()} "{below}"',
        ".SH NAME",
        f"{_escape(name)} \\- {_escape(about)}",
        ".SH SYNOPSIS",
        ".nh",
        ".ad l",
        *_synopsis(parser),
        ".ad",
        ".hy",
    ]
    if parser.description:
        lines += [".SH DESCRIPTION", *_text(parser.description)]
    for group in parser._action_groups:
        shown = [action for action in group._group_actions if action.help is not argparse.SUPPRESS]
        if shown:
            lines += [f".SH {_escape((group.title or '').upper())}"]
            for action in shown:
                lines += list(_action(parser, action))
    lines += _examples(parser.epilog or "")
    lines += [".SH SEE ALSO"]
    lines += [f".BR {_escape(each)} ({section}){',' if each != see[-1] else ''}" for each in see]
    return "\n".join(lines) + "\n"


def _synopsis(parser: argparse.ArgumentParser) -> list[str]:
    usage = " ".join(parser.format_usage().removeprefix("usage:").split())
    rest = usage.removeprefix(parser.prog).strip()
    return [f".B {_escape(parser.prog)}", _escape(rest)] if rest else [f".B {_escape(parser.prog)}"]


def _action(parser: argparse.ArgumentParser, action: argparse.Action) -> Iterator[str]:
    if isinstance(action, argparse._SubParsersAction):
        for choice in action._choices_actions:
            yield ".TP"
            yield f".B {_escape(choice.dest)}"
            yield _escape(choice.help or "")
        return
    # What the help shows, in one line, whatever the terminal's width.
    formatter = argparse.HelpFormatter(parser.prog, max_help_position=4, width=10_000)
    yield ".TP"
    yield f".B {_escape(_invocation(formatter, action))}"
    yield _escape(" ".join(formatter._expand_help(action).split())) if action.help else "\\&"


def _invocation(formatter: argparse.HelpFormatter, action: argparse.Action) -> str:
    """Return how a flag is written, as Python 3.13's help does; other versions write it in other ways."""
    if not action.option_strings or action.nargs == 0:
        return formatter._format_action_invocation(action)
    value = formatter._format_args(action, formatter._get_default_metavar_for_optional(action))
    return f"{', '.join(action.option_strings)} {value}"


def _text(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(re.split(r"\n\s*\n", text.strip())):
        if number:
            yield ".PP"
        yield _escape(" ".join(paragraph.split()))


def _examples(epilog: str) -> list[str]:
    """Return the examples as they are; and what is below them."""
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", epilog.strip("\n")) if epilog.strip() else ():
        title, _, rest = block.partition("\n")
        if title.rstrip().endswith(":") and rest.strip():
            shown = [line.removeprefix("  ") for line in rest.split("\n")]
            lines += [f".SH {_escape(title.rstrip(': ').upper())}", ".nf", *map(_escape, shown), ".fi"]
        elif not title.startswith("see also"):
            lines += [".SH NOTES", *_text(block)]
    return lines


def _page(prog: str) -> str:
    return prog.replace(" ", "-")


def _escape(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    # ASCII only: a page must be right in every locale.
    escaped = "".join(c if c.isascii() else f"\\[u{ord(c):04X}]" for c in escaped)
    return f"\\&{escaped}" if escaped.startswith(_REQUESTS) else escaped


def pages_of(program: str, date: datetime.date) -> dict[str, str]:
    """Return the pages of one of `PROGRAMS`.

    The overview of edge-agent is written by hand: `packaging/files/edge-agent.8`.
    """
    sys.path.insert(0, str(PROJECT))
    module, section = PROGRAMS[program]
    parser = importlib.import_module(module)._parser()
    version = importlib.import_module("agent").__version__
    found = pages(parser, section=section, version=version, date=date)
    by_hand = PROJECT / "packaging/files" / f"{program}.{section}"
    return found | ({by_hand.name: by_hand.read_text("utf-8")} if by_hand.exists() else {})


def write(folder: Path, found: dict[str, str]) -> None:
    """Write pages into `man1`, `man8` below a folder."""
    for name, text in found.items():
        place = folder / f"man{name.rpartition('.')[2]}"
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text, "utf-8")


def main() -> int:
    """Write the pages of both programs."""
    parser = argparse.ArgumentParser(description="Write the manual pages of edgebundle and edge-agent.")
    parser.add_argument("-o", "--output", type=Path, default=PROJECT / "dist/man", help="(default: dist/man)")
    parser.add_argument("--program", choices=sorted(PROGRAMS), action="append", help="only of this one")
    parser.add_argument(
        "--date", type=datetime.date.fromisoformat, default=datetime.datetime.now(datetime.UTC).date()
    )
    options = parser.parse_args()
    for program in options.program or sorted(PROGRAMS):
        write(options.output, pages_of(program, options.date))
    print(f"{options.output}: read them with `man -M {options.output} edgebundle`")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
