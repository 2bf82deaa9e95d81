"""The command line of the agent: run, install, enroll, check, config, version.

Exit status: 0; 2 for wrong usage; 4 for a bundle or folder that is not taken; 78 (EX_CONFIG) for a wrong
configuration, with which systemd does not start it again; 1 for faults of ours and of the machine. A
user's mistake is told in a line with what was expected and what came, and a hint; never with a traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import agent
from agent.config import Config, load_config, sample_config
from agent.errors import BundleError, ConfigError, EdgeError, StateDirectoryError
from agent.provision.commands import DEFAULT_CONFIG, add_commands

EXIT_INPUT: Final = 4
# sd-daemon(3): the level that journald takes from the head of a line.
_JOURNAL_LEVELS: Final = {
    logging.CRITICAL: 2,
    logging.ERROR: 3,
    logging.WARNING: 4,
    logging.INFO: 6,
    logging.DEBUG: 7,
}
# A line of the log is for a person to read.
_MAX_LOG_CHARACTERS: Final = 4000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.command(options)
    except ConfigError as error:
        return _complain(error, error.exit_code)
    except (BundleError, StateDirectoryError) as error:
        return _complain(error, EXIT_INPUT)
    except EdgeError as error:
        return _complain(error, 1)
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="edge-agent", description="Serves signed model bundles over MQTT.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="serve, in the foreground")
    _add_configuration(run)
    run.add_argument("--log-level", metavar="LEVEL", help="debug, info, warning or error")
    run.set_defaults(command=_run)

    install = commands.add_parser("install", help="hand a bundle to the agent on this machine")
    install.add_argument("bundle", type=Path, help="the bundle's file")
    _add_configuration(install)
    install.set_defaults(command=_install)

    add_commands(commands)

    config = commands.add_parser("config", help="print a configuration with every key explained")
    config.set_defaults(command=_config)

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(command=_version)
    return parser


def _add_configuration(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"configuration; {DEFAULT_CONFIG} if it exists"
    )
    parser.add_argument("--broker", metavar="URL", help="mqtt://HOST[:PORT], in place of broker.url")
    parser.add_argument("--device", metavar="NAME", help="this device's name, in place of device")
    parser.add_argument("--trust", metavar="DIR", help="folder of trusted keys, in place of trust.dir")
    parser.add_argument("--state-dir", metavar="DIR", help="where state is kept, in place of state_dir")


def _load(options: argparse.Namespace, *, unused: Mapping[str, str] | None = None) -> Config:
    """Read the configuration; what is `unused` here need not be in it."""
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
    faulthandler.enable()  # systemd ends a service whose watchdog starved with SIGABRT
    set_up_logging(config.log_level, os.environ)
    return asyncio.run(_serve(config))


async def _serve(config: Config) -> int:
    # paho takes dnspython where it finds it, for SRV records that no broker here has: 5 MiB of this process.
    sys.modules.setdefault("dns", None)  # type: ignore[arg-type]  # None is how an import is made to fail
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
        what = "a folder" if options.bundle.is_dir() else "nothing"
        missing = BundleError(
            f"expected a bundle at {options.bundle}, found {what}",
            hint="give the file that edgebundle compile wrote: NAME.bundle",
        )
        return _complain(missing, EXIT_INPUT)
    # The file is handed to the agent on this machine: no broker has a part in it.
    return install(_load(options, unused={"broker.url": "mqtt://localhost"}), options.bundle)


def _config(_options: argparse.Namespace) -> int:
    print(sample_config(), end="")
    return 0


def _version(_options: argparse.Namespace) -> int:
    print(f"edge-agent {agent.__version__}")
    return 0


class _Formatter(logging.Formatter):
    """One bounded line a record, without control characters, whatever found its way into it."""

    def __init__(self, *, journal: bool) -> None:
        super().__init__(
            "%(name)s: %(message)s" if journal else "%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)[:_MAX_LOG_CHARACTERS]
        text = "".join(
            character if character.isprintable() or character in "\n\t" else "?" for character in text
        )
        if not self._journal:
            return text
        level = f"<{_JOURNAL_LEVELS.get(record.levelno, 6)}>"
        return "\n".join(level + line for line in text.split("\n"))


def set_up_logging(level: str, environment: Mapping[str, str]) -> None:
    """Log to standard error, in journald's form when it listens there."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(journal="JOURNAL_STREAM" in environment))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def _complain(error: EdgeError, status: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    if error.hint is not None:
        print(f"hint: {error.hint}", file=sys.stderr)
    return status
