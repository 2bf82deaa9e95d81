"""The verb `completion`: print a script with which a shell completes verbs, flags, targets and files."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Final

from agent.terminal import say_text
from builder.cli import SubParsers
from builder.cli.flags import argument, takes

SHELLS: Final = ("bash", "zsh", "fish")

EXAMPLES: Final = """examples:
  edgebundle completion bash > ~/.local/share/bash-completion/completions/edgebundle
  edgebundle completion zsh > ~/.zfunc/_edgebundle     # with ~/.zfunc in fpath, before compinit
  edgebundle completion fish > ~/.config/fish/completions/edgebundle.fish
"""


@dataclass(frozen=True, slots=True)
class _Completion:
    shell: str = argument(choices=SHELLS, help="the shell")


def add_parsers(subparsers: SubParsers) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "completion",
        help="print a script that lets a shell complete edgebundle's words",
        description="Print a script with which bash, zsh or fish completes verbs, flags, targets and files.",
        epilog=EXAMPLES,
    )
    takes(parser, _Completion, _completion)


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell that asks for words through a script of this verb, and end the process."""
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options="long")


def _completion(args: _Completion) -> int:
    from argcomplete.shell_integration import shellcode

    say_text(shellcode(["edgebundle"], shell=args.shell))
    return 0
