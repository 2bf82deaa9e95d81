"""The command line: `edgebundle VERB ...`.

Promises: the exit code is 0 for success, 1 for a bug or failure in edgebundle, 2 for wrong usage, 4 for input
that cannot be used, 130 after Ctrl-C. An error is one `edgebundle: error:` line on stderr, sometimes followed
by indented lines that explain why a model cannot be taken, and by an `edgebundle: hint:` line; `--traceback`
adds a traceback. Results go to stdout, for scripts.

Each module in `VERB_MODULES` has `add_parsers(subparsers)`. A verb declares its flags as the fields of a
dataclass, and its function takes that (`flags.takes`).
These modules import compilers, arrays and brokers only inside their handlers, so that `edgebundle --help`
and `edgebundle verify` start quickly.
"""

from __future__ import annotations

import argparse
import errno
import gc
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, Final, NoReturn, Protocol, TypeAlias, cast

from agent import __version__
from agent.errors import EdgeError
from agent.terminal import note
from builder.cli.interruption import EXIT_INTERRUPTED
from builder.cli.project_defaults import with_project
from builder.cli.tvmc_flags import instead_of
from builder.errors import BuildError
from builder.spelling import closest, did_you_mean

EXIT_OK: Final = 0
EXIT_OURS: Final = 1
EXIT_USAGE: Final = 2
EXIT_INPUT: Final = 4
EXIT_BROKEN_PIPE: Final = 128 + signal.SIGPIPE

# Syntax trees and schedules are many objects that stay. Python's default, a search for cycles after every 700
# new ones, takes a twentieth of the time in which a small model compiles.
COLLECT_AFTER: Final = 20_000

# `edgebundle --help` lists their verbs in this order.
VERB_MODULES: Final = (
    *(
        "new",
        "keys",
        "compile",
        "quantize",
        "check",
        "repack",
        "run",
        "tune",
        "records",
        "rpc",
        "deploy",
        "rollback",
        "infer",
        "agents",
        "metrics",
        "dashboard",
        "completion",
    ),
)

# File system errors that the user's paths or disk cause: exit code 4, not 1.
_FILE_FAULTS: Final = frozenset(
    {
        errno.ENOENT,
        errno.EACCES,
        errno.EPERM,
        errno.EEXIST,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EFBIG,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EIO,
    }
)

# A module of these that is missing is a bug; any other one belongs to an extra of the distribution.
_OURS: Final = frozenset({"agent", "builder", "dashboard", "edgebundle"})

# Longer words are shortened: a name in a damaged file may have any length, a path at most 4096 characters.
_LONG_WORD: Final = re.compile(r"\S{4097,}")

SubParsers: TypeAlias = "argparse._SubParsersAction[Parser]"


class VerbModule(Protocol):
    """A module of this package that adds verbs."""

    def add_parsers(self, subparsers: SubParsers) -> None:
        """Add one parser a verb, each with its flags and its function (`flags.takes`)."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors look like every other error of the command."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - argparse's own signature
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        # A script with an abbreviated flag would break when a new flag makes it ambiguous.
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self.verbs: dict[str, Parser] = {}
        self.add_argument(
            "--traceback",
            action="store_true",
            default=argparse.SUPPRESS,  # a verb's default would override the flag given before the verb
            help="print a Python traceback if the command fails",
        )

    def flags(self) -> list[str]:
        """Return the flags that the parser knows, without those that its help hides."""
        shown = [action for action in self._actions if action.help is not argparse.SUPPRESS]
        return [flag for action in shown for flag in action.option_strings]

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Check a word against the choices, as the base class does, and say which one was meant."""
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            name = action.metavar or "/".join(action.option_strings)
            self.fail(
                f"{name}: expected one of {', '.join(known)}; got {str(value)[:80]!r}",
                hint=did_you_mean(str(value), known, otherwise=f"see `{self.prog} --help`"),
            )

    def error(self, message: str) -> NoReturn:
        """Print an error and a hint to read the help, and exit with the code for wrong usage."""
        self.fail(message)

    def fail(self, message: str, *, hint: str | None = None) -> NoReturn:
        """Print an error with this hint, and exit with the code for wrong usage."""
        _say("error", message)
        _say("hint", hint or f"see `{self.prog} --help`")
        self.exit(EXIT_USAGE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Parameters
    ----------
    argv
        The arguments after the program's name; None for those of this process.

    Returns
    -------
    int
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])
    try:
        code = _run(arguments)
        sys.stdout.flush()  # a closed pipe must raise here, not while the interpreter shuts down
    except BrokenPipeError:
        _silence(sys.stdout)
        return EXIT_BROKEN_PIPE
    return code


