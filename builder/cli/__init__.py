"""The command line: `edgebundle VERB ...`.

Promises: exit code 0, 2 for usage, 4 when what was given cannot be used, 1 when the fault is ours, 130 after
Ctrl-C; an error is one `edgebundle: error:` line and perhaps an `edgebundle: hint:` line on stderr, never
a traceback unless `--traceback` asks for it. What a script reads goes to stdout.

A verb lives in a module of this package that has `add_parsers(subparsers)`; each parser it adds sets
`handler(args) -> int`. Those modules import compilers, arrays and brokers inside their handlers alone, so
that `edgebundle --help` and `edgebundle verify` answer at once.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import pkgutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any, Final, NoReturn, Protocol, TypeAlias, cast

from agent import __version__
from agent.errors import EdgeError
from builder.cli._tvmc import instead_of
from builder.errors import BuildError

EXIT_OK: Final = 0
EXIT_OURS: Final = 1
EXIT_USAGE: Final = 2
EXIT_INPUT: Final = 4
EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
EXIT_BROKEN_PIPE: Final = 128 + signal.SIGPIPE

# The order in which a user meets the verbs; a module that is not named here is listed after these.
WORKFLOW: Final = ("keys", "tune", "compile", "run", "fleet", "metrics")

# What the file system says about the paths that were given, or the disk they are on: not a fault of ours.
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

SubParsers: TypeAlias = "argparse._SubParsersAction[Parser]"


class VerbModule(Protocol):
    """A module of this package that adds verbs."""

    def add_parsers(self, subparsers: SubParsers) -> None:
        """Add one parser a verb, each with `set_defaults(handler=...)`."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors look like every other error of the command."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - argparse's own signature
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)  # what works today would break with tomorrow's flag
        super().__init__(*args, **kwargs)
        self.add_argument(
            "--traceback",
            action="store_true",
            default=argparse.SUPPRESS,  # or a verb's default would hide the flag given before the verb
            help="show where an error came from",
        )

    def error(self, message: str) -> NoReturn:
        """Print the two lines and leave with the exit code of usage errors."""
        self.fail(message)

    def fail(self, message: str, *, hint: str | None = None) -> NoReturn:
        """Do what `error` does, with a hint of its own."""
        _say("error", message)
        _say("hint", hint or f"see `{self.prog} --help`")
        self.exit(EXIT_USAGE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb.

    Parameters
    ----------
    argv
        The arguments after the program's name; those of this process when None.

    Returns
    -------
    int
        The exit code.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()  # a reader that went away is noticed here, not in the interpreter's shutdown
    except BrokenPipeError:
        _silence(sys.stdout)
        return EXIT_BROKEN_PIPE
    return code


def _run(arguments: list[str]) -> int:
    try:
        parser = _parser()
        args, unknown = parser.parse_known_args(arguments)
        if unknown:  # said here and not by parse_args, so that the hint names the verb
            parser.prog = f"{parser.prog} {args.verb}"
            parser.fail(f"unrecognized arguments: {' '.join(unknown)}", hint=instead_of(unknown))
        return cast("Callable[[argparse.Namespace], int]", args.handler)(args)
    except SystemExit as error:  # argparse leaves so after --help, --version and usage errors
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
        _say("error", f"internal error: {type(error).__name__}: {_one_line(str(error))}")
        if "--traceback" not in arguments:
            _say(
                "hint",
                "a fault of edgebundle: run it again with --traceback and report what it prints",
            )
        return EXIT_OURS


def _parser() -> Parser:
    parser = Parser(
        prog="edgebundle",
        description="Compile models for small Linux boards, sign them, and run them there over MQTT.",
        epilog="examples:\n"
        "  edgebundle keygen keys/\n"
        "  edgebundle compile model.onnx --target rpi4 --sign-key keys/signing.key -o model.bundle\n"
        "  edgebundle deploy model.bundle --agent kitchen --broker mqtt://localhost\n"
        "\nevery verb explains itself: edgebundle VERB --help",
    )
    parser.add_argument("--version", action="version", version=f"edgebundle {__version__}")
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", dest="verb", required=True)
    for module in _verb_modules():
        module.add_parsers(subparsers)
    return parser


def _verb_modules() -> Iterator[VerbModule]:
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    ranks = {name: rank for rank, name in enumerate(WORKFLOW)}
    for name in sorted(names, key=lambda name: (ranks.get(name, len(ranks)), name)):
        module = importlib.import_module(f"{__name__}.{name}")
        if hasattr(module, "add_parsers"):
            yield cast("VerbModule", module)


def _explain(error: BuildError | EdgeError | OSError) -> int:
    if isinstance(error, OSError):
        where = f": {os.fsdecode(error.filename)}" if isinstance(error.filename, str | bytes) else ""
        _say("error", f"{error.strerror or _one_line(str(error))}{where}")
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            _say("hint", "nothing was left half written: make room, or write somewhere else with -o")
        return EXIT_INPUT if error.errno in _FILE_FAULTS else EXIT_OURS
    code = getattr(error, "code", "")
    _say("error", _one_line(str(error)) + (f" ({code})" if code else ""))
    if error.hint:
        _say("hint", _one_line(error.hint))
    return error.exit_code if isinstance(error, BuildError) else EXIT_INPUT


def _show_traceback(arguments: Sequence[str]) -> None:
    if "--traceback" in arguments:
        import traceback

        traceback.print_exc()


def _say(kind: str, text: str) -> None:
    print(f"edgebundle: {kind}: {text}", file=sys.stderr, flush=True)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _silence(stream: IO[str]) -> None:
    # The interpreter flushes stdout once more on its way out, and would complain about the closed pipe there.
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: PTH123 - a descriptor, not a path, is wanted
        os.dup2(nowhere.fileno(), stream.fileno())
