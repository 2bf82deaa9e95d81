"""The agent's command line: `edge-agent run`, `install`, `enroll`, `check`, `config`, `version`.

Exit status: 0 for success; 2 for wrong usage; 4 for a bundle or folder that cannot be used; 78 (EX_CONFIG)
for a wrong configuration, which systemd tries again slowly; 1 for a bug in the agent or a failure of the
machine; 130 after Ctrl-C. An error is one `edge-agent: error:` line on stderr, perhaps with an
`edge-agent: hint:` line. Only a bug has a traceback, above these lines.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

import agent
from agent.config.file import DEFAULT_CONFIG, load_config
from agent.config.keys import sample_config
from agent.config.settings import Config
from agent.errors import BundleError, ConfigError, EdgeError, StateDirectoryError
from agent.provision.commands import add_commands
from agent.terminal import note, printable, say, say_text

EXIT_OURS: Final = 1
EXIT_USAGE: Final = 2
EXIT_INPUT: Final = BundleError.exit_code
EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
EXIT_BROKEN_PIPE: Final = 128 + signal.SIGPIPE
_PR_SET_DUMPABLE: Final = 4
# A full collection stops the event loop for 30 ms at the 140,000 objects of 10,000 requests that wait for the
# broker (14 each), and there are none in cycles. The last number makes it five times as rare.
_GC_THRESHOLDS: Final = (700, 10, 50)
# sd-daemon(3): journald reads a line's level from the number at its beginning.
_JOURNAL_LEVELS: Final = {
    logging.CRITICAL: 2,
    logging.ERROR: 3,
    logging.WARNING: 4,
    logging.INFO: 6,
    logging.DEBUG: 7,
}
_LONGEST_WORD: Final = 80  # of a word that is compared: comparing takes quadratic time
# People read the log, so longer records are cut.
_MAX_LOG_CHARACTERS: Final = 4000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.command(options)
        sys.stdout.flush()  # a closed pipe must raise here, not while the interpreter shuts down
    except ConfigError as error:
        return _explain(error, error.exit_code)
    except (BundleError, StateDirectoryError) as error:
        return _explain(error, EXIT_INPUT)
    except EdgeError as error:
        return _explain(error, EXIT_OURS)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed the pipe: flushing the rest at exit must not raise again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - the outermost loop of the process
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != "agent":
            _say("error", f"the package {error.name} is not installed")
            _say("hint", "install the agent with what it needs: pip install 'edgebundle[agent]'")
            return EXIT_OURS
        note(*traceback.format_exc().rstrip().split("\n"))
        _say("error", f"internal error: {type(error).__name__}: {error}")
        _say("hint", "this is a bug in edge-agent: report it with the traceback above")
        return EXIT_OURS
    return status


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors look like every other error, and name the word that may be meant."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - argparse's own signature
        # A script with an abbreviated flag would break when a new flag makes it ambiguous.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self.set_defaults(parser=self)  # a command's own replaces the program's

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # noqa: ANN401
        """Parse arguments; an unknown flag is an error of the command that it was given to."""
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser: _Parser = known.parser
            flags = [flag for action in parser._actions for flag in action.option_strings]
            parser.fail(f"unrecognized arguments: {' '.join(unknown)}", unknown[0].partition("=")[0], flags)
        return known

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            name = action.metavar or "/".join(action.option_strings)
            expected = f"expected one of {', '.join(known)}"
            self.fail(f"{name}: {expected}; got {str(value)[:80]!r}", str(value), known)

    def error(self, message: str) -> NoReturn:
        """Print an error and a hint to read the help, and exit with the code for wrong usage."""
        self.fail(message, "", ())

    def fail(self, message: str, word: str, known: Sequence[str]) -> NoReturn:
        """Print an error with the known word that is most like `word`, and exit."""
        from difflib import get_close_matches  # 0.2 MiB that a running agent need not keep

        close = get_close_matches(word[:_LONGEST_WORD], known, n=1)
        meant = f"did you mean {close[0]}? Otherwise see" if close else "see"
        _say("error", message)
        _say("hint", f"{meant} `{self.prog} --help`")
        self.exit(EXIT_USAGE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="edge-agent", description="Serves signed model bundles over MQTT.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="serve, in the foreground")
    _add_configuration(run)
    run.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error")
    run.set_defaults(command=_run)

    install = commands.add_parser("install", help="give a bundle to the agent on this machine")
    install.add_argument("bundle", type=Path, help="the bundle file")
    _add_configuration(install)
    install.set_defaults(command=_install)

    add_commands(commands)

    config = commands.add_parser("config", help="print a sample configuration that explains every key")
    config.set_defaults(command=lambda _: _config())

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(command=lambda _: _version())
    return parser


def _add_configuration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help=f"configuration; by default {DEFAULT_CONFIG}, if it exists",
    )
    parser.add_argument("--broker", metavar="URL", help="mqtt[s]://HOST[:PORT]; overrides broker.url")
    parser.add_argument("--device", metavar="NAME", help="name of this device; overrides device")
    parser.add_argument(
        "--trust",
        metavar="KEY.pub|DIR",
        help="a trusted public key, or a folder of them; overrides trust.dir",
    )
    parser.add_argument("--state-dir", metavar="DIR", help="folder for state; overrides state_dir")


def _load(options: argparse.Namespace, *, unused: Mapping[str, str] | None = None) -> Config:
    """Read the configuration; `unused` has values for required keys that the command does not use."""
    path: Path | None = options.config
    if path is None and DEFAULT_CONFIG.exists():
        path = DEFAULT_CONFIG
    given = {
        "broker.url": options.broker,
        "device": options.device,
        "trust.dir": options.trust,
        "state_dir": options.state_dir,
        "log_level": getattr(options, "log_level", None),
    }
    overrides = {key: value for key, value in given.items() if value is not None}
    return load_config(path, overrides, os.environ, unused=unused or {})


def _run(options: argparse.Namespace) -> int:
    config = _load(options)
    _hide_memory()
    faulthandler.enable()  # systemd sends SIGABRT to a service that misses its watchdog
    set_up_logging(config.log_level, os.environ)
    gc.set_threshold(*_GC_THRESHOLDS)
    return asyncio.run(_serve(config))


def _hide_memory() -> None:
    """Keep other processes of the same user from reading this process's memory, which holds keys.

    A worker's sandbox does, too; this also holds where the kernel lacks a part of the sandbox.
    """
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


async def _serve(config: Config) -> int:
    # paho imports dnspython if it is installed: 5 MiB of memory for SRV records, which we do not use.
    sys.modules.setdefault("dns", None)  # type: ignore[arg-type]  # None makes the import fail
    from agent.service.notify import Notifier
    from agent.service.service import Service

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    service = Service(config, Notifier())
    loop.add_signal_handler(signal.SIGHUP, service.reload)
    await service.run(stop)
    return 0


def _install(options: argparse.Namespace) -> int:
    from agent.deploy.local import install

    if not options.bundle.is_file():
        found = "a folder" if options.bundle.is_dir() else "nothing"
        missing = BundleError(
            f"expected a bundle at {options.bundle}, got {found}",
            hint="give the file NAME.bundle that edgebundle compile wrote",
        )
        return _explain(missing, EXIT_INPUT)
    # The file goes to the agent on this machine: no broker is needed.
    return install(_load(options, unused={"broker.url": "mqtt://localhost"}), options.bundle)


def _config() -> int:
    say_text(sample_config())
    return 0


def _version() -> int:
    say(f"edge-agent {agent.__version__}")
    return 0


class _Formatter(logging.Formatter):
    """Cuts long records, replaces control characters, and marks each line with its level for journald.

    A message is one line, whatever others wrote into it; the lines of a traceback are indented.
    """

    def __init__(self, *, journal: bool) -> None:
        super().__init__(
            "%(name)s: %(message)s" if journal else "%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        self._journal = journal

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name of logging's hook
        record.message = printable(record.message)
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)[:_MAX_LOG_CHARACTERS]
        level = f"<{_JOURNAL_LEVELS.get(record.levelno, 6)}>" if self._journal else ""
        return "\n".join(level + printable(line) for line in text.replace("\n", "\n  ").split("\n"))


def set_up_logging(level: str, environment: Mapping[str, str]) -> None:
    """Log to standard error, in journald's form if it is connected to the journal."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(journal="JOURNAL_STREAM" in environment))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _explain(error: EdgeError, status: int) -> int:
    _say("error", str(error))
    if error.hint is not None:
        _say("hint", error.hint)
    return status


def _say(kind: str, text: str) -> None:
    # The mistakes of a configuration are a line each, and indented; other line breaks are of others' texts.
    first, *more = text.split("\n  ")
    note(f"edge-agent: {kind}: {first}", *(f"  {line.strip()}" for line in more))