def _run(arguments: list[str]) -> int:
    try:
        parser = _parser()
        if "_ARGCOMPLETE" in os.environ:
            _complete(parser)
        _check_verb_is_first(parser, arguments)
        args, unknown = with_project(parser.verbs, arguments, parser.parse_known_args)
        if unknown:  # not left to parse_args, whose hint would not name the verb
            verb = parser.verbs[args.verb]
            verb.fail(f"unrecognized arguments: {' '.join(unknown)}", hint=_meant(verb, unknown))
        return cast("Callable[[argparse.Namespace], int]", args.handler)(args)
    except SystemExit as error:  # raised by argparse after --help, --version and usage errors
        return error.code if isinstance(error.code, int) else EXIT_OK
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        raise
    except (BuildError, EdgeError, OSError) as error:
        _show_traceback(arguments)
        return _explain(error)
    except Exception as error:  # noqa: BLE001 - the outermost loop of the process: one line instead of a traceback
        _show_traceback(arguments)
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] not in _OURS:
            _say("error", f"this verb needs the package {error.name}, which is not installed")
            _say("hint", "install the compiler with it: pip install 'edgebundle[builder]'")
            return EXIT_INPUT
        _say("error", f"internal error: {type(error).__name__}: {_one_line(str(error))}")
        if "--traceback" not in arguments:
            _say(
                "hint",
                "this is a bug in edgebundle: run it again with --traceback and report the output",
            )
        return EXIT_OURS


def _complete(parser: Parser) -> None:
    """Answer a shell that asks for words, and end the process."""
    from builder.cli.completion import complete

    complete(parser)


def _check_verb_is_first(parser: Parser, arguments: Sequence[str]) -> None:
    """Refuse the flags of a verb before it: argparse would take their values for the verb."""
    first = next(iter(arguments), "")
    flag = first.partition("=")[0]
    verb = next((word for word in arguments if word in parser.verbs), None)
    if first.startswith("-") and flag not in parser.flags() and verb is not None:
        parser.fail(
            f"expected a verb first, got {flag}", hint=f"flags come after it: edgebundle {verb} {flag} ..."
        )


def _meant(verb: Parser, unknown: Sequence[str]) -> str | None:
    """Return a hint about the first argument that is a flag of TVMC's, or that is like a flag of the verb."""
    flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), "")
    close = closest(flag, verb.flags()) if flag else None
    meant = None if close is None else f"did you mean {close}? Otherwise see `{verb.prog} --help`"
    return instead_of(unknown) or meant


def _parser() -> Parser:
    parser = Parser(
        prog="edgebundle",
        description="Compile models for small Linux boards, sign them, deploy them and query them over MQTT.",
        epilog="examples:\n"
        "  edgebundle keygen keys/\n"
        "  edgebundle compile model.onnx --target rpi4 --sign-key keys/signing.key -o model.bundle\n"
        "  edgebundle deploy model.bundle --agent kitchen --broker mqtt://localhost\n"
        "\nsee also: edgebundle VERB --help",
    )
    parser.add_argument("--version", action="version", version=f"edgebundle {__version__}")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True)
    for module in _verb_modules():
        module.add_parsers(subparsers)
    parser.verbs = dict(subparsers.choices)
    return parser


def _verb_modules() -> Iterator[VerbModule]:
    for name in VERB_MODULES:
        yield cast("VerbModule", importlib.import_module(f"{__name__}.{name}"))


def _explain(error: BuildError | EdgeError | OSError) -> int:
    if isinstance(error, OSError):
        where = f": {os.fsdecode(error.filename)}" if isinstance(error.filename, str | bytes) else ""
        _say("error", f"{error.strerror or _one_line(str(error))}{where}")
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            _say("hint", "free some space, or write to another disk with -o; no incomplete file was left")
        return EXIT_INPUT if error.errno in _FILE_FAULTS else EXIT_OURS
    code = f" ({error.code})" if isinstance(error, EdgeError) else ""
    _say("error", _one_line(str(error)) + code)
    for line in error.details if isinstance(error, BuildError) else ():
        note(f"  {_cut(line)}")
    if error.hint:
        _say("hint", _one_line(error.hint))
    return error.exit_code if isinstance(error, BuildError) else EXIT_INPUT


def _show_traceback(arguments: Sequence[str]) -> None:
    if "--traceback" in arguments:
        import traceback

        note(*traceback.format_exc().rstrip().split("\n"))


def _say(kind: str, text: str) -> None:
    note(f"edgebundle: {kind}: {text}")


def _one_line(text: str) -> str:
    return _cut(" ".join(text.split()))


def _cut(line: str) -> str:
    return _LONG_WORD.sub(lambda found: f"{found[0][:200]}...", line)


def _silence(stream: IO[str]) -> None:
    # The interpreter flushes stdout again at exit and would print an error about the closed pipe.
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: PTH123 - a descriptor is needed, not a path
        os.dup2(nowhere.fileno(), stream.fileno())
